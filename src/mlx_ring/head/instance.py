"""Epoch of a served model: loading, serving, and its loss.

A rank that owes an answer past its deadline is stuck, which ends the epoch.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from mlx_ring.cluster.agent_link import Report
from mlx_ring.cluster.deployment import StartedWorkers, WorkerPlace, deploy
from mlx_ring.cluster.relinking import EpochWorkers, Superseded, link, load_lost, unless_returned
from mlx_ring.core.engine_stats import Meter
from mlx_ring.core.errors import (
    GroupStuck,
    LinkLost,
    NodeDrained,
    NotReady,
    RingError,
    WorkerLost,
    WorkerStuck,
)
from mlx_ring.core.lean_imports import collect_left, left_out
from mlx_ring.core.traces import Tracing
from mlx_ring.core.types import RankId
from mlx_ring.engine.engine import Engine
from mlx_ring.engine.executor import GrpcExecutor, RankAddress
from mlx_ring.engine.kv_budget import Allowance
from mlx_ring.engine.left_kv import LeftKvMoves, LeftStages
from mlx_ring.engine.live_request import Hold, LiveRequest
from mlx_ring.engine.request_traces import RequestTracer
from mlx_ring.engine.resumption import KeptKv, kept_message
from mlx_ring.engine.streams import Vocabulary
from mlx_ring.head.instance_view import InstanceService, SuspectWait
from mlx_ring.head.instance_watch import InstanceWatch, end_tasks
from mlx_ring.head.kv_memory import KvShares, KvUser, Reservation, Workers, are_on_gpus
from mlx_ring.head.patching import Remains, can_be_patched, sites_of
from mlx_ring.head.placing import Placement
from mlx_ring.head.rank_placements import assign_all, kv_places, predict_by
from mlx_ring.head.reshaping import Reshaping, head_hello
from mlx_ring.head.served_model import ServedModel, memory_for_weights, policy_of, sizes_for_chunks
from mlx_ring.head.step_down import blame_join, groups_of
from mlx_ring.planner.profiles import ModelProfile
from mlx_ring.rpc.hello import make_hello
from mlx_ring.rpc.protos import hello_pb2, worker_pb2
from mlx_ring.rpc.tls.credentials import Credentials
from mlx_ring.settings.config import Settings

log = logging.getLogger(__name__)
Result = TypeVar("Result")

_LOAD_BEGINS_S = 0.1
"""Time after which a load has begun on all machines, and the head waits for it."""
_REPLACED_WAIT_S = 3.0
"""Time for nodes to end workers that others have replaced, before memory is shared out."""
_BETTER_REASON_S = 1.0
"""Time to wait for the reason of a loss: a stream breaks a moment before the worker's end is reported."""


@dataclass(frozen=True, slots=True)
class Epoch:
    """Instance to serve, and its placement."""

    instance: str
    number: int
    placement: Placement
    node: str
    """Name of the head's own node."""
    trust: Credentials | None = None
    """Credentials of the head for other machines."""
    loaded: tuple[WorkerPlace, ...] = ()
    """Its workers, if an earlier head loaded them."""
    prepared: StartedWorkers | None = None
    """Its ranks that stay from the epoch before; None if all are to be loaded."""
    head: int = 1
    """Number of this head, which is higher than those of earlier ones."""
    kept: dict[LiveRequest, KeptKv] = field(default_factory=dict[LiveRequest, KeptKv])
    """KV that its ranks keep of interrupted requests, until its engine has taken them over."""
    returning: asyncio.Task[None] | None = None
    """Wait for lost ranks that are only silent. If it ends before the others are linked, this epoch is dropped."""
    superseded: Superseded = field(default_factory=Superseded)
    reshaping: Reshaping | None = None
    """Change to its plan, if its ranks have another one's stages until they are linked."""
    left: LeftStages | None = None
    """KV that its ranks keep of these stages."""

    @property
    def late(self) -> Mapping[RankId, int]:
        """Bytes of weights that ranks which stay load before they are linked."""
        return {} if self.reshaping is None else self.reshaping.late

    def all_stay(self, remains: Remains) -> Remains:
        """Return what is left of the epoch before, if this one was dropped before its ranks were linked."""
        return remains.as_whole() if self.reshaping is None else self.reshaping.back(remains, self.placement)

    @property
    def workers(self) -> EpochWorkers:
        """Its workers, to end them."""
        hello = make_hello(instance=self.instance, epoch=self.number, node=self.node, fencing_id=self.head)
        # On one machine the channel belongs to the agent, which other epochs share.
        return EpochWorkers(hello, self.placement.nodes, closes_links=self.trust is not None)


