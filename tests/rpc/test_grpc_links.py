"""gRPC's links: how they open, end, break and pack what they carry."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, cast

import grpc
import numpy as np
import pytest
import zstandard
from tests.eventually import eventually, run_tasks_until
from tests.rpc.receivers import TENSOR, key, serve

from mlx_ring.core.errors import LinkLost, NotReady, ProtocolError, RingError
from mlx_ring.rpc import channels, links
from mlx_ring.rpc.channels import make_server
from mlx_ring.rpc.failures import error_to_failure
from mlx_ring.rpc.frames import Frame, Packer
from mlx_ring.rpc.hello import make_hello
from mlx_ring.rpc.links import GrpcLink, Inbox, Opening, WireTensor, deliver_frames
from mlx_ring.rpc.methods import LINK, WORKER_SERVICE, service_handler
from mlx_ring.rpc.protos import worker_pb2


def test_a_link_without_a_receiver_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(LinkLost, match="No worker answered at unix:") as caught:
        GrpcLink(f"unix:{tmp_path}/nobody", make_hello(node="mini-1"), timeout_s=0.2, node="mini-2")
    assert caught.value.ends == ("mini-1", "mini-2")


def test_a_link_that_is_given_up_ends_without_its_limit(tmp_path: Path) -> None:
    opening = Opening()
    with ThreadPoolExecutor(1) as threads:
        connecting = threads.submit(
            GrpcLink, f"unix:{tmp_path}/nobody", make_hello(), timeout_s=3600.0, opening=opening
        )
        opening.give_up()
        with pytest.raises(LinkLost, match="was given up"):
            connecting.result()
    assert not opening.done()


def test_a_link_whose_greeting_is_not_answered_can_be_given_up() -> None:
    opening, greeted = Opening(), threading.Event()

    def greet(frames: Iterator[Frame], context: grpc.ServicerContext) -> Iterator[worker_pb2.FrameAccepted]:
        next(frames)
        ended = threading.Event()
        context.add_callback(ended.set)
        greeted.set()
        ended.wait()
        yield worker_pb2.FrameAccepted()

    server = make_server(1)
    server.add_generic_rpc_handlers((service_handler(WORKER_SERVICE, ((LINK, greet),)),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        with ThreadPoolExecutor(1) as threads:
            connecting = threads.submit(GrpcLink, f"127.0.0.1:{port}", make_hello(), opening=opening)
            greeted.wait()
            opening.give_up()
            with pytest.raises(LinkLost):
                connecting.result()
    finally:
        server.stop(None).wait()


@pytest.mark.slow
def test_a_refused_link_leaves_neither_a_channel_nor_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    waits, closed, sent = threading.Event(), threading.Event(), threading.Event()

    def open_channel(*args: Any, **options: Any) -> grpc.Channel:
        channel = channels.open_channel(*args, **options)
        close = channel.close

        def note() -> None:
            close()
            closed.set()

        monkeypatch.setattr(channel, "close", note)
        return channel

    outgoing: Callable[[GrpcLink], Iterator[Frame]] = GrpcLink._outgoing  # pyright: ignore[reportPrivateUsage] - runs in gRPC's thread

    def watched(link: GrpcLink) -> Iterator[Frame]:
        frames = outgoing(link)
        yield next(frames)
        waits.set()
        yield from frames
        sent.set()

    def refuse(frames: Iterator[Frame], _context: grpc.ServicerContext) -> Iterator[worker_pb2.FrameAccepted]:
        next(frames)
        waits.wait()
        yield worker_pb2.FrameAccepted(failure=error_to_failure(NotReady("Others wait already.")))

    monkeypatch.setattr(links, "open_channel", open_channel)
    monkeypatch.setattr(GrpcLink, "_outgoing", watched)
    server = make_server(1)
    server.add_generic_rpc_handlers((service_handler(WORKER_SERVICE, ((LINK, refuse),)),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        with pytest.raises(NotReady, match="Others wait already"):
            GrpcLink(f"127.0.0.1:{port}", make_hello())
        assert closed.wait(60.0)
        assert sent.wait(60.0)
    finally:
        server.stop(None).wait()


@contextmanager
def _link(inbox: Inbox, lost: list[RingError]) -> Generator[tuple[GrpcLink, grpc.Server]]:
    server, port = serve(inbox, "127.0.0.1:0")
    sender = GrpcLink(f"127.0.0.1:{port}", make_hello(node="mini-1"), on_lost=lost.append)
    try:
        yield sender, server
    finally:
        sender.close()
        server.stop(None).wait()


def test_the_sender_reports_a_broken_link_although_it_sends_nothing(inbox: Inbox) -> None:
    lost: list[RingError] = []
    with _link(inbox, lost) as (sender, server):
        server.stop(None).wait()
        (error,) = eventually(lambda: lost)
        assert isinstance(error, LinkLost)
        assert error.ends == ("mini-1", "mini-2")
        with pytest.raises(LinkLost, match="The link from stage 0 on mini-1 to stage 0 on mini-2 broke: "):
            sender.send(key(1), TENSOR)


def test_a_link_that_its_sender_closes_is_not_reported(inbox: Inbox) -> None:
    lost: list[RingError] = []
    with _link(inbox, lost) as (sender, _):
        sender.close()
        with pytest.raises(LinkLost):
            sender.send(key(1), TENSOR)
    assert lost == []


class Relay:
    """Relay of one connection on loopback, which can drop everything as a broken network does."""

    def __init__(self, port: int) -> None:
        self._server = socket.create_server(("127.0.0.1", 0))
        self._target = socket.create_connection(("127.0.0.1", port))
        self.port = self._server.getsockname()[1]
        self.parts = 0
        """Parts that were forwarded to the receiver."""
        self.drops = False
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        sender, _ = self._server.accept()
        threading.Thread(target=self._pump, args=(self._target, sender), daemon=True).start()
        self._pump(sender, self._target)

    def _pump(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError), source, target:
            while data := source.recv(1 << 16):
                if not self.drops:
                    target.sendall(data)
                    self.parts += target is self._target


@contextmanager
def _relayed(inbox: Inbox, lost: list[RingError]) -> Generator[tuple[GrpcLink, Relay]]:
    server, port = serve(inbox, "127.0.0.1:0")
    relay = Relay(port)
    sender = GrpcLink(f"127.0.0.1:{relay.port}", make_hello(), bytes_per_s=1e9, on_lost=lost.append)
    try:
        yield sender, relay
    finally:
        sender.close()
        server.stop(None).wait()


@pytest.mark.slow
def test_pings_of_an_idle_link_are_permitted(inbox: Inbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channels, "_PING_EVERY_MS", 100)
    lost: list[RingError] = []
    with _relayed(inbox, lost) as (sender, relay):
        before = relay.parts
        # By default, gRPC ends a connection at the third ping.
        eventually(lambda: relay.parts - before >= 4)
        sender.send(key(1), TENSOR)
        assert inbox.recv(key(1)).tokens == TENSOR.tokens
        assert lost == []


def test_a_link_whose_pings_are_not_answered_breaks(inbox: Inbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channels, "_PING_EVERY_MS", 100)
    monkeypatch.setattr(channels, "_PING_ANSWER_MS", 300)
    lost: list[RingError] = []
    with _relayed(inbox, lost) as (_, relay):
        relay.drops = True
        eventually(lambda: lost)


@pytest.mark.slow
def test_an_idle_stream_of_the_head_is_pinged_and_no_number_of_pings_ends_it() -> None:
    settings = dict(channels._server_options(1 << 20))  # pyright: ignore[reportPrivateUsage] - gRPC reads them
    assert settings["grpc.http2.max_ping_strikes"] == 0
    between_ms = dict(channels.keep_alive())["grpc.keepalive_time_ms"]
    assert settings["grpc.http2.min_ping_interval_without_data_ms"] <= between_ms / 2

    async def echo(requests: AsyncIterator[bytes], _context: object) -> AsyncIterator[bytes]:
        async for each in requests:
            yield each

    async def run() -> None:
        server = channels.make_aio_server()
        method = cast("Any", grpc).stream_stream_rpc_method_handler(echo)
        handlers = {"Echo": method}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test", handlers),))
        relay = Relay(server.add_insecure_port("127.0.0.1:0"))
        await server.start()
        address = f"127.0.0.1:{relay.port}"
        async with channels.open_aio_channel(address, more=channels.keep_alive()) as channel:
            call: Any = cast("Any", channel).stream_stream("/test/Echo")()
            await call.write(b"first")
            assert await call.read() == b"first"
            before = relay.parts
            # By default, gRPC ends a connection at the third ping.
            await run_tasks_until(lambda: relay.parts - before >= 4)
            await call.write(b"after the pings")
            assert await call.read() == b"after the pings"
            call.cancel()
        await server.stop(None)

    asyncio.run(run())


def test_a_frame_without_content_is_refused(inbox: Inbox) -> None:
    with pytest.raises(ProtocolError, match="neither activations nor a tombstone"):
        deliver_frames(iter([Frame(worker_pb2.FrameHeader())]), inbox)


def test_activations_over_a_slow_link_are_packed_and_arrive_unchanged(inbox: Inbox) -> None:
    server, port = serve(inbox, "127.0.0.1:0")
    packer = Packer(bytes_per_s=10_000)
    sender = GrpcLink(f"127.0.0.1:{port}", make_hello(), packer=packer)
    data = np.random.default_rng(3).standard_normal(8192).astype(np.float32).tobytes()
    try:
        for step in (1, 2):
            sender.send(key(step), WireTensor("float32", (8, 1024), data, (7,)))
            got = inbox.recv(key(step), deadline=time.monotonic() + 30)
            assert (got.dtype, got.shape, bytes(got.data), got.tokens) == ("float32", (8, 1024), data, (7,))
    finally:
        sender.close()
        server.stop(None).wait()
    use = packer.use()
    assert use.compresses
    assert use.sent_bytes < use.tensor_bytes == 2 * len(data)


def test_a_packed_frame_that_grows_beyond_its_tensor_is_refused(inbox: Inbox) -> None:
    bomb = zstandard.ZstdCompressor().compress(bytes(1 << 24))
    activation = worker_pb2.Activation(
        instance="demo", epoch=1, step=1, dtype="bfloat16", shape=[8], packed_bytes=len(bomb)
    )
    frame = Frame(worker_pb2.FrameHeader(activation=activation), bomb + bytes(8))
    with pytest.raises(ProtocolError, match="announces 16777216 bytes; there are 8 numbers"):
        deliver_frames(iter([frame]), inbox)
