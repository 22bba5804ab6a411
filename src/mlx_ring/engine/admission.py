"""Who may come, and what those are told who may not. Pure."""

from __future__ import annotations

from mlx_ring.core.errors import Overloaded, RequestError
from mlx_ring.engine.policy import Policy

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
            f"(--max-num-seqs {policy.max_num_seqs}, --max-waiting {policy.max_waiting}): ask for fewer.",
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
