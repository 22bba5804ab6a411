"""Distribution of a fetch: parts of wanted pieces are assigned to peers as they ask for work. Pure.

Peers take work when they are free, so a fast one takes more. Parts that a peer did not finish go to the others.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from mlx_ring.models.weights_manifest import WeightsManifest

RUN_BYTES = 32 << 20
"""Maximum bytes of one request; a single larger part is allowed."""
_RUN_PARTS = 1024
_FEW_PARTS = 64
"""Number of parts up to which inserting each is cheaper than sorting all."""

_Place = tuple[str, int]
"""File and start of a part, by which parts are ordered."""


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
    _places: dict[str, tuple[frozenset[int], _Place]] = field(
        default_factory=dict[str, tuple[frozenset[int], _Place]]
    )
    """Place of each peer before which nothing waits that it has, for the pieces that it had then."""

    def take(self, peer: str) -> list[PiecePart]:
        """Return parts of one file for a peer to fetch now, in order; none if it has nothing that is wanted."""
        first = self._first(peer)
        has = self.peers.get(peer, frozenset())
        run: list[PiecePart] = []
        left: list[PiecePart] = []
        end, nbytes = first, 0
        while end < len(self.waiting):
            part = self.waiting[end]
            if part.piece not in has:
                if run and part.file != run[0].file:
                    break
                left.append(part)
            elif run and not self._fits(run, nbytes, part):
                break
            else:
                run.append(part)
                nbytes += part.nbytes
            end += 1
            if part.alone and run and run[-1] is part:
                break
        # The parts that stay keep their places; a moved tail costs far less than a new list.
        self.waiting[first:end] = left
        self.in_progress += len(run)
        return run

    def _first(self, peer: str) -> int:
        """Return the index of the first part that the peer has, and remember its place; the number of parts if none."""
        has = self.peers.get(peer, frozenset())
        known, place = self._places.get(peer, (None, ("", 0)))
        index = 0 if known is not has else bisect_left(self.waiting, place, key=_place)
        while index < len(self.waiting) and self.waiting[index].piece not in has:
            index += 1
        if index < len(self.waiting):
            self._places[peer] = has, _place(self.waiting[index])
        elif self.waiting:
            last = self.waiting[-1]
            self._places[peer] = has, (last.file, last.start + 1)
        return index

    def _fits(self, run: list[PiecePart], nbytes: int, part: PiecePart) -> bool:
        return (
            not part.alone
            and len(run) < _RUN_PARTS
            and part.file == run[0].file
            and nbytes + part.nbytes <= RUN_BYTES
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
        added = list(parts)
        if len(added) > _FEW_PARTS:
            self.waiting = sorted([*self.waiting, *added], key=_place)
        else:
            for part in added:
                insort(self.waiting, part, key=_place)
        if added:
            earliest = min(map(_place, added))
            self._places = {peer: (has, min(place, earliest)) for peer, (has, place) in self._places.items()}

    def drop(self, peer: str) -> None:
        """Remove a peer that is lost or must not be used."""
        self.peers.pop(peer, None)
        self._places.pop(peer, None)

    def can_take(self, peer: str) -> bool:
        """Return True if `take` would return parts for the peer now."""
        return self._first(peer) < len(self.waiting)

    def may_take_later(self, peer: str) -> bool:
        """Return True if the peer may still get parts that others are fetching."""
        return peer in self.peers and self.in_progress > 0


def _place(part: PiecePart) -> _Place:
    return part.file, part.start


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
