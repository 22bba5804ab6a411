"""Prompts that are being prefilled, and whose turn it is. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from mlx_ring.engine.sequence import Sequence


class PrefillLine:
    """In order of arrival; but while a long prompt is at the head, every second chunk is for short ones.

    A prompt whose step failed goes alone, so that it takes no other down if it is to blame.
    """

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

    def in_turn(self, left: Callable[[Sequence], int], most: int) -> list[Sequence]:
        """Who may go into the next chunk; the first of them has to. Short are those with no more than `most` tokens left."""
        first = next(iter(self._line.values()))
        short = [
            sequence for sequence in self._line.values() if left(sequence) <= most and not sequence.replays
        ]
        if short and (short[0] is first or self._long == first.id):
            self._long = None
            return short
        self._long = first.id
        return [first]
