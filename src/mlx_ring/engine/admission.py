"""Admission to the queue, and load shedding when it is full. Pure.

A full queue is shared evenly among clients: the client with most requests loses its newest to one with fewer. One

client alone may fill the queue.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from mlx_ring.core.engine_stats import Policy
from mlx_ring.core.errors import Overloaded, RequestError

_RETRY_AFTER_S = 1.0


def check_places(requests: int, policy: Policy, *, free: int, waiting: int) -> None:
    """Check that requests that belong together can be admitted to the queue now.

    Args:
        requests: number of requests.
        policy: limits of the scheduler.
        free: number of free places.
        waiting: number of requests in the queue.

    Raises:
        RequestError: the server never admits so many.
        Overloaded: it cannot admit so many now.
    """
    most = policy.max_num_seqs + policy.max_queued_requests
    if requests > most:
        raise RequestError(
            f"This request asks for {requests} answers (its prompts times n), and the server takes {most} at once "
            f"(--max-num-seqs {policy.max_num_seqs}, --max-queued-requests {policy.max_queued_requests}): ask for fewer.",
            param="n",
        )
    if requests > free:
        wait = "1 request waits" if waiting == 1 else f"{waiting} requests wait"
        asked = f", and this one asks for {requests} answers" if requests > 1 else ""
        raise Overloaded(
            f"{wait} already{asked}; try again in {_RETRY_AFTER_S:g} s.",
            retry_after_s=_RETRY_AFTER_S,
        )


def shed_error() -> Overloaded:
    """Return the error of a waiting request that was shed for another client."""
    return Overloaded(
        "The queue is full, and this client has the most requests in it: one of them was shed for another client; "
        f"try again in {_RETRY_AFTER_S:g} s.",
        retry_after_s=_RETRY_AFTER_S,
    )


@dataclass(frozen=True, slots=True)
class QueuePlace:
    """A place that a client holds."""

    sequence: int
    client: str
    may_be_shed: bool
    """True if the request waits and nothing was computed for it yet."""


def choose_to_shed(held: Iterable[QueuePlace], client: str, *, wants: int, needs: int) -> list[int] | None:
    """Choose the newest waiting sequences of the clients that have most.

    Args:
        held: places, the oldest first.
        client: the client that sends requests.
        wants: number of its new requests.
        needs: number of these that have no free place.

    Returns:
        As many sequences as needed; None if that would leave another client with fewer than this one.
    """
    places, waiting = Counter({client: wants}), dict[str, list[int]]()
    for each in held:
        places[each.client] += 1
        if each.may_be_shed:
            waiting.setdefault(each.client, []).append(each.sequence)
    shed: list[int] = []
    while len(shed) < needs:
        most = max((name for name in waiting if waiting[name]), key=places.__getitem__, default=client)
        if places[most] <= places[client]:
            return None
        shed.append(waiting[most].pop())
        places[most] -= 1
    return shed