class Instance:
    """Run of one epoch."""

    def __init__(
        self,
        settings: Settings,
        served: ServedModel,
        service: InstanceService,
        epoch: Epoch,
        report: Report,
        shares: KvShares,
        meter: Meter,
        tracing: Tracing | None,
        hold: Hold | None,
        on_suspects: Callable[[Remains | None], None],
        *,
        is_beside: bool,
    ) -> None:
        self._meter, self._tracing, self._hold, self._on_suspects = meter, tracing, hold, on_suspects
        self._settings = settings.model_copy(update=dict(epoch.placement.group_settings))
        self._shares, self._served, self._service = shares, served, service
        self._epoch, self._report, self._is_beside = epoch, report, is_beside
        self._lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._explained = asyncio.Event()
        self.watch = InstanceWatch(
            epoch.instance,
            epoch.placement,
            self.lose,
            self._suspect,
            (service.record_workers, shares.record_workers),
            is_cluster=epoch.trust is not None,
            first_epoch=0 if epoch.loaded else epoch.number,
            staying={place: worker.pid for place, (worker, _) in (epoch.prepared or {}).items()},
            wait=SuspectWait(epoch.instance, meter, service.recoveries.silences, service.recovery_s),
        )
        self._has_served, self._drained = False, frozenset[str]()
        self._loaded: StartedWorkers = {
            place: one for place, one in (epoch.prepared or {}).items() if place not in epoch.late
        }
        """Ranks that are loaded: those that stay, and all once the others are."""
        self.is_dropped = False
        """True if it was dropped before its ranks were linked: lost ones of the epoch before answer, or all go back to it."""
        self.remains: Remains | None = None
        """Ranks that it leaves loaded after a loss, for the caller to patch or stop."""
        self.loss: RingError | None = None
        """Best known reason of the loss."""

    def lose(self, error: RingError, *, explains: bool = True) -> None:
        """End the instance because of an error; `explains` is False if a better reason may follow."""
        if not self._explained.is_set() and error is not self.loss:
            self.loss = error
            self._service.lose(error)
        if explains:
            self._explained.set()
        if not self._lost.done():
            self._lost.set_result(None)

    def drain(self, nodes: frozenset[str], why: str) -> None:
        """End the instance for a reason, so that others replace the ranks on these nodes, which are in order."""
        self._drained = nodes
        self.lose(NodeDrained(why))

    def check_serves(self) -> None:
        """Raise the reason of its loss, if it is lost."""
        if self.loss is not None:
            raise self.loss

    def _suspect(self, reason: str) -> None:
        """Show the suspicion, and report what is left if the suspects are lost; None once there are none."""
        self._service.suspect(reason)
        self._on_suspects(self._without(*self.watch.suspects) if reason else None)

    async def run(self, ready: Callable[[float], None]) -> None:
        """Load and serve until the loss. `ready` receives the seconds that loading took.

        Raises:
            RingError: it was lost before it served. The ranks that were loaded may be in `remains`.
        """
        async with contextlib.AsyncExitStack() as cleanup:
            try:
                await self._load_and_serve(cleanup, ready)
            except RingError as error:
                self.remains = self._find_remains(error)
                raise
            self.remains = self._find_remains(self.loss)

    async def _load_and_serve(
        self, cleanup: contextlib.AsyncExitStack, ready: Callable[[float], None]
    ) -> None:
        started, epoch = time.monotonic(), self._epoch
        if not (digest := epoch.placement.model_digest):
            digest = await asyncio.to_thread(self._served.read_digest)
            epoch = self._epoch = replace(epoch, placement=replace(epoch.placement, model_digest=digest))
        placement, of_model = epoch.placement, (self._settings, self._served, digest)
        assignments = assign_all(*of_model, epoch.instance, epoch.number, placement.cut, placement.ranks)
        hello = head_hello(assignments[0], epoch.node, epoch.head)
        cleanup.callback(self._shares.leave, epoch.instance)
        await cleanup.enter_async_context(self.watch.watching(hello))
        cleanup.push_async_exit(self._stop_workers)
        if not epoch.loaded:
            self._shares.expect(self._kv_user, self._reservations())
        if not (is_quick := self._is_beside or self._service.recoveries.status is not None):
            cleanup.callback(asyncio.get_running_loop().call_later(_LOAD_BEGINS_S, collect_left).cancel)
        places = epoch.loaded or await self._deploy(assignments, hello)
        executor = await self._unless_lost(self._connect(cleanup, places, hello))
        await self.watch.begin()
        await asyncio.wait((self.watch.first_report, self._lost), return_when=asyncio.FIRST_COMPLETED)
        if not self._lost.done():
            workers = self.watch.first_report.result()
            sizes = await sizes_for_chunks(self._served, self._settings, on_gpus=are_on_gpus(workers))
            engine = self._make_engine(executor, workers, sizes)
            cleanup.enter_context(self._meter.attached(engine, self._nodes))
            cleanup.push_async_callback(engine.close)
            looking = asyncio.create_task(self.watch.find_stuck(engine), name="deadlines")
            cleanup.push_async_callback(end_tasks, looking)
            if epoch.left is not None:
                moving = LeftKvMoves(engine.moves, epoch.left)
                await self._unless_lost(moving.bring_running())
                cleanup.push_async_callback(end_tasks, asyncio.create_task(moving.bring_rest()))
            self._service.serve(engine)
            self._has_served = True
            cleanup.enter_context(left_out(is_quick=is_quick))
            ready(time.monotonic() - started)
        await self._lost
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_BETTER_REASON_S):
                await self._await_reason(hello)
        if not self._has_served:
            self.check_serves()

    async def _connect(
        self, cleanup: contextlib.AsyncExitStack, places: Sequence[WorkerPlace], hello: hello_pb2.Hello
    ) -> GrpcExecutor:
        """Connect with all workers, until the cleanup, which also follows a loss at the same moment."""
        timeout_s = 10.0 if self._epoch.loaded else 30.0
        addresses = [RankAddress(RankId(each.stage, each.rank), each.address, each.node) for each in places]
        executor = await GrpcExecutor.connect(addresses, hello, trust=self._epoch.trust, timeout_s=timeout_s)
        placement = self._epoch.placement
        executor.kv_places, executor.kv_peers = kv_places(placement.ranges, placement.ranks, places)
        cleanup.push_async_callback(executor.close)
        return executor

    async def _await_reason(self, hello: hello_pb2.Hello) -> None:
        """Wait for the reason of the loss. If a link broke whose workers run, there is no better one.

        A group's link has no ends, because MLX does not report with which rank the connection broke.
        """
        if isinstance(loss := self.loss, LinkLost):
            ends = loss.ends or [site.node for site in self._epoch.placement.nodes]
            if await self.watch.are_alive(ends, hello):
                if not loss.ends:
                    self.lose(self.watch.blame_reset(loss))
                return
        await self._explained.wait()

    @property
    def lost_ranks(self) -> Mapping[RankId, float]:
        """Ranks that died or hung, and the others of their groups, each with the last step that it may have begun."""
        lost, begun = frozenset(self.watch.lost_ranks), self.watch.begun_by_stuck
        return {rank: begun.get(rank, math.inf) for rank in self._with_groups(lost)}

    def _with_groups(self, lost: frozenset[RankId]) -> frozenset[RankId]:
        """Return ranks and the others of their groups, because those wait for them."""
        return lost.union(*(group for group in groups_of(self._epoch.placement) if lost & set(group)))

    def _find_remains(self, loss: RingError | None) -> Remains | None:
        """Return the ranks that are left, if they can serve again with others in place of the lost ones.

        If a load failed, those are left that stayed from the epoch before, because agents end what they were loading.
        A group that hangs in a load may need another plan.
        """
        is_loss = isinstance(loss, WorkerLost | WorkerStuck) and not isinstance(loss, GroupStuck)
        if not self._has_served and not is_loss:
            return None
        lost = self._ranks_on(self._drained).union(self.watch.lost_ranks)
        if (remains := self._without(self.watch.silent_nodes, lost)) is None:
            return None
        ended = self.watch.lost_ranks - self.watch.silent_ranks
        may_return = (
            self._has_served and bool(remains.lost) and not ended and remains.lost <= self._pids.keys()
        )
        return replace(remains, pids=self._pids, may_return=may_return and not self._drained)

    def without_drained(self, nodes: frozenset[str]) -> Remains:
        """Return the ranks that would be left without some nodes, with their process ids."""
        epoch, lost = self._epoch, self._with_groups(self._ranks_on(nodes))
        return Remains(epoch.instance, epoch.number, epoch.placement, lost, frozenset(), self._pids)

    @property
    def _pids(self) -> Mapping[RankId, int]:
        return {place: worker.pid for place, (worker, _) in self._loaded.items()} | {**self.watch.pids}

    def _ranks_on(self, nodes: frozenset[str]) -> frozenset[RankId]:
        return frozenset(rank for rank, node in self._nodes.items() if node in nodes)

    def _without(self, nodes: frozenset[str], ranks: frozenset[RankId]) -> Remains | None:
        """Return the ranks that are left without these nodes and ranks, if they can serve again."""
        epoch, sites = self._epoch, sites_of(self._epoch.placement)
        left = sites.keys() if self._has_served else self._loaded.keys()
        lost = ranks | {place for place, site in sites.items() if site.node in nodes or place not in left}
        remains = Remains(epoch.instance, epoch.number, epoch.placement, self._with_groups(lost), nodes)
        return remains if can_be_patched(self._settings.link, remains) else None

    @property
    def _nodes(self) -> Mapping[RankId, str]:
        """Node of every rank."""
        return {place: site.node for place, site in sites_of(self._epoch.placement).items()}

    @property
    def _tracer(self) -> RequestTracer | None:
        if self._tracing is None:
            return None
        return RequestTracer(self._tracing, self._served.names[0], self._nodes)

    @property
    def _kv_user(self) -> KvUser:
        return KvUser(
            self._epoch.instance,
            self._served.names[0],
            self._served.limits.context_length,
            insisted=self._settings.max_model_len is not None,
        )

    def _reservations(self) -> Mapping[str, Reservation]:
        """Return what will be loaded on each node: weights as planned, else equal shares for all stages.

        Ranks that stay are loaded already.
        """
        placement, weights, workers = self._epoch.placement, Counter[str](), Counter[str]()
        whole = memory_for_weights(self._served.folder, self._settings)
        for number, stage in enumerate(placement.ranks):
            planned = placement.forecast.memory_of_ranks(number) if placement.forecast else None
            for rank, placed in enumerate(stage):
                if (place := RankId(number, rank)) in (self._epoch.prepared or ()):
                    if place in self._epoch.late:
                        weights[placed.site.node] += self._epoch.late[place]
                    continue
                part = placed.share / sum(other.share for other in stage) / len(placement.ranks)
                weights[placed.site.node] += planned[rank].weight_bytes if planned else int(whole * part)
                workers[placed.site.node] += 1
        return {node: Reservation(nbytes, workers[node]) for node, nbytes in weights.items()}

    async def _deploy(
        self, assignments: Sequence[worker_pb2.StageAssignment], hello: hello_pb2.Hello
    ) -> Sequence[WorkerPlace]:
        """Load all stages."""
        sites = [placed.site for stage in self._epoch.placement.ranks for placed in stage]
        prepared = self._epoch.prepared
        if prepared is None:
            return await self._unless_lost(deploy(sites, assignments, hello, self._report))
        at, reshaping = sites_of(self._epoch.placement), self._epoch.reshaping
        if reshaping is not None:
            await self._unless_lost(reshaping.load_late(at, prepared))
            if reshaping.problem is not None:
                self.is_dropped = True
                raise NotReady(f"The workers of {self._epoch.instance} go back to their stages.")
        loading = load_lost(at, assignments, prepared, hello, self._report)
        loaded = await self._unless_lost(unless_returned(self._epoch.returning, loading))
        if loaded is None:
            self.is_dropped = True
            raise NotReady(f"The lost workers of {self._epoch.instance} answer again.")
        self._loaded = loaded.workers
        kept = kept_message(self._epoch.kept.values())
        places = await self._unless_lost(link(loaded, prepared, hello, kept))
        await self._end_superseded()
        return places

    async def _end_superseded(self) -> None:
        """End workers that others have replaced. Wait for nodes in use, where they would count as used memory."""
        stops = self._epoch.superseded.end()
        in_use = {site.node for site in self._epoch.placement.nodes}
        awaited = [stop for node, of_node in stops.items() if node in in_use for stop in of_node]
        if awaited:
            await self._unless_lost(asyncio.wait(awaited, timeout=_REPLACED_WAIT_S))

    async def _unless_lost(self, work: Coroutine[object, object, Result]) -> Result:
        """Do work that needs all nodes, and stop if one is lost meanwhile, because it would never answer."""
        working = asyncio.ensure_future(work)
        try:
            await asyncio.wait((working, self._lost), return_when=asyncio.FIRST_COMPLETED)
            if working.done() and isinstance(working.exception(), WorkerLost | GroupStuck):
                # A connection breaks a moment before the reason is known.
                await asyncio.wait((self._lost,), timeout=_BETTER_REASON_S)
            self.check_serves()
            return working.result()
        except GroupStuck as error:
            raise blame_join(error, self._epoch.placement, self._service.load_phase) from None
        finally:
            working.cancel()
            await asyncio.wait((working,))

    def _make_engine(self, executor: GrpcExecutor, workers: Workers, sizes: ModelProfile | None) -> Engine:
        """Make the engine, with the KV memory that the workers report."""
        instance, placed = self._epoch.instance, self._epoch.placement
        nodes = {site.node: Allowance(site.reserve_share, site.memory_limit_bytes) for site in placed.nodes}
        kv, context = self._shares.join(self._kv_user, workers, nodes)
        longest = self._shares.long_chunk(instance, sizes, placed.ranges, self._settings.kv_bits)
        limits = self._served.limits
        if context < limits.context_length:
            log.warning(
                "The KV cache holds %d tokens of one request, so this is the context length, instead of %d.",
                context,
                limits.context_length,
            )
        engine = Engine(
            executor,
            Vocabulary.of(self._served.tokenizer),
            replace(limits.within(context), model=placed.model_digest),
            instance=instance,
            epoch=self._epoch.number,
            policy=policy_of(self._settings, longest),
            kv=kv,
            predict=predict_by(placed.forecast),
            on_lost=lambda error: self.lose(error, explains=False),
            hold=self._hold,
            meter=self._meter,
            tracer=self._tracer,
            kept=self._epoch.kept,
        )
        return self._shares.attach(instance, engine)

    async def _stop_workers(self, error: type[BaseException] | None, *_: object) -> None:
        self.watch.end()
        if not self.is_dropped and (self.remains is None or error is asyncio.CancelledError):
            await stop_workers(self._epoch, self.watch.wait_unless_silent)


async def stop_workers(epoch: Epoch, wait: Callable[[str, Awaitable[None]], Awaitable[None]]) -> None:
    """Stop an epoch's workers on every node. Those that do not answer are asked beside the next load.

    If they do not answer at all, they end their workers when they return.

    Args:
        epoch: the epoch.
        wait: waits for the end of the workers of a node, unless that node does not answer.
    """
    epoch.superseded.end()
    waits = [wait(site.node, epoch.workers.stop_late(site)) for site in epoch.placement.nodes]
    await asyncio.gather(*waits)
