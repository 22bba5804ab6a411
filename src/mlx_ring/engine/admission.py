"""Who may come, and what those are told who may not. Pure.

Who gives way where the queue is full: whoever has most, to who has less. Pure.

So one client may have the whole queue while nobody else wants any of it, and as many as want it share it evenly.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from mlx_ring.core.engine_stats import Policy
from mlx_ring.core.errors import Overloaded, RequestError

_RETRY_AFTER_S = 1.0


def check_places(requests: int, policy: Policy, *, free: int, waiting: int) -> None:
    """Check that requests that belong together can come now.

    Args:
        requests: how many come.
        policy: how many there may ever be.
        free: places for those who come.
        waiting: requests that wait already.

    Raises:
        RequestError: the server never takes so many.
        Overloaded: it does not take so many now.
    """
    most = policy.max_num_seqs + policy.max_waiting
    if requests > most:
        raise RequestError(
            f"This request asks for {requests} answers (its prompts times n), and the server takes {most} at once "
            f"(--max-num-seqs {policy.max_num_seqs}, --max-queued-requests {policy.max_waiting}): ask for fewer.",
            param="n",
        )
    if requests > free:
        wait = "1 request waits" if waiting == 1 else f"{waiting} requests wait"
        asked = f", and this one asks for {requests} answers" if requests > 1 else ""
        raise Overloaded(
            f"{wait} already{asked}; try again in {_RETRY_AFTER_S:g} s.",
            retry_after_s=_RETRY_AFTER_S,
        )


def gave_way() -> Overloaded:
    """What one is told who waited, and whose place another client was given."""
    return Overloaded(
        "The queue is full, and of those who wait in it this client had most: a request of it gave way to another client's; "
        f"try again in {_RETRY_AFTER_S:g} s.",
        retry_after_s=_RETRY_AFTER_S,
    )


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
