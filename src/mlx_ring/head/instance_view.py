"""Instance of a model as the API sees it, and its recoveries: their phases and times, and the limit of their number."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import get_args

from pydantic import TypeAdapter

from mlx_ring.api.context import workers_of
from mlx_ring.api.ops.status import RecoveryPhase, RecoveryStatus
from mlx_ring.core.engine_stats import Meter
from mlx_ring.core.errors import NodeDrained, NotReady, RingError
from mlx_ring.core.generation import WayBack, WaysBack
from mlx_ring.core.types import LayerRange, RankId
from mlx_ring.core.worker_status import (
    MEMORY,
    REPORTED,
    GroupUse,
    InstanceInfo,
    LinkUse,
    WaitUse,
    WorkerInfo,
    WorkerMemory,
)
from mlx_ring.engine.engine import Engine
from mlx_ring.engine.live_request import LiveRequest
from mlx_ring.engine.resumption import Destination, Silences
from mlx_ring.engine.step_times import StepTimes
from mlx_ring.head.placing import Placement
from mlx_ring.head.status import InstanceView, LoadingProgress
from mlx_ring.rpc.protos import agent_pb2

log = logging.getLogger(__name__)

FIRST_EPOCH = 1
LOADING = "The model is being loaded; ask again in a moment."


WINDOW_S = 600.0
"""Time after the last loss that ends a row of them."""
STEADY_S = 10.0
"""Time for which an instance serves until its loss is no sign of a broken cluster."""
PROMPT_LOSSES = 5
"""Losses in a row that cause no pause before the next load."""
MOST_LOSSES = 15
"""Losses in a row after which interrupted requests are not continued."""
_LONGEST_PAUSE_S = 30.0
_FIRST_LOAD_SHARE = 0.5
"""Part of the first load that the first recovery is predicted to take: weights and programs are in memory then."""
_PHASES = get_args(RecoveryPhase)
_PARTS: Mapping[RecoveryPhase, str] = {"planning": "plan", "loading": "load", "replaying": "replay"}


class Recoveries:
    """Recoveries of one replica. A loss in any phase of a recovery begins another one."""

    def __init__(self, model: str, meter: Meter, clock: Callable[[], float] = time.monotonic) -> None:
        """Start before the first load.

        Args:
            model: name of the model.
            meter: measurements of the replica.
            clock: seconds.
        """
        self._model, self._clock = model, clock
        self.meter = meter
        self._losses: deque[float] = deque(maxlen=MOST_LOSSES)
        """Times of losses in a row without success. The instance had served only for a moment, or had not computed
        everything again, and no answer has continued since."""
        self._served_at = 0.0
        self._phase: RecoveryPhase | None = None
        self._lost_at = self._phase_at = 0.0
        self._has_served = False
        self._longest_load_s: float | None = None
        self._parts: dict[str, float] = {}
        """Seconds of the ended parts of the present recovery."""
        self._last_s: dict[RecoveryPhase, float] = {}
        """Seconds that each phase took last."""
        self.silences = Silences()
        """Silences of its machines and workers."""
        self._resumed = self._replaying = 0
        """Requests that were resumed, and those of them that have no new token yet. Ended ones without a token do not
        count."""

    # ---- the instance records

    def record_loss(self, error: RingError, waited_s: float) -> None:
        """Begin a recovery, unless this loss was recorded already or the instance is ended on purpose.

        Args:
            error: the loss.
            waited_s: time for which the oldest step had waited for an answer; 0 if a broken stream showed the loss.
        """
        if isinstance(error, NotReady) or not self._has_served or self._phase == "planning":
            return
        now = self._clock()
        is_steady = self._phase is None and now - self._served_at >= STEADY_S
        if self._phase != "loading" and not is_steady:
            self._losses.append(now)
        self._phase, self._lost_at, self._parts = "planning", now, {"detect": waited_s}
        self._phase_at = now

    def record_plan(self) -> None:
        """Record that an instance was placed and is being loaded."""
        if self._phase is None:
            self._phase_at = self._clock()
        else:
            self._end_phase("loading")

    def record_load(self) -> None:
        """Record that the instance serves."""
        self._has_served, self._served_at = True, self._clock()
        self._longest_load_s = max(self._longest_load_s or 0.0, self._served_at - self._phase_at)
        if self._phase is None:
            self._last_s["loading"] = self._clock() - self._phase_at
        else:
            self._end_phase("replaying")

    def record_resumed(self, lives: Iterable[LiveRequest]) -> None:
        """Follow the interrupted requests that the instance took over, until each has a new token or has ended."""
        if self._phase != "replaying":
            # A first load took over the requests of another replica.
            return
        resumed = [live for live in lives if not live.has_ended]
        self._resumed = self._replaying = len(resumed)
        for live in resumed:
            live.on_resumed = self._record_continued
        if not resumed:
            self._end()

    def _record_continued(self, has_token: bool) -> None:  # noqa: FBT001 - a callback
        self._replaying -= 1
        if has_token:
            self._parts.setdefault("first_token", self._clock() - self._phase_at)
        else:
            self._resumed -= 1
        if not self._replaying:
            if self._resumed:
                self._losses.clear()
            self._end_phase("replaying")
            self._end()

    def _end_phase(self, following: RecoveryPhase) -> None:
        now, ended = self._clock(), self._phase or following
        self._last_s[ended] = now - self._phase_at
        # A load is repeated if it is dropped because the lost workers answer again.
        self._parts[_PARTS[ended]] = self._parts.get(_PARTS[ended], 0.0) + self._last_s[ended]
        self._phase, self._phase_at = following, now

    def _end(self) -> None:
        self._phase = None
        self.meter.record_recovery(self._parts)
        parts = [part for part in ("detect", "plan", "load", "replay") if part in self._parts]
        log.info(
            "Recovered %s in %.2f s: %s; %d %s resumed",
            self._model,
            sum(self._parts[part] for part in parts),
            ", ".join(f"{part} {self._parts[part]:.2f} s" for part in parts),
            self._resumed,
            "request" if self._resumed == 1 else "requests",
        )

    # ---- reports

    @property
    def load_s(self) -> float | None:
        """Longest time that a load took, because some load only a part; None before the first."""
        return self._longest_load_s

    @property
    def back_s(self) -> float | None:
        """Predicted seconds from a loss until an instance serves, by the last plan and load; None before the first load."""
        load_s, plan_s = self._last_s.get("loading"), self._last_s.get("planning")
        if load_s is None:
            return None
        return self.pause_s + (_FIRST_LOAD_SHARE * load_s if plan_s is None else plan_s + load_s)

    @property
    def status(self) -> RecoveryStatus | None:
        """Phase of the present recovery, and how long it may take; None without one."""
        if self._phase is None:
            return None
        now = self._clock()
        left_s = self._last_s.get(self._phase, -1.0) - (now - self._phase_at)
        following = _PHASES[_PHASES.index(self._phase) + 1 :]
        return RecoveryStatus(
            phase=self._phase,
            elapsed_s=now - self._lost_at,
            remaining_s=None
            if left_s < 0
            else left_s + sum(self._last_s.get(each, 0.0) for each in following),
        )

    # ---- the limit

    def _recent_losses(self) -> int:
        if self._losses and self._clock() - self._losses[-1] >= WINDOW_S:
            self._losses.clear()
        return len(self._losses)

    @property
    def pause_s(self) -> float:
        """Time to wait before the next load, so that a broken cluster does not load without end."""
        excess = self._recent_losses() - PROMPT_LOSSES
        return 0.0 if excess <= 0 else min(_LONGEST_PAUSE_S, 2.0 ** (excess - 1))

    @property
    def refusal(self) -> NotReady | None:
        """Error of interrupted requests while there are too many losses; None while they are continued."""
        if self._recent_losses() < MOST_LOSSES:
            return None
        return NotReady(
            f"The model was lost {MOST_LOSSES} times in a row, so interrupted answers are not continued for "
            f"{WINDOW_S / 60:.0f} minutes. See the log for the reasons, and ask again later."
        )


class SuspectWait:
    """Wait for suspects of an instance, as long as it is predicted to be cheaper than a recovery without them."""

    def __init__(
        self,
        instance: str,
        meter: Meter,
        silences: Silences,
        recovery_s: Callable[[], float | None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Prepare for the suspects of an instance.

        Args:
            instance: its name.
            meter: measurements of the replica.
            silences: earlier silences; this adds its own.
            recovery_s: returns the predicted seconds of a recovery now, or None.
            clock: returns seconds.
        """
        self._instance, self._meter, self._silences, self._clock = instance, meter, silences, clock
        self._predict_recovery_s = recovery_s
        self._back: WayBack | None = None
        self._recovery_s: float | None = None
        self._silent_s = 0.0
        """Longest silence at the last look."""
        self._has_looked = False
        """True if a silence was looked at since the last end: one loss of several workers ends one silence."""

    def gives_up(self, silent_s: float, limit_s: float) -> bool:
        """Return True if a suspect that has been silent for some seconds is waited for no longer, at most up to a limit."""
        if self._back is None:
            self._recovery_s, self._silent_s = self._predict_recovery_s(), silent_s
        self._has_looked = True
        is_over = not self._silences.is_worth_waiting(silent_s, limit_s, self._recovery_s)
        if self._back is None and not is_over:
            other = "unknown" if self._recovery_s is None else f"{self._recovery_s:.2f} s"
            ways = WaysBack(self._instance, self._meter.record_way, f" (recovery: {other})")
            self._back = ways.begin("wait", self._silences.wait_s(silent_s, limit_s), self._clock())
        self._silent_s = max(self._silent_s, silent_s)
        return is_over

    def end(self, *, has_answered: bool) -> None:
        """Record the end of the silence, or of the wait."""
        if not self._has_looked:
            return
        self._has_looked = False
        if not has_answered:
            log.warning("%s waits no longer for what is silent for %.1f s", self._instance, self._silent_s)
        if self._back is not None or not has_answered:
            self._silences.record(self._silent_s if has_answered else None)
        if self._back is not None:
            self._back.arrive(self._clock())
            self._back = None


