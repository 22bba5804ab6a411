"""Marks in text that comes in pieces, where one may be cut anywhere."""

from __future__ import annotations

from collections.abc import Iterable


def first_mark(text: str, marks: Iterable[str]) -> tuple[int, str] | None:
    """Where the first mark begins, and which; of several that begin there the longest."""
    found = [(place, mark) for mark in marks if (place := text.find(mark)) >= 0]
    return min(found, key=lambda one: (one[0], -len(one[1])), default=None)


def open_end(text: str, marks: Iterable[str]) -> int:
    """Characters at the end of `text` that may be the beginning of a mark."""
    known = tuple(marks)
    longest = min(len(text), max(map(len, known), default=1) - 1)
    for length in range(longest, 0, -1):
        end = text[-length:]
        if any(mark.startswith(end) for mark in known):
            return length
    return 0
