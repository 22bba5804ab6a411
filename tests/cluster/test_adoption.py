"""Workers that a new head can adopt."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import pytest

from mlx_ring.cluster.adoption import find_adoptable, highest_epoch
from mlx_ring.cluster.placement import Cut, make_assignments
from mlx_ring.core.types import LayerRange
from mlx_ring.rpc.protos import agent_pb2, hello_pb2, worker_pb2

CUT = Cut.alike((LayerRange(0, 3), LayerRange(3, 5)))


def expect(instance: str, cut: Cut, shaping: str = "auto") -> Sequence[worker_pb2.StageAssignment]:
    return make_assignments(
        cut,
        instance=instance,
        epoch=0,
        dtype="auto",
        model_digest="model",
        max_model_len=64,
        shaping=shaping,
    )


def loaded(epoch: int = 4) -> list[agent_pb2.AgentEvent]:
    """Return a stage on each of two nodes, as an earlier head has loaded them."""
    assignments = make_assignments(
        CUT,
        instance="one",
        epoch=epoch,
        dtype="auto",
        model_digest="model",
        max_model_len=64,
        shaping="auto",
    )
    assignments[0].next_address, assignments[0].next_node = "10.0.0.2:4000", "b"
    assignments[0].previous_node, assignments[1].previous_node = "b", "a"
    return [
        agent_pb2.AgentEvent(
            hello=hello_pb2.Hello(node=node),
            workers=[
                agent_pb2.WorkerState(
                    instance="one",
                    stage=stage,
                    alive=True,
                    status=worker_pb2.WorkerStatus(phase="ready", hello=hello_pb2.Hello(epoch=epoch)),
                    assignment=assignments[stage],
                )
            ],
        )
        for stage, node in enumerate("ab")
    ]


def test_an_instance_with_the_current_assignments_is_adopted() -> None:
    (found,) = find_adoptable(reversed(loaded()), expect)
    assert (found.instance, found.cut) == ("one", CUT)
    assert [(node, state.stage) for node, state in found.workers] == [("a", 0), ("b", 1)]


@pytest.mark.parametrize(
    "difference", ["missing", "dead", "loading", "other model", "other context", "overlap"]
)
def test_any_other_instance_is_not_adopted(difference: str) -> None:
    events = loaded()
    worker = events[1].workers[0]
    if difference == "missing":
        del events[1]
    elif difference == "dead":
        worker.alive = False
    elif difference == "loading":
        worker.status.phase = "loading"
    elif difference == "other model":
        worker.assignment.model_digest = "another"
    elif difference == "other context":
        worker.assignment.max_model_len = 65
    else:
        worker.assignment.first_layer = 2
    assert find_adoptable(events, expect) == []


def test_an_instance_cut_with_other_settings_is_not_adopted() -> None:
    assert find_adoptable(loaded(), partial(expect, shaping="uniform")) == []


def test_the_highest_epoch_is_that_of_any_worker() -> None:
    events = loaded(epoch=4)
    events[0].workers[0].status.hello.epoch = 9
    assert highest_epoch(events) == 9
    assert highest_epoch([]) == 0
