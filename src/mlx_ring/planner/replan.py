"""Comparison of a loaded plan with the best one for the machines as they are now, and when a move pays. Pure."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Literal, Protocol

from mlx_ring.core.errors import PlanError
from mlx_ring.core.types import LayerRange
from mlx_ring.planner.place import LoadedStages, place, plan_loaded
from mlx_ring.planner.plan import Plan
from mlx_ring.planner.profiles import ClusterProfile, ModelProfile, NodeProfile
from mlx_ring.planner.request import PlanRequest
from mlx_ring.planner.stage_costs import StageTables
from mlx_ring.planner.strategies import uses_all_machines
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
SHORT_PAUSE_S = 5.0
"""Longest predicted pause that needs no permission: a recovery takes as long."""
_LINK_S = 1.0
"""Time until workers that have their layers are linked."""


class MakePlan(Protocol):
    """Maker of the best plan of a model, as at the start of a head."""

    def __call__(self, model: ModelProfile, cluster: ClusterProfile, request: PlanRequest) -> Plan:
        """Return the plan; raise `PlanError` if none fits."""
        ...


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
    shared: tuple[NodeProfile, ...] = ()
    """Other machines of the instance, which it shares with replicas, as it finds them while these compute."""
    has_less_memory: bool = False
    """True if one of its machines has less memory than when it was loaded."""
    only_whole: str = ""
    """Reason why no worker may load a part of its next stage; empty if they may."""
    head: str = ""
    """Machine of the head, which has all weights."""
    had: Mapping[str, frozenset[int]] = field(default_factory=dict[str, frozenset[int]])
    """Layers that each machine has had since the model was first loaded, and whose weights it keeps on its disk."""
    plan: MakePlan = place


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
    """True if it has room for them while it still has its present stages."""
    present: LayerRange | None = None
    """Layers of the present stage whose worker stays; None if the machine has none. Its other workers end."""


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
    unused: tuple[str, ...] = ()
    """Machines that need no gain: they have lost their layers, and the strategy gives them some again, or the instance
    shares other ones with replicas."""
    is_shared: bool = False
    """True if the instance shares machines with replicas."""

    @property
    def worth(self) -> float:
        """Gain for which a move has to pay; infinite if none is needed."""
        return math.inf if self.unused else self.gain

    @property
    def merit(self) -> tuple[float, ...]:
        """Values that are larger for a better one. A machine that is back goes to the replica with the fewest machines."""
        return (
            self.worth,
            -len({node for _, ranks in stages_of(self.planned) for node, _ in ranks}),
            self.gain,
        )

    @property
    def gain(self) -> float:
        """Relative gain in speed: with 0.25, as much takes 1.25 times as long now. Infinite if the memory does not suffice."""
        return _gain(self.loaded, self.planned)


def compare(now: Situation) -> Comparison | None:
    """Compare the loaded stages with the best plan; return None if they are the best one.

    Raises:
        PlanError: no plan fits, the strategy cannot be used with these machines, or loaded stages do not reach each other.
    """
    best = now.plan(now.model, now.cluster, now.request)
    if stages_of(best) == now.loaded:
        return None
    found = _compared(now, best)
    planned = stages_of(found.planned)
    unused = _unused(now, planned, found.gain)
    return replace(found, fetch_s=_fetch_s(now, planned), unused=unused, is_shared=bool(now.shared))


def _unused(now: Situation, planned: LoadedStages, gain: float) -> tuple[str, ...]:
    """Return the machines that only the next plan uses and that need no gain.

    A strategy over all machines gives them layers. They had layers before a loss or a drain. Until then, another machine may
    have several stages, or those of several replicas. Replicas have machines of their own, unless these are slower than a
    shared one by more than predictions are off.
    """
    used, all_nodes = (
        {node for _, ranks in now.loaded for node, _ in ranks},
        {node.name for node in now.cluster.nodes},
    )
    if now.shared and gain > -LEAST_GAIN:
        returned = all_nodes
    elif uses_all_machines(now.request.strategy):
        returned = now.had.keys() if len(used) >= len(now.loaded) else all_nodes
    else:
        return ()
    return tuple(node for _, ranks in planned for node, _ in ranks if node in returned - used)


def _compared(now: Situation, best: Plan) -> Comparison:
    loaded = _predict_loaded(now)
    if now.refusal:
        return _with_pause(now, loaded, best, now.refusal)
    try:
        second = now.plan(now.model, now.beside, now.request)
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
        # Ranks that share layers read whole tensors, and keep their part.
        for node in {node for node, _ in ranks}:
            gained = set(range(layers.start, layers.end)) - present[node]
            nbytes = sum(model.layers[layer].weight_bytes for layer in gained)
            nbytes += model.ends_bytes(is_first=0 in gained, is_last=last in gained)
            link = now.cluster.link(now.head, node)
            usual = now.cluster.usual_link if link == UNREACHABLE else link
            seconds += 0.0 if node == now.head else nbytes / usual.bandwidth
    return seconds


def with_loaded(
    had: Mapping[str, frozenset[int]],
    loaded: Iterable[LoadedStages],
    earlier: Iterable[Mapping[str, frozenset[int]]] = (),
) -> dict[str, frozenset[int]]:
    """Return the layers that each machine has had, with those that it has now and others that it had earlier."""
    found = dict(had)
    for node, layers in chain.from_iterable(each.items() for each in earlier):
        found[node] = found.get(node, frozenset()) | layers
    for layers, ranks in chain.from_iterable(loaded):
        for node, _ in ranks:
            found[node] = found.get(node, frozenset()) | frozenset(range(layers.start, layers.end))
    return found


def known_facts(nodes: Iterable[NodeProfile]) -> object:
    """Return the facts that may change of machines. The memory of mlx-ring's own processes changes all the time."""
    return [(node.name, node.memory_bytes, node.ratios) for node in nodes]


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
    before, after = _by_node(loaded), {node: layers for node, (layers,) in _once(_by_node(planned)).items()}
    if not any(
        _common(present, layers) for node, layers in after.items() for present in before.get(node, ())
    ):
        raise UnchangeableWorkers(
            "No machine would keep one of its layers, so the whole model is loaded again."
        )
    if [layers for layers, _ in loaded] == [layers for layers, _ in planned] and any(
        layers not in before.get(node, [layers]) for node, layers in after.items()
    ):
        raise UnchangeableWorkers("Machines would exchange their stages, so the whole model is loaded again.")
    tables, nodes = StageTables(model, request.demand), {node.name: node for node in cluster.nodes}
    return tuple(_change(tables, nodes[node], before.get(node, ()), layers) for node, layers in after.items())


