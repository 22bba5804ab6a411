"""Comparison of a loaded plan with the best one for the machines as they are now, and when a move pays. Pure.

A measured split shows what predictions of another one leave out: the time of a step beside computing, which stays when
layers move.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Literal

from mlx_ring.core.errors import PlanError
from mlx_ring.core.types import LayerRange
from mlx_ring.planner.place import LoadedStages, place, plan_loaded
from mlx_ring.planner.plan import Plan
from mlx_ring.planner.profiles import ClusterProfile, ModelProfile, NodeProfile
from mlx_ring.planner.request import PlanRequest
from mlx_ring.planner.stage_costs import StageTables
from mlx_ring.rpc.link_profile import UNREACHABLE

LEAST_GAIN = 0.15
"""Predicted gain from which another plan is proposed: predictions are off by about as much."""
_HELD_S = 60.0
"""Time for which a machine must have been faster or slower."""
_CHANGE_HELD_S = 10.0
"""Time for which a machine must have been there, or had another memory limit."""
_PATIENCE = 4
"""Factor of both times for each recent move, so that conditions that come and go cause few of them."""
_RECENT_S = 6 * 3600.0
_LONGEST_LOOK_S = 30.0
"""Longest time between two looks that counts: of the rest nothing is known."""


@dataclass(frozen=True, slots=True)
class Situation:
    """Instance that serves, and its machines as they are now."""

    model: ModelProfile
    request: PlanRequest
    loaded: LoadedStages
    cluster: ClusterProfile
    """Machines, with the memory that the instance would leave."""
    beside: ClusterProfile
    """The same machines, with the memory that they have while it stays loaded."""
    refusal: str = ""
    """Reason why no second instance may be loaded, whatever the machines' memory."""
    has_less_memory: bool = False
    """True if one of its machines has less memory than when it was loaded."""
    only_whole: str = ""
    """Reason why no worker may load a part of its next stage; empty if they may."""
    head: str = ""
    """Machine of the head, which has all weights."""
    had: Mapping[str, frozenset[int]] = field(default_factory=dict[str, frozenset[int]])
    """Layers that each machine has had since the model was first loaded, and whose weights it keeps on its disk."""


class UnchangeableWorkers(PlanError):
    """Workers cannot change to another plan's stages, but the whole model can be loaded again."""


MoveWay = Literal["beside", "ranges", "after"]


@dataclass(frozen=True, slots=True)
class StageChange:
    """Change of one machine's stage, whose worker loads only the layers that it lacks."""

    node: str
    gained_bytes: int
    """Bytes of the weights that it loads."""
    fits_beside: bool
    """True if it has room for them while it still has its present stage."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Loaded plan, and the best one."""

    loaded: Plan | None
    """Prediction for the loaded stages as the machines are now; None if they no longer have the memory."""
    planned: Plan
    way: MoveWay
    """`beside`: another instance can be loaded while the present one serves. `ranges`: workers stay, and load only the
    layers that they gain. `after`: answers pause while the whole model is loaded again."""
    why: str
    """Reason why they would pause."""
    changes: tuple[StageChange, ...] = ()
    """With `ranges`, the change of each machine of the best plan."""
    fetch_s: float = 0.0
    """Predicted seconds in which machines fetch weights that they lack."""

    @property
    def gain(self) -> float:
        """Relative gain in speed: with 0.25, as much takes 1.25 times as long now. Infinite if the memory does not suffice."""
        return _gain(self.loaded, self.planned)


def compare(now: Situation) -> Comparison | None:
    """Compare the loaded stages with the best plan; return None if they are the best one.

    Raises:
        PlanError: no plan fits, the strategy cannot be used with these machines, or loaded stages do not reach each other.
    """
    best = place(now.model, now.cluster, now.request)
    if stages_of(best) == now.loaded:
        return None
    found = _compared(now, best)
    return replace(found, fetch_s=_fetch_s(now, stages_of(found.planned)))


def _compared(now: Situation, best: Plan) -> Comparison:
    loaded = _predict_loaded(now)
    if now.refusal:
        return _with_pause(now, loaded, best, now.refusal)
    try:
        second = place(now.model, now.beside, now.request)
    except PlanError as error:
        return _with_pause(now, loaded, best, str(error))
    if stages_of(second) != now.loaded and _gain(loaded, second) >= min(LEAST_GAIN, _gain(loaded, best)):
        return Comparison(loaded, second, "beside", "")
    return _with_pause(
        now, loaded, best, "Beside the present instance, the machines have no room for a faster one."
    )


