"""Change of an instance to another plan, for which workers load only the layers that they gain.

Workers keep their process, weights and compiled code. Those of machines with room load while the present plan serves,
and so do new workers of other machines. Then the present epoch ends, and its workers are linked as the next plan's, as
after a loss. Those without room load in between, once they have dropped what they lose. The others keep the KV of their
present stage, which the ranks of the next plan read (`engine/left_kv.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Container, Mapping
from dataclasses import dataclass, replace

from mlx_ring.cluster.agent_link import STOP_WAIT_S, Source
from mlx_ring.cluster.deployment import Site, StartedWorkers, blaming, close_sites, start_on, together
from mlx_ring.core.errors import PlanError, RingError, WorkerLost, WorkerStuck
from mlx_ring.core.types import RankId
from mlx_ring.engine.engine import Engine
from mlx_ring.engine.left_kv import LeftStages
from mlx_ring.engine.live_request import LiveRequest
from mlx_ring.engine.resumption import LeftKv
from mlx_ring.head.kv_memory import KvShares, KvUser, Reservation
from mlx_ring.head.patching import Remains, Room, sites_of
from mlx_ring.head.placing import Order, Placement, replica_request
from mlx_ring.head.rank_placements import assign_all
from mlx_ring.head.served_model import memory_for_weights
from mlx_ring.planner.model_sizes import profile_folder
from mlx_ring.planner.place import LoadedStages
from mlx_ring.planner.replan import StageChange, UnchangeableWorkers, stage_changes
from mlx_ring.rpc.backends import is_collective
from mlx_ring.rpc.hello import make_hello
from mlx_ring.rpc.protos import agent_pb2, hello_pb2, worker_pb2

log = logging.getLogger(__name__)

_ANNOUNCED, _BESIDE, _AFTER = (
    worker_pb2.LoadRequest.ANNOUNCED,
    worker_pb2.LoadRequest.BESIDE,
    worker_pb2.LoadRequest.AFTER,
)
_FORGET_WAIT_S = 3.0
"""Time for workers to drop what they have loaded, if the present plan stays."""


def why_only_whole(link: str) -> str:
    """Return the reason why workers with this link between stages cannot change theirs; empty if they can."""
    if not is_collective(link):
        return ""
    return f"With --link {link}, workers cannot get other neighbours, so the whole model is loaded again."


@dataclass(frozen=True, slots=True)
class NextPlan:
    """Another placement of an instance, on machines that may have its present stages."""

    room: Room
    placement: Placement
    node: str
    """Name of the head's own node."""
    head: int
    """Number of this head."""


def head_hello(assignment: worker_pb2.StageAssignment, node: str, head: int) -> hello_pb2.Hello:
    """Return the greeting of a head, of this number on a node, for the workers of an assignment's plan."""
    return make_hello(
        instance=assignment.instance,
        epoch=assignment.epoch,
        model_digest=assignment.model_digest,
        plan_digest=assignment.plan_digest,
        node=node,
        fencing_id=head,
    )


def _stages(placement: Placement) -> LoadedStages:
    return tuple(
        (layers, tuple((placed.site.node, placed.share) for placed in ranks))
        for layers, ranks in zip(placement.ranges, placement.ranks, strict=True)
    )


