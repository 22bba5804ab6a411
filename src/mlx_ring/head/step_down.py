"""Blame for MLX groups that hang, and plans without the backends that hung.

Two hangs bar a backend (`cluster/quarantine.py`). Links between stages then use the ring, or gRPC if the ring is barred.
Tensor-parallel groups use the ring, or the layers are split into more stages instead.

A first load that fails by such a hang, or because a worker or a machine is lost, is repeated.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace

from mlx_ring.api.ops.status import HungBackendStatus
from mlx_ring.cluster.membership import Member
from mlx_ring.cluster.quarantine import (
    HANGS,
    WINDOW_S,
    Hang,
    HungBackend,
    HungBackends,
    barred_backends,
    pair_of,
)
from mlx_ring.core.errors import (
    GroupStuck,
    LinkLost,
    NodeLost,
    PlanError,
    RingError,
    WorkerLost,
    WorkerStuck,
)
from mlx_ring.core.types import RankId
from mlx_ring.engine.in_flight import Unanswered
from mlx_ring.head.placing import Order, Placement, plan_as_at_start
from mlx_ring.models.model_folder import ModelFolder
from mlx_ring.planner.plan import Plan
from mlx_ring.planner.profiles import ClusterProfile, ModelProfile
from mlx_ring.planner.request import PlanRequest
from mlx_ring.rpc.backends import AUTO, BACKENDS, is_collective
from mlx_ring.rpc.protos import agent_pb2
from mlx_ring.settings.config import Settings
from mlx_ring.settings.rank_settings import rank_shares

log = logging.getLogger(__name__)

_RING = "ring"

RankGroup = Sequence[RankId]
"""Ranks that MLX joins, in the order of the group."""


def groups_of(placement: Placement) -> Sequence[RankGroup]:
    """Return the groups of an instance: the ranks of each shared stage, or all stages that a collective links.

    An instance that a head adopts has no collectives between its stages.
    """
    shared = [
        [RankId(stage, rank) for rank in range(len(placed))]
        for stage, placed in enumerate(placement.ranks)
        if len(placed) > 1
    ]
    link = str(placement.group_settings.get("link", "grpc"))
    if shared or not is_collective(link) or len(placement.ranks) == 1:
        return shared
    return [[RankId(stage, 0) for stage in range(len(placement.ranks))]]


def node_of(place: RankId, placement: Placement) -> str:
    """Return the node of a rank."""
    return placement.ranks[place.stage][place.rank].site.node


def nodes_of(group: RankGroup, placement: Placement) -> list[str]:
    """Return the node of each rank of a group."""
    return [node_of(place, placement) for place in group]


PlaceOrder = Callable[[Order], Awaitable[Placement]]
"""Function that places an instance; it raises `PlanError` if there is no room."""


def may_step_down(settings: Settings) -> bool:
    """Return True if another backend, or none, may replace one that is barred."""
    mode = settings.link_step_down
    return mode == "auto" or (mode == "implicit" and settings.backend == AUTO)


_MOST_FIRST_LOADS = 3
"""Loads in which workers may be lost until a replica has served. Its later losses have other limits."""


class FirstLoads:
    """Failed loads of a replica that has not served yet."""

    def __init__(self, model: str, settings: Settings, *, is_beside: bool) -> None:
        """Start before the first load; `is_beside` is True if another replica serves until this one does."""
        self._model, self._settings, self._is_beside = model, settings, is_beside
        self._count = 0

    def check(self, error: RingError, load_s: float) -> None:
        """Raise the error of a load that took this long, unless the next load may succeed without a change by the user."""
        if isinstance(error, NodeLost) or (isinstance(error, GroupStuck) and may_step_down(self._settings)):
            return
        is_lost = isinstance(error, WorkerLost | WorkerStuck) and not isinstance(error, GroupStuck)
        # One that is too slow for the timeout is so again.
        if not is_lost or self._is_beside or load_s >= self._settings.model_load_timeout:
            raise error
        self._count += 1
        if self._count == _MOST_FIRST_LOADS:
            message = f"{self._model} could not be loaded in {self._count} attempts. The last reason: {error}"
            raise WorkerLost(message).blamed_on(error.node) from error


class StepDown:
    """Backends that hung on the machines of a head, and the plans that avoid them."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._hung = HungBackends()
        self._clock = clock
        self._kept: set[float] = set()
        """Ends of the bars under which a backend is used anyway, each logged once."""

    def states(self) -> Sequence[HungBackend]:
        """Return the record of each backend that hung."""
        return self._hung.states(self._clock())

    def record(self, error: RingError | None, begun_s: float) -> None:
        """Record the loss or failed load of an instance that began at this Unix time, if a group hung."""
        if not isinstance(error, GroupStuck) or not error.backend:
            return
        now_s = self._clock()
        hang = Hang(error.backend, pair_of(error.nodes), str(error), now_s, begun_s)
        state = self._hung.record(hang)
        if state.until_s is not None:
            log.error(
                "MLX's backend %s is barred %s until %s, because it hung %d times within %.0f minutes",
                state.backend,
                where(state),
                time.strftime("%H:%M", time.localtime(state.until_s)),
                HANGS,
                WINDOW_S / 60,
            )

    async def place(self, order: Order, place: PlaceOrder) -> Placement:
        """Place an instance without barred backends.

        If nothing else can be planned, the barred ones are used anyway.

        Raises:
            PlanError: there is no room for it.
        """
        may, settings = may_step_down(order.settings), order.settings
        placement = await _placed(order, place)
        while barred := self._barred(order, placement):
            if not may:
                self._warn_of(settings, barred)
                break
            lower = _next_order(order, placement, barred)
            try:
                placement = await _placed(lower, place)
            except PlanError as error:
                log.warning("Using MLX's backend %s, because without it: %s", ", ".join(barred), error)
                break
            order = lower
        return placement

    def without_barred(self, order: Order, placement: Placement) -> Order:
        """Return the order to replace ranks of an instance, without barred backends for its groups.

        Raises:
            PlanError: its cut needs a barred backend, so that it must be planned as a whole.
        """
        barred = self._barred(order, placement)
        if not barred:
            return order
        if not may_step_down(order.settings):
            self._warn_of(order.settings, barred)
            return order
        lower = _next_order(order, placement, barred)
        if lower.pipeline_only or lower.settings.link != order.settings.link:
            raise PlanError(f"its groups hung, and MLX's backend {', '.join(sorted(barred))} is barred.")
        return lower

    def _barred(self, order: Order, placement: Placement) -> AbstractSet[str]:
        """Return the barred backends that the placement may use."""
        asked, now_s = _asked(order.settings, placement), self._clock()
        barred = set[str]()
        for group in groups_of(placement):
            barred |= self._hung.barred(nodes_of(group, placement), now_s)
        return barred if asked == AUTO else barred & {asked}

    def _warn_of(self, settings: Settings, barred: AbstractSet[str]) -> None:
        """Log once per bar that a barred backend is used anyway."""
        for state in self.states():
            if state.backend in barred and state.until_s is not None and state.until_s not in self._kept:
                self._kept.add(state.until_s)
                log.warning(
                    "MLX's backend %s hung %d times %s, and is used again because of --%s. To use another link or "
                    "split then, set --link-step-down auto.",
                    state.backend,
                    state.hangs,
                    where(state),
                    "link-step-down off"
                    if settings.link_step_down == "off"
                    else f"backend {settings.backend}",
                )


