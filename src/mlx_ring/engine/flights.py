"""Steps on their way, and how far each rank is. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from mlx_ring.core.errors import ProtocolError
from mlx_ring.engine.executor import RankId
from mlx_ring.engine.groups import DecodeGroup
from mlx_ring.engine.rows import tokens_fed
from mlx_ring.engine.sequence import Sequence
from mlx_ring.engine.stats import StepTiming, Unanswered
from mlx_ring.rpc.protos import step_pb2

_RECENT_STEPS = 256


@dataclass(slots=True)
class Flight:
    """A step that some rank has not answered yet."""

    step: step_pb2.Step
    sequences: tuple[Sequence, ...]
    """In the order of the step's rows."""
    generations: tuple[int, ...]
    """Of the sequences, when the step was sent."""
    group: DecodeGroup | None
    """Whose decode step it is; None for prefill and for operations alone."""
    sent_at: float
    tokens: int
    failed: bool = False

    @property
    def is_prefill(self) -> bool:
        return self.group is None and bool(self.sequences)

    def current(self) -> Iterator[tuple[Sequence, step_pb2.Row]]:
        """The rows whose sequences have not been put back since."""
        for sequence, generation, row in zip(self.sequences, self.generations, self.step.rows, strict=True):
            if sequence.generation == generation:
                yield sequence, row


@dataclass(slots=True)
class _Progress:
    """How far a rank is."""

    step: int = 0
    at: float = 0.0
    kv_bytes: int = 0


@dataclass(slots=True)
class Answered:
    """What a rank's answer belongs to."""

    flight: Flight
    rank: RankId
    timing: StepTiming


class Flights:
    """Every step from its sending until all ranks have answered it."""

    def __init__(self, ranks: Iterable[RankId], deadline_s: float) -> None:
        self._progress = {rank: _Progress() for rank in ranks}
        self._deadline_s = deadline_s
        self._flights: dict[int, Flight] = {}
        self._recent: deque[StepTiming] = deque(maxlen=_RECENT_STEPS)
        self.sent = 0
        self.prefills = 0
        """Prefill steps that some rank has not answered."""

    def send(
        self, step: step_pb2.Step, sequences: Iterable[Sequence], group: DecodeGroup | None, now: float
    ) -> Flight:
        sequences = tuple(sequences)
        generations = tuple(sequence.generation for sequence in sequences)
        tokens = sum(map(tokens_fed, step.rows))
        flight = Flight(step, sequences, generations, group, now, tokens)
        self._flights[step.step] = flight
        self.sent = step.step
        self.prefills += flight.is_prefill
        return flight

    def note(self, done: step_pb2.StepDone, now: float) -> Answered:
        """Take in an answer.

        Raises:
            ProtocolError: a rank that is not in the plan, or an answer out of order.
        """
        rank = RankId(done.stage, done.rank)
        progress = self._progress.get(rank)
        if progress is None:
            raise ProtocolError(
                f"Stage {done.stage} rank {done.rank} answered a step, and the plan has no such rank."
            )
        if done.step != progress.step + 1 or done.step > self.sent:
            raise ProtocolError(
                f"Stage {done.stage} rank {done.rank} answered step {done.step} after step {progress.step} "
                f"of {self.sent} sent."
            )
        progress.step, progress.at, progress.kv_bytes = done.step, now, done.kv_bytes
        flight = self._flights[done.step]
        timing = _timing(rank, flight, done.timings)
        self._recent.append(timing)
        return Answered(flight, rank, timing)

    def land(self) -> bool:
        """Forget the steps that every rank has answered by now; tells whether there were any."""
        completed, has_landed = self.completed, False
        while self._flights and (number := next(iter(self._flights))) <= completed:
            self.prefills -= self._flights.pop(number).is_prefill
            has_landed = True
        return has_landed

    @property
    def completed(self) -> int:
        """The last step that every rank has answered."""
        return min(progress.step for progress in self._progress.values())

    @property
    def kv_bytes(self) -> dict[RankId, int]:
        return {rank: progress.kv_bytes for rank, progress in self._progress.items()}

    @property
    def recent(self) -> tuple[StepTiming, ...]:
        return tuple(self._recent)

    def oldest_unanswered(self, now: float) -> Unanswered | None:
        """The rank that has owed an answer longest; None when nobody owes one."""
        owing = [
            Unanswered(
                rank=rank,
                step=progress.step + 1,
                waited_s=now - max(self._flights[progress.step + 1].sent_at, progress.at),
                deadline_s=self._deadline_s,
            )
            for rank, progress in self._progress.items()
            if progress.step < self.sent
        ]
        return max(owing, key=lambda unanswered: unanswered.waited_s, default=None)


def _timing(rank: RankId, flight: Flight, timings: step_pb2.Timings) -> StepTiming:
    return StepTiming(
        step=flight.step.step,
        rank=rank,
        rows=len(flight.sequences),
        tokens=flight.tokens,
        is_decode=flight.group is not None,
        started_us=timings.started_us,
        finished_us=timings.finished_us,
        queue_us=timings.queue_us,
        link_wait_us=timings.link_wait_us,
        compute_us=timings.compute_us,
        link_send_us=timings.link_send_us,
    )
