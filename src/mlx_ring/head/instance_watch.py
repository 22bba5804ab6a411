"""Watch over an instance: reports of its agents, lost nodes, dead or silent workers, and stuck ranks.

Any message of a node proves that it lives: its own, its agent's reports, and its workers' answers. While a node or a
worker is silent, the instance is suspect and gets no new steps. If it speaks again in time, everything continues in
place. Otherwise the instance is lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from typing import Literal

from mlx_ring.cluster.deployment import Site
from mlx_ring.cluster.membership import SILENCE_S
from mlx_ring.cluster.relinking import ANSWERS_S
from mlx_ring.core.engine_stats import Meter
from mlx_ring.core.errors import LinkLost, NodeLost, RingError, WorkerLost, WorkerStuck
from mlx_ring.core.types import RankId
from mlx_ring.engine.engine import Engine
from mlx_ring.engine.in_flight import Unanswered
from mlx_ring.engine.kv_budget import NodeRank
from mlx_ring.engine.resumption import Silences
from mlx_ring.head.instance_view import SuspectWait
from mlx_ring.head.placing import Placement
from mlx_ring.head.step_down import blame_late, blame_reset, ranks_of_reset
from mlx_ring.host.child import advice_for
from mlx_ring.rpc.channels import Silence
from mlx_ring.rpc.protos import agent_pb2, hello_pb2, worker_pb2

LOOK_S = 1.0
"""Time between two checks."""
_ENDED_AFTER_S = 0.2
"""Time for an agent to learn of a worker's end after the worker's connections broke."""
_JUDGE_S = 0.1
SUSPECT_S = 2.0
"""Silence of a node or a worker after which the instance is suspect."""
WORKER_SILENCE_S = 3.0
"""Silence of a worker after which it counts as stuck."""
_LONGEST_PART_S = 600.0
"""Time that a part of a load between steps may take: kernels are compiled, or a slow disk is read."""
_FIRST_REPORT_S = 60.0
"""Time until an agent must have reported; one of this machine may have to start."""

log = logging.getLogger(__name__)


class StuckWatch:
    """Detector of a rank that is stuck.

    A rank is stuck if it is late in two checks in a row. After a pause of the head itself, every rank is late
    in the first check. Before the second one, the head reads the answers that arrived meanwhile.
    """

    def __init__(self) -> None:
        self._late: tuple[object, int] | None = None

    def look(self, owed: Unanswered | None) -> Unanswered | None:
        """Return the rank that is stuck, if any."""
        before, self._late = self._late, None
        if owed is None or not owed.is_late:
            return None
        self._late = (owed.rank, owed.step)
        return owed if self._late == before else None


class Watched:
    """Status of an instance's workers, on all its nodes."""

    def __init__(self, instance: str, nodes: int) -> None:
        self._instance = instance
        self._nodes = nodes
        self._by_node: dict[str, dict[NodeRank, worker_pb2.WorkerStatus]] = {}

    def record(self, event: agent_pb2.AgentEvent) -> dict[NodeRank, worker_pb2.WorkerStatus] | None:
        """Record an event; return the status of all workers, or None until every node is ready."""
        node = event.hello.node
        ours = [state for state in event.workers if state.instance == self._instance]
        if ours and all(map(_is_ready, ours)):
            self._by_node[node] = {(node, RankId(state.stage, state.rank)): state.status for state in ours}
        if len(self._by_node) < self._nodes:
            return None
        return {place: status for statuses in self._by_node.values() for place, status in statuses.items()}


def _is_ready(state: agent_pb2.WorkerState) -> bool:
    """Report whether a worker's last answer is of the stage that it has now, and says that it is ready."""
    status = state.status
    return status.phase == "ready" and status.hello.plan_digest == state.assignment.plan_digest