async def _placed(order: Order, place: PlaceOrder) -> Placement:
    """Place the order, with its link and backend."""
    return replace(await place(order), group_settings=order.group_settings)


def where(state: HungBackend) -> str:
    """Return the place where a backend hung, for messages."""
    if state.pair is None:
        return "everywhere"
    one, other = state.pair
    return f"on {one}" if one == other else f"between {one} and {other}"


def _asked(settings: Settings, placement: Placement) -> str:
    """Return the backend that the settings request for the groups of a placement; `auto` if none."""
    is_shared = any(len(stage) > 1 for stage in placement.ranks)
    if settings.backend != AUTO or is_shared or settings.link not in BACKENDS:
        return settings.backend
    return settings.link


def _next_order(order: Order, placement: Placement, barred: AbstractSet[str]) -> Order:
    """Return the order with the ring instead of barred backends, or without groups if the ring is barred."""
    settings, changes = order.settings, dict[str, object]()
    if _RING not in barred and _asked(settings, placement) != _RING:
        changes["backend"] = _RING
        if settings.link in BACKENDS:
            changes["link"] = _RING
        log.info("Using MLX's backend ring for %s instead of %s", order.served.names[0], ", ".join(barred))
        return replace(order, settings=settings.model_copy(update=changes))
    changes["backend"] = AUTO
    if is_collective(settings.link):
        changes["link"] = "grpc"
        log.info("Linking the stages of %s by gRPC instead of %s", order.served.names[0], settings.link)
        return replace(order, settings=settings.model_copy(update=changes))
    log.info("Splitting %s into stages, without tensor parallelism", order.served.names[0])
    return replace(order, settings=_without_groups(settings, order.served.folder), pipeline_only=True)


