"""Which nodes are left out of plans for a while, for they have failed again and again. Pure.

Losses that were blamed on nodes, in the cluster's folder: a command beside the running head may strike them out.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from pydantic import BaseModel

from mlx_ring.cluster.security.state_file import StateFile
from mlx_ring.core.errors import ConfigError

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
class Quarantine:
    """A node that is left out."""

    reason: str
    """A sentence."""
    until_s: float


def quarantined(losses: tuple[Loss, ...], now_s: float) -> Mapping[str, Quarantine]:
    """By node, who is left out now."""
    held: dict[str, Quarantine] = {}
    for node in {loss.node for loss in losses}:
        own = sorted((loss for loss in losses if loss.node == node), key=lambda loss: loss.at_s)
        last = own[-1]
        count = _apart([loss for loss in own if loss.at_s > last.at_s - WINDOW_S])
        if count >= LOSSES and now_s < last.at_s + REST_S:
            reason = f"It was lost {count} times within {WINDOW_S / 60:.0f} minutes, the last time because: {last.reason}"
            held[node] = Quarantine(reason, last.at_s + REST_S)
    return held


def _apart(losses: list[Loss]) -> int:
    """How many times something happened, given losses in order."""
    return 1 + sum(_is_another(before, after) for before, after in pairwise(losses))


def _is_another(before: Loss, after: Loss) -> bool:
    return after.begun_s > before.at_s or after.at_s - before.at_s > _ONE_LOSS_S


def still_counting(losses: tuple[Loss, ...], now_s: float) -> tuple[Loss, ...]:
    """Those that can still matter. What the future is said to hold, by a clock that was put back, cannot."""
    return tuple(loss for loss in losses if 0 <= now_s - loss.at_s < WINDOW_S + REST_S)


log = logging.getLogger(__name__)

_FILE = "losses.json"


class _Content(BaseModel):
    losses: tuple[Loss, ...] = ()


class QuarantineList:
    """Who has failed, and who is left out for it.

    A head serves without it where its file cannot be used: that says so in the log and leaves nobody out.
    """

    def __init__(self, folder: Path, clock: Callable[[], float] = time.time) -> None:
        self._path = folder / _FILE
        self._file = StateFile(self._path, _Content, "remove it, and what nodes have lost is forgotten")
        self._clock = clock
        self._told = ""

    def note(self, node: str, reason: str, begun_s: float) -> Quarantine | None:
        """An instance that was begun then, since the Unix epoch, was lost through the node; tells where it is left out from now on."""
        now_s = self._clock()
        try:
            with self._file.change() as content:
                content.losses = (*still_counting(content.losses, now_s), Loss(node, reason, now_s, begun_s))
        except (ConfigError, OSError) as error:
            self._tell(error)
            return None
        return quarantined(content.losses, now_s).get(node)

    def held(self) -> Mapping[str, Quarantine]:
        """By node, who is left out now."""
        try:
            return self._held_by(self._file.read())
        except (ConfigError, OSError) as error:
            self._tell(error)
            return {}

    def readmit(self, node: str) -> None:
        """Forget the node's losses.

        Raises:
            ConfigError: it is not left out, or the file cannot be used.
        """
        with self._file.change() as content:
            held = self._held_by(content)
            if node not in held:
                raise ConfigError(
                    f"The node {node!r} is not left out: those that are now are {', '.join(sorted(held)) or 'none'}."
                )
            content.losses = tuple(loss for loss in content.losses if loss.node != node)

    def _held_by(self, content: _Content) -> Mapping[str, Quarantine]:
        now_s = self._clock()
        return quarantined(still_counting(content.losses, now_s), now_s)

    def _tell(self, error: ConfigError | OSError) -> None:
        """Once for each trouble: a head asks again and again."""
        told = f"{self._path}: {error.strerror}" if isinstance(error, OSError) else str(error)
        if told != self._told:
            self._told = told
            log.warning("losses are not counted, and no node is left out for them: %s", told)