class InstanceWatch:
    """Watch over one instance, which reports its suspicions and its loss."""

    def __init__(
        self,
        instance: str,
        placement: Placement,
        lose: Callable[[RingError], None],
        on_suspicion: Callable[[str], None],
        records: Sequence[Callable[[agent_pb2.AgentEvent], None]],
        *,
        is_cluster: bool,
        first_epoch: int = 0,
        staying: Mapping[RankId, int] | None = None,
        wait: SuspectWait | None = None,
    ) -> None:
        """Prepare a watch, inside the event loop.

        Args:
            instance: name of the instance.
            placement: its nodes and ranks.
            lose: ends the instance because of an error.
            on_suspicion: receives the reason why the instance is suspect; empty once it is not.
            records: receive each report of an agent.
            is_cluster: True if its nodes attend the head; otherwise there is one machine.
            first_epoch: lowest epoch of its workers; others of the instance are left from before a loss. 0: any.
            staying: process id of each worker that stays, and is of an earlier epoch until it is linked.
            wait: decides how long suspects are waited for, up to the limits; None: up to the limits.
        """
        self._wait = SuspectWait(instance, Meter(), Silences(), lambda: None) if wait is None else wait
        self._instance = instance
        self._placement = placement
        self._lose_instance = lose
        self._on_suspicion = on_suspicion
        self._records = records
        self._is_cluster = is_cluster
        self._first_epoch, self._staying = first_epoch, staying or {}
        self._nodes = {
            RankId(stage, rank): placed.site.node
            for stage, ranks in enumerate(placement.ranks)
            for rank, placed in enumerate(ranks)
        }
        """Node of each rank."""
        self._watched = Watched(instance, len(placement.nodes))
        self._engine: Engine | None = None
        self._hello = hello_pb2.Hello()
        self._tasks: list[asyncio.Task[None]] = []
        self._phase: Literal["loading", "judging", "stopping"] = "loading"
        self._silences: dict[str, Silence] = {}
        """Silence of each node whose agent has reported."""
        self._unreported = {site.node: Silence() for site in placement.nodes}
        self._silent_workers: dict[RankId, str] = {}
        self._answered_s: Mapping[RankId, float] = {}
        """Time of each rank's last answer to a step."""
        self._suspicion = ""
        self._suspect_nodes = frozenset[str]()
        self._lost_nodes = {site.node: asyncio.Event() for site in placement.nodes}
        """Events of nodes that no longer answer the head."""
        self.first_report: asyncio.Future[dict[NodeRank, worker_pb2.WorkerStatus]] = (
            asyncio.get_running_loop().create_future()
        )
        """Status of all workers, once every node has reported that they are ready."""
        self._states: dict[RankId, agent_pb2.WorkerState] = {}
        """Last report of each rank."""
        self.lost_ranks: set[RankId] = set()
        """Ranks that are dead or stuck; those on silent nodes may be."""
        self.silent_ranks: set[RankId] = set()
        """Those of them that are only silent."""
        self.begun_by_stuck: Mapping[RankId, int] = {}
        """Last step that each rank had begun, if the instance was lost because one of them was stuck in a step."""

    @property
    def silent_nodes(self) -> frozenset[str]:
        """Nodes that no longer answer the head."""
        return frozenset(node for node, lost in self._lost_nodes.items() if lost.is_set())

    @property
    def pids(self) -> Mapping[RankId, int]:
        """Process ids of the ranks, as reported last."""
        return {**self._staying, **{place: state.pid for place, state in self._states.items()}}

    @property
    def suspects(self) -> tuple[frozenset[str], frozenset[RankId]]:
        """Nodes and workers that are silent, or lost."""
        return self._suspect_nodes | self.silent_nodes, frozenset(self._silent_workers) | self.lost_ranks

    @contextlib.asynccontextmanager
    async def watching(self, hello: hello_pb2.Hello) -> AsyncGenerator[None]:
        """Follow all agents. Until `begin`, workers are being loaded, so only lost nodes and dead workers matter."""
        self._hello = hello
        judging = asyncio.create_task(self._judge_regularly(), name="silence")
        self._follow_agents()
        try:
            yield
        finally:
            await end_tasks(judging, *self._tasks)

    async def begin(self) -> None:
        """Judge the workers, which are loaded, from their agents' reports."""
        await end_tasks(*self._tasks)
        self._phase = "judging"
        self._follow_agents()

    def end(self) -> None:
        """Ignore the workers' ends, because they are being stopped."""
        self._phase = "stopping"

    async def wait_unless_silent(self, node: str, work: Awaitable[None]) -> None:
        """Wait for work of a node, but no longer once it does not answer."""
        lost, task = asyncio.create_task(self._lost_nodes[node].wait()), asyncio.ensure_future(work)
        try:
            await asyncio.wait((task, lost), return_when=asyncio.FIRST_COMPLETED)
        finally:
            lost.cancel()

    # ---- nodes

    def on_node_message(self, node: str) -> None:
        """Record that a node has sent the head a message of its own."""
        if node in self._silences:
            self._silences[node].end()

    def on_node_left(self, node: str, reason: str, *, is_final: bool) -> None:
        """End the instance if the node has a part of it, and has left for good.

        Otherwise its silence decides: a node that missed the head's messages connects again.
        """
        if node not in self._lost_nodes:
            return
        if is_final:
            self._lose_node(node, reason)
        else:
            self._silences.setdefault(node, Silence())

    def _lose_node(self, node: str, reason: str) -> None:
        self._lost_nodes[node].set()
        stages = map(str, sorted({rank.stage for rank, on in self._nodes.items() if on == node}))
        error = NodeLost(f"Node {node}, which has stage {' and '.join(stages)}, was lost: {reason}.")
        self._lose_instance(error.blamed_on(node))

    async def _judge_regularly(self) -> None:
        while True:
            await asyncio.sleep(_JUDGE_S)
            self.judge()

    def judge(self) -> None:
        """Look at the silence of nodes and workers, and report a loss or a change of the suspicion."""
        self._record_answers()
        suspicions, suspect_nodes = [*self._silent_workers.values()], set[str]()
        for node, silence in self._silences.items():
            seconds = silence.look()
            if seconds >= SUSPECT_S:
                suspect_nodes.add(node)
                suspicions.append(f"{node} has sent nothing for {seconds:.1f} s")
            if self._is_over(seconds, SILENCE_S) and not self._lost_nodes[node].is_set():
                self._wait.end(has_answered=False)
                self._lose_silent(node, min(SILENCE_S, round(seconds, 1)))
        for node, silence in self._unreported.items():
            if silence.look() >= _FIRST_REPORT_S and not self._lost_nodes[node].is_set():
                self._lose_silent(node, _FIRST_REPORT_S)
        if not self._is_cluster and bool(suspect_nodes) != bool(self._suspect_nodes):
            for site in self._placement.nodes:
                (site.link.on_suspect if suspect_nodes else site.link.on_answer)()
        self._suspect_nodes = frozenset(suspect_nodes)
        self._suspect(suspicions)

    def _is_over(self, silent_s: float, limit_s: float) -> bool:
        """Return True if a silence counts as a loss: at its limit, or when a recovery is predicted to be cheaper."""
        if silent_s < SUSPECT_S or self._engine is None or self._engine.error is not None:
            return silent_s >= limit_s
        return self._wait.gives_up(silent_s, limit_s)

    def _lose_silent(self, node: str, seconds: float) -> None:
        if self._is_cluster:
            self._lose_node(node, f"it sent nothing for {seconds:g} s")
        else:
            self._lost_nodes[node].set()
            for site in self._placement.nodes:
                site.link.is_silent = True
            error = WorkerStuck(f"The agent of {node} has sent nothing for {seconds:g} s.")
            self._lose_instance(error.blamed_on(node))

    def _record_answers(self) -> None:
        """Record that nodes and workers live whose ranks have answered steps since the last look."""
        if self._engine is None:
            return
        before, self._answered_s = self._answered_s, self._engine.answered_at
        for rank, answered_s in self._answered_s.items():
            if answered_s > before.get(rank, 0.0):
                self._silent_workers.pop(rank, None)
                if (silence := self._silences.get(self._nodes[rank])) is not None:
                    silence.end()

    def _suspect(self, suspicions: Sequence[str]) -> None:
        """Pause the engine while there are suspicions."""
        if self._engine is not None and self._engine.error is not None:
            # It is lost already, so nothing continues.
            return
        before, self._suspicion = self._suspicion, "; ".join(suspicions)
        self._on_suspicion(self._suspicion)
        if self._engine is None or bool(before) == bool(self._suspicion):
            return
        if self._suspicion:
            log.warning("%s is suspect and gets no new steps: %s", self._instance, self._suspicion)
            self._engine.pause()
        else:
            self._wait.end(has_answered=True)
            log.warning("%s continues in place: what was silent has answered", self._instance)
            self._engine.resume()

    # ---- reports of agents

    def _follow_agents(self) -> None:
        self._tasks = [
            asyncio.create_task(self._follow_agent(site), name=f"watch {site.node}")
            for site in self._placement.nodes
        ]

    async def _follow_agent(self, site: Site) -> None:
        """Follow the reports of a node's agent, until the agent ends."""
        try:
            async for event in self._reports(site):
                self._record(event, site)
        except RingError as error:
            self._lost_nodes[site.node].set()
            if self._is_cluster and isinstance(error, WorkerLost):
                error = NodeLost(str(error))
            self._lose_instance(error.blamed_on(site.node))

    async def _reports(self, site: Site) -> AsyncIterator[agent_pb2.AgentEvent]:
        """Yield the reports of an agent. If its call breaks, open another one, once."""
        broken: RingError | None = None
        while True:
            try:
                async for event in site.link.watch(self._hello, waits=broken is None):
                    if broken is not None:
                        log.warning("%s Its reports continue.", broken)
                        broken = None
                    yield event
            except RingError as error:
                if broken is not None:
                    raise broken from None
                broken = error

    def _record(self, event: agent_pb2.AgentEvent, site: Site) -> None:
        self._unreported.pop(site.node, None)
        self._silences.setdefault(site.node, Silence()).end()
        if self._phase == "stopping":
            return
        event = self._without_earlier(event, site.node)
        ours = [state for state in event.workers if state.instance == self._instance]
        for state in ours:
            if not state.alive:
                self._lose_worker(state, site.node)
        if self._phase == "loading":
            return
        for record in self._records:
            record(event)
        workers = self._watched.record(event)
        if workers is not None and not self.first_report.done():
            self.first_report.set_result(workers)
        for state in ours:
            self._check(state, site.node)

    def _without_earlier(self, event: agent_pb2.AgentEvent, node: str) -> agent_pb2.AgentEvent:
        """Return a report without workers of the instance that were replaced, which a node may have kept."""
        workers = [
            state for state in event.workers if state.instance != self._instance or self._is_ours(state, node)
        ]
        if len(workers) == len(event.workers):
            return event
        kept = agent_pb2.AgentEvent()
        kept.CopyFrom(event)
        del kept.workers[:]
        kept.workers.extend(workers)
        return kept

    def _is_ours(self, state: agent_pb2.WorkerState, node: str) -> bool:
        rank = RankId(state.stage, state.rank)
        is_of_epoch = (
            state.assignment.epoch >= self._first_epoch
            if rank not in self._staying
            else state.pid == self._staying[rank]
        )
        return self._nodes.get(rank) == node and is_of_epoch

    def _lose_worker(self, state: agent_pb2.WorkerState, node: str) -> None:
        self.lost_ranks.add(RankId(state.stage, state.rank))
        end = f"{state.exit_reason}."
        if self._phase == "loading":
            end = f"{state.exit_reason} while the instance was loaded.{advice_for(state.exit_reason, node)}"
        self._lose_instance(WorkerLost(f"{_label(state, node)} {end}").of_worker().blamed_on(node))

    def _check(self, state: agent_pb2.WorkerState, node: str) -> None:
        rank = RankId(state.stage, state.rank)
        self._states[rank] = state
        self._silent_workers.pop(rank, None)
        if not state.alive:
            return
        label = _label(state, node)
        # Its last answer may be of its load, so the phase in it shows nothing.
        if self._is_over(state.silent_s, WORKER_SILENCE_S):
            self._wait.end(has_answered=False)
            self.lost_ranks.add(rank)
            self.silent_ranks.add(rank)
            error = WorkerStuck(f"{label} has not answered for {state.silent_s:.0f} s; it is stuck.")
            self._lose_instance(error.of_worker().blamed_on(node))
        elif state.silent_s >= SUSPECT_S:
            self._silent_workers[rank] = f"{label} has not answered for {state.silent_s:.1f} s"
        elif self._engine is not None:
            waits = state.status.waits
            is_loading = waits.kind == "load" and waits.seconds < _LONGEST_PART_S
            self._engine.record_started(rank, state.status.last_step, is_loading=is_loading)

    def blame_reset(self, loss: LinkLost) -> RingError:
        """Return the error for a group's connection that broke although all workers run, which end then."""
        self.lost_ranks.update(ranks_of_reset(loss, self._placement))
        return blame_reset(loss, self._placement, self._states)

    async def are_alive(self, nodes: Collection[str], hello: hello_pb2.Hello) -> bool:
        """Report whether the instance's workers on these nodes run, although their connections broke just now."""
        await asyncio.sleep(_ENDED_AFTER_S)
        agents = [site.link for site in self._placement.nodes if site.node in nodes]
        events = await asyncio.gather(*(agent.look(hello, SILENCE_S) for agent in agents))
        return all(event is not None and self._all_run(event) for event in events)

    def _all_run(self, event: agent_pb2.AgentEvent) -> bool:
        ours = [state for state in event.workers if state.instance == self._instance]
        return bool(ours) and all(state.alive and state.silent_s < ANSWERS_S for state in ours)

    # ---- stuck ranks

    async def find_stuck(self, engine: Engine) -> None:
        """Check regularly for a rank of the engine that owes an answer for too long although it is alive."""
        self._engine, watch = engine, StuckWatch()
        while True:
            await asyncio.sleep(LOOK_S)
            owed = watch.look(None if self._suspicion else engine.oldest_unanswered())
            if owed is not None and (error := blame_late(owed, self._placement, self._states)) is not None:
                self.lost_ranks.add(owed.rank)
                self.begun_by_stuck = {
                    rank: max(owed.step, state.status.last_step) for rank, state in self._states.items()
                }
                self._lose_instance(error)
                return


def _label(state: agent_pb2.WorkerState, node: str) -> str:
    return f"The worker of stage {state.stage}, rank {state.rank} on {node} (pid {state.pid})"


async def end_tasks(*tasks: asyncio.Task[None]) -> None:
    """Cancel tasks, and wait until they have ended."""
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks)
