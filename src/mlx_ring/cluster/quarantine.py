"""Which nodes are left out of plans for a while, for they have failed again and again. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

LOSSES = 4
WINDOW_S = 600.0
"""So many losses within so long, and a node is left out ..."""
REST_S = 900.0
"""... for so long after the last of them."""
_ONE_LOSS_S = 1.5
"""Whatever comes so soon after another is the same, unless it was begun after that: a node may have stages of several instances."""


@dataclass(frozen=True, slots=True)
class Loss:
    """An instance was lost, or could not be loaded, through a node."""

    node: str
    reason: str
    at_s: float
    """Since the Unix epoch: it is kept between runs."""
    begun_s: float = 0.0
    """When what was lost had begun to load."""


@dataclass(frozen=True, slots=True)
class Held:
    """A node that is left out."""

    reason: str
    """A sentence."""
    until_s: float


def quarantined(losses: tuple[Loss, ...], now_s: float) -> Mapping[str, Held]:
    """By node, who is left out now."""
    held: dict[str, Held] = {}
    for node in {loss.node for loss in losses}:
        own = sorted((loss for loss in losses if loss.node == node), key=lambda loss: loss.at_s)
        last = own[-1]
        count = _apart([loss for loss in own if loss.at_s > last.at_s - WINDOW_S])
        if count >= LOSSES and now_s < last.at_s + REST_S:
            reason = f"It was lost {count} times within {WINDOW_S / 60:.0f} minutes, the last time because: {last.reason}"
            held[node] = Held(reason, last.at_s + REST_S)
    return held


def _apart(losses: list[Loss]) -> int:
    """How many times something happened, given losses in order."""
    return 1 + sum(_is_another(before, after) for before, after in pairwise(losses))


def _is_another(before: Loss, after: Loss) -> bool:
    return after.begun_s > before.at_s or after.at_s - before.at_s > _ONE_LOSS_S


def still_counting(losses: tuple[Loss, ...], now_s: float) -> tuple[Loss, ...]:
    """Those that can still matter. What the future is said to hold, by a clock that was put back, cannot."""
    return tuple(loss for loss in losses if 0 <= now_s - loss.at_s < WINDOW_S + REST_S)
