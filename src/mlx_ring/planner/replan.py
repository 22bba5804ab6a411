"""Comparison of a loaded plan with the best one for the machines as they are now, and when a move pays. Pure."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from mlx_ring.core.errors import PlanError
from mlx_ring.planner.place import LoadedStages, place, plan_loaded
from mlx_ring.planner.plan import Plan
from mlx_ring.planner.profiles import ClusterProfile, ModelProfile
from mlx_ring.planner.request import PlanRequest

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


@dataclass(frozen=True, slots=True)
class Comparison:
    """Loaded plan, and the best one."""

    loaded: Plan | None
    """Prediction for the loaded stages as the machines are now; None if they no longer have the memory."""
    planned: Plan
    way: Literal["beside", "after"]
    """`beside`: another instance can be loaded while the present one serves. `after`: answers pause meanwhile."""
    why: str
    """Reason why they would pause."""

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
    loaded = _predict_loaded(now)
    if now.refusal:
        return Comparison(loaded, best, "after", now.refusal)
    try:
        second = place(now.model, now.beside, now.request)
    except PlanError as error:
        return Comparison(loaded, best, "after", str(error))
    if stages_of(second) != now.loaded and _gain(loaded, second) >= min(LEAST_GAIN, _gain(loaded, best)):
        return Comparison(loaded, second, "beside", "")
    return Comparison(
        loaded, best, "after", "Beside the present instance, the machines have no room for a faster one."
    )


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
            move_s: time of a move, in which answers are slower or pause.
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
