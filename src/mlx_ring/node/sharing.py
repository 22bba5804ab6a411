"""Who makes room where there are as many connections as may be. Pure.

One that has no request goes first. Where all are busy, the address that has most gives one up, to one that has fewer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Protocol, TypeVar


class Connected(Protocol):
    """A connection, or one that is still agreeing on its encryption."""

    peer: str
    """Whose it is."""
    since_s: float
    """When it was opened."""
    quiet_since_s: float | None
    """Since when it has no request; None while it has one."""

    @property
    def has_answered(self) -> bool:
        """Whether a part of an answer is out, which would be cut."""
        ...


Each = TypeVar("Each", bound=Connected)


def who_makes_room(newcomer: Connected, others: Iterable[Each]) -> Each | None:
    """The one that ends for a newcomer; None where it is the newcomer that must go."""
    others = tuple(others)
    counts = Counter(each.peer for each in (newcomer, *others))
    quiet = {each: each.quiet_since_s for each in others if each.quiet_since_s is not None}
    if quiet:
        return min(quiet, key=lambda each: (-counts[each.peer], quiet[each]))
    most = max(counts.values())
    greedy = [each for each in others if counts[each.peer] == most > counts[newcomer.peer]]
    return min(greedy, key=lambda each: (each.has_answered, -each.since_s), default=None)
