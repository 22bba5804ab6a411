"""The rows of the next decode step: micro-batches that take turns, and drafts of prompt lookup. Pure.

Running sequences form as many micro-batches as there are stages, so that each stage has one to work on. A row's input
may be the token that the sequence's previous row samples, so that no stage waits for the head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Generic, Protocol, TypeVar

from mlx_ring.core.engine_stats import Policy
from mlx_ring.engine.kv_manager import KvManager
from mlx_ring.engine.prompt_lookup import DraftedStep
from mlx_ring.engine.rows import decode_row
from mlx_ring.engine.sequence import Sequence
from mlx_ring.engine.step_times import ChunkSizer
from mlx_ring.rpc.protos import step_pb2

Rows = list[tuple[Sequence, step_pb2.Row]]


class Decoded(Protocol):
    """A sequence that decodes, or a count of its tokens in a simulation."""

    @property
    def id(self) -> int:
        """Number of the sequence; newer ones have larger numbers."""
        ...

    def can_step(self, steps_ahead: int) -> bool:
        """Return True if a decode row can be sent."""
        ...


Member = TypeVar("Member", bound=Decoded)


@dataclass(slots=True, eq=False)
class MicroBatch(Generic[Member]):
    """Sequences that decode in the same steps."""

    members: dict[int, Member] = field(default_factory=dict[int, Member])
    in_flight: int = 0
    """Number of decode steps that the last stage has not answered."""
    last_step: int = 0
    """Number of its last decode step."""

    def is_active(self, steps_ahead: int) -> bool:
        """Return True if it has a step in flight or could send one."""
        return self.in_flight > 0 or any(member.can_step(steps_ahead) for member in self.members.values())


_last_step = attrgetter("last_step")


class MicroBatches(Generic[Member]):
    """As many micro-batches as stages. Their sizes differ by one at most."""

    def __init__(self, count: int) -> None:
        self._batches = [MicroBatch[Member]() for _ in range(count)]
        self._batch_of: dict[int, MicroBatch[Member]] = {}
        self._still: dict[int, Member] = {}
        """Sequences that wait with their KV while another one runs alone."""
        self.is_held_still = False
        """True from `hold_still` until `release`, also if no sequence is left that waits."""

    def __len__(self) -> int:
        return len(self._batch_of)

    def __contains__(self, sequence: int) -> bool:
        return sequence in self._batch_of

    def __iter__(self) -> Iterator[MicroBatch[Member]]:
        """Iterate over those with members, the one that has waited longest first."""
        active = [batch for batch in self._batches if batch.members]
        active.sort(key=_last_step)
        return iter(active)

    def in_turn(self, steps_ahead: int) -> Iterator[MicroBatch[Member]]:
        """Yield the micro-batches that may send a step, the one that has waited longest first.

        They take turns: two consecutive steps of one micro-batch would leave all stages but one idle.
        """
        active = [batch for batch in self if batch.is_active(steps_ahead)]
        for place, batch in enumerate(active):
            if batch.in_flight < steps_ahead and not (batch.in_flight and place):
                yield batch

    def add(self, sequence: Member) -> MicroBatch[Member]:
        """Add a sequence to the smallest micro-batch, and return that one."""
        batch = min(self._batches, key=lambda batch: len(batch.members))
        batch.members[sequence.id] = sequence
        self._batch_of[sequence.id] = batch
        return batch

    def hold_still(self) -> None:
        """Send no rows of the present sequences until `release`; answers to earlier rows are taken."""
        held = {member.id: member for batch in self._batches for member in batch.members.values()}
        for sequence in held:
            self.remove(sequence)
        self._still |= held
        self.is_held_still = True

    def release(self) -> None:
        """Continue the sequences that were held still."""
        held, self._still, self.is_held_still = self._still, {}, False
        for sequence in held.values():
            self.add(sequence)

    def remove(self, sequence: int) -> tuple[Member, MicroBatch[Member]] | None:
        """Remove a sequence, and move the newest one of the largest micro-batch if sizes then differ too much.

        Return the one that moved, and its new micro-batch.
        """
        self._still.pop(sequence, None)
        batch = self._batch_of.pop(sequence, None)
        if batch is None:
            return None
        del batch.members[sequence]
        largest = max(self._batches, key=lambda batch: len(batch.members))
        if len(largest.members) <= len(batch.members) + 1:
            return None
        number = max(largest.members)
        moved = batch.members[number] = largest.members.pop(number)
        self._batch_of[number] = batch
        return moved, batch


class Decoding(MicroBatches[Sequence]):
    """The running sequences that decode, and the rows of their steps."""

    def __init__(self, policy: Policy, stages: int, *, sizer: ChunkSizer, kv: KvManager) -> None:
        super().__init__(stages)
        self._policy = policy
        self._sizer = sizer
        self._kv = kv
        self.drafts = 0
        """Number of rows with a draft."""
        self.draft_tokens = 0
        self.accepted_tokens = 0

    def next_rows(
        self, make_room: Callable[[Sequence, int], bool]
    ) -> tuple[MicroBatch[Sequence], Rows] | None:
        """Return the rows of the micro-batch that has waited longest, counted as sent; None if no step may go out.

        Args:
            make_room: reserves KV for a number of tokens of a sequence; it may preempt sequences, including this one.
        """
        for batch in self.in_turn(self._policy.steps_ahead):
            rows = self._rows(batch, make_room)
            if rows:
                for sequence, row in rows:
                    self._count_sent(sequence, row)
                return batch, rows
        return None

    def _rows(self, batch: MicroBatch[Sequence], make_room: Callable[[Sequence, int], bool]) -> Rows:
        ready = [member for member in batch.members.values() if member.can_step(self._policy.steps_ahead)]
        step = DraftedStep(len(ready), self._sizer.verifying_cost)
        rows = [
            (sequence, decode_row(sequence, self._draft(sequence, step)))
            for sequence in ready
            if sequence.id in self and make_room(sequence, sequence.scheduled + 1)
        ]
        # Making room for one sequence may have preempted another one.
        return [(sequence, row) for sequence, row in rows if sequence.id in self]

    def _draft(self, sequence: Sequence, step: DraftedStep) -> tuple[int, ...]:
        most = min(self._policy.num_speculative_tokens, sequence.max_length - 2 - sequence.scheduled)
        if most <= 0 or not self._kv.can_draft:
            return ()
        draft = sequence.lookup.propose(sequence.tokens, sequence.unanswered, most, step)
        if not draft or not self._kv.may_draft(sequence, sequence.scheduled + 1 + len(draft)):
            return ()
        sequence.lookup.record_draft(step, len(draft))
        return draft

    def _count_sent(self, sequence: Sequence, row: step_pb2.Row) -> None:
        sequence.feed(1 + len(row.draft))
        sequence.unanswered += 1
        sequence.verifying = bool(row.draft)
        self.drafts += bool(row.draft)
        self.draft_tokens += len(row.draft)

    def rollback(self, sequence: Sequence, row: step_pb2.Row, sampled: int) -> None:
        """Cut a sequence's KV to the verified part of its row's draft, which gave `sampled` tokens."""
        sequence.verifying = False
        sequence.lookup.record_verified(len(row.draft), sampled - 1)
        self.accepted_tokens += sampled - 1
        length = row.start + sampled
        if length < sequence.scheduled:
            sequence.scheduled = length
            self._kv.trim(sequence, length)
