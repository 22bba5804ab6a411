"""Who fetches what: parts of pieces that are still wanted, handed out to peers as they ask for work. Pure.

Peers take work when they are free, so a fast one takes more. What a peer did not finish goes back to the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from mlx_ring.models.weights_manifest import WeightsManifest

RUN_BYTES = 32 << 20
"""What one request is for, at most: a part more, where one part is larger."""
_RUN_PARTS = 1024


@dataclass(frozen=True, slots=True)
class Part:
    """Bytes `[start, end)` of a file, which belong to one piece.

    `number` counts the piece's parts; `alone` says that the whole piece must come from one peer, for it came
    wrong from several.
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
    """What is wanted and not under way, in the order of the files, and which peers have what."""

    manifest: WeightsManifest
    waiting: list[Part]
    peers: dict[str, frozenset[int]] = field(default_factory=dict[str, frozenset[int]])
    under_way: int = 0
    """Parts that peers have taken."""

    def take(self, peer: str) -> list[Part]:
        """Parts of one file for a peer to fetch now, in order; none where it has nothing that is wanted."""
        has = self.peers.get(peer, frozenset())
        run: list[Part] = []
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
        self.under_way += len(run)
        return run

    def _fits(self, run: list[Part], part: Part) -> bool:
        return (
            not part.alone
            and len(run) < _RUN_PARTS
            and part.file == run[0].file
            and sum(taken.nbytes for taken in run) + part.nbytes <= RUN_BYTES
        )

    def finish(self) -> None:
        """One of the parts under way is there."""
        self.under_way -= 1

    def put_back(self, parts: Iterable[Part]) -> None:
        """Parts that their peer did not finish, or of which only the end is missing."""
        returned = list(parts)
        self.under_way -= len(returned)
        self.add(returned)

    def add(self, parts: Iterable[Part]) -> None:
        """Want these too."""
        self.waiting = sorted([*self.waiting, *parts], key=lambda part: (part.file, part.start))

    def drop(self, peer: str) -> None:
        """A peer that is gone, or not to be used any more."""
        self.peers.pop(peer, None)

    def can_take(self, peer: str) -> bool:
        """Whether `take` would give it something now."""
        has = self.peers.get(peer, frozenset())
        return any(part.piece in has for part in self.waiting)

    def may_take_later(self, peer: str) -> bool:
        """Whether what others have under way may come to it yet."""
        return peer in self.peers and self.under_way > 0


def join_ranges(parts: Iterable[Part]) -> Iterator[tuple[int, int]]:
    """The parts' ranges, adjacent ones as one."""
    begin = end = -1
    for part in parts:
        if part.start != end:
            if end > begin:
                yield begin, end
            begin = part.start
        end = part.end
    if end > begin:
        yield begin, end


def rest_of(parts: Iterable[Part], reached: int) -> list[Part]:
    """Of the parts of a run, what lies behind `reached` bytes of it; a piece that must come whole is all of it."""
    rest: list[Part] = []
    for part in parts:
        if reached < part.nbytes:
            rest.append(part if part.alone else replace(part, start=part.start + max(reached, 0)))
        reached -= part.nbytes
    return rest
