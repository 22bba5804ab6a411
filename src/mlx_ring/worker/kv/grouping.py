"""Choice of the rows that share a forward pass (pure, by token counts and lengths), and of banks' growth.

Rows share a pass if that costs less padding than a pass of their own. So decoding rows share one, and so do short
prompts or what remains of them after a cached prefix. Lengths in one batch stay within a factor of two. A row that
already lies with the others may fall back to a quarter before it is separated. So groups do not change with every
token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

DECODE_TOKENS = 16
"""Number of tokens up to which a row counts as decoding: drafts to verify come with the last token."""
SHORT_PROMPT_TOKENS = 256
"""Length above which a chunk keeps a device busy alone."""
SHORT_TOKENS = 512
"""Length below which padding costs less than another pass."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """Row of a step."""

    index: int
    start: int
    count: int
    bank: int
    """Identity of its bank; 0: none yet."""
    bases: tuple[int, ...] = ()
    """Position of the first token held, in sliding layers."""

    @property
    def end(self) -> int:
        return self.start + self.count


def group_rows(candidates: Sequence[Candidate], longest_chunk: int = SHORT_PROMPT_TOKENS) -> list[list[int]]:
    """Return the row indices of each forward pass. A chunk of more than `longest_chunk` tokens has a pass alone."""
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
    """Group rows like `group_rows`, for models that take one offset for the whole batch.

    Only rows with equal start, count and bases share a pass.
    """
    groups: dict[tuple[object, ...], list[int]] = {}
    for row in candidates:
        large = row.count > DECODE_TOKENS
        key = (row.start, row.count, row.bases, row.index if large else None)
        groups.setdefault(key, []).append(row.index)
    return list(groups.values())


def _by_count(rows: Sequence[Candidate]) -> list[list[Candidate]]:
    """Group chunks whose lengths differ by a factor of two at most, because every token of padding is computed."""
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
"""Number of free tokens at which a bank begins to grow."""
STEP_BYTES = 32 << 20
"""Number of bytes that a step may write to resize arrays ..."""
STEPS = 32
"""... or more, if that number of steps would not suffice."""


def blocks(tokens: int) -> int:
    """Round tokens up to whole blocks."""
    return -(-tokens // BLOCK) * BLOCK


@dataclass(slots=True)
class Growth:
    """Growth of one store's banks."""

    held: Callable[[], int]
    """Function that returns the bytes of all banks at their target sizes."""
    step_bytes: int = STEP_BYTES
    limit_bytes: int | None = None
    """Bytes that banks may hold; room ahead of need stays within it."""

    def capacity(self, present: int, need: int, most: int, more: Callable[[int], int]) -> int:
        """Return the tokens for a slot that has room for `present` and is about to need more.

        It grows by a quarter, by a block or two, or by as little as it must: as much as the limit allows.

        Args:
            present: tokens of the target so far.
            need: tokens, now.
            most: tokens that any row will ever need.
            more: returns the bytes that a capacity would add.
        """
        ahead = blocks(need + GROWS_AHEAD)
        generous = max(ahead, blocks(present + max(BLOCK, present // 4)) if present else 0)
        for capacity in (min(generous, max(most, need)), min(ahead, max(most, need))):
            if self.allows(more(capacity)):
                return max(present, capacity)
        return max(present, min(blocks(need), max(most, need)))

    def slots(self, present: int, need: int, more: Callable[[int], int]) -> int:
        """Return the slots of a bank that has `present` and needs more.

        `more` returns the bytes that a number of them would add.
        """
        generous = max(need, present * 3 // 2)
        return generous if self.allows(more(generous)) else need

    def allows(self, more_bytes: int) -> bool:
        """Return True if banks may hold more bytes."""
        return self.limit_bytes is None or self.held() + more_bytes <= self.limit_bytes
