"""Placement of lost ranks, and the search for those that are left."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
from tests.eventually import run_tasks_until
from tests.planner.clusters import cluster_of, node_of

from mlx_ring.cluster.agent_link import AgentLink, Source
from mlx_ring.cluster.deployment import Site, StartedWorkers
from mlx_ring.cluster.layer_split import even_split
from mlx_ring.core.errors import NotReady, PlanError, RingError
from mlx_ring.core.types import RankId
from mlx_ring.head import patching as subject
from mlx_ring.head.patching import (
    EarlyPlan,
    PatchPlan,
    Remains,
    Room,
    can_be_patched,
    patch_ranks,
    place_again,
    plan_patch,
)
from mlx_ring.head.placing import Order, Placement
from mlx_ring.head.rank_placements import place_ranks
from mlx_ring.head.served_model import prepare_model
from mlx_ring.planner.plan import Plan
from mlx_ring.rpc.hello import make_hello
from mlx_ring.rpc.link_profile import UNREACHABLE, LinkProfile
from mlx_ring.rpc.protos import agent_pb2, hello_pb2, worker_pb2
from mlx_ring.settings.config import Settings

FAST = LinkProfile(round_trip_s=1e-6, bandwidth=1e12)
"""Link that costs nothing, as for a model whose layers take long."""


class _Agent:
    """Agent whose workers answer, except for the stages that are silent."""

    def __init__(self, *silent: int) -> None:
        self.silent = silent
        self.prepared: list[list[int]] = []
        self.asked: list[tuple[list[int], bool]] = []
        """Process ids that were to be prepared, and True if other workers were left."""
        self.stopped = self.closed = 0

    def site(self, node: str) -> Site:
        return Site(node, cast("AgentLink", self), is_local=False, hosts={"": node}, source=Source("model"))

    async def relink(
        self,
        _hello: object,
        assignments: Sequence[worker_pb2.StageAssignment],
        *,
        commit: bool,
        pids: Sequence[int],
        leaves_others: bool,
        halt: bool,
        until_steps: Sequence[int],
    ) -> Sequence[agent_pb2.StartedWorker]:
        assert not commit
        assert not halt
        assert not until_steps
        self.asked.append((list(pids), leaves_others))
        self.prepared.append([one.stage for one in assignments])
        return [
            agent_pb2.StartedWorker(stage=one.stage) for one in assignments if one.stage not in self.silent
        ]

    async def close(self) -> None:
        self.closed += 1

    async def stop(self, _instance: str, _timeout_s: float, hello: hello_pb2.Hello) -> None:
        assert hello.epoch == 1
        self.stopped += 1


@pytest.fixture(scope="module")
def model(tiny_model: Path) -> Path:
    return tiny_model


def order_of(model: Path, **settings: object) -> Order:
    given = Settings.model_validate({"model": str(model), **settings})
    return Order(prepare_model(given), given, number=2, nodes=1, only=None)


def place(stage: int) -> RankId:
    return RankId(stage, 0)


def remains_of(order: Order, agents: Sequence[_Agent], lost: Sequence[int], nodes: str = "abc") -> Remains:
    """Return what is left of an instance whose stages were on these nodes in this order."""
    sites = [agent.site(node) for agent, node in zip(agents, nodes, strict=False)]
    ranges = even_split(order.served.folder.num_layers, len(sites))
    placement = Placement(ranges, place_ranks(sites, [(1.0,)] * len(sites)), None)
    return Remains("one", 1, placement, frozenset(map(place, lost)), frozenset())


def patched(order: Order, remains: Remains, room: Room) -> tuple[Placement, StartedWorkers]:
    """Plan a patch, and prepare the ranks that are left."""

    async def patch() -> tuple[Placement, StartedWorkers]:
        plan = await plan_patch(order, remains, room)
        return await patch_ranks(order, remains, 2, plan, make_hello())

    return asyncio.run(patch())


def nodes_of(placement: Placement) -> str:
    return "".join(stage[0].site.node for stage in placement.ranks)


def room_on(
    agents: dict[str, _Agent], *, steady: str = "abcd", gigabytes: float = 16, broken: str = ""
) -> Room:
    """Return room on these agents' nodes, of which the broken pairs do not reach each other."""
    nodes = [node_of(name, gigabytes) for name in agents]
    sites = [agent.site(name) for name, agent in agents.items()]
    links = {frozenset(pair): UNREACHABLE for pair in broken.split()}
    cluster = replace(cluster_of(*nodes, link=FAST), links=links)
    return Room(cluster, [name for name in agents if name in steady], sites)


