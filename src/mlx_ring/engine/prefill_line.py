"""Prompts that are being prefilled, and whose turn it is. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from mlx_ring.engine.sequence import Sequence


class PrefillLine:
    """In order of arrival; but while a long prompt is at the head, every second chunk is for those that fit in one."""

    def __init__(self) -> None:
        self._line: dict[int, Sequence] = {}
        self._long: int | None = None
        """The long prompt that had the last turn."""

    def __len__(self) -> int:
        return len(self._line)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._line.values())

    def add(self, sequence: Sequence) -> None:
        """Prompts that were put back come in where they were."""
        self._line[sequence.id] = sequence
        self._line = dict(sorted(self._line.items()))

    def remove(self, sequence: int) -> None:
        self._line.pop(sequence, None)

    def in_turn(self, size: int) -> list[Sequence]:
        """Who may go into the next chunk, of so many tokens; the first of them has to."""
        line = list(self._line.values())
        first = line[0]
        if _left(first) <= size:
            self._long = None
            return [sequence for sequence in line if _left(sequence) <= size]
        short = [sequence for sequence in line if _left(sequence) <= size]
        if short and self._long == first.id:
            self._long = None
            return short
        self._long = first.id
        return [first]


def _left(sequence: Sequence) -> int:
    return sequence.fill_to - sequence.scheduled