class Reshaping:
    """Load of the layers that an instance's workers gain for its next plan."""

    def __init__(
        self, order: Order, remains: Remains, plan: NextPlan, shares: KvShares, *, may_pause: bool
    ) -> None:
        """Find out what each machine has to load.

        Args:
            order: order of the next epoch; its number is that of the workers that are started for it.
            remains: the present ranks, with their process ids.
            plan: the next plan.
            shares: shares of KV memory.
            may_pause: True if more may be loaded in the pause than the plan predicts.

        Raises:
            UnchangeableWorkers: its workers cannot change to it, or the model's files are others than those loaded.
            PlanError: the plan is the present one.
        """
        self._order, self._present, self._plan, self._shares = order, remains, plan, shares
        self._may_pause = may_pause
        digest, loaded = order.served.read_digest(), remains.placement.model_digest
        self.placement = replace(plan.placement, model_digest=digest)
        before, after = _stages(remains.placement), _stages(plan.placement)
        if problem := why_only_whole(order.settings.link):
            raise UnchangeableWorkers(problem)
        if before == after:
            raise PlanError("The best plan for the machines as they are now is the present one.")
        if loaded not in ("", digest):
            raise UnchangeableWorkers(
                f"The files of {order.served.names[0]} have changed since they were loaded, so the whole model is loaded "
                "again."
            )
        model = profile_folder(order.served.folder, order.served.names[0])
        cluster = plan.room.cluster
        changes = stage_changes(model, cluster, replica_request(order, cluster.nodes), before, after)
        self._changes: Mapping[str, StageChange] = {change.node: change for change in changes}
        self._assignments = {
            RankId(one.stage, one.rank): one for one in self._assign(self.placement, order.number)
        }
        self._hello = head_hello(next(iter(self._assignments.values())), plan.node, plan.head)
        self._staying = {
            site.node: place
            for place, site in sites_of(remains.placement).items()
            if site.node not in self._changes
            or remains.placement.ranges[place.stage] == self._changes[site.node].present
        }
        """Present rank of each machine whose worker stays. Its other ranks end when the pause begins."""
        self._pids = {node: remains.pids[place] for node, place in self._staying.items()}
        """Process id of each machine's worker, of the present plan or new."""
        self._started: StartedWorkers = {}
        self.late: dict[RankId, int] = {}
        """Bytes that ranks load in the pause, because their machine has no room for them beside the present stage."""
        self._loaded: dict[RankId, int] = {}
        self._left: LeftStages | None = None
        self.paused_requests = 0
        """Requests that were running or waiting when the pause began."""
        self.problem: RingError | None = None
        """Reason why layers could not be loaded in the pause, so that the workers go back to the present plan."""

    def _assign(self, placement: Placement, number: int) -> list[worker_pb2.StageAssignment]:
        order = self._order
        # The present plan's digest is the same, also if the files change meanwhile.
        own = (order.settings, order.served, self.placement.model_digest, self._present.instance, number)
        return [*assign_all(*own, placement.cut, placement.ranks)]

    @property
    def loaded_bytes(self) -> int:
        """Bytes of weights that workers have read for the next plan."""
        return sum(self._loaded.values())

    # ---- while the present plan serves

    async def load(self) -> None:
        """Start workers on machines without one, and load what has room beside the present stages.

        Raises:
            RingError: a machine could not. The present plan serves; the caller abandons this one.
        """
        started = time.monotonic()
        try:
            self._reserve()
            sites = sites_of(self.placement)
            new = [place for place, site in sites.items() if site.node not in self._pids]
            # Nothing watches these machines yet, and one that has left since the plan was made never answers.
            found = await together(
                start_on(sites[place], [self._assignments[place]], self._hello, waits=False) for place in new
            )
            for workers in found:
                self._started |= workers
            self._pids |= {site.node: worker.pid for worker, site in self._started.values()}
            await together(
                self._load_on(place, site, _ANNOUNCED if place in self.late else _BESIDE)
                for place, site in sites.items()
            )
        finally:
            self._shares.leave(self._user.instance)
        log.warning(
            "%s: workers have loaded the layers that they gain, %.1f MB of %.1f MB, in %.1f s",
            self._present.instance,
            self.loaded_bytes / 1e6,
            memory_for_weights(self._order.served.folder, self._order.settings) / 1e6,
            time.monotonic() - started,
        )

    def _reserve(self) -> None:
        """Reserve memory for what is loaded beside the present stages; machines without room load in the pause."""
        reserved: dict[str, Reservation] = {}
        for place, site in sites_of(self.placement).items():
            change, is_new = self._changes[site.node], site.node not in self._pids
            wanted = {**reserved, site.node: Reservation(change.gained_bytes, int(is_new))}
            if not change.fits_beside:
                problem = f"{site.node} has no room for more layers beside its present ones."
            else:
                try:
                    self._shares.expect(self._user, wanted)
                except PlanError as error:
                    if is_new or not self._may_pause:
                        raise
                    problem = str(error)
                else:
                    reserved = wanted
                    continue
            log.warning("%s loads %.1f MB in the pause: %s", site.node, change.gained_bytes / 1e6, problem)
            self.late[place] = change.gained_bytes

    @property
    def _user(self) -> KvUser:
        """User of the memory that is reserved meanwhile, beside the instance itself."""
        served = self._order.served
        name = f"{self._present.instance}, next plan"
        return KvUser(name, served.names[0], served.limits.context_length, insisted=False)

    async def _load_on(self, place: RankId, site: Site, gain: worker_pb2.LoadRequest.Gain) -> None:
        with blaming(site):
            await site.link.load(
                self._hello,
                site.source,
                [self._assignments[place]],
                self._record,
                gain=gain,
                pids=[self._pids[site.node]],
            )

    def _record(self, progress: agent_pb2.StageProgress) -> None:
        if progress.progress.phase in ("weights", "ready"):
            self._loaded[RankId(progress.stage, progress.rank)] = progress.progress.bytes_loaded

    async def abandon(self) -> None:
        """End the new workers, and let the others drop what they have loaded, because the present plan stays."""
        instance, sites = self._present.instance, {site.node: site for site in self._plan.room.sites}
        present = {site.node for site in self._present.placement.nodes}
        new = {site.node for site in self.placement.nodes} - present
        before = {
            RankId(one.stage, one.rank): one
            for one in self._assign(self._present.placement, self._order.number)
        }

        async def forget(place: RankId, site: Site) -> None:
            with contextlib.suppress(RingError, TimeoutError):
                async with asyncio.timeout(_FORGET_WAIT_S):
                    await site.link.load(
                        *(self._hello, Source(), [before[place]], self._record),
                        gain=_ANNOUNCED,
                        pids=[self._present.pids[place]],
                    )

        await asyncio.gather(
            *(sites[node].link.stop(instance, STOP_WAIT_S, self._hello) for node in new),
            *(
                forget(place, sites[site.node])
                for place, site in sites_of(self._present.placement).items()
                if site.node in sites
            ),
        )
        await self.close()

    async def close(self) -> None:
        """Close the connections to the agents."""
        await close_sites(self._plan.room.sites)

    # ---- in the pause

    def leave(self, engine: Engine) -> None:
        """Remember the KV of the present engine, whose workers change their stages next."""
        self._left = LeftStages(engine.moves.origin, engine.moves.texts)

    def left_kv(self, prepared: Container[RankId], lives: Mapping[LiveRequest, LeftKv]) -> LeftStages | None:
        """Return the KV that the workers of some ranks of the next plan keep of the present one, also of interrupted requests.

        Those that load in the pause drop it.
        """
        staying = {
            self._staying[site.node]
            for place, site in sites_of(self.placement).items()
            if place in prepared and place not in self.late and site.node in self._staying
        }
        return self._left and replace(self._left, ranks=staying, lives=lives)

    def left(self, remains: Remains) -> Remains:
        """Return what is left of the present plan as ranks of the next one, of which none is loaded anew if all answer."""
        lost = remains.silent_nodes | {node for node, place in self._staying.items() if place in remains.lost}
        sites = sites_of(self.placement)
        return Remains(
            remains.instance,
            self._order.number,
            self.placement,
            frozenset(place for place, site in sites.items() if site.node in lost),
            remains.silent_nodes & {site.node for site in sites.values()},
            {place: self._pids[site.node] for place, site in sites.items()},
        )

    def back(self, remains: Remains, now: Placement) -> Remains:
        """Return what is left of the present plan, with the connections of the next one, because those before are closed.

        Ranks without a stage in the next plan are lost: they were asked to end when the pause began.
        """
        sites = {site.node: site for site in now.nodes}
        staying = {place for node, place in self._staying.items() if node in sites}
        ended = remains.places - staying
        ranks = tuple(
            tuple(replace(placed, site=sites.get(placed.site.node, placed.site)) for placed in stage)
            for stage in remains.placement.ranks
        )
        placement = replace(remains.placement, ranks=ranks)
        return replace(remains, placement=placement, lost=remains.lost | ended)

    async def load_late(self, sites: Mapping[RankId, Site], prepared: StartedWorkers) -> None:
        """Load what had no room before; the workers drop the layers that they lose first. If one cannot, set `problem`.

        Args:
            sites: the site of every rank.
            prepared: the ranks that stay.

        Raises:
            WorkerLost: a worker was lost, which others can replace in the next plan.
            WorkerStuck: a worker hangs.
        """
        try:
            await together(
                self._load_on(place, sites[place], _AFTER) for place in self.late if place in prepared
            )
        except (WorkerLost, WorkerStuck):
            raise
        except RingError as error:
            self.problem = error
            log.warning(
                "%s goes back to its present split, because layers could not be loaded: %s",
                *(self._present.instance, error),
            )
