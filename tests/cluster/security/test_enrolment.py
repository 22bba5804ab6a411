"""The limits on wrong join requests, and on connections of machines that want to join."""

from __future__ import annotations

import asyncio
from itertools import repeat
from unittest.mock import AsyncMock, MagicMock

import pytest
from tests.eventually import run_tasks_until

from mlx_ring.cluster.security import enrolment
from mlx_ring.cluster.security.enrolment import StrangersPort, TryLimit
from mlx_ring.core.errors import AddressInUse


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


def test_connections_of_an_address_make_room_for_those_of_others() -> None:
    async def run() -> list[str]:
        port = StrangersPort(MagicMock(stop=AsyncMock()), 0, {})
        made: list[str] = []

        def connection(host: str) -> asyncio.StreamWriter:
            writer = MagicMock(spec=asyncio.StreamWriter)
            writer.get_extra_info.return_value = (host, 5000)
            writer.transport.abort.side_effect = lambda: made.append(host)
            return writer

        tasks: list[asyncio.Task[None]] = []
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
            tasks.append(asyncio.create_task(port._serve(asyncio.StreamReader(), connection(host))))  # pyright: ignore[reportPrivateUsage]
            await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(enrolment, "_MOST_CONNECTIONS", 4)
        # Addresses of one IPv6 network belong to one owner. Then nobody has more than one, and the oldest goes.
        assert asyncio.run(run()) == ["2001:db8::1", "10.0.0.1", "::ffff:10.0.0.2"]


def test_a_connection_is_forwarded_for_its_own_address_and_a_silent_one_is_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(enrolment, "_SILENT_S", 0.05)
    callers: dict[str, str] = {}

    async def report_caller(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, port = writer.get_extra_info("peername")
        writer.write(await reader.read(5) + callers[f"{host}:{port}"].encode())
        writer.close()

    async def run() -> None:
        async with await asyncio.start_server(report_caller, "127.0.0.1", 0) as behind:
            port = StrangersPort(MagicMock(stop=AsyncMock()), behind.sockets[0].getsockname()[1], callers)
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
        port = StrangersPort(MagicMock(stop=AsyncMock()), 0, {})
        listened = await port.listen("127.0.0.1:0")
        with pytest.raises(AddressInUse, match=f"127.0.0.1:{listened} cannot be used"):
            await StrangersPort(MagicMock(stop=AsyncMock()), 0, {}).listen(f"127.0.0.1:{listened}")
        await port.stop(None)

    asyncio.run(run())
