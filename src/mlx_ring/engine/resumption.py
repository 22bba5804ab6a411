"""Interrupted sequences in another engine: the KV that stages keep of them, and their tokens that are drawn again. Pure.

If an instance is patched, the stages behind the last lost one keep KV of each sequence. Its length is the one that all
of them hold for certain. Up to there, the next engine computes the known tokens again on the other stages alone. After
that it continues on all stages. If only a link was lost, every stage keeps its KV.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from mlx_ring.core.types import TokenLogprob
from mlx_ring.engine.prefix_cache import LEAST_TOKENS
from mlx_ring.engine.sequence import Sequence
from mlx_ring.rpc.protos import step_pb2, worker_pb2

FIRST_KEPT = 1 << 49
"""First id of kept sequences, far from those of requests and snapshots."""


@dataclass(frozen=True, slots=True)
class KeptKv:
    """KV that the stages from `first_stage` on keep of one sequence."""

    id: int
    """Id by which the ranks know it until a sequence of the next engine takes it."""
    sequence: int
    """Id by which they knew it before."""
    length: int
    """Number of tokens."""
    first_stage: int
    reached: int
    """Most tokens that it may ever have held."""
    least: int
    """Least length to which it can be cut."""

    def left(self, stages: int) -> LeftKv:
        """Return what another loss leaves of it, if no sequence has taken it before."""
        lengths = tuple(self.length if stage >= self.first_stage else 0 for stage in range(stages))
        return LeftKv(self.id, lengths, self.reached, self.least)


@dataclass(frozen=True, slots=True)
class LeftKv:
    """KV of one sequence at the loss of its instance."""

    sequence: int
    """Id by which the ranks know it."""
    lengths: tuple[int, ...]
    """Number of tokens that each stage holds for certain."""
    reached: int
    least: int

    def keep(self, known: Sequence, first_stage: int, id_: int) -> KeptKv | None:
        """Return what stages keep of it; None if that would be too little.

        Args:
            known: the sequence with its known tokens.
            first_stage: the first stage behind the last lost one.
            id_: id of the kept sequence.
        """
        length = min([_most(known), *self.lengths[first_stage:]])
        if first_stage >= len(self.lengths) or length < max(LEAST_TOKENS, self.least):
            return None
        return KeptKv(id_, self.sequence, length, first_stage, self.reached, self.least)


def _most(known: Sequence) -> int:
    """Return the most tokens to keep: another engine needs results of those after them, on all stages."""
    if known.length > known.prompt_length:
        return known.length - 2
    return 0 if known.request.computes_all else known.prompt_length - 1


def find_left(
    running: Iterable[Sequence],
    unanswered: Iterable[tuple[Sequence, step_pb2.Row]],
    held: Collection[int],
    least_length: Callable[[int], int | None],
    stages: int,
) -> dict[int, LeftKv]:
    """Return the KV that a loss leaves of running sequences.

    Args:
        running: the sequences.
        unanswered: rows that some rank has not answered.
        held: sequences that were opened on the ranks.
        least_length: returns the least length to which a sequence can be cut that held so many tokens; None if it
            cannot be cut.
        stages: number of stages.
    """
    lengths: dict[int, int] = {}
    for sequence, row in unanswered:
        lengths[sequence.id] = min(row.start, lengths.get(sequence.id, row.start))
    left: dict[int, LeftKv] = {}
    for sequence in running:
        length, least = lengths.get(sequence.id, sequence.scheduled), least_length(sequence.reached)
        # Until its first row is answered, some ranks may not even have opened it.
        if least is not None and sequence.id in held and length > sequence.reused:
            behind = max(length, sequence.kept)
            by_stage = tuple(behind if stage >= sequence.kept_from else length for stage in range(stages))
            left[sequence.id] = LeftKv(sequence.id, by_stage, sequence.reached, least)
    return left


def kept_message(kept: Iterable[KeptKv]) -> worker_pb2.KeptKv:
    """Make the message to the ranks; all entries have the same first stage."""
    entries = list(kept)
    return worker_pb2.KeptKv(
        first_stage=entries[0].first_stage if entries else 0,
        sequences=[
            worker_pb2.KeptSequence(sequence=each.sequence, kept_as=each.id, length=each.length)
            for each in entries
        ],
    )


class Resumptions:
    """Counts of resumed sequences."""

    def __init__(self) -> None:
        self.redrawn = 0
        """Known tokens that were drawn again ..."""
        self.disagreements = 0
        """... and those that differed."""
        self.kept_tokens = 0
        """Known tokens that the stages from `kept_from` on did not compute again ..."""
        self.replayed_tokens = 0
        """... and all others."""

    def totals(self) -> dict[str, int]:
        """Return the counts by their names in `StepTotals`."""
        return {
            "resume_redrawn": self.redrawn,
            "resume_disagreements": self.disagreements,
            "resume_kept": self.kept_tokens,
            "resume_replayed": self.replayed_tokens,
        }

    def record_prefilled(self, sequence: Sequence) -> None:
        """Count the known tokens of a sequence, once they are computed, and let it be one like others from now on."""
        sequence.is_resumed = False
        self.kept_tokens += sequence.kept
        self.replayed_tokens += sequence.length - sequence.kept

    def compare(self, sequence: Sequence, redrawn: Iterable[TokenLogprob]) -> None:
        """Compare a token that was delivered before a loss with what is drawn now; the delivered one stays."""
        for token in redrawn:
            sequence.redraws = False
            self.redrawn += 1
            self.disagreements += token.token != sequence.tokens[-1]
