"""Streams that are listened to for as long as something comes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from mlx_ring.rpc.channels import limit_silence


async def numbers(last: int, *, is_silent_then: bool = False) -> AsyncIterator[int]:
    for number in range(last):
        yield number
    if is_silent_then:
        await asyncio.Event().wait()


def test_all_that_comes_is_given_until_it_ends() -> None:
    async def run() -> list[int]:
        return [number async for number in limit_silence(numbers(3), 60.0)]

    assert asyncio.run(run()) == [0, 1, 2]


def test_silence_ends_it() -> None:
    async def run() -> None:
        heard = limit_silence(numbers(1, is_silent_then=True), 0.01)
        assert await anext(heard) == 0
        with pytest.raises(TimeoutError):
            await anext(heard)

    asyncio.run(run())


@pytest.mark.parametrize("turns", range(8))
def test_a_listener_that_is_cancelled_ends_also_when_something_comes_at_that_moment(turns: int) -> None:
    """Cancel at each turn of the event loop after an item came."""

    async def run() -> bool:
        news = asyncio.Event()

        async def coming() -> AsyncIterator[None]:
            while True:
                await news.wait()
                news.clear()
                yield

        async def listen() -> None:
            async for _ in limit_silence(coming(), 60.0):
                pass

        listening = asyncio.create_task(listen())
        await asyncio.sleep(0)
        news.set()
        for _ in range(turns):
            await asyncio.sleep(0)
        listening.cancel()
        done, _ = await asyncio.wait((listening,), timeout=5.0)
        return bool(done)

    assert asyncio.run(run())
