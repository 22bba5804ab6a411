"""Quarantine of nodes that have failed repeatedly, which plans leave out for a while.

Losses that were blamed on nodes are kept in the cluster's folder, where another process may clear them.
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
"""Window in which that number of losses puts a node into quarantine."""
REST_S = 900.0
"""Time in quarantine after the last loss."""
_ONE_LOSS_S = 1.5
"""Interval within which losses count as one, because a node may hold stages of several instances.

A loss of something that began to load after the previous loss counts separately.
"""


@dataclass(frozen=True, slots=True)
class Loss:
    """Loss, or failed load, of an instance because of a node."""

    node: str
    reason: str
    at_s: float
    """Time of the loss in seconds since the Unix epoch, because it is kept between runs."""
    begun_s: float = 0.0
    """Time at which the lost instance began to load."""


@dataclass(frozen=True, slots=True)
class Quarantine:
    """Quarantine of a node."""

    reason: str
    """Reason, as a sentence."""
    until_s: float


def quarantined(losses: tuple[Loss, ...], now_s: float) -> Mapping[str, Quarantine]:
    """Return the current quarantines by node."""
    held: dict[str, Quarantine] = {}
    for node in {loss.node for loss in losses}:
        own = sorted((loss for loss in losses if loss.node == node), key=lambda loss: loss.at_s)
        last = own[-1]
        count = _apart([loss for loss in own if loss.at_s > last.at_s - WINDOW_S])
        if count >= LOSSES and now_s < last.at_s + REST_S:
            reason = f"It was lost {count} times within {WINDOW_S / 60:.0f} minutes. The last reason: {last.reason}"
            held[node] = Quarantine(reason, last.at_s + REST_S)
    return held


def _apart(losses: list[Loss]) -> int:
    """Return the number of separate losses; `losses` must be in order."""
    return 1 + sum(_is_another(before, after) for before, after in pairwise(losses))


def _is_another(before: Loss, after: Loss) -> bool:
    return after.begun_s > before.at_s or after.at_s - before.at_s > _ONE_LOSS_S


def still_counting(losses: tuple[Loss, ...], now_s: float) -> tuple[Loss, ...]:
    """Return the losses that still count; those in the future, because the clock was set back, do not."""
    return tuple(loss for loss in losses if 0 <= now_s - loss.at_s < WINDOW_S + REST_S)


log = logging.getLogger(__name__)

_FILE = "losses.json"


class _Content(BaseModel):
    losses: tuple[Loss, ...] = ()


class QuarantineList:
    """The losses of nodes and the resulting quarantines.

    If its file cannot be used, the head logs that and continues without quarantines.
    """

    def __init__(self, folder: Path, clock: Callable[[], float] = time.time) -> None:
        self._path = folder / _FILE
        self._file = StateFile(self._path, _Content, "remove it, and what nodes have lost is forgotten")
        self._clock = clock
        self._logged = ""

    def note(self, node: str, reason: str, begun_s: float) -> Quarantine | None:
        """Record the loss of an instance because of the node; return the quarantine if the node is in one now.

        Args:
            node: The node.
            reason: The reason of the loss.
            begun_s: The time at which the instance began to load, since the Unix epoch.
        """
        now_s = self._clock()
        try:
            with self._file.change() as content:
                content.losses = (*still_counting(content.losses, now_s), Loss(node, reason, now_s, begun_s))
        except (ConfigError, OSError) as error:
            self._log_once(error)
            return None
        return quarantined(content.losses, now_s).get(node)

    def held(self) -> Mapping[str, Quarantine]:
        """Return the current quarantines by node."""
        try:
            return self._held_by(self._file.read())
        except (ConfigError, OSError) as error:
            self._log_once(error)
            return {}

    def readmit(self, node: str) -> None:
        """Forget the node's losses.

        Raises:
            ConfigError: A node that is not in quarantine, or a file that cannot be used.
        """
        with self._file.change() as content:
            held = self._held_by(content)
            if node not in held:
                raise ConfigError(
                    f"The node {node!r} is not in quarantine: nodes in quarantine are {', '.join(sorted(held)) or 'none'}."
                )
            content.losses = tuple(loss for loss in content.losses if loss.node != node)

    def _held_by(self, content: _Content) -> Mapping[str, Quarantine]:
        now_s = self._clock()
        return quarantined(still_counting(content.losses, now_s), now_s)

    def _log_once(self, error: ConfigError | OSError) -> None:
        """Log each error once, because the head reads the file repeatedly."""
        reason = f"{self._path}: {error.strerror}" if isinstance(error, OSError) else str(error)
        if reason != self._logged:
            self._logged = reason
            log.warning("losses are not counted, and no node is put into quarantine: %s", reason)
