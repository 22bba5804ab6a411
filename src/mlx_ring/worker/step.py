"""State of a step in a stage: taken in, built, under way on the device, answered."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import mlx.core as mx

from mlx_ring.core.errors import NotReady, ProtocolError, RingError, WorkerStuck
from mlx_ring.rpc.failures import error_to_failure
from mlx_ring.rpc.links import WireTensor
from mlx_ring.rpc.protos import step_pb2
from mlx_ring.worker.forward import Pass
from mlx_ring.worker.inputs import StepInput
from mlx_ring.worker.results import DrawnRow, StepDraws

log = logging.getLogger(__name__)

_WAITS = 4
_INPUT_WAIT_S = 4.0
"""Seconds to wait for input that another rank of the group has already: less than the agent waits for a rank."""


def monotonic_us() -> int:
    """Return the machine's monotonic clock, in microseconds."""
    return time.monotonic_ns() // 1000


@dataclass(slots=True)
class StepClock:
    """Times of one step, in microseconds."""

    arrived: int
    started: int
    """Time at which the step was taken in or the step before was done. These overlap if this step was built ahead."""
    submitted: int = 0
    """Time at which the device got it."""
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
    """Time to wait for the next step before waiting for the results of the one under way.

    Waiting for results does not make them come sooner, and a step that arrives early can be built meanwhile. The time
    is half of the shortest of the last few waits for results. So an answer is late only if a step takes half as long as
    those before it.
    """

    def __init__(self) -> None:
        self._waits_us: deque[int] = deque(maxlen=_WAITS)

    def note(self, work: StepWork, now_us: int) -> None:
        """Record that a step's results have come."""
        if work.is_decode:
            self._waits_us.append(now_us - work.clock.submitted)

    def seconds(self, work: StepWork, now_us: int) -> float:
        """Return the seconds that remain for the step under way."""
        if not work.is_decode:
            return 0.0
        return max(0.0, min(self._waits_us, default=0) / 2 - (now_us - work.clock.submitted)) / 1e6


@dataclass(slots=True)
class StepWork:
    """One step on this stage."""

    step: step_pb2.Step
    clock: StepClock
    begin: Callable[[int], None] | None = None
    """Function to call with the step's number once its input is there, which may refuse it."""
    refused: dict[int, RingError] = field(default_factory=dict[int, RingError])
    """Errors of failed cache operations, by sequence."""
    message: WireTensor | None = None
    """Message from other stages."""
    failed: dict[int, RingError] = field(default_factory=dict[int, RingError])
    """Errors of rows that failed here or on a stage before, by sequence."""
    error: Exception | None = None
    """Error of the whole step."""
    inputs: StepInput | None = None
    passes: list[Pass] = field(default_factory=list[Pass])
    draws: StepDraws | None = None
    activations: mx.array | None = None
    outputs: list[mx.array] = field(default_factory=list[mx.array])
    """Arrays to wait for."""
    drawn: list[DrawnRow] = field(default_factory=list[DrawnRow])
    is_submitted: bool = False
    waits_to_draw: bool = False
    """True if its tokens are drawn only after the tokens before them are known."""

    @property
    def is_pending(self) -> bool:
        """True if the device has work to do for the step."""
        return self.error is None and bool(self.passes)

    @property
    def is_decode(self) -> bool:
        """True if each row has one token: such steps take about equally long."""
        return self.inputs is not None and all(len(row.tokens) == 1 for row in self.inputs.rows)

    @property
    def has_lookups(self) -> bool:
        """True if rows want more than tokens."""
        return self.inputs is not None and any(row.wants.lookups for row in self.inputs.rows)

    @property
    def reported(self) -> list[DrawnRow]:
        """Rows that drew and did not fail. A row that fails while it draws still has a token, which is not used."""
        return [drawn for drawn in self.drawn if drawn.sequence not in self.failed]

    @property
    def allows_building_ahead(self) -> bool:
        """True if another step can be built on this one: its answer needs neither the device nor its KV any more."""
        tails = any(item.batch.members.tails for item in self.passes)
        return self.is_pending and not self.has_lookups and not tails

    @property
    def built_on(self) -> set[int]:
        """Sequences whose tokens were unknown when the step was built."""
        rows = self.inputs.rows if self.inputs is not None else []
        return {row.row.sequence for row in rows if row.lazy is not None}

    @property
    def is_rolled_back(self) -> bool:
        """True if the step was rolled back and must be built again."""
        return self.error is None and bool(self.step.rows) and self.inputs is None

    def roll_back(self) -> None:
        """Drop what was built."""
        self.inputs, self.passes, self.draws, self.activations = None, [], None, None
        self.outputs, self.is_submitted, self.waits_to_draw = [], False, False

    def row_failure(self) -> step_pb2.Failure | None:
        """Return the failure of single rows and operations, or None."""
        failed = {**self.refused, **self.failed}
        if not failed:
            return None
        errors = list(failed.values())
        # A row that was merely out of step is computed again, so another row's error must not hide its kind.
        first = next((error for error in errors if isinstance(error, ProtocolError)), errors[0])
        failure = error_to_failure(first, sorted(failed))
        failure.message = " ".join(dict.fromkeys(map(str, errors)))
        return failure


class Halt:
    """Steps of one stream that are held back from some moment on.

    Ranks of a group compute a step together. Before they get other neighbours, all of them are halted. Then each one
    executes the steps that another has begun, which would wait for it otherwise, and no others. A step begins once its
    input is there.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._begun = 0
        self._held: list[tuple[step_pb2.Step, int]] | None = None
        """Steps that came since, and the times of their arrival; None while steps are executed."""
        self._until: float | None = math.inf
        """Last step that may begin; None while only the head knows it."""
        self._is_settled = False
        """True once the steps that may begin were executed."""

    def halt(self) -> int:
        """Hold back all steps from now on, and return the last one that has begun."""
        with self._changed:
            if self._held is None:
                self._held = []
                log.info("Halted after step %d", self._begun)
            self._until, self._is_settled = None, False
            return self._begun

    def holds(self, step: step_pb2.Step, arrived_us: int) -> bool:
        """Return True if the step is held back."""
        with self._changed:
            if self._held is not None:
                self._held.append((step, arrived_us))
            return self._held is not None

    def begin(self, step: int) -> None:
        """Begin a step whose input is there. While halted, wait until it is known which steps may begin.

        Raises:
            NotReady: no other rank has begun it.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._until is not None)
            if self._until is None or step > self._until:
                raise NotReady("This worker is being linked with others.")
            self._begun = step
            self._changed.notify_all()

    def release(self, step: int) -> None:
        """Let steps up to one begin, if all are held back; wait until it has begun, unless its input does not come."""
        with self._changed:
            if self._held is not None:
                self._until = step
                self._changed.notify_all()
            self._changed.wait_for(lambda: self._begun >= step or self._is_settled, _INPUT_WAIT_S)

    def take_held(self, step: int) -> list[tuple[step_pb2.Step, int]]:
        """Take out the steps up to one that were held back, with the times of their arrival."""
        with self._changed:
            if self._held is None:
                return []
            taken = [held for held in self._held if held[0].step <= step]
            self._held = [held for held in self._held if held[0].step > step]
            return taken

    def settle(self, step: int) -> None:
        """End the wait for a step's input, because all steps that came were executed.

        Raises:
            WorkerStuck: the step has not begun, so other ranks wait for this one.
        """
        with self._changed:
            self._is_settled = True
            self._changed.notify_all()
            if self._begun < step:
                raise WorkerStuck(f"The input of step {step}, which other ranks have begun, did not arrive.")
