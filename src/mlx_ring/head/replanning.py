"""Proposals of another split of the layers, while a model serves.

Machines join, get slower or faster, have other limits of their memory, or yield to their users. From time to time, the loaded split is compared with
the best one for the machines as they are now.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple
from weakref import WeakKeyDictionary

from mlx_ring.api.ops.status import PlannedSplit, PlannedStage, ProposalStatus
from mlx_ring.api.service import ModelService, Moved
from mlx_ring.core.errors import Conflict, PlanError, RingError
from mlx_ring.engine.step_times import StepTimes
from mlx_ring.head.instance_view import InstanceService
from mlx_ring.head.model import HostedModel, check_room, promised_bytes
from mlx_ring.head.moves import Moves
from mlx_ring.head.nodes import Machines
from mlx_ring.head.placing import plan_request
from mlx_ring.head.plan_requests import measured_cluster, readable_names
from mlx_ring.head.reshaping import why_only_whole
from mlx_ring.head.status import ClusterView
from mlx_ring.planner.model_sizes import sizes_of
from mlx_ring.planner.place import LoadedStages
from mlx_ring.planner.plan import Plan
from mlx_ring.planner.profiles import ClusterProfile
from mlx_ring.planner.replan import (
    LEAST_GAIN,
    Comparison,
    MoveWay,
    Patience,
    Situation,
    compare,
    stages_of,
)
from mlx_ring.planner.request import PlanRequest
from mlx_ring.settings.rank_settings import rank_shares

ReplanMode = Literal["auto", "ask", "off"]
log = logging.getLogger(__name__)

_LOOK_S = 10.0
_USUAL_LOAD_S = 60.0
"""Time of a load, as long as none was measured."""
SHORT_PAUSE_S = 5.0
"""Longest predicted pause that needs no permission: a recovery takes as long."""
_LINK_S = 1.0
"""Time until workers that have their layers are linked."""
_NOTICED_GAIN = 0.01
"""Gain below which two splits count as equally good, also for a user who asks for another one."""


@dataclass(slots=True)
class _Watched:
    """Last comparison of a model's split, and its facts."""

    patience: Patience
    instance: str = ""
    granted: Mapping[str, Granted] = field(default_factory=dict[str, "Granted"])
    """Grants of each machine when the instance was loaded, or when there was no better split."""
    last: Mapping[str, Granted] = field(default_factory=dict[str, "Granted"])
    """The same at the last look."""
    had: Mapping[str, frozenset[int]] = field(default_factory=dict[str, frozenset[int]])
    """Layers that each machine has had."""
    times: StepTimes = field(default_factory=StepTimes)
    basis: object = None
    """Facts on which the last comparison depends."""
    found: Comparison | None = None
    is_due: bool = False
    """True if a move to the better split pays."""

    def forget(self) -> None:
        """Begin anew: there is nothing to compare, or another instance."""
        self.found, self.basis, self.is_due = None, None, False
        self.patience.forget()


