"""Which rows of a step share a forward pass: pure, by token counts and lengths.

Rows share a pass when that costs less padding than a pass of their own would: rows that decode go together,
so do short prompts, or what is left of them after a reused beginning, and lengths in one batch stay within a factor of two. A row that already lies with the
others may fall back to a quarter before it is parted from them, so that groups do not change with every token.

How much room banks make ahead of need, and how soon.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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


BLOCK = 256
GROWS_AHEAD = 64
"""With so many tokens left, a bank begins to grow."""
STEP_BYTES = 32 << 20
"""What a step may write to bring arrays to another size ..."""
STEPS = 32
"""... or more, where so many steps would not do."""


def blocks(tokens: int) -> int:
    """The tokens of as many whole blocks as hold `tokens`."""
    return -(-tokens // BLOCK) * BLOCK


@dataclass(slots=True)
class Growth:
    """Of one store's banks."""

    held: Callable[[], int]
    """Bytes of all banks, once they have the sizes that are aimed at."""
    step_bytes: int = STEP_BYTES
    limit_bytes: int | None = None
    """What banks may hold; room that nobody needs yet is made within it only."""

    def capacity(self, present: int, need: int, most: int, more: Callable[[int], int]) -> int:
        """Tokens for a slot that has room for `present` and is about to need more than that.

        By a quarter, by a block or two, or by no more than it must: as much as the limit allows.

        Args:
            present: tokens, aimed at already.
            need: tokens, now.
            most: tokens that any row will ever need.
            more: the bytes that a capacity would add.
        """
        ahead = blocks(need + GROWS_AHEAD)
        generous = max(ahead, blocks(present + max(BLOCK, present // 4)) if present else 0)
        for capacity in (min(generous, max(most, need)), min(ahead, max(most, need))):
            if self._allows(more(capacity)):
                return max(present, capacity)
        return max(present, min(blocks(need), max(most, need)))

    def slots(self, present: int, need: int, more: Callable[[int], int]) -> int:
        """Slots of a bank that has `present` and needs more. `more` gives the bytes that a number of them would add."""
        generous = max(need, present * 3 // 2)
        return generous if self._allows(more(generous)) else need

    def _allows(self, more_bytes: int) -> bool:
        return self.limit_bytes is None or self.held() + more_bytes <= self.limit_bytes