def _fetch_s(now: Situation, planned: LoadedStages) -> float:
    """Return the seconds in which the head's machine sends others the weights that they lack, one after the other."""
    model, present = (
        now.model,
        defaultdict[str, set[int]](set, {node: {*had} for node, had in now.had.items()}),
    )
    for layers, ranks in now.loaded:
        for node, _ in ranks:
            present[node].update(range(layers.start, layers.end))
    seconds, last = 0.0, len(model.layers) - 1
    for layers, ranks in planned:
        for node, share in ranks:
            gained = set(range(layers.start, layers.end)) - present[node]
            nbytes = sum(model.layers[layer].weight_bytes for layer in gained)
            nbytes += model.ends_bytes(is_first=0 in gained, is_last=last in gained)
            link = now.cluster.link(now.head, node)
            usual = now.cluster.usual_link if link == UNREACHABLE else link
            seconds += 0.0 if node == now.head else share * nbytes / usual.bandwidth
    return seconds


def _with_pause(now: Situation, loaded: Plan | None, best: Plan, why: str) -> Comparison:
    """Return the way to a plan that cannot be loaded beside the present one."""
    if now.only_whole:
        return Comparison(loaded, best, "after", f"{why} {now.only_whole}")
    try:
        changes = stage_changes(now.model, now.cluster, now.request, now.loaded, stages_of(best))
    except PlanError as error:
        return Comparison(loaded, best, "after", f"{why} {error}")
    return Comparison(loaded, best, "ranges", why, changes)


def stage_changes(
    model: ModelProfile,
    cluster: ClusterProfile,
    request: PlanRequest,
    loaded: LoadedStages,
    planned: LoadedStages,
) -> tuple[StageChange, ...]:
    """Return the change of each machine of a plan, in its order, if workers load only the layers that they gain.

    Args:
        model: the model.
        cluster: the machines of the plan, with the memory that the present instance would leave.
        request: the request for plans.
        loaded: the present stages.
        planned: the plan's stages.

    Raises:
        UnchangeableWorkers: workers that stay cannot change to this plan.
    """
    before, after = _by_node(loaded), _by_node(planned)
    if not any(_common(before.get(node), layers) for node, layers in after.items()):
        raise UnchangeableWorkers(
            "No machine would keep one of its layers, so the whole model is loaded again."
        )
    if [layers for layers, _ in loaded] == [layers for layers, _ in planned] and any(
        before.get(node, layers) != layers for node, layers in after.items()
    ):
        raise UnchangeableWorkers("Machines would exchange their stages, so the whole model is loaded again.")
    tables, nodes = StageTables(model, request.demand), {node.name: node for node in cluster.nodes}
    return tuple(_change(tables, nodes[node], before.get(node), layers) for node, layers in after.items())


def _by_node(stages: LoadedStages) -> dict[str, LayerRange]:
    """Return the layers of each machine. Raises `UnchangeableWorkers` if machines share a stage, or one has several."""
    if any(len(ranks) > 1 for _, ranks in stages):
        raise UnchangeableWorkers("Machines share the layers of a stage, so the whole model is loaded again.")
    found = {node: layers for layers, ((node, _),) in stages}
    if len(found) < len(stages):
        raise UnchangeableWorkers("One machine has several stages, so the whole model is loaded again.")
    return found


def _common(present: LayerRange | None, layers: LayerRange) -> LayerRange | None:
    """Return the layers that are in both ranges; None if there are none."""
    if present is None:
        return None
    first, end = max(present.start, layers.start), min(present.end, layers.end)
    return LayerRange(first, end) if first < end else None


def _change(
    tables: StageTables, node: NodeProfile, present: LayerRange | None, layers: LayerRange
) -> StageChange:
    kept, memory = _common(present, layers), tables.memory(node)
    gained = tables.weight_bytes(node, layers.start, layers.end)
    if kept is not None:
        gained -= tables.weight_bytes(node, kept.start, kept.end)
    held = 0.0 if present is None else memory[present.start, present.end]
    fits = present is None or held + gained <= node.usable_bytes
    return StageChange(node.name, max(0, gained), bool(fits))


