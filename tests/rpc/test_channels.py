"""Limit on the silence of a stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from mlx_ring.rpc.channels import Silence, limit_silence


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