@pytest.mark.parametrize(
    ("there", "steady", "strategy", "expected"),
    [
        ("abc", "abc", "auto", "abc"),
        ("abd", "abd", "uniform", "abd"),
        ("abcd", "abd", "uniform", "abd"),
        ("ab", "ab", "auto", "aba"),
    ],
    ids=["on its own machine", "on an unused one", "not on a quarantined one", "beside its neighbour"],
)
def test_a_lost_stage_is_placed(there: str, steady: str, strategy: str, expected: str, model: Path) -> None:
    order = order_of(model, strategy=strategy)
    remains = remains_of(order, [_Agent(), _Agent(), _Agent()], [2])
    room = room_on({name: _Agent() for name in there}, steady=steady)
    again, replaced = place_again(order, remains, remains.lost, room)
    assert (nodes_of(again), replaced) == (expected, remains.lost)
    assert again.cut == remains.placement.cut
    assert again.plan is not None
    left_out = {(left.node, left.why) for left in again.plan.left_out}
    assert left_out == {
        (node, "the stages are as they were before a loss") for node in {*there} - {*expected}
    }


@pytest.mark.parametrize("strategy", ["auto", "uniform"])
@pytest.mark.parametrize(
    ("nodes", "lost", "expected"),
    [("aba", [2], "abc"), ("aba", [1], "aba"), ("abb", [1, 2], "abc"), ("adad", [1, 3], "abac")],
    ids=["for the second stage of a node", "not for the only one of a node", "for one of two", "for two"],
)
def test_a_machine_that_is_back_is_used_at_the_next_loss(
    strategy: str, nodes: str, lost: Sequence[int], expected: str, model: Path
) -> None:
    order = order_of(model, strategy=strategy)
    remains = remains_of(order, [_Agent() for _ in nodes], lost, nodes)
    again, _ = place_again(order, remains, remains.lost, room_on({name: _Agent() for name in "abc"}))
    assert nodes_of(again) == expected


def test_one_stage_moves_if_two_machines_do_not_reach_each_other(model: Path) -> None:
    order = order_of(model)
    agents = [_Agent(), _Agent(), _Agent()]
    remains = remains_of(order, agents, [])
    room = room_on(dict(zip("abc", agents, strict=True)), broken="bc")
    placement, prepared = patched(order, remains, room)
    assert nodes_of(placement) in ("aac", "aba")
    moved = nodes_of(placement).rindex("a")
    assert set(prepared) == {place(stage) for stage in range(3)} - {place(moved)}
    assert agents[moved].stopped == 1


def test_two_machines_of_two_that_do_not_reach_each_other_give_their_stages_to_one(model: Path) -> None:
    order = order_of(model)
    remains = remains_of(order, [_Agent(), _Agent()], [])
    again, _ = place_again(order, remains, remains.lost, room_on({"a": _Agent(), "b": _Agent()}, broken="ab"))
    assert nodes_of(again) in ("aa", "bb")
    small = room_on({"a": _Agent(), "b": _Agent()}, broken="ab", gigabytes=1e-4)
    with pytest.raises(PlanError):
        place_again(order, remains, remains.lost, small)


def test_a_group_is_replaced_as_a_whole_and_the_stages_around_it_stay(model: Path) -> None:
    order = order_of(model, backend="ring")
    agents = {node: _Agent() for node in "abc"}
    sites = [agents[node].site(node) for node in "abbc"]
    ranges = even_split(order.served.folder.num_layers, 3)
    before = Placement(ranges, place_ranks(sites, [(1.0,), (1.0, 1.0), (1.0,)]), None)
    remains = Remains("one", 1, before, frozenset({RankId(1, 0), RankId(1, 1)}), frozenset())
    placement, prepared = patched(order, remains, room_on(agents))
    assert [[placed.site.node for placed in stage] for stage in placement.ranks] == [["a"], ["b", "b"], ["c"]]
    assert placement.group_settings == {"link": "grpc", "backend": "ring"}
    assert set(prepared) == {place(0), place(2)}
    assert agents["b"].stopped == 1, "the workers of the hung group end"


