"""Marks in text that comes in pieces, where one may be cut anywhere."""

from __future__ import annotations

from collections.abc import Iterable


def first_mark(text: str, marks: Iterable[str]) -> tuple[int, str] | None:
    """Where the first mark begins, and which; of several that begin there the longest."""
    found = [(place, mark) for mark in marks if (place := text.find(mark)) >= 0]
    return min(found, key=lambda one: (one[0], -len(one[1])), default=None)


def open_end(text: str, marks: Iterable[str]) -> int:
    """Characters at the end of `text` that may be the beginning of a mark. Asked for every token: mostly there are none."""
    return max((_open_end(text, mark) for mark in marks), default=0)


def _open_end(text: str, mark: str) -> int:
    place = text.find(mark[0], max(0, len(text) - len(mark) + 1))
    while place >= 0 and not mark.startswith(text[place:]):
        place = text.find(mark[0], place + 1)
    return len(text) - place if place >= 0 else 0