def _without_groups(settings: Settings, folder: ModelFolder) -> Settings:
    """Return settings by which no workers share layers."""
    ranks = len(rank_shares(settings))
    stages = 1 if settings.nodes > 1 else min(settings.stages * ranks, folder.num_layers)
    changes = {"backend": AUTO, "tp": 1, "tp_shares": (), "stages": stages, "strategy": "auto"}
    return settings.model_copy(update={**changes, "proportions": ()})


def plan_of_start(
    settings: Settings,
    folder: ModelFolder,
    members: Mapping[str, Member],
    hung: Sequence[HungBackend],
    model: ModelProfile,
    cluster: ClusterProfile,
    request: PlanRequest,
) -> Plan:
    """Return the plan by which a model would be loaded on these machines, without groups whose backends hung.

    Args:
        settings: settings of the model.
        folder: the model.
        members: the machines by their names in `cluster`.
        hung: the backends that hung.
        model: sizes of the model.
        cluster: the machines, in order of preference.
        request: the request for plans.

    Raises:
        PlanError: the machines cannot hold the model as promised.
    """
    plan = plan_as_at_start(settings, folder, model, request, cluster, members)
    groups = [stage.ranks for stage in plan.stages if len(stage.ranks) > 1]
    barred = [barred_backends(hung, [members[rank.node].node for rank in ranks]) for ranks in groups]
    asked = settings.backend
    if not may_step_down(settings) or not any(
        _RING in each and (asked in {AUTO, _RING} or asked in each) for each in barred
    ):
        return plan
    lower = _without_groups(settings, folder)
    apart = replace(request, strategy=lower.strategy, allows_tensor=False)
    try:
        return plan_as_at_start(lower, folder, model, apart, cluster, members)
    except PlanError:
        return plan


# ---- blame

_COLLECTIVE = "collective"
_BEFORE_JOINING = frozenset({"starting", "fetch"})
"""Phases of a load before a rank joins its group."""

States = Mapping[RankId, agent_pb2.WorkerState]
"""Last report of each rank."""


