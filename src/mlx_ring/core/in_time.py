"""What comes one by one, each within its time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import TypeVar

T = TypeVar("T")


async def in_time(coming: AsyncIterator[T], silence_s: float) -> AsyncIterator[T]:
    """All that comes, until it ends.

    Raises:
        TimeoutError: nothing came for `silence_s` seconds.
    """
    while True:
        try:
            async with asyncio.timeout(silence_s):
                one = await anext(coming)
        except StopAsyncIteration:
            return
        yield one
