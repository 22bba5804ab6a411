"""Watch over an instance: reports of its agents, lost nodes, dead or silent workers, and stuck ranks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from mlx_ring.cluster.deployment import Site
from mlx_ring.core.errors import NodeLost, RingError, WorkerLost, WorkerStuck
from mlx_ring.core.types import RankId
from mlx_ring.engine.engine import Engine
from mlx_ring.engine.kv_budget import Place
from mlx_ring.engine.step_times import Unanswered
from mlx_ring.head.placing import Placement
from mlx_ring.rpc.channels import limit_silence
from mlx_ring.rpc.protos import agent_pb2, hello_pb2, worker_pb2

LOOK_S = 1.0
"""Time between two checks."""
SILENCE_S = 3.0
"""Time without a report after which an agent or a worker counts as stuck; both report every second."""


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
        self._by_node: dict[str, dict[Place, worker_pb2.WorkerStatus]] = {}

    def record(self, event: agent_pb2.AgentEvent) -> dict[Place, worker_pb2.WorkerStatus] | None:
        """Record an event; return the status of all workers, or None until every node is ready."""
        node = event.hello.node
        ours = [state for state in event.workers if state.instance == self._instance]
        if ours and all(state.status.phase == "ready" for state in ours):
            self._by_node[node] = {(node, RankId(state.stage, state.rank)): state.status for state in ours}
        if len(self._by_node) < self._nodes:
            return None
        return {place: status for statuses in self._by_node.values() for place, status in statuses.items()}


class InstanceWatch:
    """Watch over one instance, which reports its loss."""

    def __init__(
        self,
        instance: str,
        placement: Placement,
        lose: Callable[[RingError], None],
        records: Sequence[Callable[[agent_pb2.AgentEvent], None]],
    ) -> None:
        """Prepare a watch, inside the event loop.

        Args:
            instance: name of the instance.
            placement: its nodes and ranks.
            lose: ends the instance because of an error.
            records: receive each report of an agent.
        """
        self._instance = instance
        self._placement = placement
        self._lose = lose
        self._records = records
        self._watched = Watched(instance, len(placement.nodes))
        self._engine: Engine | None = None
        self.first_report: asyncio.Future[dict[Place, worker_pb2.WorkerStatus]] = (
            asyncio.get_running_loop().create_future()
        )
        """Status of all workers, once every node has reported that they are ready."""
        self.silent_nodes: set[str] = set()
        """Nodes that no longer answer the head."""
        self.lost_ranks: set[RankId] = set()
        """Ranks that are dead or stuck; those on silent nodes may be."""

    def on_node_lost(self, node: str, reason: str) -> None:
        """End the instance if the lost node has a part of it."""
        stages = [
            str(stage)
            for stage, ranks in enumerate(self._placement.ranks)
            if any(placed.site.node == node for placed in ranks)
        ]
        if stages:
            self.silent_nodes.add(node)
            error = NodeLost(f"Node {node}, which has stage {' and '.join(stages)}, was lost: {reason}.")
            self._lose(error.blamed_on(node))

    async def follow_agent(self, site: Site, hello: hello_pb2.Hello) -> None:
        """Follow the reports of a node's agent, until the agent or one of its workers ends."""
        try:
            async for event in limit_silence(site.link.watch(hello), SILENCE_S):
                for record in self._records:
                    record(event)
                workers = self._watched.record(event)
                if workers is not None and not self.first_report.done():
                    self.first_report.set_result(workers)
                for state in event.workers:
                    if state.instance == self._instance:
                        self._check(state, site)
        except TimeoutError:
            self.silent_nodes.add(site.node)
            error = WorkerStuck(f"The agent of {site.node} has sent nothing for {SILENCE_S:g} s.")
            self._lose(error.blamed_on(site.node))
        except RingError as error:
            self.silent_nodes.add(site.node)
            self._lose(error.blamed_on(site.node))

    def _check(self, state: agent_pb2.WorkerState, site: Site) -> None:
        label = f"The worker of stage {state.stage}, rank {state.rank} on {site.node} (pid {state.pid})"
        place = RankId(state.stage, state.rank)
        if not state.alive:
            self.lost_ranks.add(place)
            self._lose(WorkerLost(f"{label} {state.exit_reason}.").of_worker().blamed_on(site.node))
        elif state.status.phase == "ready" and state.silent_s >= SILENCE_S:
            self.lost_ranks.add(place)
            error = WorkerStuck(f"{label} has not answered for {state.silent_s:.0f} s; it is stuck.")
            self._lose(error.of_worker().blamed_on(site.node))
        elif self._engine is not None:
            self._engine.record_started(place, state.status.last_step)

    async def find_stuck(self, engine: Engine) -> None:
        """Check regularly for a rank of the engine that owes an answer for too long although it is alive."""
        self._engine, watch = engine, StuckWatch()
        while True:
            await asyncio.sleep(LOOK_S)
            if (stuck := watch.look(engine.oldest_unanswered())) is not None:
                self._lose(self._stuck(stuck))
                return

    def _stuck(self, owed: Unanswered) -> RingError:
        stage, rank = owed.rank
        self.lost_ranks.add(owed.rank)
        node = self._placement.ranks[stage][rank].site.node
        error = WorkerStuck(
            f"Stage {stage}, rank {rank} on {node} has made no progress on step {owed.step} for "
            f"{owed.waited_s:.0f} s, more than the limit of {owed.deadline_s:.0f} s; its worker is stuck."
        )
        return error.of_worker().blamed_on(node)
