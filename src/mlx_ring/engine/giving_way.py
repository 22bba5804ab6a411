"""Who gives way where the queue is full: whoever has most, to who has less. Pure.

So one client may have the whole queue while nobody else wants any of it, and as many as want it share it evenly.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Held:
    """A place that a client has."""

    sequence: int
    client: str
    may_go: bool
    """Whether it only waits, and nothing was computed for it yet."""


def who_gives_way(held: Iterable[Held], client: str, *, wants: int, needs: int) -> list[int] | None:
    """The newest waiting sequences of those that have most.

    Args:
        held: places, the oldest first.
        client: who comes.
        wants: places that it asks for.
        needs: how many of these are not free.

    Returns:
        As many sequences as are needed; None where that would leave anybody with less than who comes.
    """
    places, waiting = Counter({client: wants}), dict[str, list[int]]()
    for each in held:
        places[each.client] += 1
        if each.may_go:
            waiting.setdefault(each.client, []).append(each.sequence)
    gone: list[int] = []
    while len(gone) < needs:
        most = max((name for name in waiting if waiting[name]), key=places.__getitem__, default=client)
        if places[most] <= places[client]:
            return None
        gone.append(waiting[most].pop())
        places[most] -= 1
    return gone
