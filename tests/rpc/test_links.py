"""Contract of every kind of link."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, cast

import grpc
import numpy as np
import pytest
import zstandard
from tests.eventually import eventually, run_tasks_until
from tests.worker.collective.pairs import KINDS, ForwardingInbox, joined_pair
from tests.worker.in_process_link import InProcessLink

from mlx_ring.core.errors import (
    LinkLost,
    NotReady,
    ProtocolError,
    RingError,
    StaleMessage,
    StepFailed,
    WorkerLost,
    WorkerStuck,
)
from mlx_ring.rpc import channels, links
from mlx_ring.rpc.channels import make_server
from mlx_ring.rpc.failures import error_to_failure
from mlx_ring.rpc.frames import Frame, Packer
from mlx_ring.rpc.hello import make_hello
from mlx_ring.rpc.links import (
    HIDDEN,
    SAMPLED,
    GrpcLink,
    Inbox,
    LinkKey,
    LinkSender,
    Opening,
    WireTensor,
    deliver_frames,
)
from mlx_ring.rpc.methods import LINK, WORKER_SERVICE, service_handler
from mlx_ring.rpc.protos import worker_pb2

TENSOR = WireTensor("float32", (2, 3), bytes(range(24)), (7, 8))


def key(step: int, epoch: int = 1) -> LinkKey:
    return LinkKey("demo", epoch, step)


@pytest.fixture
def inbox() -> Inbox:
    return Inbox("demo", epoch=1)


def _serve(inbox: Inbox, address: str) -> tuple[grpc.Server, int]:
    def take(frames: Iterator[Frame], _context: grpc.ServicerContext) -> Iterator[worker_pb2.FrameAccepted]:
        next(frames)
        yield worker_pb2.FrameAccepted(hello=make_hello(node="mini-2"))
        try:
            deliver_frames(frames, inbox)
        except grpc.RpcError as error:
            inbox.break_off(WorkerLost(str(error)))
        else:
            inbox.break_off(WorkerLost("closed"))

    server = make_server(4)
    server.add_generic_rpc_handlers((service_handler(WORKER_SERVICE, ((LINK, take),)),))
    port = server.add_insecure_port(address)
    server.start()
    return server, port


@pytest.fixture(scope="module")
def collectives() -> Iterator[Callable[[str, Inbox], LinkSender]]:
    """Return a function that lets a pair of a kind deliver to an inbox; each pair is started once."""
    started: dict[str, tuple[LinkSender, ForwardingInbox]] = {}
    with ExitStack() as stack:

        def into(kind: str, inbox: Inbox) -> LinkSender:
            if kind not in started:
                forwarding = ForwardingInbox()
                started[kind] = stack.enter_context(joined_pair(kind, forwarding)), forwarding
            pair, forwarding = started[kind]
            forwarding.target = inbox
            return pair

        yield into


@pytest.fixture(params=["in process", "grpc over a Unix socket", "grpc over TCP", *KINDS])
def link(
    request: pytest.FixtureRequest,
    inbox: Inbox,
    tmp_path: Path,
    collectives: Callable[[str, Inbox], LinkSender],
) -> Iterator[LinkSender]:
    if request.param in KINDS:
        yield collectives(request.param, inbox)
        return
    if request.param == "in process":
        yield InProcessLink(inbox)
        return
    unix = f"unix:{tmp_path}/s"
    server, port = _serve(inbox, unix if "Unix" in request.param else "127.0.0.1:0")
    sender = GrpcLink(unix if "Unix" in request.param else f"127.0.0.1:{port}", make_hello())
    yield sender
    sender.close()
    server.stop(None).wait()


def test_a_tensor_arrives_with_its_bytes_shape_and_tokens(link: LinkSender, inbox: Inbox) -> None:
    link.send(key(1), TENSOR)
    got = inbox.recv(key(1))
    assert (got.dtype, got.shape, bytes(got.data), got.tokens) == ("float32", (2, 3), TENSOR.data, (7, 8))


def test_messages_are_taken_by_key_and_those_of_passed_steps_are_dropped(
    link: LinkSender, inbox: Inbox
) -> None:
    for step in (1, 2, 3):
        link.send(key(step), WireTensor("float32", (1, 3), bytes([step] * 12)))
    assert [bytes(inbox.recv(key(step)).data)[0] for step in (1, 3)] == [1, 3]
    with pytest.raises(WorkerStuck):
        inbox.recv(key(2), deadline=0.0)


def test_a_tombstone_ends_the_wait_with_the_steps_error(link: LinkSender, inbox: Inbox) -> None:
    link.send_failure(key(4), error_to_failure(StepFailed("matmul went wrong")))
    with pytest.raises(StepFailed, match="matmul went wrong"):
        inbox.recv(key(4))


def test_an_older_epochs_message_is_dropped(link: LinkSender, inbox: Inbox) -> None:
    inbox.advance(2)
    link.send(key(5, epoch=1), TENSOR)
    link.send(key(5, epoch=2), TENSOR)
    assert inbox.recv(key(5, epoch=2)).shape == (2, 3)
    with pytest.raises(StaleMessage, match="epoch 2 is in force"):
        inbox.recv(key(5, epoch=1))


@pytest.mark.parametrize("purpose", [HIDDEN, SAMPLED])
def test_a_message_of_a_later_epoch_is_dropped(inbox: Inbox, purpose: worker_pb2.Activation.Purpose) -> None:
    inbox.put(LinkKey("demo", 2, 5, purpose), TENSOR)
    inbox.advance(2)
    assert not inbox.holds(LinkKey("demo", 2, 5, purpose))
    inbox.put(LinkKey("demo", 2, 5, purpose), TENSOR)
    assert inbox.holds(LinkKey("demo", 2, 5, purpose))


@pytest.mark.parametrize("purpose", [HIDDEN, SAMPLED])
@pytest.mark.parametrize(("most", "most_bytes"), [(3, 1 << 20), (1024, 3 * 24)])
def test_a_sender_is_refused_when_too_many_messages_wait(
    inbox: Inbox,
    monkeypatch: pytest.MonkeyPatch,
    purpose: worker_pb2.Activation.Purpose,
    most: int,
    most_bytes: int,
) -> None:
    monkeypatch.setattr(links, "_MOST_WAITING", most)
    monkeypatch.setattr(links, "_MOST_WAITING_BYTES", most_bytes)
    for step in (1, 2, 3):
        inbox.put(LinkKey("demo", 1, step, purpose), TENSOR)
    with pytest.raises(ProtocolError, match="4 messages of 96 bytes wait on a link"):
        inbox.put(LinkKey("demo", 1, 4, purpose), TENSOR)
    inbox.recv(LinkKey("demo", 1, 1, purpose))
    inbox.put(LinkKey("demo", 1, 4, purpose), TENSOR)


def test_a_large_tensor_arrives_whole(link: LinkSender, inbox: Inbox) -> None:
    data = bytes(range(256)) * (3 << 14)
    link.send(key(6), WireTensor("float32", (len(data) // 12, 3), data))
    assert bytes(inbox.recv(key(6)).data) == data


def test_sampled_tokens_do_not_mix_with_activations(link: LinkSender, inbox: Inbox) -> None:
    link.send(LinkKey("demo", 1, 7, SAMPLED), WireTensor("uint32", (0,), b"", (42,)))
    link.send(key(7), TENSOR)
    assert inbox.recv(key(7)).shape == (2, 3)
    assert inbox.holds(LinkKey("demo", 1, 7, SAMPLED), wait_s=60.0)
    assert [
        message.tokens for _, message in inbox.take_arrived(SAMPLED) if isinstance(message, WireTensor)
    ] == [(42,)]
    assert inbox.take_arrived(SAMPLED) == []


def test_tokens_of_a_later_step_can_be_received_first(link: LinkSender, inbox: Inbox) -> None:
    earlier, later = (LinkKey("demo", 1, step, SAMPLED) for step in (1, 2))
    for sampled in (earlier, later):
        link.send(sampled, WireTensor("uint32", (0,), b"", (sampled.step,)))
    assert inbox.recv(later).tokens == (2,)
    assert inbox.recv(earlier, deadline=0.0).tokens == (1,)


def test_a_wait_past_its_deadline_names_its_step(inbox: Inbox) -> None:
    with pytest.raises(WorkerStuck, match="demo epoch 1 step 9"):
        inbox.recv(key(9), deadline=0.0)


def test_a_new_epoch_ends_waits_for_the_old_one(inbox: Inbox) -> None:
    errors: list[BaseException] = []

    def wait() -> None:
        try:
            inbox.recv(key(1))
        except StaleMessage as error:
            errors.append(error)

    waiter = threading.Thread(target=wait)
    waiter.start()
    inbox.advance(2)
    waiter.join(timeout=10)
    assert [type(error) for error in errors] == [StaleMessage]


def test_messages_before_a_lost_link_can_still_be_received(inbox: Inbox) -> None:
    inbox.put(key(1), TENSOR)
    inbox.break_off(WorkerLost("stage 0 was lost"))
    assert inbox.recv(key(1)) is TENSOR
    with pytest.raises(WorkerLost, match="stage 0 was lost"):
        inbox.recv(key(2))


def test_a_new_sender_ends_the_loss_of_the_one_before_but_no_other_error(inbox: Inbox) -> None:
    first = inbox.admit()
    assert first.break_off(LinkLost("The first sender ended."))
    with pytest.raises(LinkLost, match="The first sender ended"):
        inbox.recv(key(1))
    second = inbox.admit()
    assert not inbox.holds(key(1))
    assert not first.break_off(LinkLost("The first sender ended again."))
    second.put(key(1), TENSOR)
    assert inbox.recv(key(1)) is TENSOR
    # A worker that is prepared for other neighbours drops its steps, whoever links meanwhile.
    inbox.break_off(NotReady("It is being linked."))
    inbox.admit()
    with pytest.raises(NotReady, match="It is being linked"):
        inbox.recv(key(2), deadline=0.0)


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
    server, port = _serve(inbox, "127.0.0.1:0")
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


def test_pings_are_permitted_and_a_link_without_answers_breaks(
    inbox: Inbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channels, "_PING_EVERY_MS", 100)
    monkeypatch.setattr(channels, "_PING_ANSWER_MS", 300)
    lost: list[RingError] = []
    server, port = _serve(inbox, "127.0.0.1:0")
    relay = Relay(port)
    sender = GrpcLink(f"127.0.0.1:{relay.port}", make_hello(), bytes_per_s=1e9, on_lost=lost.append)
    before = relay.parts
    # By default, gRPC ends a connection at the third ping.
    eventually(lambda: relay.parts - before >= 4)
    sender.send(key(1), TENSOR)
    assert inbox.recv(key(1)).tokens == TENSOR.tokens
    assert lost == []
    relay.drops = True
    eventually(lambda: lost)
    sender.close()
    server.stop(None).wait()


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


def test_holds_waits_for_a_message_until_its_timeout_or_an_error(inbox: Inbox) -> None:
    assert not inbox.holds(key(1))
    assert not inbox.holds(key(1), wait_s=1e-3)
    sender = threading.Thread(target=inbox.put, args=(key(1), TENSOR))
    sender.start()
    assert inbox.holds(key(1), wait_s=60.0)
    sender.join()
    inbox.break_off(WorkerLost("lost"))
    assert inbox.holds(key(2), wait_s=60.0), "an error ends the wait too"


def test_activations_over_a_slow_link_are_packed_and_arrive_unchanged(inbox: Inbox) -> None:
    server, port = _serve(inbox, "127.0.0.1:0")
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
