"""Losses that were blamed on nodes, in the cluster's folder: a command beside the running head may strike them out."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from pydantic import BaseModel

from mlx_ring.cluster.quarantine import Held, Loss, quarantined, still_counting
from mlx_ring.cluster.security.state_file import StateFile
from mlx_ring.core.errors import ConfigError

log = logging.getLogger(__name__)

_FILE = "losses.json"


class _Content(BaseModel):
    losses: tuple[Loss, ...] = ()


class QuarantineBook:
    """Who has failed, and who is left out for it.

    A head serves without it where its file cannot be used: that says so in the log and leaves nobody out.
    """

    def __init__(self, folder: Path, clock: Callable[[], float] = time.time) -> None:
        self._path = folder / _FILE
        self._file = StateFile(self._path, _Content, "remove it, and what nodes have lost is forgotten")
        self._clock = clock
        self._told = ""

    def note(self, node: str, reason: str, begun_s: float) -> Held | None:
        """An instance that was begun then, since the Unix epoch, was lost through the node; tells where it is left out from now on."""
        now_s = self._clock()
        try:
            with self._file.change() as content:
                content.losses = (*still_counting(content.losses, now_s), Loss(node, reason, now_s, begun_s))
        except (ConfigError, OSError) as error:
            self._tell(error)
            return None
        return quarantined(content.losses, now_s).get(node)

    def held(self) -> Mapping[str, Held]:
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

    def _held_by(self, content: _Content) -> Mapping[str, Held]:
        now_s = self._clock()
        return quarantined(still_counting(content.losses, now_s), now_s)

    def _tell(self, error: ConfigError | OSError) -> None:
        """Once for each trouble: a head asks again and again."""
        told = f"{self._path}: {error.strerror}" if isinstance(error, OSError) else str(error)
        if told != self._told:
            self._told = told
            log.warning("losses are not counted, and no node is left out for them: %s", told)
