"""Proposals of another split of the layers, while a model serves.

Machines join, get slower or faster, have other limits of their memory, or yield to their users. From time to time, the
loaded split is compared with the best one for the machines as they are now. Each replica is compared by itself, on the
machines that no other replica uses. Those that it shares with one count for its present speed only.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal, NamedTuple
from weakref import WeakKeyDictionary

from mlx_ring.api.ops.status import NoProposalStatus, ProposalStatus
from mlx_ring.api.service import ModelService, Moved
from mlx_ring.core.errors import Conflict, PlanError, RingError
from mlx_ring.engine.step_times import StepTimes
from mlx_ring.head.instance_view import InstanceService
from mlx_ring.head.model import HostedModel
from mlx_ring.head.move_order import check_room, promised_bytes
from mlx_ring.head.moves import Choice, Moves, nodes_of
from mlx_ring.head.nodes import Machines
from mlx_ring.head.placing import Placement, placed_stages
from mlx_ring.head.plan_requests import (
    Granted,
    granted_by,
    ids_of,
    measured_cluster,
    plan_request,
    planned_names,
    readable_names,
    steady,
    why_fixed,
)
from mlx_ring.head.replica import Replica
from mlx_ring.head.reshaping import why_only_whole
from mlx_ring.head.status import ClusterView
from mlx_ring.head.step_down import plan_of_start
from mlx_ring.planner.model_sizes import sizes_of
from mlx_ring.planner.place import LoadedStages
from mlx_ring.planner.profiles import ClusterProfile, NodeProfile
from mlx_ring.planner.rank_costs import beside_others
from mlx_ring.planner.replan import (
    LEAST_GAIN,
    Comparison,
    Patience,
    Situation,
    compare,
    describe,
    known_facts,
    needs_pause,
    with_loaded,
)
from mlx_ring.planner.request import PlanRequest

ReplanMode = Literal["auto", "ask", "off"]
log = logging.getLogger(__name__)

_LOOK_S = 10.0
_USUAL_LOAD_S = 60.0
"""Time of a load, as long as none was measured."""
_NOTICED_GAIN = 0.01
"""Gain below which two splits count as equally good, also for a user who asks for another one."""


@dataclass(slots=True)
class _Watched:
    """Last comparison of a model's splits, and its facts."""

    patience: Patience
    instances: Sequence[str] = ()
    granted: Mapping[str, Granted] = field(default_factory=dict[str, Granted])
    """Grants of each machine when the instances were loaded, or when there was no better split."""
    last: Mapping[str, Granted] = field(default_factory=dict[str, Granted])
    """The same at the last look."""
    had: Mapping[str, frozenset[int]] = field(default_factory=dict[str, frozenset[int]])
    """Layers that each machine has had."""
    times: Sequence[StepTimes] = ()
    basis: object = None
    """Facts on which the last comparison depends."""
    found: Better | None = None
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
        self._comparing = asyncio.Lock()
        """Lock for comparisons, because each takes a core for a while."""
        self._watched: WeakKeyDictionary[HostedModel, _Watched] = WeakKeyDictionary()

    async def keep_looking(self) -> None:
        """Compare from time to time, unless the mode is `off`. A model that moves does not delay others."""
        looking: dict[HostedModel, asyncio.Task[None]] = {}
        async with asyncio.TaskGroup() as group:
            while self._mode != "off":
                await asyncio.sleep(_LOOK_S)
                for hosted in self._hosted():
                    if hosted not in looking or looking[hosted].done():
                        name = f"look at the split of {hosted.model_id}"
                        looking[hosted] = group.create_task(self._try_to_look(hosted), name=name)

    async def _try_to_look(self, hosted: HostedModel) -> None:
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
        compared = self._compared(hosted, machines)
        services = [each.replica.service for each in compared]
        granted = granted_by(node for _, now in compared for node in now.nodes)
        names = [service.info.name for service in services]
        if watched.instances != names:
            watched.forget()
            plans = (each.placement and each.placement.plan for each in services)
            planned = planned_names(steady(machines.cluster_view()), plans)
            # The plan counted the shares of about the last look. Others are a change.
            watched.granted = {
                name: each._replace(speed_share=watched.last.get(name, Granted(0, 1.0)).speed_share)
                for name, each in granted.items()
                if planned is None or name in planned
            }
            watched.instances = names
        watched.last = granted
        basis = [machines.cluster_view().hung, *(now.basis for _, now in compared)]
        if basis != watched.basis:
            watched.found, watched.basis = await self._compare(hosted, compared), basis
        times = [service.engine.step_times() for service in services]
        is_measured, watched.times = times != watched.times, times
        better, was_due = watched.found, watched.is_due
        gain, fetch_s, load_s = 0.0, 0.0, None
        if better is not None:
            gain, fetch_s, load_s = better.found.worth, better.found.fetch_s, better.load_s
        watched.is_due = watched.patience.look(
            gain,
            (load_s or _USUAL_LOAD_S) + fetch_s,
            is_measured=is_measured,
            has_changed=granted != watched.granted or bool(better and better.found.unused),
        )
        if gain < LEAST_GAIN:
            # A machine that joined without a gain says nothing about later changes of speed.
            watched.granted = granted
        if better is None or not watched.is_due:
            return
        may_move = not needs_pause(better.found, load_s)
        if self._mode == "auto" and may_move:
            await self._move(hosted, watched, better)
        elif not was_due:
            pause = "" if may_move else " --pause"
            log.warning("%s. Run: mlx-ring replan %s%s", _describe(hosted, better), hosted.model_id, pause)

    async def _move(self, hosted: HostedModel, watched: _Watched, better: Better) -> None:
        log.warning("%s. It moves there now.", _describe(hosted, better))
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
        better = await self._better(hosted)
        return None if better is None else _status(hosted, better, is_due=self._of(hosted).is_due)

    async def replan(
        self, model: ModelService, *, may_pause: bool
    ) -> tuple[ProposalStatus | None, Moved | None]:
        """Move a model to the best split; return what was proposed, and the move. Without a better split, nothing moves."""
        return await self._replan(self._own(model), may_pause=may_pause)

    async def _replan(
        self, hosted: HostedModel, *, may_pause: bool
    ) -> tuple[ProposalStatus | None, Moved | None]:
        proposal: ProposalStatus | None = None

        async def choose() -> Choice | None:
            nonlocal proposal
            proposal, better = None, await self._better(hosted)
            if better is None:
                return None
            proposal, way = _status(hosted, better, is_due=self._of(hosted).is_due), better.found.way
            refusal = None if way == "beside" else _refusal(hosted, proposal, may_pause=may_pause)
            names = {rank.node for stage in better.found.planned.stages for rank in stage.ranks}
            return Choice(better.replica, way, ids_of(self._view, names), refusal)

        moved = await self._moves.split_again(hosted, choose, may_pause=may_pause)
        watched = self._of(hosted)
        watched.forget()
        if moved is not None:
            watched.patience.moved()
            # An instance whose workers stay keeps its name.
            watched.instances = ()
        return proposal, moved

    async def _better(self, hosted: HostedModel) -> Better | None:
        machines, why_not = self._machines(), self._why_not(hosted)
        if machines is None or why_not:
            raise Conflict(_why_nothing(hosted, why_not))
        better = await self._compare(hosted, self._compared(hosted, machines))
        return None if better is None or better.found.worth < _NOTICED_GAIN else better

    async def _compare(self, hosted: HostedModel, compared: Sequence[Compared]) -> Better | None:
        """Compare in a thread, where the sizes of the layers are read, too. Return the replica that gains most."""
        served, watched, view = hosted.served, self._of(hosted), self._view
        before, names = watched.granted, readable_names(view)
        served_on = [
            {names.get(node, node): had for node, had in each.had.items()} for each in hosted.replicas
        ]
        had = watched.had = with_loaded(watched.had, [now.loaded for _, now in compared], served_on)
        members = {name: view.membership.members[node] for node, name in names.items()}
        situation = partial(
            Situation,
            only_whole=why_only_whole(hosted.settings.link),
            head=names.get(view.own, view.own),
            had=had,
            plan=partial(plan_of_start, hosted.settings, served.folder, members, view.hung),
        )

        def compare_one(now: Present) -> Comparison | None:
            sizes = sizes_of(served.folder, served.names[0], now.cluster)
            has_less = any(node.memory_bytes < before.get(node.name, node).memory_bytes for node in now.nodes)
            return compare(situation(sizes, *now, has_less_memory=has_less))

        def work() -> Better | None:
            found, errors = list[Better](), list[RingError]()
            for replica, now in compared:
                try:
                    better = compare_one(now)
                except RingError as error:
                    errors.append(error)
                else:
                    found += [] if better is None else [Better(replica, better)]
            if errors and not found:
                raise errors[0]
            return max(found, key=lambda better: better.found.merit, default=None)

        async with self._comparing:
            return await asyncio.to_thread(work)

    @property
    def _view(self) -> ClusterView:
        """State of the machines; there are none before the head has some."""
        machines = self._machines()
        return ClusterView("") if machines is None else machines.cluster_view()

    def _own(self, model: ModelService) -> HostedModel:
        return next(each for each in self._hosted() if each is model)

    def _of(self, hosted: HostedModel) -> _Watched:
        if hosted not in self._watched:
            self._watched[hosted] = _Watched(Patience(self._clock))
        return self._watched[hosted]

    def _why_not(self, hosted: HostedModel) -> str:
        """Return the reason why a model's splits are not compared with others; empty if they are."""
        view = steady(self._view)
        if len(view.membership.members) <= 1:
            return "fewer than two machines may have layers"
        if fixed := why_fixed(hosted.settings):
            return fixed
        if hosted.state != "ready" or hosted.is_moving:
            return f"it is {'moving' if hosted.is_moving else hosted.state}"
        used = Counter(node for replica in hosted.replicas for node in nodes_of(replica))
        if used.total() > len(used) and view.membership.members.keys() <= used.keys():
            return "its replicas have machines in common, and none is unused"
        names = readable_names(self._view)
        if left := {names.get(node, node) for node in used.keys() - view.membership.members.keys()}:
            return f"{' and '.join(sorted(left))} has layers, and is excluded from plans"
        return ""

    def refusals(self) -> list[NoProposalStatus]:
        """Return the models that serve on several machines and are not compared with other splits, with the reason."""
        if len(self._view.membership.members) <= 1:
            return []
        reasons = {
            hosted: "the server was started with --replan off"
            if self._mode == "off"
            else self._why_not(hosted)
            for hosted in self._hosted()
            if hosted.state == "ready" and not hosted.is_moving
        }
        return [
            NoProposalStatus(model=hosted.model_id, why=_why_nothing(hosted, reason))
            for hosted, reason in reasons.items()
            if reason
        ]

    def _compared(self, hosted: HostedModel, machines: Machines) -> list[Compared]:
        """Return what each replica that serves is compared on: its own machines, and those that no other one uses."""
        view, links = steady(machines.cluster_view()), machines.link_profiles
        names = readable_names(view)
        whole = measured_cluster(hosted.settings, view, links, {})
        request = plan_request(hosted.settings, hosted.served, whole.nodes)
        sequences = request.share(len(hosted.replicas))
        part = replace(request, demand=replace(request.demand, sequences=sequences))
        try:
            check_room(hosted, 1, self._hosted(), hosted.settings.model_memory)
        except PlanError as error:
            refusal = str(error)
        else:
            refusal = ""

        def present(replica: Replica, placement: Placement) -> Present:
            others = (nodes_of(other) for other in hosted.replicas if other is not replica)
            used = Counter(names.get(node, node) for nodes in others for node in nodes)

            def cluster(without: InstanceService | None) -> ClusterProfile:
                return measured_cluster(hosted.settings, view, links, promised_bytes(self._hosted(), without))

            def apart(cluster: ClusterProfile) -> ClusterProfile:
                return replace(cluster, nodes=tuple(each for each in cluster.nodes if each.name not in used))

            now, loaded = cluster(replica.service), placed_stages(placement, names)
            own = {name for _, ranks in loaded for name, _ in ranks}
            common = (each for each in now.nodes if each.name in own & used.keys())
            shared = tuple(beside_others(each, 1 + used[each.name]) for each in common)
            return Present(part, loaded, apart(now), apart(cluster(None)), refusal, shared)

        return [
            Compared(replica, present(replica, placement))
            for replica in hosted.replicas
            if replica.service.error is None and (placement := replica.placement) is not None
        ]


