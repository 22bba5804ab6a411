"""Nodes that have failed repeatedly, links that broke repeatedly, and MLX backends that hang. Plans avoid them for a while.

Losses that were blamed on nodes and links are kept in the cluster's folder, where another process may clear them. Hangs of
backends are forgotten when the head ends.

A group hangs if all its ranks answer, but none completes its collectives. That is a fault of the connection between its
nodes, or of the backend, and not of a node. A group of two ranks blames its pair of nodes. Larger groups do not show
which pair is at fault, so they blame the backend everywhere.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel

from mlx_ring.core.errors import ConfigError
from mlx_ring.host.private_files import StateFile

LOSSES = 4
WINDOW_S = 600.0
"""Window in which that number of losses puts a node into quarantine."""
REST_S = 900.0
"""Time in quarantine after the last loss."""
_ONE_LOSS_S = 1.5
"""Interval within which losses count as one, because a node may hold stages of several instances.

A loss of something that began to load after the previous loss counts separately.
"""


LINK_LOSSES = 2
"""The same for the link between two nodes."""

Pair = tuple[str, str]
"""Two nodes in order of their names; twice the same for two ranks on one node."""


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
    """Time for which plans leave out a node or a link."""

    reason: str
    """Reason, as a sentence."""
    until_s: float

    @property
    def until(self) -> str:
        """Hour and minute of its end, in this machine's time zone."""
        return time.strftime("%H:%M", time.localtime(self.until_s))


@dataclass(frozen=True, slots=True)
class LostLink:
    """Loss of an instance because the link between two of its nodes broke."""

    ends: Pair
    reason: str
    at_s: float
    """Time of the loss in seconds since the Unix epoch."""
    begun_s: float = 0.0
    """Time at which the lost instance began to load."""


AnyLoss = TypeVar("AnyLoss", Loss, LostLink)


def quarantined(losses: Sequence[Loss], now_s: float) -> Mapping[str, Quarantine]:
    """Return the current quarantines by node."""
    nodes = {loss.node for loss in losses}
    found = {node: _rest([loss for loss in losses if loss.node == node], LOSSES, now_s) for node in nodes}
    return {node: rest for node, rest in found.items() if rest is not None}


def avoided_links(losses: Sequence[LostLink], now_s: float) -> Mapping[Pair, Quarantine]:
    """Return the links that plans avoid now, by their ends."""
    pairs = {loss.ends for loss in losses}
    found = {
        pair: _rest([loss for loss in losses if loss.ends == pair], LINK_LOSSES, now_s) for pair in pairs
    }
    return {pair: rest for pair, rest in found.items() if rest is not None}


def _rest(losses: Sequence[Loss | LostLink], most: int, now_s: float) -> Quarantine | None:
    """Return the rest of a node or link after this number of losses; None if there is none now."""
    own = sorted(losses, key=lambda loss: loss.at_s)
    last = own[-1]
    count = _apart([loss for loss in own if loss.at_s > last.at_s - WINDOW_S])
    if count < most or now_s >= last.at_s + REST_S:
        return None
    reason = f"It was lost {count} times within {WINDOW_S / 60:.0f} minutes. The last reason: {last.reason}"
    return Quarantine(reason, last.at_s + REST_S)


def _apart(losses: Sequence[Loss | LostLink]) -> int:
    """Return the number of separate losses; `losses` must be in order."""
    return 1 + sum(_is_another(before, after) for before, after in pairwise(losses))


def _is_another(before: Loss | LostLink, after: Loss | LostLink) -> bool:
    return after.begun_s > before.at_s or after.at_s - before.at_s > _ONE_LOSS_S


def still_counting(losses: tuple[AnyLoss, ...], now_s: float) -> tuple[AnyLoss, ...]:
    """Return the losses that still count; those in the future, because the clock was set back, do not."""
    return tuple(loss for loss in losses if 0 <= now_s - loss.at_s < WINDOW_S + REST_S)


log = logging.getLogger(__name__)

_FILE = "losses.json"


class _QuarantineFile(BaseModel):
    losses: tuple[Loss, ...] = ()
    links: tuple[LostLink, ...] = ()


