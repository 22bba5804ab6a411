"""Instances that an earlier head has loaded and a new one can adopt. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from mlx_ring.cluster.placement import Cut
from mlx_ring.core.types import LayerRange
from mlx_ring.rpc.protos import agent_pb2, worker_pb2

Expect = Callable[[str, Cut], Sequence[worker_pb2.StageAssignment]]
"""Function that returns the assignments that a head would make now for an instance with this cut."""
_FREE = (
    "epoch",
    "next_address",
    "first_address",
    "next_node",
    "first_node",
    "previous_node",
    "next_bytes_per_s",
    "group",
    "group_host",
    "group_from",
    "group_environment",
    "rdma",
    "next_ranks",
    "first_ranks",
)
"""Fields of an assignment that may differ, because they say where and when it was loaded."""


@dataclass(frozen=True, slots=True)
class Adoptable:
    """An instance whose workers all run and are loaded as the head would load them now."""

    instance: str
    cut: Cut
    workers: tuple[tuple[str, agent_pb2.WorkerState], ...]
    """Node and worker of each rank of each stage, in order."""

    @property
    def nodes(self) -> tuple[tuple[str, ...], ...]:
        """Nodes of each stage's ranks."""
        return tuple(
            tuple(node for node, state in self.workers if state.stage == stage)
            for stage in range(len(self.cut.ranges))
        )


def find_adoptable(events: Iterable[agent_pb2.AgentEvent], expect: Expect) -> list[Adoptable]:
    """Return the instances that can be adopted."""
    found: list[Adoptable] = []
    by_instance: Mapping[str, list[tuple[str, agent_pb2.WorkerState]]] = defaultdict(list)
    for event in events:
        for state in event.workers:
            by_instance[state.instance].append((event.hello.node, state))
    for instance, workers in by_instance.items():
        workers.sort(key=lambda found: (found[1].stage, found[1].rank))
        states = [state for _, state in workers]
        if not all(state.alive and state.status.phase == "ready" for state in states):
            continue
        cut = _cut(state.assignment for state in states if not state.rank)
        expected = expect(instance, cut)
        if [_what(one) for one in expected] == [_what(state.assignment) for state in states]:
            found.append(Adoptable(instance, cut, tuple(workers)))
    return found


def highest_epoch(events: Iterable[agent_pb2.AgentEvent]) -> int:
    """Return the highest epoch of all workers; 0 without workers."""
    return max(
        (
            max(state.assignment.epoch, state.status.hello.epoch)
            for event in events
            for state in event.workers
        ),
        default=0,
    )


def _cut(stages: Iterable[worker_pb2.StageAssignment]) -> Cut:
    assigned = list(stages)
    ranges = tuple(LayerRange(stage.first_layer, stage.end_layer) for stage in assigned)
    return Cut(ranges, tuple(tuple(stage.shares) for stage in assigned))


def _what(assignment: worker_pb2.StageAssignment) -> worker_pb2.StageAssignment:
    what = worker_pb2.StageAssignment()
    what.CopyFrom(assignment)
    for field in _FREE:
        what.ClearField(field)
    return what