class Replanning:
    """Comparisons of the loaded splits with the best ones, and moves to these."""

    def __init__(
        self,
        mode: ReplanMode,
        machines: Callable[[], Machines | None],
        hosted: Callable[[], Sequence[HostedModel]],
        moves: Moves,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start without a comparison.

        Args:
            mode: whether it moves, asks, or does nothing by itself.
            machines: returns the machines; None before there are some.
            hosted: returns all models.
            moves: the moves between machines.
            clock: returns seconds.
        """
        self._mode, self._machines, self._hosted, self._moves = mode, machines, hosted, moves
        self._clock = clock
        self._watched: WeakKeyDictionary[HostedModel, _Watched] = WeakKeyDictionary()

    async def keep_looking(self) -> None:
        """Compare from time to time, unless the mode is `off`."""
        while self._mode != "off":
            await asyncio.sleep(_LOOK_S)
            for hosted in [*self._hosted()]:
                try:
                    await self.look(hosted)
                except Exception as error:
                    self._of(hosted).forget()
                    if isinstance(error, RingError):
                        log.debug("No other split of %s is looked for: %s", hosted.model_id, error)
                    else:
                        log.exception("No other split of %s could be looked for", hosted.model_id)

    async def look(self, hosted: HostedModel) -> None:
        """Compare once, and report or make the move that pays."""
        watched, machines = self._of(hosted), self._machines()
        if machines is None or self._why_not(hosted):
            watched.forget()
            return
        service, now = hosted.instances[0], self._compared(hosted, machines)
        granted = _granted(now)
        if watched.instance != service.info.name:
            watched.forget()
            planned = _planned_nodes(service, machines)
            # The plan counted the shares of about the last look. Others are a change.
            watched.granted = {
                name: each._replace(speed_share=watched.last.get(name, Granted(0, 1.0)).speed_share)
                for name, each in granted.items()
                if planned is None or name in planned
            }
            watched.instance = service.info.name
        watched.last = granted
        basis = now.loaded, _known(now.cluster), _known(now.beside), dict(now.cluster.links), now.refusal
        if basis != watched.basis:
            watched.found, watched.basis = await self._compare(hosted, now), basis
        times = service.engine.step_times()
        is_measured, watched.times = times != watched.times, times
        found, was_due = watched.found, watched.is_due
        gain, fetch_s = (0.0, 0.0) if found is None else (found.gain, found.fetch_s)
        watched.is_due = watched.patience.look(
            gain,
            (service.recoveries.load_s or _USUAL_LOAD_S) + fetch_s,
            is_measured=is_measured,
            has_changed=granted != watched.granted,
        )
        if gain < LEAST_GAIN:
            # A machine that joined without a gain says nothing about later changes of speed.
            watched.granted = granted
        if found is None or not watched.is_due:
            return
        may_move = not needs_pause(found, service.recoveries.load_s)
        if self._mode == "auto" and may_move:
            await self._move(hosted, watched, found)
        elif not was_due:
            pause = "" if may_move else " --pause"
            log.warning(
                "%s. Run: mlx-ring replan %s%s", describe(hosted.model_id, found), hosted.model_id, pause
            )

    async def _move(self, hosted: HostedModel, watched: _Watched, found: Comparison) -> None:
        log.warning("%s. It moves there now.", describe(hosted.model_id, found))
        try:
            _, moved = await self._replan(hosted, may_pause=False)
            if moved is None:
                log.warning("%s keeps its split, which is as fast now", hosted.model_id)
        except RingError as error:
            log.warning("%s keeps its split: %s", hosted.model_id, error)
            # A failed move is not repeated at once, either.
            watched.patience.moved()
            watched.is_due = False

    def proposals(self) -> list[ProposalStatus]:
        """Return the splits to which a move pays."""
        return [
            _status(hosted, watched.found, is_due=True)
            for hosted in self._hosted()
            if (watched := self._watched.get(hosted)) is not None
            and watched.is_due
            and watched.found is not None
        ]

    async def propose(self, model: ModelService) -> ProposalStatus | None:
        """Compare a model's split with the best one now; return None if it is the best one."""
        hosted = self._own(model)
        found = await self._better(hosted)
        return None if found is None else _status(hosted, found, is_due=self._of(hosted).is_due)

    async def replan(
        self, model: ModelService, *, may_pause: bool
    ) -> tuple[ProposalStatus | None, Moved | None]:
        """Move a model to the best split; return what was proposed, and the move. Without a better split, nothing moves."""
        return await self._replan(self._own(model), may_pause=may_pause)

    async def _replan(
        self, hosted: HostedModel, *, may_pause: bool
    ) -> tuple[ProposalStatus | None, Moved | None]:
        proposals: list[ProposalStatus] = []

        async def choose() -> MoveWay | None:
            found = await self._better(hosted)
            if found is None:
                return None
            proposal = _status(hosted, found, is_due=self._of(hosted).is_due)
            if found.way != "beside":
                _check_pause(hosted, proposal, may_pause=may_pause)
            proposals.append(proposal)
            return found.way

        moved = await self._moves.split_again(hosted, choose, may_pause=may_pause)
        watched = self._of(hosted)
        watched.forget()
        if moved is not None:
            watched.patience.moved()
            # An instance whose workers stay keeps its name.
            watched.instance = ""
        return next(iter(proposals), None), moved

    async def _better(self, hosted: HostedModel) -> Comparison | None:
        machines, why_not = self._machines(), self._why_not(hosted)
        if machines is None or why_not:
            raise Conflict(f"No other split of {hosted.model_id} can be looked for: {why_not}.")
        found = await self._compare(hosted, self._compared(hosted, machines))
        return None if found is None or found.gain < _NOTICED_GAIN else found

    async def _compare(self, hosted: HostedModel, now: Present) -> Comparison | None:
        """Compare in a thread, where the sizes of the layers are read, too."""
        served, watched, machines = hosted.served, self._of(hosted), self._machines()
        before, had = watched.granted, _with_loaded(watched.had, now.loaded)
        watched.had = had
        view = ClusterView("") if machines is None else machines.cluster_view()
        head = readable_names(view).get(view.own, view.own)

        def work() -> Comparison | None:
            sizes = sizes_of(served.folder, served.names[0], now.cluster)
            has_less = any(
                node in before and each.memory_bytes < before[node].memory_bytes
                for node, each in _granted(now).items()
            )
            only_whole = why_only_whole(hosted.settings.link)
            return compare(Situation(sizes, *now, has_less_memory=has_less, only_whole=only_whole, head=head))

        return await asyncio.to_thread(work)

    def _own(self, model: ModelService) -> HostedModel:
        return next(each for each in self._hosted() if each is model)

    def _of(self, hosted: HostedModel) -> _Watched:
        if hosted not in self._watched:
            self._watched[hosted] = _Watched(Patience(self._clock))
        return self._watched[hosted]

    def _why_not(self, hosted: HostedModel) -> str:
        """Return the reason why a model's split is not compared with others; empty if it is."""
        machines, settings = self._machines(), hosted.settings
        view = ClusterView("") if machines is None else _steady(machines.cluster_view())
        if machines is None or len(view.membership.members) <= 1:
            return "fewer than two machines may have layers"
        if settings.strategy == "custom" or len(rank_shares(settings)) > 1:
            return "its settings give the split (--strategy custom, or --tp)"
        if hosted.state != "ready":
            return f"it is {hosted.state}"
        if len(hosted.replicas) != 1:
            return f"it has {len(hosted.replicas)} replicas, and only the split of a single one can change"
        used = {name for _, ranks in _loaded(hosted, view) for name, _ in ranks}
        if left := used - set(readable_names(view).values()):
            return f"{' and '.join(sorted(left))} has layers, and is excluded from plans"
        return ""

    def _compared(self, hosted: HostedModel, machines: Machines) -> Present:
        view = _steady(machines.cluster_view())
        others = [each for each in self._hosted() if each is not hosted]

        def nodes(loaded: Sequence[HostedModel]) -> ClusterProfile:
            return measured_cluster(hosted.settings, view, machines.link_profiles, promised_bytes(loaded))

        try:
            check_room(hosted, 1, self._hosted(), hosted.settings.model_memory)
        except PlanError as error:
            refusal = str(error)
        else:
            refusal = ""
        return Present(
            plan_request(hosted.settings, hosted.served),
            _loaded(hosted, view),
            nodes(others),
            nodes([*others, hosted]),
            refusal,
        )


class Present(NamedTuple):
    """Instance and machines as they are now: `Situation` without the sizes of the model."""

    request: PlanRequest
    loaded: LoadedStages
    cluster: ClusterProfile
    beside: ClusterProfile
    refusal: str


class Granted(NamedTuple):
    """Memory and share of the speed that the owner of a machine grants."""

    memory_bytes: int
    speed_share: float


def _granted(now: Present) -> Mapping[str, Granted]:
    return {node.name: Granted(node.memory_bytes, node.speed_share) for node in now.cluster.nodes}


def _check_pause(hosted: HostedModel, proposal: ProposalStatus, *, may_pause: bool) -> None:
    """Raise `Conflict` if answers would pause without permission, or would end."""
    model = hosted.model_id
    if hosted.settings.resume == "off" and (busy := hosted.open_requests):
        raise Conflict(
            f"{busy} {'request' if busy == 1 else 'requests'} of {model} would end, because of --resume off: "
            f"wait for the end. {proposal.why}"
        )
    if proposal.needs_pause and not may_pause:
        pause = "" if proposal.pause_s is None else f" for about {max(1.0, proposal.pause_s):.0f} s"
        raise Conflict(
            f"Answers of {model} would pause{pause}. {proposal.why} To allow that: mlx-ring replan {model} --pause"
        )


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


def _steady(view: ClusterView) -> ClusterView:
    """Return the machines that plans may use."""
    return replace(view, membership=view.membership.usable.without(view.held))


def _planned_nodes(service: InstanceService, machines: Machines) -> set[str] | None:
    """Return the machines that were there when an instance was planned; None if that is not known."""
    plan = None if service.placement is None else service.placement.plan
    if plan is None:
        return None
    names = readable_names(_steady(machines.cluster_view()))
    nodes = [rank.node for stage in plan.stages for rank in stage.ranks]
    return {names.get(node, node) for node in (*nodes, *(left.node for left in plan.left_out))}


def _loaded(hosted: HostedModel, view: ClusterView) -> LoadedStages:
    return next(iter(hosted.loaded_stages(readable_names(view))), ())


def _with_loaded(had: Mapping[str, frozenset[int]], loaded: LoadedStages) -> dict[str, frozenset[int]]:
    """Return the layers that each machine has had, with those that it has now."""
    found = dict(had)
    for layers, ranks in loaded:
        for node, _ in ranks:
            found[node] = found.get(node, frozenset()) | frozenset(range(layers.start, layers.end))
    return found


def _known(cluster: ClusterProfile) -> object:
    """Return the facts that may change of machines. The memory of mlx-ring's own processes changes all the time."""
    return [(node.name, node.memory_bytes, node.ratios) for node in cluster.nodes]


# ---- reports

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
    faster = f"{found.gain:.0%} faster" if found.gain < 1 else f"{1 + found.gain:.1f} times as fast"
    return f"{model} would be {faster} with another split{pause}: layers of {layers}"


def _status(hosted: HostedModel, found: Comparison, *, is_due: bool) -> ProposalStatus:
    load_s = next((service.recoveries.load_s for service in hosted.instances), None)
    return ProposalStatus(
        model=hosted.model_id,
        way=found.way,
        why=found.why or None,
        gain=None if math.isinf(found.gain) else found.gain,
        load_s=load_s,
        fetch_s=found.fetch_s,
        pause_s=pause_s(found, load_s),
        needs_pause=needs_pause(found, load_s),
        gained_bytes=sum(change.gained_bytes for change in found.changes) if found.changes else None,
        loaded=None if found.loaded is None else _split(found.loaded),
        planned=_split(found.planned),
        is_due=is_due,
    )


def _split(plan: Plan) -> PlannedSplit:
    prediction = plan.prediction
    return PlannedSplit(
        stages=[
            PlannedStage(nodes=[name for name, _ in ranks], layers=(span.start, span.end))
            for span, ranks in stages_of(plan)
        ],
        tokens_per_s=1 / prediction.token_s,
        first_token_s=prediction.first_token_s,
        request_s=prediction.request_s,
    )
