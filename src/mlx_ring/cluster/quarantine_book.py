"""Losses that were blamed on nodes, in the cluster's folder: a command beside the running head may strike them out."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path

from pydantic import BaseModel

from mlx_ring.cluster.quarantine import Held, Loss, quarantined, still_counting
from mlx_ring.cluster.security.state_file import StateFile
from mlx_ring.core.errors import ConfigError

_FILE = "losses.json"


class _Content(BaseModel):
    losses: tuple[Loss, ...] = ()


class QuarantineBook:
    """Who has failed, and who is left out for it."""

    def __init__(self, folder: Path, clock: Callable[[], float] = time.time) -> None:
        self._file = StateFile(folder / _FILE, _Content)
        self._clock = clock

    def note(self, node: str, reason: str) -> Held | None:
        """An instance was lost through the node; tells where it is left out from now on."""
        now_s = self._clock()
        with self._file.change() as content:
            content.losses = (*still_counting(content.losses, now_s), Loss(node, reason, now_s))
            return quarantined(content.losses, now_s).get(node)

    def held(self) -> Mapping[str, Held]:
        """By node, who is left out now."""
        return quarantined(self._file.read().losses, self._clock())

    def readmit(self, node: str) -> None:
        """Forget the node's losses.

        Raises:
            ConfigError: it is not left out.
        """
        with self._file.change() as content:
            held = quarantined(content.losses, self._clock())
            if node not in held:
                raise ConfigError(
                    f"The node {node!r} is not left out: those that are now are {', '.join(sorted(held)) or 'none'}."
                )
            content.losses = tuple(loss for loss in content.losses if loss.node != node)