def test_a_lost_stage_without_a_machine_that_has_room_is_refused(model: Path) -> None:
    order = order_of(model)
    remains = remains_of(order, [_Agent(), _Agent()], [1])
    with pytest.raises(PlanError, match=r"need .* GB"):
        place_again(order, remains, remains.lost, room_on({"a": _Agent()}, gigabytes=1e-4))
    with pytest.raises(PlanError, match="b left, and no other machine"):
        place_again(order, remains, remains.lost, room_on({"a": _Agent()}, steady=""))


def test_ranks_that_do_not_answer_are_replaced_too(model: Path) -> None:
    order = order_of(model)
    agents = [_Agent(), _Agent(1), _Agent()]
    remains = remains_of(order, agents, [2])
    placement, prepared = patched(order, remains, room_on(dict(zip("abc", agents, strict=True))))
    assert nodes_of(placement) == "abc"
    assert set(prepared) == {place(0)}
    assert [agent.prepared for agent in agents] == [[[0], [0]], [[1]], []]
    assert [agent.stopped for agent in agents] == [0, 1, 2], "nodes without a rank that stays end theirs"


def test_a_machine_without_a_rank_that_stays_ends_what_it_has_before_it_gets_a_lost_one(model: Path) -> None:
    """Start it where a worker of the next plan is left, as on the way back from a change."""
    order = order_of(model)
    agents = {node: _Agent() for node in "abc"}
    remains = remains_of(order, [agents[node] for node in "abb"], [1], "abb")
    placement, prepared = patched(order, remains, room_on(agents))
    assert (nodes_of(placement), set(prepared)) == ("acb", {place(0), place(2)})
    assert {node: agent.stopped for node, agent in agents.items()} == {"a": 0, "b": 0, "c": 1}


class _Leaving(_Agent):
    """Agent of a node that leaves when its workers, or another's, are to be prepared; it does not answer."""

    def __init__(self, *, leaves_with: _Agent | None = None) -> None:
        super().__init__()
        self.trigger = leaves_with or self

    def has_left(self, node: str) -> bool:
        return node == "c" and bool(self.trigger.prepared)

    async def wait_until_left(self, node: str) -> None:
        await run_tasks_until(lambda: self.has_left(node))

    async def relink(
        self,
        hello: object,
        assignments: Sequence[worker_pb2.StageAssignment],
        *,
        commit: bool,
        pids: Sequence[int],
        leaves_others: bool,
        halt: bool,
        until_steps: Sequence[int],
    ) -> Sequence[agent_pb2.StartedWorker]:
        await super().relink(
            hello,
            assignments,
            commit=commit,
            pids=pids,
            leaves_others=leaves_others,
            halt=halt,
            until_steps=until_steps,
        )
        return await asyncio.get_running_loop().create_future()


@pytest.mark.parametrize("lost", [1, 2], ids=["with a rank that stayed", "with the new rank"])
def test_a_node_that_leaves_while_others_are_prepared_gets_no_rank(lost: int, model: Path) -> None:
    order = order_of(model, strategy="uniform")
    first = _Agent()
    leaving = _Leaving(leaves_with=first if lost == 2 else None)
    agents = [first, _Agent(), leaving]
    remains = remains_of(order, agents, [lost])

    async def patch() -> tuple[Placement, StartedWorkers]:
        room = room_on(dict(zip("abc", agents, strict=True)))
        plan = await plan_patch(order, remains, room)
        assert nodes_of(plan.placement) == "abc"
        return await patch_ranks(order, remains, 2, plan, make_hello(), leaving)

    placement, prepared = asyncio.run(patch())
    assert "c" not in nodes_of(placement)
    assert set(prepared) == {place(0), place(1)} - {place(lost)}


