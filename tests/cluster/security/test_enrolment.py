"""The limits on wrong join requests, and on connections of machines that want to join."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable
from itertools import repeat
from pathlib import Path
from unittest.mock import AsyncMock, MagicMock

import psutil
import pytest
from tests.eventually import run_tasks_until

from mlx_ring.cluster.security import enrolment
from mlx_ring.cluster.security.authority import Authority
from mlx_ring.cluster.security.enrolment import EnrolmentProxy, EnrolmentService, TryLimit
from mlx_ring.core.errors import AddressInUse
from mlx_ring.rpc.protos import enrol_pb2


def take(limit: TryLimit, host: str, now_s: float) -> bool:
    """Make a wrong try; return False if it is not allowed."""
    if not limit.has_try(host, now_s):
        return False
    limit.charge(host, now_s)
    return True


def test_a_host_has_a_burst_of_tries_and_then_the_refill_rate() -> None:
    limit = TryLimit(burst=3, per_second=0.5)
    assert [take(limit, "a", 0.0) for _ in range(4)] == [True, True, True, False]
    assert [take(limit, "a", 2.0) for _ in range(2)] == [True, False]


def test_a_long_pause_refills_no_more_than_the_burst() -> None:
    limit = TryLimit(burst=2, per_second=1.0)
    take(limit, "a", 0.0)
    assert [take(limit, "a", 1e6) for _ in range(3)] == [True, True, False]


def test_a_successful_try_does_not_count() -> None:
    limit = TryLimit(burst=1, per_second=0.0)
    assert all(limit.has_try(host, 0.0) for host in repeat("a", 10))


def test_tries_are_counted_per_host() -> None:
    limit = TryLimit(burst=1, per_second=0.0)
    assert take(limit, "192.168.1.7", 0.0)
    assert not take(limit, "192.168.1.7", 0.0)
    assert take(limit, "192.168.1.8", 0.0)


def test_a_host_gains_no_tries_by_changing_its_ipv6_address() -> None:
    limit = TryLimit(burst=1, per_second=0.0)
    assert take(limit, "2001:db8::1", 0.0)
    assert not take(limit, "2001:db8::ffff:2", 0.0)
    assert take(limit, "2001:db8:0:1::1", 0.0)
    assert take(limit, "::ffff:192.168.1.7", 0.0)
    assert not take(limit, "192.168.1.7", 0.0)


def test_the_number_of_remembered_hosts_is_limited() -> None:
    limit = TryLimit(burst=1, per_second=0.0, addresses=2)
    for host in "abc":
        assert take(limit, host, 0.0)
    assert take(limit, "a", 0.0)
    assert not take(limit, "c", 0.0)


def test_connections_of_an_address_make_room_for_those_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(enrolment, "_MOST_CONNECTIONS", 4)

    async def run() -> list[str]:
        proxy = EnrolmentProxy(MagicMock(stop=AsyncMock()), 0, {})
        made: list[str] = []

        def connection(host: str) -> asyncio.StreamWriter:
            writer = MagicMock(spec=asyncio.StreamWriter)
            writer.get_extra_info.return_value = (host, 5000)
            # It may be called again, which does nothing.
            aborts = iter([host])
            writer.transport.abort.side_effect = lambda: made.extend(aborts)
            return writer

        hosts = [
            "10.0.0.1",
            "::ffff:10.0.0.2",
            "2001:db8::1",
            "2001:db8::2",
            "10.0.0.3",
            "10.0.0.1",
            "10.0.0.4",
        ]
        for host in hosts:
            proxy._accept(asyncio.StreamReader(), connection(host))  # pyright: ignore[reportPrivateUsage]
            for _ in range(3):
                await asyncio.sleep(0)
        await run_tasks_until(lambda: len(made) == 3)
        evicted = list(made)
        await proxy.stop(None)
        assert sorted(made) == sorted(hosts)
        return evicted

    # Addresses of one IPv6 network belong to one owner. Then nobody has more than one, and the oldest goes.
    assert asyncio.run(run()) == ["2001:db8::1", "10.0.0.1", "::ffff:10.0.0.2"]


def test_a_connection_is_forwarded_for_its_own_address_and_a_silent_one_is_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(enrolment, "_FIRST_BYTE_S", 0.05)
    callers: dict[str, str] = {}

    async def report_caller(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, port = writer.get_extra_info("peername")
        writer.write(await reader.read(5) + callers[f"{host}:{port}"].encode())
        writer.close()

    async def run() -> None:
        async with await asyncio.start_server(report_caller, "127.0.0.1", 0) as behind:
            port = EnrolmentProxy(MagicMock(stop=AsyncMock()), behind.sockets[0].getsockname()[1], callers)
            listened = await port.listen("[::]:0")
            reader, writer = await asyncio.open_connection("127.0.0.1", listened)
            silent, other = await asyncio.open_connection("127.0.0.1", listened)
            writer.write(b"hello")
            own = "{}:{}".format(*writer.get_extra_info("sockname"))
            assert await reader.read() == b"hello" + own.encode()
            assert await silent.read() == b""
            for each in (writer, other):
                each.close()
            await port.stop(None)
            await run_tasks_until(lambda: not callers)

    asyncio.run(run())


def test_a_port_in_use_is_named() -> None:
    async def run() -> None:
        port = EnrolmentProxy(MagicMock(stop=AsyncMock()), 0, {})
        listened = await port.listen("127.0.0.1:0")
        with pytest.raises(AddressInUse, match=f"127.0.0.1:{listened} cannot be used"):
            await EnrolmentProxy(MagicMock(stop=AsyncMock()), 0, {}).listen(f"127.0.0.1:{listened}")
        await port.stop(None)

    asyncio.run(run())


async def _never_end(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Send more than any buffer takes, and read nothing."""
    del reader
    writer.write(bytes(64 << 20))


