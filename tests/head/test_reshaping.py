"""Change of workers to the stages of a next plan: what is asked of each machine, and what stays if it fails."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from tests.head.test_patching import order_of
from tests.planner.clusters import cluster_of, node_of

from mlx_ring.cluster.agent_link import AgentLink, Source
from mlx_ring.cluster.deployment import Site, StartedWorkers
from mlx_ring.core.errors import PlanError, RingError, StepFailed, WorkerLost
from mlx_ring.core.types import LayerRange, RankId
from mlx_ring.head.kv_memory import KvShares
from mlx_ring.head.patching import Remains, Room
from mlx_ring.head.placing import Order, Placement
from mlx_ring.head.rank_placements import place_ranks
from mlx_ring.head.reshaping import NextPlan, Reshaping
from mlx_ring.head.served_model import ServedModel, prepare_model
from mlx_ring.planner.replan import UnchangeableWorkers
from mlx_ring.rpc.protos import agent_pb2, hello_pb2, worker_pb2
from mlx_ring.settings.config import Settings

GAINS = {number: name for name, number in worker_pb2.LoadRequest.Gain.items()}


class Agent:
    """Agent that records what is asked of it, and may fail to load."""

    def __init__(
        self,
        node: str,
        calls: list[str],
        asked: list[worker_pb2.StageAssignment],
        problem: RingError | None,
    ) -> None:
        self.node, self.calls, self.asked, self.problem = node, calls, asked, problem

    async def start(
        self, hello: hello_pb2.Hello, assignments: Sequence[worker_pb2.StageAssignment], *, waits: bool
    ) -> Sequence[agent_pb2.StartedWorker]:
        assert not waits, "a machine that has left never answers"
        self.calls.append(f"{self.node} starts in epoch {hello.epoch}")
        return [agent_pb2.StartedWorker(stage=one.stage, pid=40) for one in assignments]

    async def load(
        self,
        _hello: hello_pb2.Hello,
        _source: Source,
        assignments: Sequence[worker_pb2.StageAssignment],
        report: Any,
        *,
        gain: int,
        pids: Sequence[int],
    ) -> None:
        (one,), (pid,) = assignments, pids
        self.asked.append(one)
        layers = f"{one.first_layer}-{one.end_layer}"
        self.calls.append(f"{self.node} {GAINS[gain]} stage {one.stage} {layers} pid {pid}")
        # A machine without room loads in the pause.
        if self.problem is not None and gain != worker_pb2.LoadRequest.ANNOUNCED:
            raise self.problem
        for phase, done in (("fetch", 999), ("weights", 5), ("weights", 10)):
            progress = worker_pb2.LoadProgress(phase=phase, bytes_loaded=done)
            report(agent_pb2.StageProgress(stage=one.stage, progress=progress))

    async def stop(self, _instance: str, _timeout_s: float, hello: hello_pb2.Hello) -> None:
        self.calls.append(f"{self.node} ends epoch {hello.epoch}")

    async def close(self) -> None:
        self.calls.append(f"{self.node} closes")


class Shares(KvShares):
    """Shares of memory, in which some nodes have no room."""

    def __init__(self, full: str = "") -> None:
        super().__init__(None)
        self.full = full
        self.expected: list[Mapping[str, Any]] = []
        self.left = 0

    def expect(self, user: object, reservations: Mapping[str, Any]) -> None:
        del user
        if self.full in reservations:
            raise PlanError(f"Other models keep the memory of {self.full}.")
        self.expected.append(reservations)

    def leave(self, instance: str) -> None:
        assert instance == "one, next plan"
        self.left += 1


class Change:
    """Change from stages on `a` and `b`, or other `present` ones, to another plan of five layers."""

    def __init__(
        self,
        model: Path,
        planned: Sequence[tuple[str, int, int]],
        *,
        full: str = "",
        problem: RingError | None = None,
        loaded: str = "",
        present: Sequence[tuple[str, int, int]] = (("a", 0, 2), ("b", 2, 5)),
        **options: Any,
    ) -> None:
        self.calls: list[str] = []
        self.asked: list[worker_pb2.StageAssignment] = []
        """Assignments that were announced or loaded."""
        agents = {
            node: Agent(node, self.calls, self.asked, problem if node == "b" else None) for node in "abc"
        }
        self.sites = {
            node: Site(
                node, cast("AgentLink", agent), is_local=False, hosts={"": node}, source=Source("model")
            )
            for node, agent in agents.items()
        }
        self.order: Order = order_of(model, **options.pop("settings", {}))
        self.shares = Shares(full)
        self.present = replace(self.placement(present), model_digest=loaded)
        remains = Remains(
            *("one", 1, self.present, frozenset[RankId](), frozenset[str]()),
            pids={RankId(stage, 0): 1 + stage for stage in range(len(present))},
        )
        room = Room(cluster_of(*(node_of(node, 16) for node in "abc")), "abc", [*self.sites.values()])
        plan = NextPlan(room, self.placement(planned), "head", 7)
        self.remains = remains
        self.reshaping = Reshaping(self.order, remains, plan, self.shares, may_pause=True, **options)

    def placement(self, stages: Sequence[tuple[str, int, int]]) -> Placement:
        sites = [self.sites[node] for node, _, _ in stages]
        ranges = tuple(LayerRange(start, end) for _, start, end in stages)
        return Placement(ranges, place_ranks(sites, [(1.0,)] * len(sites)), None)

    def load(self) -> list[str]:
        asyncio.run(self.reshaping.load())
        return self.calls


def test_each_machine_loads_its_next_stage_and_new_ones_start_before(tiny_model: Path) -> None:
    change = Change(tiny_model, [("a", 0, 1), ("c", 1, 3), ("b", 3, 5)])
    assert change.load() == [
        "c starts in epoch 2",
        "a BESIDE stage 0 0-1 pid 1",
        "c BESIDE stage 1 1-3 pid 40",
        "b BESIDE stage 2 3-5 pid 2",
    ]
    assert change.reshaping.loaded_bytes == 30
    assert not change.reshaping.late
    *_, reserved = change.shares.expected
    assert {node: each.workers for node, each in reserved.items()} == {"a": 0, "c": 1, "b": 0}
    assert change.shares.left == 1
    left = change.reshaping.left(change.remains)
    assert (left.epoch, left.placement, left.lost) == (2, change.reshaping.placement, frozenset())
    assert left.pids == {RankId(0, 0): 1, RankId(1, 0): 40, RankId(2, 0): 2}


def test_a_machine_that_is_lost_meanwhile_is_lost_in_the_next_plan(tiny_model: Path) -> None:
    change = Change(tiny_model, [("c", 0, 1), ("a", 1, 2), ("b", 2, 5)])
    change.load()
    lost = Remains(
        *("one", 1, change.present, frozenset({RankId(1, 0)}), frozenset({"a"})), pids=change.remains.pids
    )
    left = change.reshaping.left(lost)
    assert (left.lost, left.silent_nodes) == ({RankId(1, 0), RankId(2, 0)}, {"a"})


def test_ranks_of_machines_that_end_are_lost_if_the_others_go_back(tiny_model: Path) -> None:
    change = Change(tiny_model, [("a", 0, 5)])
    back = change.reshaping.back(change.remains, change.reshaping.placement)
    assert (back.lost, back.silent_nodes) == ({RankId(1, 0)}, frozenset())
    all_stay = Change(tiny_model, [("b", 0, 1), ("a", 1, 5)])
    assert not all_stay.reshaping.back(all_stay.remains, all_stay.reshaping.placement).lost


def test_a_stage_leaves_a_machine_with_several_for_one_that_has_none(tiny_model: Path) -> None:
    change = Change(
        tiny_model,
        [("a", 0, 1), ("c", 1, 3), ("b", 3, 5)],
        present=[("a", 0, 1), ("b", 1, 3), ("b", 3, 5)],
    )
    assert change.load() == [
        "c starts in epoch 2",
        "a BESIDE stage 0 0-1 pid 1",
        "c BESIDE stage 1 1-3 pid 40",
        "b BESIDE stage 2 3-5 pid 3",
    ]
    assert change.reshaping.left(change.remains).pids == {RankId(0, 0): 1, RankId(1, 0): 40, RankId(2, 0): 3}
    # The loss of the worker that ends anyway matters only for a way back.
    ending = replace(change.remains, lost=frozenset({RankId(1, 0)}))
    assert not change.reshaping.left(ending).lost
    staying = replace(change.remains, lost=frozenset({RankId(2, 0)}))
    assert change.reshaping.left(staying).lost == {RankId(2, 0)}
    assert change.reshaping.back(change.remains, change.reshaping.placement).lost == {RankId(1, 0)}


def test_layers_without_room_are_announced_and_loaded_in_the_pause(tiny_model: Path) -> None:
    change = Change(tiny_model, [("a", 0, 4), ("b", 4, 5)], full="a")
    assert change.load() == ["a ANNOUNCED stage 0 0-4 pid 1", "b BESIDE stage 1 4-5 pid 2"]
    assert change.reshaping.late.keys() == {RankId(0, 0)}
    assert change.reshaping.late[RankId(0, 0)] > 0
    prepared: StartedWorkers = {RankId(stage, 0): cast("Any", None) for stage in (0, 1)}
    places = {RankId(0, 0): change.sites["a"], RankId(1, 0): change.sites["b"]}
    asyncio.run(change.reshaping.load_late(places, prepared))
    assert change.calls[2:] == ["a AFTER stage 0 0-4 pid 1"]
    # One that was lost since is loaded as a whole.
    asyncio.run(change.reshaping.load_late(places, {}))
    assert len(change.calls) == 3


@pytest.mark.parametrize("problem", [StepFailed("No memory is left."), WorkerLost("It died.")])
def test_a_load_that_fails_in_the_pause_is_no_loss_unless_its_worker_is_lost(
    tiny_model: Path, problem: RingError
) -> None:
    change = Change(tiny_model, [("a", 0, 1), ("b", 1, 5)], full="b", problem=problem)
    change.load()
    places = {RankId(0, 0): change.sites["a"], RankId(1, 0): change.sites["b"]}
    prepared: StartedWorkers = {place: cast("Any", None) for place in places}
    late = change.reshaping.load_late(places, prepared)
    if isinstance(problem, WorkerLost):
        with pytest.raises(WorkerLost, match="It died"):
            asyncio.run(late)
        assert change.reshaping.problem is None
    else:
        asyncio.run(late)
        assert change.reshaping.problem is problem
    assert problem.node == "b"


def test_a_failed_load_leaves_the_present_plan(tiny_model: Path) -> None:
    change = Change(
        tiny_model, [("a", 0, 1), ("c", 1, 2), ("b", 2, 5)], problem=WorkerLost("No memory is left.")
    )
    with pytest.raises(WorkerLost, match="No memory is left"):
        change.load()
    assert change.shares.left == 1
    del change.calls[:]
    asyncio.run(change.reshaping.abandon())
    assert sorted(change.calls) == [
        *("a ANNOUNCED stage 0 0-2 pid 1", "a closes", "b ANNOUNCED stage 1 2-5 pid 2"),
        *("b closes", "c closes", "c ends epoch 2"),
    ]


def test_a_new_machine_without_room_is_refused(tiny_model: Path) -> None:
    with pytest.raises(PlanError, match="Other models keep the memory of c"):
        Change(tiny_model, [("a", 0, 1), ("c", 1, 2), ("b", 2, 5)], full="c").load()


@pytest.mark.parametrize(
    ("planned", "settings", "problem"),
    [
        ([("a", 0, 2), ("b", 2, 5)], {}, "is the present one"),
        ([("a", 0, 3), ("b", 3, 5)], {"link": "ring"}, "With --link ring"),
        ([("c", 0, 5)], {}, "No machine would keep"),
    ],
)
def test_plans_to_which_workers_cannot_change_are_refused(
    tiny_model: Path, planned: Sequence[tuple[str, int, int]], settings: Mapping[str, object], problem: str
) -> None:
    with pytest.raises(PlanError, match=problem):
        Change(tiny_model, planned, settings=settings)


def test_a_model_whose_files_were_replaced_since_is_loaded_as_a_whole(tiny_model: Path) -> None:
    with pytest.raises(UnchangeableWorkers, match="have changed since they were loaded, so the whole model"):
        Change(tiny_model, [("a", 0, 3), ("b", 3, 5)], loaded="another")


def test_workers_go_back_to_the_digest_that_they_loaded_though_files_change_meanwhile(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = prepare_model(Settings(model=str(tiny_model))).read_digest()
    change = Change(tiny_model, [("a", 0, 3), ("b", 3, 5)], loaded=loaded)
    monkeypatch.setattr(ServedModel, "read_digest", lambda _: "another")  # pyright: ignore[reportUnknownLambdaType, reportUnknownArgumentType]
    change.load()
    asyncio.run(change.reshaping.abandon())
    assert len(change.asked) == 4
    assert {one.model_digest for one in change.asked} == {loaded}
