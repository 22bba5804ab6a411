"""Which rows of a step share a forward pass: pure, by token counts and lengths.

Rows share a pass when that costs less padding than a pass of their own would: rows that decode go together,
so do short prompts, or what is left of them after a reused beginning, and lengths in one batch stay within a factor of two. A row that already lies with the
others may fall back to a quarter before it is parted from them, so that groups do not change with every token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

DECODE_TOKENS = 16
"""Up to this many tokens a row counts as decoding: drafts to verify come with the last token."""
SHORT_PROMPT_TOKENS = 256
"""Chunks longer than this keep a device busy alone."""
SHORT_TOKENS = 512
"""Below this length padding costs less than another pass."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A row of a step."""

    index: int
    start: int
    count: int
    bank: int
    """Identity of the bank where it lies; 0: none yet."""
    bases: tuple[int, ...] = ()
    """Where what it holds begins, in sliding layers."""

    @property
    def end(self) -> int:
        return self.start + self.count


def group_rows(candidates: Sequence[Candidate], longest_chunk: int = SHORT_PROMPT_TOKENS) -> list[list[int]]:
    """Indices of the rows of each forward pass. A chunk of more than `longest_chunk` tokens goes alone."""
    decoding: list[Candidate] = []
    short: list[Candidate] = []
    alone: list[Candidate] = []
    for row in candidates:
        if row.count <= DECODE_TOKENS:
            decoding.append(row)
        elif row.count <= longest_chunk:
            short.append(row)
        else:
            alone.append(row)
    chunks = [group for rows in _by_count(short) for group in _by_length(rows)]
    groups = [*_by_length(decoding), *chunks, *([row] for row in alone)]
    return [[row.index for row in group] for group in groups]


def group_even_rows(candidates: Sequence[Candidate]) -> list[list[int]]:
    """As `group_rows`, for models that take one offset for the whole batch.

    Only rows that are alike in start, count and bases share a pass.
    """
    groups: dict[tuple[object, ...], list[int]] = {}
    for row in candidates:
        large = row.count > DECODE_TOKENS
        key = (row.start, row.count, row.bases, row.index if large else None)
        groups.setdefault(key, []).append(row.index)
    return list(groups.values())


def _by_count(rows: Sequence[Candidate]) -> list[list[Candidate]]:
    """Chunks that differ by no more than a factor of two: every token of padding is computed."""
    groups: list[list[Candidate]] = []
    for row in sorted(rows, key=lambda row: -row.count):
        if groups and 2 * row.count >= groups[-1][0].count:
            groups[-1].append(row)
        else:
            groups.append([row])
    return groups


def _by_length(rows: Sequence[Candidate]) -> list[list[Candidate]]:
    groups: list[list[Candidate]] = []
    for row in sorted(rows, key=lambda row: -row.end):
        if groups and _belongs(row, groups[-1][0]):
            groups[-1].append(row)
        else:
            groups.append([row])
    return groups


def _belongs(row: Candidate, longest: Candidate) -> bool:
    settled = row.bank != 0 and row.bank == longest.bank
    return longest.end <= SHORT_TOKENS or row.end * (4 if settled else 2) >= longest.end
