"""Distribution of a fetch: parts of wanted pieces are assigned to peers as they ask for work. Pure.

Peers take work when they are free, so a fast one takes more. Parts that a peer did not finish go to the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from mlx_ring.models.weights_manifest import WeightsManifest

RUN_BYTES = 32 << 20
"""Maximum bytes of one request; a single larger part is allowed."""
_RUN_PARTS = 1024


@dataclass(frozen=True, slots=True)
class PiecePart:
    """Bytes `[start, end)` of a file, which belong to one piece.

    `number` counts the piece's parts. With `alone`, the whole piece must come from one peer,
    because it arrived corrupt from several.
    """

    piece: int
    number: int
    file: str
    start: int
    end: int
    alone: bool = False

    @property
    def nbytes(self) -> int:
        return self.end - self.start


@dataclass(slots=True)
class Board:
    """Wanted parts that are not being fetched yet, in the order of the files, and the pieces of each peer."""

    manifest: WeightsManifest
    waiting: list[PiecePart]
    peers: dict[str, frozenset[int]] = field(default_factory=dict[str, frozenset[int]])
    in_progress: int = 0
    """Number of parts that are being fetched."""

    def take(self, peer: str) -> list[PiecePart]:
        """Return parts of one file for a peer to fetch now, in order; none if it has nothing that is wanted."""
        has = self.peers.get(peer, frozenset())
        run: list[PiecePart] = []
        for part in self.waiting:
            if part.piece not in has:
                continue
            if run and not self._fits(run, part):
                break
            run.append(part)
            if part.alone:
                break
        taken = set(run)
        self.waiting = [part for part in self.waiting if part not in taken]
        self.in_progress += len(run)
        return run

    def _fits(self, run: list[PiecePart], part: PiecePart) -> bool:
        return (
            not part.alone
            and len(run) < _RUN_PARTS
            and part.file == run[0].file
            and sum(taken.nbytes for taken in run) + part.nbytes <= RUN_BYTES
        )

    def finish(self) -> None:
        """Record a finished part."""
        self.in_progress -= 1

    def return_unfinished(self, parts: Iterable[PiecePart]) -> None:
        """Return parts that a peer did not finish to the wanted ones."""
        returned = list(parts)
        self.in_progress -= len(returned)
        self.add(returned)

    def add(self, parts: Iterable[PiecePart]) -> None:
        """Add wanted parts."""
        self.waiting = sorted([*self.waiting, *parts], key=lambda part: (part.file, part.start))

    def drop(self, peer: str) -> None:
        """Remove a peer that is lost or must not be used."""
        self.peers.pop(peer, None)

    def can_take(self, peer: str) -> bool:
        """Return True if `take` would return parts for the peer now."""
        has = self.peers.get(peer, frozenset())
        return any(part.piece in has for part in self.waiting)

    def may_take_later(self, peer: str) -> bool:
        """Return True if the peer may still get parts that others are fetching."""
        return peer in self.peers and self.in_progress > 0


def join_ranges(parts: Iterable[PiecePart]) -> Iterator[tuple[int, int]]:
    """Return the ranges of parts, with adjacent ones joined."""
    begin = end = -1
    for part in parts:
        if part.start != end:
            if end > begin:
                yield begin, end
            begin = part.start
        end = part.end
    if end > begin:
        yield begin, end


def rest_of(parts: Iterable[PiecePart], reached: int) -> list[PiecePart]:
    """Return the rest of a run after `reached` bytes; a piece that must come from one peer counts as a whole."""
    rest: list[PiecePart] = []
    for part in parts:
        if reached < part.nbytes:
            rest.append(part if part.alone else replace(part, start=part.start + max(reached, 0)))
        reached -= part.nbytes
    return rest
