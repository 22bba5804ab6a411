"""Limits on the silence of a stream, and on the connections of a server."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.machines import node_credentials

from mlx_ring.cluster.security.authority import Authority
from mlx_ring.rpc import channels
from mlx_ring.rpc.channels import Silence, add_secure_port, limit_silence, make_server


async def numbers(last: int, *, is_silent_then: bool = False) -> AsyncIterator[int]:
    for number in range(last):
        yield number
    if is_silent_then:
        await asyncio.Event().wait()


def test_every_item_is_passed_on_until_the_stream_ends() -> None:
    async def run() -> list[int]:
        return [number async for number in limit_silence(numbers(3), 60.0)]

    assert asyncio.run(run()) == [0, 1, 2]


def test_silence_ends_the_stream() -> None:
    async def run() -> None:
        limited = limit_silence(numbers(1, is_silent_then=True), 0.01)
        assert await anext(limited) == 0
        with pytest.raises(TimeoutError):
            await anext(limited)

    asyncio.run(run())


@pytest.mark.parametrize("turns", range(8))
def test_a_cancelled_reader_ends_even_if_an_item_arrives_at_that_moment(turns: int) -> None:
    """Cancel the reader at each turn of the event loop after an item arrived."""

    async def run() -> None:
        arrived = asyncio.Event()

        async def items() -> AsyncIterator[None]:
            while True:
                await arrived.wait()
                arrived.clear()
                yield

        async def read() -> None:
            async for _ in limit_silence(items(), 60.0):
                pass

        reading = asyncio.create_task(read())
        await asyncio.sleep(0)
        arrived.set()
        for _ in range(turns):
            await asyncio.sleep(0)
        reading.cancel()
        await asyncio.wait((reading,))
        assert reading.cancelled()

    asyncio.run(run())


def test_a_pause_of_this_process_is_not_silence_of_its_peers() -> None:
    now_s = 100.0
    silence = Silence(lambda: now_s)
    looks = list[float]()
    for pause_s in (0.25, 0.25, 3600.0, 0.25):
        now_s += pause_s
        looks.append(silence.look())
    assert looks == [0.25, 0.5, 1.0, 1.25]
    silence.end()
    assert silence.look() == 0.0


def test_silent_connections_do_not_take_all_descriptors_of_a_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channels, "descriptor_limit", lambda: 7)
    monkeypatch.setattr(channels, "_HANDSHAKE_MS", 600_000)
    server = make_server(1)
    credentials = node_credentials(Authority.open(tmp_path), "mini-1").for_server()
    port = add_secure_port(server, "127.0.0.1:0", credentials)
    server.start()

    try:
        with contextlib.ExitStack() as stack:
            silent = [
                stack.enter_context(socket.create_connection(("127.0.0.1", port), 60)) for _ in range(6)
            ]
            for refused in silent[4:]:
                with contextlib.suppress(ConnectionError):
                    assert refused.recv(1) == b""
            for kept in silent[:4]:
                kept.settimeout(0.0)
                with pytest.raises(BlockingIOError):
                    kept.recv(1)
    finally:
        server.stop(None)
