"""What sequences hold of every rank's KV memory, and what still fits. Pure.

Every rank holds the same tokens of the same sequences, so two numbers say it all: tokens, by whole blocks, and
sequences. What was released counts until every rank has answered the step that frees it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from mlx_ring.engine.executor import RankId
from mlx_ring.engine.policy import RankKv

BLOCK = 256
"""Tokens by which a sequence's memory grows."""


@dataclass(frozen=True, slots=True)
class RankKvUse:
    """How one rank's KV memory stands. Bytes."""

    limit_bytes: int
    used_bytes: int
    """As accounted: by whole blocks, and what is being freed included."""
    held_bytes: int
    """As the rank said last."""
    bytes_per_token: int
    bytes_per_sequence: int
    kept_bytes: int = 0
    """Of those used, what is kept of ended sequences, and makes way when others need it."""

    def sequences_allowed(self, tokens: int) -> int:
        """How many sequences of so many tokens the limit holds."""
        each = _blocks(tokens) * BLOCK * self.bytes_per_token + self.bytes_per_sequence
        return self.limit_bytes // each if each else 0


class KvBudget:
    """The account of one instance."""

    def __init__(self, ranks: Mapping[RankId, RankKv] | None) -> None:
        self._ranks = dict(ranks or {})
        self._blocks: dict[int, int] = {}
        """By sequence."""
        self._total_blocks = 0
        self._freeing: deque[tuple[int, int]] = deque()
        """Step and blocks of what is being freed."""
        self._freeing_blocks = 0
        self._held = dict.fromkeys(self._ranks, 0)

    @property
    def capacity_tokens(self) -> int | None:
        """Most tokens that a sequence can have which is alone; None without a limit."""
        rooms = [
            (rank.limit_bytes - rank.bytes_per_sequence) // (rank.bytes_per_token * BLOCK) * BLOCK
            for rank in self._ranks.values()
            if rank.bytes_per_token
        ]
        # Where KV does not grow with its tokens, a sequence fits as a whole or not at all.
        rooms += [0 for rank in self._ranks.values() if rank.bytes_per_sequence > rank.limit_bytes]
        return max(0, min(rooms)) if rooms else None

    @property
    def being_freed(self) -> int:
        """Sequences whose memory is free once the ranks have answered."""
        return len(self._freeing)

    def fits(
        self,
        tokens: int,
        sequence: int,
        *,
        without: Iterable[int] = (),
        spare_blocks: int = 0,
        freed: bool = False,
    ) -> bool:
        """Whether a sequence, which may hold some already, can have `tokens`.

        Args:
            tokens: in all.
            sequence: whose.
            without: sequences whose memory would be free for it.
            spare_blocks: to leave for others.
            freed: whether to count on what is being freed.
        """
        held = self._blocks.get(sequence)
        gone = [self._blocks[other] for other in without if other in self._blocks]
        blocks = _blocks(tokens) - (held or 0) - sum(gone) + spare_blocks
        sequences = int(held is None) - len(gone)
        if freed:
            blocks -= self._freeing_blocks
            sequences -= len(self._freeing)
        return all(
            self._used(rank) + self._bytes(rank, blocks, sequences) <= rank.limit_bytes
            for rank in self._ranks.values()
        )

    def fits_as_held(self, tokens: int) -> bool:
        """Whether a new sequence fits beside what the ranks say they hold, padding and room for growth included."""
        more = _blocks(tokens)
        return all(
            self._held[place] + self._bytes(rank, more, 1) <= rank.limit_bytes
            for place, rank in self._ranks.items()
        )

    @property
    def limits(self) -> Mapping[RankId, int]:
        """Bytes, by rank."""
        return {place: rank.limit_bytes for place, rank in self._ranks.items()}

    def limit(self, limits: Mapping[RankId, int], longest: int) -> None:
        """New limits, in bytes; one sequence of `longest` tokens fits whatever they are."""
        for place, nbytes in limits.items():
            rank = self._ranks[place]
            self._ranks[place] = replace(
                rank, limit_bytes=max(nbytes, self._bytes(rank, _blocks(longest), 1))
            )

    @property
    def is_over(self) -> bool:
        """Whether more is accounted for than some rank may hold, what is being freed apart."""
        return any(
            self._bytes(rank, self._total_blocks, len(self._blocks)) > rank.limit_bytes
            for rank in self._ranks.values()
        )

    @property
    def is_over_as_held(self) -> bool:
        """Whether some rank says that it holds more than it may."""
        return any(self._held[place] > rank.limit_bytes for place, rank in self._ranks.items())

    def charge(self, sequence: int, tokens: int) -> None:
        """A sequence holds so many tokens from now on."""
        blocks = _blocks(tokens)
        self._total_blocks += blocks - self._blocks.get(sequence, 0)
        self._blocks[sequence] = blocks

    def release(self, sequence: int, step: int) -> None:
        """A sequence's memory is free once every rank has answered `step`."""
        blocks = self._blocks.pop(sequence, None)
        if blocks is not None:
            self._total_blocks -= blocks
            self._freeing_blocks += blocks
            self._freeing.append((step, blocks))

    def drop(self, sequence: int) -> None:
        """A sequence never had its memory, or another has it now, which was charged for it."""
        self._total_blocks -= self._blocks.pop(sequence, 0)

    def settle(self, completed: int) -> None:
        """Every rank has answered the steps up to `completed`."""
        while self._freeing and self._freeing[0][0] <= completed:
            self._freeing_blocks -= self._freeing.popleft()[1]

    def report(self, rank: RankId, held_bytes: int) -> None:
        """What a rank says it holds."""
        self._held[rank] = held_bytes

    def use(self, kept: Iterable[int] = ()) -> dict[RankId, RankKvUse]:
        """How every rank stands; `kept` are the ended sequences whose KV stays."""
        blocks = [self._blocks[sequence] for sequence in kept if sequence in self._blocks]
        return {
            place: RankKvUse(
                limit_bytes=rank.limit_bytes,
                used_bytes=self._used(rank),
                held_bytes=self._held[place],
                bytes_per_token=rank.bytes_per_token,
                bytes_per_sequence=rank.bytes_per_sequence,
                kept_bytes=self._bytes(rank, sum(blocks), len(blocks)),
            )
            for place, rank in self._ranks.items()
        }

    def _used(self, rank: RankKv) -> int:
        return self._bytes(
            rank, self._total_blocks + self._freeing_blocks, len(self._blocks) + len(self._freeing)
        )

    @staticmethod
    def _bytes(rank: RankKv, blocks: int, sequences: int) -> int:
        return blocks * BLOCK * rank.bytes_per_token + sequences * rank.bytes_per_sequence


def sequence_bytes(rank: RankKv, tokens: int) -> int:
    """What one sequence of so many tokens takes of a rank, by whole blocks."""
    return _blocks(tokens) * BLOCK * rank.bytes_per_token + rank.bytes_per_sequence


def _blocks(tokens: int) -> int:
    return -(-tokens // BLOCK)
