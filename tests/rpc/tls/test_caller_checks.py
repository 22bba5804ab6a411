"""Callers that TLS accepts and the guard refuses, over real servers, for every served arity."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import grpc
import pytest
from cryptography import x509
from tests.machines import ANSWER, listening, node_credentials

from mlx_ring.cluster.security.authority import Authority
from mlx_ring.core.errors import PeerRefused
from mlx_ring.rpc.channels import (
    add_secure_port,
    make_aio_server,
    make_server,
    open_aio_channel,
    open_channel,
)
from mlx_ring.rpc.methods import AGENT_SERVICE, STEPS, STOP, WATCH, WORKER_SERVICE, service_handler
from mlx_ring.rpc.protos import agent_pb2, worker_pb2
from mlx_ring.rpc.tls.caller_checks import AioPeerGuard, PeerGuard
from mlx_ring.rpc.tls.credentials import Credentials
from mlx_ring.rpc.tls.handshakes import handshake_error
from mlx_ring.rpc.tls.peers import HEAD_NAME, Revoked, node_name, peer_of_certificate

STUDIO = node_name("studio-1")


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority.open(tmp_path_factory.mktemp("cluster"))


def serial(credentials: Credentials) -> str:
    return peer_of_certificate(x509.load_pem_x509_certificate(credentials.certificate)).serial


async def stop(address: str, credentials: Credentials, name: str) -> int:
    async with open_aio_channel(address, credentials, name) as channel:
        reply = await STOP.aio_unary_unary(channel)(agent_pb2.StopRequest(), timeout=10)
    return reply.stopped


def test_a_revoked_certificate_is_refused_from_its_next_call_and_others_are_not(
    authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    lost, kept = node_credentials(authority, "lost-1"), node_credentials(authority, "kept-1")
    revoked = Revoked()

    async def run() -> grpc.aio.AioRpcError:
        async with (
            listening(authority.head_credentials(), AioPeerGuard(revoked.refusal)) as address,
            open_aio_channel(address, lost, HEAD_NAME) as channel,
        ):
            call = STOP.aio_unary_unary(channel)
            assert (await call(agent_pb2.StopRequest(), timeout=10)).stopped == ANSWER
            revoked.replace([serial(lost)])
            # The connection stays open; only the call is refused.
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call(agent_pb2.StopRequest(), timeout=10)
            assert await stop(address, kept, HEAD_NAME) == ANSWER
        return caught.value

    error = asyncio.run(run())
    assert error.code() is grpc.StatusCode.PERMISSION_DENIED
    mapped = handshake_error(error, "The head")
    assert isinstance(mapped, PeerRefused)
    assert "lost-1" in str(mapped)
    (line,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert line.startswith("Refused a call of /mlx_ring.Agent/Stop from 127.0.0.1:")
    assert "lost-1" in line


def test_head_only_methods_are_refused_to_nodes(authority: Authority) -> None:
    guard = AioPeerGuard(Revoked().refusal, head_only=(f"/{AGENT_SERVICE}/",))

    async def run() -> str:
        async with listening(node_credentials(authority, "studio-1"), guard) as address:
            assert await stop(address, authority.head_credentials(), STUDIO) == ANSWER
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stop(address, node_credentials(authority, "mini-1"), STUDIO)
        return caught.value.details() or ""

    assert asyncio.run(run()) == "mini-1 called /mlx_ring.Agent/Stop, which only the head may."


def test_local_only_methods_are_refused_to_the_head_too(authority: Authority) -> None:
    guard = AioPeerGuard(Revoked().refusal, local_only=(f"/{AGENT_SERVICE}/",))

    async def run() -> str:
        async with listening(node_credentials(authority, "studio-1"), guard) as address:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stop(address, authority.head_credentials(), STUDIO)
        return caught.value.details() or ""

    assert asyncio.run(run()).endswith(" called /mlx_ring.Agent/Stop, which only this machine's agent may.")


async def _events(
    _request: agent_pb2.WatchRequest, _context: grpc.aio.ServicerContext[object, object]
) -> AsyncIterator[agent_pb2.AgentEvent]:
    for count in (1, 2):
        yield agent_pb2.AgentEvent(memory_bytes=count)


async def _steps(
    requests: AsyncIterator[worker_pb2.StepsRequest], _context: grpc.aio.ServicerContext[object, object]
) -> AsyncIterator[worker_pb2.StepsReply]:
    async for _ in requests:
        yield worker_pb2.StepsReply()


@pytest.mark.parametrize("is_accepted", [True, False])
def test_async_streams_are_guarded_and_pass_complete(authority: Authority, *, is_accepted: bool) -> None:
    mini = node_credentials(authority, "mini-1")
    guard = AioPeerGuard(Revoked([] if is_accepted else [serial(mini)]).refusal)

    async def run() -> tuple[int, int]:
        server = make_aio_server(interceptors=[guard])
        server.add_generic_rpc_handlers(
            (
                service_handler(AGENT_SERVICE, ((WATCH, _events),)),
                service_handler(WORKER_SERVICE, ((STEPS, _steps),)),
            )
        )
        port = add_secure_port(server, "127.0.0.1:0", authority.head_credentials().for_server())
        await server.start()
        try:
            async with open_aio_channel(f"127.0.0.1:{port}", mini, HEAD_NAME) as channel:
                watch = WATCH.aio_unary_stream(channel)(agent_pb2.WatchRequest(), timeout=10)
                events = [event.memory_bytes async for event in watch]
                steps = STEPS.aio_stream_stream(channel)(iter([worker_pb2.StepsRequest()] * 3), timeout=10)
                return len(events), len([reply async for reply in steps])
        finally:
            await server.stop(None)

    if is_accepted:
        assert asyncio.run(run()) == (2, 3)
    else:
        with pytest.raises(grpc.aio.AioRpcError, match="PERMISSION_DENIED"):
            asyncio.run(run())


@pytest.mark.parametrize("is_accepted", [True, False])
def test_threaded_streams_are_guarded_and_pass_complete(authority: Authority, *, is_accepted: bool) -> None:
    mini = node_credentials(authority, "mini-1")

    def steps(
        requests: Iterator[worker_pb2.StepsRequest], _context: grpc.ServicerContext
    ) -> Iterator[worker_pb2.StepsReply]:
        for _ in requests:
            yield worker_pb2.StepsReply()

    server = make_server(2, interceptors=[PeerGuard(Revoked([] if is_accepted else [serial(mini)]).refusal)])
    server.add_generic_rpc_handlers((service_handler(WORKER_SERVICE, ((STEPS, steps),)),))
    port = add_secure_port(server, "127.0.0.1:0", authority.head_credentials().for_server())
    server.start()
    try:
        with open_channel(f"127.0.0.1:{port}", mini, HEAD_NAME) as channel:
            replies = STEPS.stream_stream(channel)(iter([worker_pb2.StepsRequest()] * 3), timeout=10)
            if is_accepted:
                assert len(list(replies)) == 3
            else:
                with pytest.raises(grpc.RpcError) as caught:
                    list(replies)
                assert "removed from the cluster" in str(handshake_error(caught.value, "The head"))
    finally:
        server.stop(None)


def test_async_streams_of_a_removed_node_end_and_others_continue(authority: Authority) -> None:
    lost, kept = node_credentials(authority, "lost-1"), node_credentials(authority, "kept-1")
    revoked = Revoked()
    guard = AioPeerGuard(revoked.refusal)
    proceed = asyncio.Event()

    async def events(
        _request: agent_pb2.WatchRequest, _context: grpc.aio.ServicerContext[object, object]
    ) -> AsyncIterator[agent_pb2.AgentEvent]:
        yield agent_pb2.AgentEvent(memory_bytes=1)
        await proceed.wait()
        yield agent_pb2.AgentEvent(memory_bytes=2)

    async def run() -> None:
        server = make_aio_server(interceptors=[guard])
        server.add_generic_rpc_handlers((service_handler(AGENT_SERVICE, ((WATCH, events),)),))
        port = add_secure_port(server, "127.0.0.1:0", authority.head_credentials().for_server())
        await server.start()
        try:
            async with (
                open_aio_channel(f"127.0.0.1:{port}", lost, HEAD_NAME) as losing,
                open_aio_channel(f"127.0.0.1:{port}", kept, HEAD_NAME) as keeping,
            ):
                ends = WATCH.aio_unary_stream(losing)(agent_pb2.WatchRequest(), timeout=30)
                lives = WATCH.aio_unary_stream(keeping)(agent_pb2.WatchRequest(), timeout=30)
                first, second = aiter(ends), aiter(lives)
                await anext(first)
                await anext(second)
                assert guard.end_refused() == 0
                revoked.replace([serial(lost)])
                assert guard.end_refused() == 1
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await anext(first)
                assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED
                assert "lost-1" in (caught.value.details() or "")
                proceed.set()
                assert (await anext(second)).memory_bytes == 2
        finally:
            await server.stop(None)

    asyncio.run(run())


class _Call:
    """Call of a node without gRPC; the test decides how long a write takes."""

    def __init__(self, credentials: Credentials) -> None:
        self._certificate = credentials.certificate

    def peer(self) -> str:
        return "ipv4:127.0.0.1:50000"

    def auth_context(self) -> dict[str, list[bytes]]:
        return {"x509_pem_cert": [self._certificate]}

    async def abort(self, code: grpc.StatusCode, details: str) -> None:
        raise grpc.aio.AbortError(code, details)


def test_a_node_removed_in_the_middle_of_a_message_gets_a_status_after_it(authority: Authority) -> None:
    lost = node_credentials(authority, "lost-1")
    revoked = Revoked()
    guard = AioPeerGuard(revoked.refusal)

    async def events(_request: object, _context: object) -> AsyncIterator[int]:
        yield 1
        yield 2

    async def run() -> None:
        async def continuation(_details: object) -> Any:
            return cast("Any", grpc).unary_stream_rpc_method_handler(events)

        details = SimpleNamespace(method=WATCH.path)
        handler: Any = await guard.intercept_service(cast("Any", continuation), cast("Any", details))
        stream = handler.unary_stream(None, _Call(lost))
        assert await anext(stream) == 1
        revoked.replace([serial(lost)])
        assert guard.end_refused() == 1
        task = asyncio.current_task()
        assert task is not None
        assert not task.cancelling(), "gRPC, which sends the message, would send no status"
        with pytest.raises(grpc.aio.AbortError) as caught:
            await anext(stream)
        assert caught.value.args[0] is grpc.StatusCode.PERMISSION_DENIED
        assert guard.end_refused() == 0

    asyncio.run(run())


def test_a_certificate_is_required_on_a_plain_port_and_not_on_a_unix_socket(tmp_path: Path) -> None:
    async def run() -> str:
        async def answer(
            _request: agent_pb2.StopRequest, _context: grpc.aio.ServicerContext[object, object]
        ) -> agent_pb2.StopReply:
            return agent_pb2.StopReply(stopped=ANSWER)

        server = make_aio_server(interceptors=[AioPeerGuard(Revoked().refusal)])
        server.add_generic_rpc_handlers((service_handler(AGENT_SERVICE, ((STOP, answer),)),))
        server.add_insecure_port(f"unix:{tmp_path}/s")
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        try:
            async with open_aio_channel(f"unix:{tmp_path}/s") as channel:
                reply = await STOP.aio_unary_unary(channel)(agent_pb2.StopRequest(), timeout=10)
                assert reply.stopped == ANSWER
            async with open_aio_channel(f"127.0.0.1:{port}") as channel:
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await STOP.aio_unary_unary(channel)(agent_pb2.StopRequest(), timeout=10)
            return caught.value.details() or ""
        finally:
            await server.stop(None)

    assert "showed no certificate" in asyncio.run(run())


def test_an_unknown_method_is_unimplemented_and_not_refused_by_the_guard(
    authority: Authority,
) -> None:
    async def run() -> grpc.StatusCode:
        async with (
            listening(authority.head_credentials()) as address,
            open_aio_channel(address, authority.head_credentials(), HEAD_NAME) as channel,
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                async for _ in WATCH.aio_unary_stream(channel)(agent_pb2.WatchRequest(), timeout=10):
                    pass
        return caught.value.code()

    assert asyncio.run(run()) is grpc.StatusCode.UNIMPLEMENTED


def test_revoked_certificates_can_be_replaced_during_checks(authority: Authority) -> None:
    revoked = Revoked()
    peer = peer_of_certificate(
        x509.load_pem_x509_certificate(node_credentials(authority, "mini-1").certificate)
    )

    def replace() -> None:
        for _ in range(500):
            revoked.replace([peer.serial])

    thread = threading.Thread(target=replace)
    thread.start()
    seen = {revoked.refusal(peer) for _ in range(500)}
    thread.join()
    assert seen <= {"", revoked.refusal(peer)}
    assert revoked.refusal(peer)


def test_threaded_streams_of_a_removed_node_end_and_others_continue(
    authority: Authority,
) -> None:
    lost, kept = node_credentials(authority, "lost-1"), node_credentials(authority, "kept-1")
    revoked = Revoked()
    guard = PeerGuard(revoked.refusal)

    def steps(
        requests: Iterator[worker_pb2.StepsRequest], _context: grpc.ServicerContext
    ) -> Iterator[worker_pb2.StepsReply]:
        for _ in requests:
            yield worker_pb2.StepsReply()

    server = make_server(4, interceptors=[guard])
    server.add_generic_rpc_handlers((service_handler(WORKER_SERVICE, ((STEPS, steps),)),))
    port = add_secure_port(server, "127.0.0.1:0", authority.head_credentials().for_server())
    server.start()
    sent: tuple[queue.SimpleQueue[worker_pb2.StepsRequest | None], ...] = (
        queue.SimpleQueue(),
        queue.SimpleQueue(),
    )
    try:
        with (
            open_channel(f"127.0.0.1:{port}", lost, HEAD_NAME) as losing,
            open_channel(f"127.0.0.1:{port}", kept, HEAD_NAME) as keeping,
        ):
            ends, lives = (
                STEPS.stream_stream(channel)(iter(requests.get, None), timeout=30)
                for channel, requests in zip((losing, keeping), sent, strict=True)
            )
            for requests, replies in zip(sent, (ends, lives), strict=True):
                requests.put(worker_pb2.StepsRequest())
                next(replies)
            assert guard.end_refused() == 0
            revoked.replace([serial(lost)])
            assert guard.end_refused() == 1
            with pytest.raises(grpc.RpcError):
                next(ends)
            sent[1].put(worker_pb2.StepsRequest())
            assert next(lives) == worker_pb2.StepsReply()
            assert guard.end_refused() == 0
    finally:
        for requests in sent:
            requests.put(None)
        server.stop(None)