class QuarantineList:
    """The losses of nodes and of links, and the resulting quarantines.

    If its file cannot be used, the head logs that and continues without quarantines.
    """

    def __init__(self, folder: Path, clock: Callable[[], float] = time.time) -> None:
        self._path = folder / _FILE
        self._file = StateFile(
            self._path, _QuarantineFile, "remove it, and what nodes have lost is forgotten"
        )
        self._clock = clock
        self._logged = ""

    def note(self, node: str, reason: str, begun_s: float) -> Quarantine | None:
        """Record the loss of an instance because of the node; return the quarantine if the node is in one now.

        Args:
            node: the node.
            reason: the reason of the loss.
            begun_s: the time at which the instance began to load, since the Unix epoch.
        """
        now_s = self._clock()
        try:
            with self._file.change() as content:
                content.losses = (*still_counting(content.losses, now_s), Loss(node, reason, now_s, begun_s))
        except (ConfigError, OSError) as error:
            self._log_once(error)
            return None
        return quarantined(content.losses, now_s).get(node)

    def note_link(self, nodes: Sequence[str], reason: str, begun_s: float) -> Quarantine | None:
        """Record the loss of an instance because the link between two nodes broke; return its quarantine, if it is in one now.

        Args:
            nodes: the nodes at its ends.
            reason: the reason of the loss.
            begun_s: the time at which the instance began to load, since the Unix epoch.
        """
        pair, now_s = pair_of(nodes), self._clock()
        if pair is None:
            return None
        try:
            with self._file.change() as content:
                lost = LostLink(pair, reason, now_s, begun_s)
                content.links = (*still_counting(content.links, now_s), lost)
        except (ConfigError, OSError) as error:
            self._log_once(error)
            return None
        return avoided_links(content.links, now_s).get(pair)

    def held(self) -> Mapping[str, Quarantine]:
        """Return the current quarantines by node."""
        now_s = self._clock()
        return quarantined(still_counting(self._read().losses, now_s), now_s)

    def links(self) -> Mapping[Pair, Quarantine]:
        """Return the links that plans avoid now, by their ends."""
        now_s = self._clock()
        return avoided_links(still_counting(self._read().links, now_s), now_s)

    def _read(self) -> _QuarantineFile:
        try:
            return self._file.read()
        except (ConfigError, OSError) as error:
            self._log_once(error)
            return _QuarantineFile()

    def readmit(self, node: str) -> None:
        """Forget the node's losses, and those of its links.

        Raises:
            ConfigError: a node that is not in quarantine and of which no link is avoided, or a file that cannot be used.
        """
        now_s = self._clock()
        with self._file.change() as content:
            held = quarantined(still_counting(content.losses, now_s), now_s)
            avoided = avoided_links(still_counting(content.links, now_s), now_s)
            if node not in held and not any(node in ends for ends in avoided):
                links = sorted(" and ".join(ends) for ends in avoided)
                raise ConfigError(
                    f"The node {node!r} is not in quarantine, and plans avoid no link of it."
                    + (f" Nodes in quarantine are {', '.join(sorted(held))}." if held else "")
                    + (f" Links that plans avoid are {', '.join(links)}." if links else "")
                )
            content.losses = tuple(loss for loss in content.losses if loss.node != node)
            content.links = tuple(loss for loss in content.links if node not in loss.ends)

    def _log_once(self, error: ConfigError | OSError) -> None:
        """Log each error once, because the head reads the file repeatedly."""
        reason = f"{self._path}: {error.strerror}" if isinstance(error, OSError) else str(error)
        if reason != self._logged:
            self._logged = reason
            log.warning("Losses are not counted, and no node is put into quarantine: %s", reason)


HANGS = 2
"""Number of hangs within `WINDOW_S` that bars a backend for `REST_S`."""


def pair_of(nodes: Sequence[str]) -> Pair | None:
    """Return the pair that a group blames, given each rank's node; None for a group of more than two ranks."""
    match tuple(nodes):
        case (one, other):
            return pair(one, other)
        case _:
            return None


def pair(one: str, other: str) -> Pair:
    """Return two nodes in order."""
    return (min(one, other), max(one, other))


@dataclass(frozen=True, slots=True)
class Hang:
    """Loss, or failed load, of an instance because a group hung. Times are seconds since the Unix epoch."""

    backend: str
    pair: Pair | None
    """Pair of nodes to blame; None blames the backend everywhere."""
    reason: str
    at_s: float
    begun_s: float
    """Time at which the instance began to load."""


@dataclass(frozen=True, slots=True)
class HungBackend:
    """Record of a backend that hung, between two nodes or everywhere."""

    backend: str
    pair: Pair | None
    hangs: int
    """Number of hangs since the head started."""
    reason: str
    """Reason of the last one, as a sentence."""
    until_s: float | None
    """Time until which it is barred; None if it is not."""


class HungBackends:
    """Counter of hangs by backend and pair."""

    def __init__(self) -> None:
        self._events: dict[tuple[str, Pair | None], list[Hang]] = {}
        """Hangs that still count, and always the last one."""
        self._counts: dict[tuple[str, Pair | None], int] = {}

    def record(self, hang: Hang) -> HungBackend:
        """Record a hang, and return the record of its backend.

        Instances that were already loaded when the same group hung elsewhere hang for the same reason, and do not count.
        """
        key = (hang.backend, hang.pair)
        before = self._events.get(key, [])
        if not before or hang.begun_s >= before[-1].at_s or hang.at_s < before[-1].at_s:
            recent = [each for each in before if 0 <= hang.at_s - each.at_s < WINDOW_S + REST_S]
            self._events[key] = [*recent, hang]
            self._counts[key] = self._counts.get(key, 0) + 1
        return self._state(key, hang.at_s)

    def barred(self, nodes: Sequence[str], now_s: float) -> frozenset[str]:
        """Return the backends that a group must not use, given the node of each of its ranks."""
        return barred_backends(self.states(now_s), nodes)

    def states(self, now_s: float) -> tuple[HungBackend, ...]:
        """Return the record of each backend that hung since the start."""
        return tuple(self._state(key, now_s) for key in self._events)

    def _state(self, key: tuple[str, Pair | None], now_s: float) -> HungBackend:
        events = self._events[key]
        until_s = max(_bars(event.at_s for event in events if event.at_s <= now_s), default=0.0)
        return HungBackend(
            *key,
            hangs=self._counts[key],
            reason=events[-1].reason,
            until_s=until_s if now_s < until_s else None,
        )


def barred_backends(states: Iterable[HungBackend], nodes: Sequence[str]) -> frozenset[str]:
    """Return the backends that a group must not use by these records, given the node of each of its ranks."""
    pairs = {pair(*each) for each in combinations(nodes, 2)}
    return frozenset(
        state.backend
        for state in states
        if state.until_s is not None and (state.pair is None or state.pair in pairs)
    )


def _bars(times_s: Iterable[float]) -> Iterator[float]:
    """Yield the end of each time for which a backend is barred; `times_s` must be in order."""
    times = list(times_s)
    for place in range(HANGS - 1, len(times)):
        if times[place] - times[place - HANGS + 1] < WINDOW_S:
            yield times[place] + REST_S