def _by_node(stages: LoadedStages) -> dict[str, list[LayerRange]]:
    """Return the stages of each machine. Raises `UnchangeableWorkers` if machines share one."""
    if any(len(ranks) > 1 for _, ranks in stages):
        raise UnchangeableWorkers("Machines share the layers of a stage, so the whole model is loaded again.")
    found = defaultdict[str, list[LayerRange]](list)
    for layers, ((node, _),) in stages:
        found[node].append(layers)
    return found


def _once(stages: dict[str, list[LayerRange]]) -> dict[str, list[LayerRange]]:
    """Return the stages of each machine, of which none may have several in a plan."""
    if any(len(own) > 1 for own in stages.values()):
        raise UnchangeableWorkers(
            "One machine would have several stages, so the whole model is loaded again."
        )
    return stages


def _common(present: LayerRange, layers: LayerRange) -> LayerRange | None:
    """Return the layers that are in both ranges; None if there are none."""
    first, end = max(present.start, layers.start), min(present.end, layers.end)
    return LayerRange(first, end) if first < end else None


def _change(
    tables: StageTables, node: NodeProfile, stages: Sequence[LayerRange], layers: LayerRange
) -> StageChange:
    """Return the change of a machine. Of several workers, the one stays that has most of its next layers."""
    kept = {present: _common(present, layers) for present in stages}
    present = max(stages, key=lambda present: len(kept[present] or ()), default=None)
    gained, memory = tables.weight_bytes(node, layers.start, layers.end), tables.memory(node)
    if present is not None and (common := kept[present]) is not None:
        gained -= tables.weight_bytes(node, common.start, common.end)
    held = sum(memory[each.start, each.end] for each in stages)
    fits = not stages or held + gained <= node.usable_bytes
    return StageChange(node.name, max(0, gained), bool(fits), present)


def _predict_loaded(now: Situation) -> Plan | None:
    """Return the plan of the loaded stages; None if their memory no longer suffices.

    The memory of mlx-ring's own processes grows a little. Without less memory than before, they fit all the same.
    """
    cluster = replace(now.cluster, nodes=(*now.cluster.nodes, *now.shared))
    try:
        return plan_loaded(now.model, cluster, now.request, (now.loaded,))[0]
    except PlanError:
        if now.has_less_memory:
            return None
    roomy = tuple(replace(node, memory_bytes=2 * node.memory_bytes) for node in cluster.nodes)
    return plan_loaded(now.model, replace(cluster, nodes=roomy), now.request, (now.loaded,))[0]


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


def pause_s(found: Comparison, load_s: float | None) -> float | None:
    """Return the predicted seconds until another split serves, without an answer; None if they are unknown.

    Args:
        found: the other split.
        load_s: longest time that a load took, by which a part of it is predicted; None before the first.
    """
    if found.way == "beside":
        return 0.0
    if found.way == "after":
        return load_s
    late = max((change.gained_bytes for change in found.changes if not change.fits_beside), default=0)
    if not late:
        return _LINK_S
    largest = max(stage.weight_bytes for stage in found.planned.stages)
    return None if load_s is None else _LINK_S + load_s * late / largest


def needs_pause(found: Comparison, load_s: float | None) -> bool:
    """Report whether a move needs permission: all layers are loaded in a pause, or some of them for long."""
    seconds = pause_s(found, load_s)
    return found.way == "after" or seconds is None or seconds > SHORT_PAUSE_S


_PAUSES: Mapping[MoveWay, str] = {
    "beside": "",
    "ranges": ", after a pause in which only layers that move are loaded",
    "after": ", after a pause in which all layers are loaded",
}


def describe(model: str, found: Comparison) -> str:
    """Return the start of a sentence that says what another split gains."""
    layers = ", ".join(
        f"{' and '.join(name for name, _ in ranks)} {span.start}-{span.end - 1}"
        for span, ranks in stages_of(found.planned)
    )
    if math.isinf(found.gain):
        return f"The machines of {model} no longer have the memory that its plan counts on; another split fits: {layers}"
    pause = _PAUSES[found.way]
    if found.unused and found.is_shared:
        return (
            f"{model} has machines in common with another one, while {' and '.join(found.unused)} had no layers. Another "
            f"split has its own{pause}: layers of {layers}"
        )
    if found.unused:
        return (
            f"{model} has no layers on {' and '.join(found.unused)}, but its strategy uses all machines. Another split "
            f"does{pause}: layers of {layers}"
        )
    faster = f"{found.gain:.0%} faster" if found.gain < 1 else f"{1 + found.gain:.1f} times as fast"
    return f"{model} would be {faster} with another split{pause}: layers of {layers}"


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