def blame_late(owed: Unanswered, placement: Placement, states: States) -> RingError | None:
    """Return the error for a rank that owes an answer for too long although it is alive.

    If it waits for its group, and all ranks of the group answer and wait as well, then no node is to blame.
    None means that a rank of the group may be silent, which its next reports will show.
    """
    stage, rank = owed.rank
    late = f"for {owed.waited_s:.0f} s, more than the limit of {owed.deadline_s:.0f} s"
    group = next((each for each in groups_of(placement) if owed.rank in each), ())
    if not group or _waits(owed.rank, states) != _COLLECTIVE:
        node = node_of(owed.rank, placement)
        error = WorkerStuck(
            f"Stage {stage}, rank {rank} on {node} has made no progress on step {owed.step} {late}; "
            "its worker is stuck."
        )
        return error.of_worker().blamed_on(node)
    if any(place not in states or not states[place].alive or states[place].silent_s for place in group):
        return None
    if (absent := _absent(owed, group, states)) is not None:
        node = node_of(absent, placement)
        error = WorkerStuck(
            f"Stage {absent.stage}, rank {absent.rank} on {node} has not joined the others of its stage in step "
            f"{owed.step}, for which they have waited {late}; its worker is stuck."
        )
        return error.of_worker().blamed_on(node)
    backend = states[owed.rank].status.waits.backend
    named = [f"stage {place.stage}, rank {place.rank} on {node_of(place, placement)}" for place in group]
    hung = GroupStuck(
        f"MLX's backend {backend} hangs between {'; '.join(named[:-1])} and {named[-1]}: all these workers answer, but "
        f"step {owed.step} has waited for it {late}."
    )
    return hung.of_group(backend, nodes_of(group, placement))


def ranks_of_reset(loss: LinkLost, placement: Placement) -> RankGroup:
    """Return the ranks of the group in which a connection broke; those of all groups if the worker is unknown."""
    groups = groups_of(placement)
    named = [group for group in groups if loss.place in group]
    return [place for group in named or groups for place in group]


def blame_reset(loss: LinkLost, placement: Placement, states: States) -> RingError:
    """Return the error for a group's connection that broke although all its ranks run. No node is to blame."""
    places = ranks_of_reset(loss, placement)
    backend = next((states[place].status.group.backend for place in places if place in states), "")
    return GroupStuck(str(loss)).of_group(backend, nodes_of(places, placement)) if places else loss


def _absent(owed: Unanswered, group: RankGroup, states: States) -> RankId | None:
    """Return a rank that the others of its stage wait for, because it has not begun to compute the step."""
    for place in group:
        status = states[place].status
        has_answered = status.last_step > owed.step or (
            status.last_step == owed.step and not status.HasField("waits")
        )
        is_awaited = place.stage == owed.rank.stage and not has_answered
        if is_awaited and _waits(place, states) != _COLLECTIVE:
            return place
    return None


def blame_join(error: GroupStuck, placement: Placement, phase_of: Callable[[RankId], str]) -> RingError:
    """Return the error for a load in which a group did not get together.

    A rank that has not even begun to join is stuck itself. Otherwise no node is to blame.

    Args:
        error: as an agent reported it, with the backend and the worker that waits.
        placement: placement of the instance.
        phase_of: returns the phase of a rank's load.
    """
    groups = [group for group in groups_of(placement) if error.place in group]
    for group in groups:
        begun = [place for place in group if phase_of(place) not in _BEFORE_JOINING]
        if begun and len(begun) < len(group):
            late = next(place for place in group if place not in begun)
            stuck = WorkerStuck(f"{error} Stage {late.stage}, rank {late.rank} has not begun to join.")
            return stuck.blamed_on(node_of(late, placement))
    nodes = nodes_of(groups[0], placement) if groups else ()
    return GroupStuck(str(error)).of_group(error.backend, nodes)


def _waits(place: RankId, states: States) -> str:
    return states[place].status.waits.kind if place in states else ""


def hung_backend_statuses(hung: Iterable[HungBackend]) -> list[HungBackendStatus]:
    """Return the status of all backends that hung."""
    return [
        HungBackendStatus(
            backend=each.backend,
            nodes=None if each.pair is None else list(each.pair),
            hangs=each.hangs,
            reason=each.reason,
            barred_until=None if each.until_s is None else int(each.until_s),
        )
        for each in hung
    ]
