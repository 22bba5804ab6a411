"""A step on its way through a stage: taken in, built, under way on the device, answered."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field

import mlx.core as mx

from mlx_ring.core.errors import ProtocolError, RingError
from mlx_ring.rpc.failures import error_to_failure
from mlx_ring.rpc.links import WireTensor
from mlx_ring.rpc.protos import step_pb2
from mlx_ring.worker.forward import Pass
from mlx_ring.worker.inputs import StepInput
from mlx_ring.worker.results import DrawnRow, StepDraws

_WAITS = 4


def monotonic_us() -> int:
    """The machine's monotonic clock, microseconds."""
    return time.monotonic_ns() // 1000


@dataclass(slots=True)
class StepClock:
    """One step's times, microseconds."""

    arrived: int
    started: int
    """When it was taken in, or the step before was done: they overlap where this one was built ahead."""
    submitted: int = 0
    """When the device had been given it."""
    link_wait: int = 0
    link_send: int = 0

    def timings(self, finished: int) -> step_pb2.Timings:
        return step_pb2.Timings(
            started_us=self.started,
            finished_us=finished,
            queue_us=max(0, self.started - self.arrived),
            link_wait_us=self.link_wait,
            link_send_us=self.link_send,
            compute_us=max(0, finished - self.started - self.link_wait - self.link_send),
        )


class Patience:
    """How long to wait for the next step before the one under way is asked for its results.

    Those come no sooner for asking, and a step that arrives in time can be built meanwhile. So it is half of
    the shortest of the last few waits for results: an answer is late only where a step takes half as long
    as those before it.
    """

    def __init__(self) -> None:
        self._waits_us: deque[int] = deque(maxlen=_WAITS)

    def note(self, work: StepWork, now_us: int) -> None:
        """A step's results are there."""
        if work.is_decode:
            self._waits_us.append(now_us - work.clock.submitted)

    def seconds(self, work: StepWork, now_us: int) -> float:
        """What is left of it for the step under way."""
        if not work.is_decode:
            return 0.0
        return max(0.0, min(self._waits_us, default=0) / 2 - (now_us - work.clock.submitted)) / 1e6


@dataclass(slots=True)
class StepWork:
    """One step on this stage."""

    step: step_pb2.Step
    clock: StepClock
    refused: dict[int, RingError] = field(default_factory=dict[int, RingError])
    """By sequence: why its cache operation failed."""
    message: WireTensor | None = None
    """What came from other stages."""
    failed: dict[int, RingError] = field(default_factory=dict[int, RingError])
    """By sequence: why its row failed here or on a stage before."""
    error: Exception | None = None
    """Why the whole step failed."""
    inputs: StepInput | None = None
    passes: list[Pass] = field(default_factory=list[Pass])
    draws: StepDraws | None = None
    activations: mx.array | None = None
    outputs: list[mx.array] = field(default_factory=list[mx.array])
    """What to wait for."""
    drawn: list[DrawnRow] = field(default_factory=list[DrawnRow])
    is_submitted: bool = False
    waits_to_draw: bool = False
    """Whether its tokens are drawn once those before them are known."""

    @property
    def is_under_way(self) -> bool:
        """Whether the device has something to do for it."""
        return self.error is None and bool(self.passes)

    @property
    def is_decode(self) -> bool:
        """Whether it is one token for each row: such steps take about as long as each other."""
        return self.inputs is not None and all(len(row.tokens) == 1 for row in self.inputs.rows)

    @property
    def has_lookups(self) -> bool:
        """Whether rows want more than tokens."""
        return self.inputs is not None and any(row.wants.lookups for row in self.inputs.rows)

    @property
    def reported(self) -> list[DrawnRow]:
        """What was drawn and is somebody's: a row may fail once it draws, and draws all the same."""
        return [drawn for drawn in self.drawn if drawn.sequence not in self.failed]

    @property
    def allows_building_ahead(self) -> bool:
        """Whether another step can be built on it: its answer needs nothing more of the device, nor its KV."""
        tails = any(item.batch.members.tails for item in self.passes)
        return self.is_under_way and not self.has_lookups and not tails

    @property
    def built_on(self) -> set[int]:
        """Sequences whose tokens were not known when the step was built."""
        rows = self.inputs.rows if self.inputs is not None else []
        return {row.row.sequence for row in rows if row.lazy is not None}

    @property
    def is_rolled_back(self) -> bool:
        """Whether the step was built in vain, and must be built again."""
        return self.error is None and bool(self.step.rows) and self.inputs is None

    def roll_back(self) -> None:
        """Forget what was built."""
        self.inputs, self.passes, self.draws, self.activations = None, [], None, None
        self.outputs, self.is_submitted, self.waits_to_draw = [], False, False

    def row_failure(self) -> step_pb2.Failure | None:
        """What befell single rows and operations."""
        failed = {**self.refused, **self.failed}
        if not failed:
            return None
        errors = list(failed.values())
        # A row that was only out of step is computed again, so that its kind must not be hidden by another's.
        first = next((error for error in errors if isinstance(error, ProtocolError)), errors[0])
        failure = error_to_failure(first, sorted(failed))
        failure.message = " ".join(dict.fromkeys(map(str, errors)))
        return failure
