"""Workers that a new head can adopt."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from mlx_ring.cluster.adoption import find_adoptable, highest_epoch, next_head
from mlx_ring.cluster.layer_split import Cut, make_assignments
from mlx_ring.core.types import LayerRange
from mlx_ring.rpc.protos import agent_pb2, hello_pb2, worker_pb2

CUT = Cut.alike((LayerRange(0, 3), LayerRange(3, 5)))


def expect(
    instance: str, cut: Cut, shaping: str = "auto", link: str = ""
) -> Sequence[worker_pb2.StageAssignment]:
    return make_assignments(
        cut,
        instance=instance,
        epoch=0,
        dtype="auto",
        model_digest="model",
        max_model_len=64,
        shaping=shaping,
        link=link,
    )


def loaded(epoch: int = 4, link: str = "", cut: Cut = CUT) -> list[agent_pb2.AgentEvent]:
    """Return a stage on each of two nodes, as an earlier head has loaded them."""
    assignments = make_assignments(
        cut,
        instance="one",
        epoch=epoch,
        dtype="auto",
        model_digest="model",
        max_model_len=64,
        shaping="auto",
        link=link,
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


def test_an_instance_is_adopted_although_a_worker_of_its_next_plan_is_not_ready() -> None:
    events = loaded()
    started = copy.deepcopy(events[0])
    started.hello.node = "mini-new"
    started.workers[0].status.phase = "loading"
    found = find_adoptable([*events, started], expect)
    assert [node for node, _ in found[0].workers] == [
        node for node, _ in find_adoptable(events, expect)[0].workers
    ]


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


def planned_fields() -> set[str]:
    """Return the fields of an assignment that follow from the plan and the settings."""
    *_, last = make_assignments(
        Cut.alike(CUT.ranges, (0.5, 0.5)),
        instance="one",
        epoch=1,
        dtype="auto",
        model_digest="model",
        max_model_len=64,
        kv_bits=8,
        link="grpc",
        backend="ring",
        group=("127.0.0.1:1",),
    )
    return {field.name for field, _ in last.ListFields()}


FILLED_IN = (
    {field.name for field in worker_pb2.StageAssignment.DESCRIPTOR.fields}
    - planned_fields()
    - {"backend_why"}
)
"""Fields that are filled in for running workers. Agents report assignments from before a backend is chosen."""


@pytest.mark.parametrize("name", sorted(FILLED_IN))
def test_a_field_that_is_filled_in_for_running_workers_does_not_prevent_adoption(name: str) -> None:
    events = loaded()
    assignment: Any = events[0].workers[0].assignment
    value = getattr(assignment, name)
    if isinstance(value, str | int | float):
        setattr(assignment, name, type(value)(1))
    elif hasattr(value, "add"):
        value.add()
    elif hasattr(value, "append"):
        value.append("x")
    else:
        value["x"] = "1"
    assert assignment != loaded()[0].workers[0].assignment
    assert len(find_adoptable(events, expect)) == 1


def test_an_instance_cut_with_other_settings_is_not_adopted() -> None:
    assert find_adoptable(loaded(), partial(expect, shaping="uniform")) == []


def test_workers_whose_links_are_collectives_are_not_adopted() -> None:
    events = loaded(link="ring")
    assert find_adoptable(events, partial(expect, link="ring")) == []


@pytest.mark.parametrize(("steps", "adopted"), [((7, 7), 1), ((7, 6), 0)])
def test_ranks_of_a_stage_are_adopted_if_they_began_the_same_steps(
    steps: tuple[int, int], adopted: int
) -> None:
    events = loaded(cut=Cut.alike((LayerRange(0, 5),), (0.5, 0.5)))
    for rank, event in enumerate(events):
        event.workers[0].stage, event.workers[0].rank = 0, rank
        event.workers[0].status.last_step = steps[rank]
    assert len(find_adoptable(events, expect)) == adopted


def test_a_head_is_newer_than_all_before_it(tmp_path: Path) -> None:
    assert [next_head(tmp_path, []) for _ in range(3)] == [1, 2, 3]


def test_a_head_without_the_file_of_numbers_is_newer_than_the_one_that_its_workers_report(
    tmp_path: Path,
) -> None:
    events = loaded()
    events[0].workers[0].status.hello.fencing_id = 9
    assert next_head(tmp_path, events) == 10
    (tmp_path / "heads.json").write_text("{")
    assert next_head(tmp_path, events) == 10


def test_the_highest_epoch_is_that_of_any_worker() -> None:
    events = loaded(epoch=4)
    events[0].workers[0].status.hello.epoch = 9
    assert highest_epoch(events) == 9
    assert highest_epoch([]) == 0