def test_workers_that_may_answer_again_are_left_until_others_are_linked(model: Path) -> None:
    order = order_of(model)
    agents = [_Agent(), _Agent(), _Agent()]
    remains = replace(
        remains_of(order, agents, [2]), pids={place(stage): 10 + stage for stage in range(3)}, may_return=True
    )
    room = room_on(dict(zip("abc", agents, strict=True)))
    _, prepared = patched(order, remains, room)
    assert set(prepared) == {place(0), place(1)}
    assert [agent.asked for agent in agents] == [[([10], True)], [([11], True)], []]
    assert [agent.stopped for agent in agents] == [0, 0, 0]
    whole = remains.as_whole()
    _, prepared = patched(order, whole, room)
    assert set(prepared) == {place(0), place(1), place(2)}
    assert agents[2].asked == [([12], True)]
    assert [agent.stopped for agent in agents] == [0, 0, 0]


def test_an_instance_of_which_nothing_answers_is_loaded_as_a_whole(model: Path) -> None:
    order = order_of(model)
    remains = remains_of(order, [_Agent(0), _Agent(1)], [])
    with pytest.raises(NotReady, match="No worker of one is left"):
        asyncio.run(patch_ranks(order, remains, 2, None, make_hello()))


def test_collective_links_and_lost_instances_are_not_patched(model: Path) -> None:
    order = order_of(model)
    assert can_be_patched("grpc", remains_of(order, [_Agent(), _Agent()], [1]))
    assert not can_be_patched("ring", remains_of(order, [_Agent(), _Agent()], [1]))
    assert not can_be_patched("grpc", remains_of(order, [_Agent(), _Agent()], [0, 1]))


class Planner:
    """Planner of patches on one agent's node, which counts its plans."""

    def __init__(self, error: RingError | None = None) -> None:
        self.agent, self.error = _Agent(), error
        self.planned: list[Remains] = []

    async def plan(self, remains: Remains) -> PatchPlan | None:
        self.planned.append(remains)
        await asyncio.sleep(0)
        if self.error is not None:
            raise self.error
        room = Room(cluster_of(node_of("a")), "a", [self.agent.site("a")])
        return PatchPlan(room, remains.placement, remains.lost)


def test_a_patch_is_planned_once_while_the_instance_is_suspect(model: Path) -> None:
    planner, order = Planner(), order_of(model)
    first, again, other = (remains_of(order, [_Agent(), _Agent()], [stage]) for stage in (1, 1, 0))

    async def act() -> None:
        early = EarlyPlan(planner.plan)
        for _ in range(3):
            early.follow(first)
            await asyncio.sleep(0)
            early.follow(again)
        plan = await early.take(again)
        assert plan is not None
        assert plan.lost == {place(1)}
        assert planner.planned == [first]
        assert await early.take(again) is None, "a plan is used once"
        early.follow(first)
        assert await early.take(other) is None, "another part was lost"

    asyncio.run(act())


def test_a_plan_is_dropped_when_the_silent_part_answers(model: Path) -> None:
    planner = Planner()
    remains = remains_of(order_of(model), [_Agent(), _Agent()], [1])

    async def act() -> None:
        early = EarlyPlan(planner.plan)
        early.follow(remains)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        early.follow(None)
        await run_tasks_until(lambda: planner.agent.closed)
        assert await early.take(remains) is None

    asyncio.run(act())


def test_a_plan_that_is_dropped_computes_no_more(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order, agents = order_of(model), {name: _Agent() for name in "abcde"}
    remains = remains_of(order, [*agents.values()][:4], [0, 1, 2], "abcd")
    begun, dropped, looked = threading.Event(), threading.Event(), list[object]()

    def refuse(*places: object) -> Plan:
        looked.append(places)
        begun.set()
        dropped.wait(60.0)
        raise PlanError("No room.")

    monkeypatch.setattr(subject, "plan_given_ranks", refuse)

    async def act() -> None:
        planning = asyncio.create_task(plan_patch(order, remains, room_on(agents, steady="de")))
        await asyncio.to_thread(begun.wait, 60.0)
        planning.cancel()
        with pytest.raises(asyncio.CancelledError):
            await planning
        dropped.set()

    # The loop's end waits for its threads.
    asyncio.run(act())
    assert len(looked) == 1


def test_what_cannot_be_planned_early_is_planned_after_the_loss(model: Path) -> None:
    planner = Planner(PlanError("No room."))
    remains = remains_of(order_of(model), [_Agent(), _Agent()], [1])

    async def act() -> None:
        early = EarlyPlan(planner.plan)
        early.follow(remains)
        assert await early.take(remains) is None

    asyncio.run(act())