async def _end_at_once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await _never_end(reader, writer)
    writer.close()


@pytest.mark.parametrize("answer", [_never_end, _end_at_once])
def test_a_client_that_never_reads_is_not_kept_beyond_its_time(
    monkeypatch: pytest.MonkeyPatch, answer: Callable[..., Awaitable[None]]
) -> None:
    monkeypatch.setattr(enrolment, "_LONGEST_S", 0.1)
    monkeypatch.setattr(enrolment, "_END_S", 0.1)
    callers: dict[str, str] = {}

    async def run() -> None:
        async with await asyncio.start_server(answer, "127.0.0.1", 0) as behind:
            proxy = EnrolmentProxy(MagicMock(stop=AsyncMock()), behind.sockets[0].getsockname()[1], callers)
            before = psutil.Process().num_fds()
            with socket.create_connection(("127.0.0.1", await proxy.listen("127.0.0.1:0"))) as client:
                client.sendall(b"hello")
                await run_tasks_until(lambda: bool(callers))
                await run_tasks_until(lambda: not proxy._open)  # pyright: ignore[reportPrivateUsage]
                # The port, and the client's own end. Both ends of the forwarded connection are closed.
                await run_tasks_until(lambda: psutil.Process().num_fds() <= before + 3)
            await proxy.stop(None)

    asyncio.run(run())


def test_a_proxy_ends_with_its_connections_in_silence(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> int:
        async with await asyncio.start_server(_never_end, "127.0.0.1", 0) as behind:
            proxy = EnrolmentProxy(MagicMock(stop=AsyncMock()), behind.sockets[0].getsockname()[1], {})
            listened = await proxy.listen("127.0.0.1:0")
            with contextlib.ExitStack() as stack:
                for says in (b"", b"hello"):
                    client = stack.enter_context(socket.create_connection(("127.0.0.1", listened)))
                    client.sendall(says)
                await run_tasks_until(lambda: len(proxy._open) == 2)  # pyright: ignore[reportPrivateUsage]
                await proxy.stop(None)
                late = MagicMock(spec=asyncio.StreamWriter)
                proxy._accept(asyncio.StreamReader(), late)  # pyright: ignore[reportPrivateUsage]
                late.transport.abort.assert_called_once_with()
        return len(asyncio.all_tasks()) - 1

    assert asyncio.run(run()) == 0
    assert not caplog.records


def test_a_call_from_behind_the_proxy_is_refused_without_a_try(tmp_path: Path) -> None:
    """Refuse calls whose connection is not the proxy's any more, so that nobody can use up this machine's own tries."""
    tries = MagicMock(spec=TryLimit)
    service = EnrolmentService(Authority.open(tmp_path), MagicMock(), MagicMock(), tries=tries)
    context = MagicMock()
    context.peer.return_value = "ipv4:127.0.0.1:5000"
    reply = asyncio.run(service.enrol(enrol_pb2.EnrolRequest(), context))
    assert "connection has ended" in reply.failure.message
    assert not tries.method_calls


def test_strangers_take_a_small_part_of_the_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(enrolment, "descriptor_limit", lambda: 256)
    assert EnrolmentProxy(MagicMock(), 0, {})._most == 16  # pyright: ignore[reportPrivateUsage]