def _predict_loaded(now: Situation) -> Plan | None:
    """Return the plan of the loaded stages; None if their memory no longer suffices.

    The memory of mlx-ring's own processes grows a little. Without less memory than before, they fit all the same.
    """
    try:
        return plan_loaded(now.model, now.cluster, now.request, (now.loaded,))[0]
    except PlanError:
        if now.has_less_memory:
            return None
    roomy = tuple(replace(node, memory_bytes=2 * node.memory_bytes) for node in now.cluster.nodes)
    return plan_loaded(now.model, replace(now.cluster, nodes=roomy), now.request, (now.loaded,))[0]


def stages_of(plan: Plan) -> LoadedStages:
    """Return the stages of a plan as those of a loaded instance."""
    return tuple(
        (stage.layers, tuple((rank.node, rank.share) for rank in stage.ranks)) for stage in plan.stages
    )


def _gain(loaded: Plan | None, planned: Plan) -> float:
    if loaded is None:
        return math.inf
    objective = planned.objective
    return loaded.prediction.minimized_s(objective) / planned.prediction.minimized_s(objective) - 1.0


class Patience:
    """Decision when a better plan pays for a move.

    It has to be better for as long as it takes until the gain makes up for the move. The reason is that conditions last on
    average for as long again as they have lasted. The least time grows with each move of the last hours.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        """Start without a move; `clock` returns seconds."""
        self._clock = clock
        self._better_s: float | None = None
        """Time for which another plan has been better; None if it was not at the last look."""
        self._looked_at: float | None = None
        self._moves: deque[float] = deque()

    def look(self, gain: float, move_s: float, *, is_measured: bool, has_changed: bool) -> bool:
        """Take note of a comparison, and return True once a move pays.

        Args:
            gain: predicted gain of the best plan; 0 if the present one is the best.
            move_s: time of a move, weights that machines fetch included. Until its end, nothing is gained.
            is_measured: True if steps were measured since the last look. Without steps, nothing is known of the speeds.
            has_changed: True if machines or their memory are others than when the instance was loaded.
        """
        now = self._clock()
        passed_s = 0.0 if self._looked_at is None else min(_LONGEST_LOOK_S, now - self._looked_at)
        self._looked_at = now
        if gain < LEAST_GAIN:
            self._better_s = None
            return False
        if self._better_s is None:
            self._better_s = 0.0
        elif is_measured or has_changed:
            self._better_s += passed_s
        while self._moves and now - self._moves[0] >= _RECENT_S:
            self._moves.popleft()
        least_s = (_CHANGE_HELD_S if has_changed else _HELD_S) * _PATIENCE ** len(self._moves)
        return self._better_s >= max(least_s, move_s / gain)

    def moved(self) -> None:
        """Record a move."""
        self._moves.append(self._clock())
        self.forget()

    def forget(self) -> None:
        """Begin anew, with the same moves: there was nothing to compare, or another instance was loaded."""
        self._better_s = self._looked_at = None


# ---- time beside computing

_MOST_OVERHEAD_S = 0.2
"""Longest time of a step beside computing that counts."""
_NOISE = 0.05
"""Change of that time, over the time of a step, that counts as noise."""
_MEASUREMENTS = 7
"""Number of last measurements whose median counts: a machine that becomes slower is noticed before half of them show it."""
_SLOWED = 1.5
"""Factor by which a machine has become slower than the others, so that the rest of the time is its own."""


@dataclass(frozen=True, slots=True)
class StageStep:
    """Measured decode step of a stage."""

    node: str
    computing_s: float
    ratio: float
    """Mean over predicted time of computing."""


@dataclass(frozen=True, slots=True)
class Round:
    """Measured time of a micro-batch from one token of its sequences to the next."""

    stages: tuple[StageStep, ...]
    batches: int
    """Number of micro-batches that take turns."""
    rows: int
    """Sequences of one."""
    round_s: float
    hops_s: float
    """Predicted seconds of all hops."""

    @property
    def step_s(self) -> float:
        """Seconds from one step of a stage to the next, whichever micro-batch it is of."""
        return self.round_s / self.batches

    def rest_s(self, known_s: float) -> float:
        """Return the seconds of the round that neither computing, hops nor `known_s` on each stage take."""
        computing_s = sum(stage.computing_s for stage in self.stages)
        return self.round_s - self.hops_s - computing_s - len(self.stages) * known_s

    def common_s(self) -> float:
        """Return the seconds that each step of a stage takes beside computing, so that this round is predicted."""
        longest_s = max(stage.computing_s for stage in self.stages)
        return min(self.rest_s(0.0) / len(self.stages), self.step_s - longest_s)


@dataclass(frozen=True, slots=True)
class _Overhead:
    counted_s: float
    """Seconds that plans count. They stay if the measured ones hardly change."""
    measured_s: float
    at: float
    """Time of the measurement."""


class StepOverheads:
    """Seconds that each decode step of a stage takes beside computing: messages, scheduling, and waits for a core.

    They count on every machine, because they come with each step of any split. If one machine has become much slower than
    the others, the time that was added since counts on that machine alone. Otherwise, a split without it would be predicted
    with its waits.
    """

    def __init__(self, clock: Callable[[], float], forget_s: float) -> None:
        """Start without any; they count for `forget_s` seconds without new rounds, by a clock of seconds."""
        self._clock, self._forget_s = clock, forget_s
        self._common: _Overhead | None = None
        self._measured_s: deque[float] = deque(maxlen=_MEASUREMENTS)
        """The last measurements of the common time."""
        self._added: Mapping[str, _Overhead] = {}
        """Times that count on single machines. It is replaced, as plans read it in other threads."""
        self._least: dict[str, dict[tuple[str, int, int], float]] = {}
        """Least ratio of each machine in rounds of a kind, by instance: predictions may be off by more for one kind."""

    def of(self, node: str) -> float:
        """Return the seconds of a step on a machine, known or not."""
        since = self._clock() - self._forget_s
        both = self._common, self._added.get(node)
        return sum(each.counted_s for each in both if each is not None and each.at >= since)

    def forget(self, node: str) -> None:
        """Forget what was added on a machine."""
        self._added = {other: each for other, each in self._added.items() if other != node}

    def learn(self, rounds: Mapping[str, Round], instances: Collection[str]) -> bool:
        """Learn from the rounds of instances, and return True if the time that is common to all steps has changed.

        Args:
            rounds: the last rounds, by instance. The least time of all instances is common to their steps.
            instances: all instances. Others are forgotten.
        """
        self._least = {name: self._least.get(name, {}) for name in instances}
        common: list[tuple[float, float]] = []
        for name, found in rounds.items():
            slowed = self._slowed(name, found)
            if slowed is None:
                common.append((found.common_s(), found.step_s))
                for stage in found.stages:
                    self.forget(stage.node)
            else:
                added_s = self._added_s(found, slowed)
                before = self._added.get(slowed.node)
                self._added = {**self._added, slowed.node: self._noted(before, added_s, found.step_s)}
        if not common:
            return False
        before, (measured_s, step_s) = self._common, min(common)
        if before is not None and before.measured_s == measured_s:
            return False
        self._measured_s.append(measured_s)
        counted_s = self._noted(before, median(self._measured_s), step_s).counted_s
        self._common = _Overhead(counted_s, measured_s, self._clock())
        return (0.0 if before is None else before.counted_s) != counted_s

    def _slowed(self, instance: str, found: Round) -> StageStep | None:
        """Return the longest step of machines that have become slower than others; None if there are none."""
        least, slower = self._least.setdefault(instance, {}), dict[str, float]()
        for stage in found.stages:
            kind = stage.node, found.batches, found.rows
            least[kind] = min(stage.ratio, least.get(kind, stage.ratio))
            slower[stage.node] = stage.ratio / least[kind]
        slowed = [stage for stage in found.stages if slower[stage.node] > _SLOWED * min(slower.values())]
        return max(slowed, key=lambda stage: stage.computing_s, default=None)

    def _added_s(self, found: Round, slowed: StageStep) -> float:
        common_s = self.of("")
        return min(found.rest_s(common_s), found.step_s - slowed.computing_s - common_s)

    def _noted(self, before: _Overhead | None, measured_s: float, step_s: float) -> _Overhead:
        if before is not None and before.measured_s == measured_s:
            return before
        counted_s = min(max(measured_s, 0.0), _MOST_OVERHEAD_S)
        if before is not None and abs(counted_s - before.counted_s) < _NOISE * step_s:
            counted_s = before.counted_s
        return _Overhead(counted_s, measured_s, self._clock())