class InstanceService:
    """Engine and its workers, or the reason why there is none."""

    def __init__(self, layers: int, kv_bits: int, recoveries: Recoveries) -> None:
        """Start without an engine; `layers` is the model's number of layers."""
        self.recoveries = recoveries
        self._layers = layers
        self._kv_bits = kv_bits
        self._placement: Placement | None = None
        self._loading = LoadingProgress()
        self._is_loading = False
        self._instance, self._epoch = "", FIRST_EPOCH
        self._engine: Engine | None = None
        self._lost: RingError | None = None
        self._suspicion = ""
        self._workers: dict[str, tuple[WorkerInfo, ...]] = {}
        """Workers of each node."""
        self.changed = asyncio.Event()
        """Event that is set, and replaced, when it begins to load, serves or is lost."""

    @property
    def engine(self) -> Engine:
        if self._engine is None:
            raise NotReady(LOADING)
        return self._engine

    @property
    def meter(self) -> Meter:
        """Measurements of its replica."""
        return self.recoveries.meter

    def runs(self, home: object) -> bool:
        """Return True if a request's owner is its engine, lost or not."""
        return self._engine is home

    def recovery_s(self) -> float | None:
        """Return the predicted seconds until its requests have new tokens, if it is lost now; None if they are unknown.

        All their tokens count, because the loss decides which KV is kept. A shared beginning counts once.
        """
        if self._engine is None or self.recoveries.back_s is None:
            return None
        token_s = self._engine.load_for(()).token_s
        own = Destination("recompute", self.recoveries.back_s, token_s, 0)
        for live in self._engine.lives:
            own.give(tuple(live.sequence.tokens))
        return own.seconds(())

    @property
    def error(self) -> RingError | None:
        """Reason why it cannot answer now; None if it can."""
        if self._lost is not None:
            return self._lost
        return NotReady(LOADING) if self._engine is None else self._engine.error

    @property
    def placement(self) -> Placement | None:
        """Placement of its stages; None before it was planned."""
        return self._placement

    @property
    def info(self) -> InstanceInfo:
        """Plan of the instance, and its workers as reported last."""
        workers = sorted(
            (worker for of_node in self._workers.values() for worker in of_node),
            key=lambda worker: (worker.stage, worker.rank),
        )
        return InstanceInfo(self._instance, self._epoch, self._layers, tuple(workers), self._kv_bits)

    def view(self, model: str) -> InstanceView | None:
        """Return the state of the instance; None before it was planned."""
        placement, error = self._placement, self.error
        if placement is None:
            return None
        return InstanceView(
            name=self._instance,
            model=model,
            epoch=self._epoch,
            state="ready" if error is None else "loading" if self._is_loading else "unavailable",
            reason=(self._suspicion or None) if error is None else str(error),
            layers=self._layers,
            ranges=placement.ranges,
            nodes=[[placed.site.node for placed in stage] for stage in placement.ranks],
            plan=placement.plan,
            forecast=placement.forecast,
            workers=workers_of(self),
            loading=self._loading,
            times=StepTimes() if self._engine is None else self._engine.step_times(),
            recovery=self.recoveries.status,
        )

    def begin(self, instance: str, epoch: int, placement: Placement) -> None:
        """Start to load another instance with this placement."""
        self._instance, self._epoch, self._placement = instance, epoch, placement
        self._workers, self._loading, self._is_loading = {}, LoadingProgress(), True
        self.recoveries.record_plan()
        self._engine, self._suspicion = None, ""
        self._change()

    def serve(self, engine: Engine) -> None:
        """Answer requests from now on."""
        self._engine, self._lost, self._is_loading = engine, None, False
        self.recoveries.record_load()
        self._change()

    def lose(self, error: RingError) -> None:
        """End the engine with the reason, and refuse new requests until `serve`.

        A later reason replaces an earlier one.
        """
        if error is not self._lost:
            # Unloading or moving a model, or ending the server, is not an error.
            is_meant = isinstance(error, NotReady | NodeDrained)
            log.log(logging.INFO if is_meant else logging.ERROR, "%s", error)
        self._lost, self._is_loading = error, False
        owed = None if self._engine is None else self._engine.oldest_unanswered()
        self.recoveries.record_loss(error, 0.0 if owed is None else owed.waited_s)
        if self._engine is not None:
            self._engine.lose(error)
        self._change()

    def _change(self) -> None:
        changed, self.changed = self.changed, asyncio.Event()
        changed.set()

    def suspect(self, reason: str) -> None:
        """Show that the instance is suspect; without a reason, that it is not."""
        self._suspicion = f"Suspect, without new steps: {reason}." if reason else ""

    def record_loading(self, progress: agent_pb2.StageProgress) -> None:
        """Record the loading progress of a worker."""
        self._loading.record(progress)

    def load_phase(self, rank: RankId) -> str:
        """Return the phase of a rank's load."""
        return self._loading.of(rank).phase

    def record_workers(self, event: agent_pb2.AgentEvent) -> None:
        """Record an agent's report of its workers."""
        if self._placement is None:
            return
        ranges = self._placement.ranges
        self._workers[event.hello.node] = tuple(
            _worker_info(state, ranges[state.stage], event.hello.node)
            for state in event.workers
            if state.instance == self._instance
        )


_MEMORY = TypeAdapter(WorkerMemory)


def _worker_info(state: agent_pb2.WorkerState, layers: LayerRange, node: str) -> WorkerInfo:
    status = state.status
    group, sends, waits = status.group, status.sends, status.waits
    return WorkerInfo(
        stage=state.stage,
        rank=state.rank,
        layers=layers,
        node=node,
        pid=state.pid,
        alive=state.alive,
        memory=_MEMORY.validate_python({name: getattr(status, name) for name in MEMORY}),
        **{name: getattr(status, name) for name in REPORTED},
        sends=LinkUse(sends.compresses, sends.why, sends.frames, sends.tensor_bytes, sends.sent_bytes)
        if status.HasField("sends")
        else None,
        group=GroupUse(group.backend, group.why) if status.HasField("group") else None,
        waits=WaitUse(waits.kind, waits.backend, waits.peer, waits.seconds)
        if status.HasField("waits")
        else None,
    )