class Present(NamedTuple):
    """Instance and machines as they are now: `Situation` without the sizes of the model."""

    request: PlanRequest
    loaded: LoadedStages
    cluster: ClusterProfile
    beside: ClusterProfile
    refusal: str
    shared: tuple[NodeProfile, ...] = ()

    @property
    def nodes(self) -> tuple[NodeProfile, ...]:
        """Machines that it may have in any split, and those that it has now."""
        return *self.cluster.nodes, *self.shared

    @property
    def basis(self) -> object:
        """Facts on which a comparison depends."""
        facts = map(known_facts, (self.cluster.nodes, self.beside.nodes, self.shared))
        return self.loaded, *facts, dict(self.cluster.links), self.refusal


class Compared(NamedTuple):
    """Replica that serves, and its machines as they are now."""

    replica: Replica
    now: Present


class Better(NamedTuple):
    """Better split of a replica."""

    replica: Replica
    found: Comparison

    @property
    def load_s(self) -> float | None:
        """Longest time that a load of it took; None before the first."""
        return self.replica.service.recoveries.load_s


def _refusal(hosted: HostedModel, proposal: ProposalStatus, *, may_pause: bool) -> Conflict | None:
    """Return an error if answers would pause without permission, or would end."""
    model = hosted.model_id
    if hosted.settings.resume == "off" and (busy := hosted.open_requests):
        return Conflict(
            f"{busy} {'request' if busy == 1 else 'requests'} of {model} would end, because of --resume off: "
            f"wait for the end. {proposal.why}"
        )
    if proposal.needs_pause and not may_pause:
        pause = "" if proposal.pause_s is None else f" for about {max(1.0, proposal.pause_s):.0f} s"
        return Conflict(
            f"Answers of {model} would pause{pause}. {proposal.why} To allow that: mlx-ring replan {model} --pause"
        )
    return None


def _why_nothing(hosted: HostedModel, reason: str) -> str:
    return f"No other split of {hosted.model_id} can be looked for: {reason}."


def _describe(hosted: HostedModel, better: Better) -> str:
    of_model = "" if len(hosted.replicas) == 1 else "A replica of "
    return describe(f"{of_model}{hosted.model_id}", better.found)


def _status(hosted: HostedModel, better: Better, *, is_due: bool) -> ProposalStatus:
    instance = better.replica.service.info.name
    return ProposalStatus.of(hosted.model_id, instance, better.found, better.load_s, is_due=is_due)
