"""Instances that an earlier head has loaded and a new one can adopt, and the number by which it replaces that head."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel

from mlx_ring.cluster.layer_split import Cut
from mlx_ring.core.errors import ConfigError
from mlx_ring.core.types import LayerRange
from mlx_ring.host.private_files import StateFile
from mlx_ring.rpc.backends import has_collective_link
from mlx_ring.rpc.protos import agent_pb2, worker_pb2

log = logging.getLogger(__name__)

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
    "cpu_weights",
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
    """Return the instances that can be adopted. Workers that are not ready, such as those of a next plan, do not belong to them."""
    found: list[Adoptable] = []
    by_instance: Mapping[str, list[tuple[str, agent_pb2.WorkerState]]] = defaultdict(list)
    for event in events:
        for state in event.workers:
            by_instance[state.instance].append((event.hello.node, state))
    for instance, workers in by_instance.items():
        ready = [(node, state) for node, state in workers if _is_ready(state)]
        ready.sort(key=lambda found: (found[1].stage, found[1].rank))
        states = [state for _, state in ready]
        if not states or not _agree(states):
            continue
        cut = _cut(state.assignment for state in states if not state.rank)
        expected = expect(instance, cut)
        if [_what(one) for one in expected] == [_what(state.assignment) for state in states]:
            found.append(Adoptable(instance, cut, tuple(ready)))
    return found


def _is_ready(state: agent_pb2.WorkerState) -> bool:
    """Return True if the worker is loaded and may serve another head; one in a collective may not."""
    return state.alive and state.status.phase == "ready" and not has_collective_link(state.assignment)


def _agree(states: Iterable[agent_pb2.WorkerState]) -> bool:
    """Return False if ranks of a stage began different steps: the others wait in a collective for ever."""
    begun = {(state.stage, state.status.last_step) for state in states}
    return len(begun) == len({stage for stage, _ in begun})


def highest_epoch(events: Iterable[agent_pb2.AgentEvent]) -> int:
    """Return the highest epoch of all workers; 0 without workers."""
    return max(
        (present_epoch(state) for event in events for state in event.workers),
        default=0,
    )


def present_epoch(state: agent_pb2.WorkerState) -> int:
    """Return the epoch in which a worker was started or linked last."""
    return max(state.assignment.epoch, state.status.hello.epoch)


_FILE = "heads.json"
_NUMBERS = 1 << 63
"""Limit of numbers that are believed; a head counts on for ever below it."""


class _Heads(BaseModel):
    newest: int = 0


def next_head(folder: Path, events: Sequence[agent_pb2.AgentEvent]) -> int:
    """Return the number of a new head, above those of all earlier ones, by which workers know the newer head.

    It follows the number in the cluster's folder, and the numbers that workers report in case that the file was lost.
    No clock is involved, because clocks are set back.
    """
    reported = (state.status.hello.fencing_id for event in events for state in event.workers)
    newest = max((number for number in reported if number < _NUMBERS), default=0)
    heads = StateFile(folder / _FILE, _Heads, "remove it, and heads are counted on from what workers report")
    try:
        with heads.change() as content:
            content.newest = max(content.newest, newest) + 1
            return content.newest
    except (ConfigError, OSError) as error:
        log.warning("The number of this head is not stored: %s", error)
        return newest + 1


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
