"""Reactions of the head to nodes that join."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Generator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tests.eventually import run_tasks_until

from mlx_ring.cluster.agent_link import AgentLink, Source
from mlx_ring.cluster.control import Control
from mlx_ring.cluster.deployment import Site
from mlx_ring.cluster.link_survey import FoundLink
from mlx_ring.cluster.membership import Drained, Event, Joined, Membership
from mlx_ring.core.errors import LinkLost, NodeDrained, NodeLost, PlanError
from mlx_ring.head import left_workers as subject
from mlx_ring.head import multi_node as subject_of_patches
from mlx_ring.head.multi_node import Cluster
from mlx_ring.head.patching import Remains, Room
from mlx_ring.head.placing import Order, Others, Placement
from mlx_ring.host.addresses import HeadAddress
from mlx_ring.rpc.link_profile import UNREACHABLE
from mlx_ring.rpc.protos import agent_pb2, hello_pb2, worker_pb2
from mlx_ring.settings.config import Settings


class BusyAgent:
    """An agent with workers of an instance that has ended. It answers the second request for its state."""

    def __init__(self) -> None:
        self.looks = 0
        self.stopped: asyncio.Queue[tuple[str, int]] = asyncio.Queue()

    async def look(self, _hello: object, _timeout_s: float) -> agent_pb2.AgentEvent | None:
        self.looks += 1
        assignment = worker_pb2.StageAssignment(instance="ended", epoch=7)
        return (
            None
            if self.looks == 1
            else agent_pb2.AgentEvent(
                hello=hello_pb2.Hello(node="n2"),
                workers=[agent_pb2.WorkerState(instance="ended", assignment=assignment, alive=True)],
            )
        )

    async def stop(self, instance: str, _timeout_s: float, hello: hello_pb2.Hello) -> None:
        self.stopped.put_nowait((instance, hello.epoch))

    async def close(self) -> None:
        pass


class FakeControl:
    """The head's membership, and the watchers of its events."""

    node = "n1"
    wait_for_joined = Control.wait_for_joined
    wait_until_left, wait_until_lacking = Control.wait_until_left, Control.wait_until_lacking
    wait_until_undrained = Control.wait_until_undrained

    def __init__(self) -> None:
        there: Any = {"n2": SimpleNamespace(node="n2", session=1, links_port=0)}
        self.membership = Membership(there)
        self.watchers: list[Callable[[Event], None]] = []

    def has_left(self, _node: str) -> bool:
        return False

    async def wait_for_reports(self, _nodes: object) -> None:
        return

    def make_token(self, *, life_s: float, uses: int | None = None) -> str:
        return f"token for {life_s} s and {uses} machines"

    @contextlib.contextmanager
    def watching(self, watcher: Callable[[Event], None]) -> Generator[None]:
        self.watchers.append(watcher)
        yield


def test_joined_node_that_does_not_answer_is_asked_for_its_state_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent, control = BusyAgent(), FakeControl()
    site = Site(
        "n2", cast("AgentLink", agent), is_local=False, hosts={"": "10.0.0.2"}, source=Source("model")
    )

    def sites(*_: object) -> list[Site]:
        return [site]

    surveyed = asyncio.Event()

    async def take_all(*_: object) -> None:
        surveyed.set()

    monkeypatch.setattr(subject, "cluster_sites", sites)
    monkeypatch.setattr(subject, "_LOOK_AGAIN_S", 0.0)
    settings = Settings.model_validate({"model": "demo", "state_dir": tmp_path})

    async def offer(_served: object) -> Any:
        raise AssertionError

    async def run() -> tuple[str, int]:
        cluster: Any = Cluster(settings, [], cast("Control", control), HeadAddress("10.0.0.1", 50051), offer)
        monkeypatch.setattr(cluster._surveys, "take_all", take_all)
        cluster._left._has_looked.set()
        tending = asyncio.create_task(cluster._left.tend_joining_nodes())
        await asyncio.sleep(0)
        control.watchers[0](Joined(control.membership.members["n2"]))
        try:
            async with asyncio.timeout(30):
                # Links for collectives are measured, too, for proposals.
                await surveyed.wait()
                return await agent.stopped.get()
        finally:
            tending.cancel()

    assert asyncio.run(run()) == ("ended", 7), "a late request ends no worker of a later epoch"
    assert agent.looks == 2


def test_a_load_that_finds_only_drained_machines_says_how_to_use_one_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def run() -> None:
        control: Any = Control(cast("Any", None), cast("Any", None), cast("Any", None), "n1")
        for node in ("n1", "n2"):
            await control._happens(Joined(cast("Any", SimpleNamespace(node=node, machine=f"{node}-machine"))))
        settings = Settings.model_validate({"model": "demo", "state_dir": tmp_path})
        cluster: Any = Cluster(settings, [], control, HeadAddress("10.0.0.1", 50051), cast("Any", None))
        cluster._tending, cluster._own_agent = [None], SimpleNamespace(ensure=do_nothing, attends=do_nothing)
        assert not cluster.lacks(2)
        await cluster.drain("n1")
        lacking = asyncio.create_task(cluster.wait_until_lacking(1))
        assert (cluster.lacks(2), cluster.lacks(1)) == (True, False)
        await cluster.drain("n2")
        await lacking
        waiting = asyncio.create_task(cluster.attend(1))
        await run_tasks_until(lambda: caplog.records)
        assert not waiting.done()
        await cluster.drain("n1", is_drained=False)
        with contextlib.suppress(AttributeError):  # the machines have no more than a name
            await waiting
        assert not cluster.lacks(1)

    async def do_nothing(*_: object) -> None:
        pass

    asyncio.run(run())
    (said,) = caplog.messages
    assert "all connected machines are drained (n1-machine and n2-machine)" in said
    assert said.endswith("run: mlx-ring node drain n1 --undo")


def test_machines_are_missing_as_long_as_a_load_waits_for_them(tmp_path: Path) -> None:
    async def do_nothing(*_: object) -> None:
        pass

    async def run() -> None:
        control: Any = Control(cast("Any", None), cast("Any", None), cast("Any", None), "n1")
        member: Any = SimpleNamespace(node="n1", machine="n1-machine", trusted=())
        await control._happens(Joined(member))
        settings = Settings.model_validate({"model": "demo", "state_dir": tmp_path})
        cluster: Any = Cluster(settings, [], control, HeadAddress("10.0.0.1", 50051), cast("Any", None))
        cluster._tending = [None]
        cluster._own_agent = SimpleNamespace(ensure=do_nothing, attends=do_nothing, is_own=True)
        assert cluster.missing == 0
        waiting = [asyncio.create_task(cluster.attend(nodes)) for nodes in (3, 2)]
        await run_tasks_until(lambda: cluster.missing)
        assert cluster.missing == 2
        # Another load has all its machines.
        await cluster.attend(1)
        assert cluster.missing == 2
        for left, ended in zip((1, 0), reversed(waiting), strict=True):
            await control._happens(Joined(cast("Any", SimpleNamespace(node=f"n{3 - left}"))))
            await ended
            assert cluster.missing == left

    asyncio.run(run())


def test_the_pause_before_the_next_load_ends_when_a_node_joins(tmp_path: Path) -> None:
    control = FakeControl()
    settings = Settings.model_validate({"model": "demo", "state_dir": tmp_path})

    async def run() -> None:
        cluster: Any = Cluster(
            settings, [], cast("Control", control), HeadAddress("10.0.0.1", 50051), cast("Any", None)
        )
        waiting = asyncio.create_task(cluster.wait_for_node(3600.0))
        await run_tasks_until(lambda: control.watchers)
        control.watchers[0](Joined(control.membership.members["n2"]))
        async with asyncio.timeout(30):
            await waiting

    asyncio.run(run())


def test_lost_link_blames_no_node_and_is_not_trusted(tmp_path: Path) -> None:
    async def offer(_served: object) -> Any:
        raise AssertionError

    async def run() -> None:
        settings = Settings.model_validate({"model": "demo", "state_dir": tmp_path})
        control = cast("Control", FakeControl())
        cluster: Any = Cluster(settings, [], control, HeadAddress("10.0.0.1", 50051), offer)
        for _ in range(5):
            cluster.record_failure(LinkLost("It broke.").between("n2", "n3").blamed_on("n2"), 0.0)
        assert cluster._quarantine.held() == {}
        assert cluster._surveys._usual.has_distrusted
        for _ in range(5):
            cluster.record_failure(NodeLost("It left.").blamed_on("n2"), time.time())
        assert [*cluster._quarantine.held()] == ["n2"]

    asyncio.run(run())


def test_a_node_that_left_while_the_model_was_placed_is_reported_at_once(tmp_path: Path) -> None:
    left: list[tuple[str, str]] = []

    class Listener:
        def on_node_message(self, node: str) -> None:
            raise AssertionError(node)

        def on_node_left(self, node: str, reason: str, *, is_final: bool) -> None:
            assert not is_final
            left.append((node, reason))

    async def offer(_served: object) -> Any:
        raise AssertionError

    settings = Settings.model_validate({"model": "demo", "state_dir": tmp_path})
    control = cast("Control", FakeControl())
    cluster: Any = Cluster(settings, [], control, HeadAddress("10.0.0.1", 50051), offer)
    nodes = [SimpleNamespace(node="n2"), SimpleNamespace(node="n3")]
    order = SimpleNamespace(served=SimpleNamespace(names=["demo"]))
    cluster._live.add("instance", order, SimpleNamespace(plan=None, nodes=nodes))
    with cluster.watching("instance", Listener()):
        assert left == [("n3", "it left while the model was placed")]
    with cluster.watching("instance", Listener()):
        assert len(left) == 1, "an instance that is not live has no nodes"


def _return(made: object, *_: object, **__: object) -> object:
    return made


class Planned:
    """Plans of a cluster's patches, which take no time, and the plan that each patch used."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self.plans = 0
        self.used: list[Any] = []
        self.closed = 0
        for name, made in (("cluster_sites", [self]), ("node_profiles", []), ("with_throughput", self)):
            monkeypatch.setattr(subject_of_patches, name, partial(_return, made))
        monkeypatch.setattr(subject_of_patches, "plan_patch", self.plan)
        monkeypatch.setattr(subject_of_patches, "patch_ranks", self.patch)
        self.node, self.link, self.is_local, self.trusted = "n2", self, True, ()
        settings = Settings.model_validate({"model": "demo", "state_dir": folder})
        control: Any = FakeControl()
        control.settle, control.credentials = self.settle, None
        self.cluster: Any = Cluster(settings, [], control, HeadAddress("10.0.0.1", 50051), self.offer)

    async def offer(self, _served: object) -> Any:
        raise AssertionError

    async def settle(self, _nodes: object) -> None:
        pass

    async def plan(self, _order: object, _remains: object, room: Room) -> Any:
        self.plans += 1
        return SimpleNamespace(room=room, number=self.plans)

    async def patch(
        self, _order: object, _remains: object, _number: int, plan: Any, _hello: object, presence: object
    ) -> Any:
        assert presence is self.cluster._control
        self.used.append(plan.number)
        return SimpleNamespace(nodes=[self], plan=None, ranks=()), {}

    async def close(self) -> None:
        self.closed += 1


def order_of(folder: Path) -> Order:
    served: Any = SimpleNamespace(names=["demo"], folder=SimpleNamespace(path=folder))
    return Order(served, Settings(), number=2, nodes=1, only=None)


def bar(cluster: Any) -> None:
    """Let the link between n1 and n2 break twice, each time for a new instance."""
    for _ in range(2):
        cluster.record_failure(LinkLost("It broke.").between("n2", "n1"), time.time())


@pytest.mark.parametrize("is_possible", [True, False])
def test_plans_of_replicas_avoid_a_link_that_broke_twice_unless_nothing_else_fits(
    is_possible: bool,  # noqa: FBT001 - as pytest gives it
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    planned: list[Any] = []

    def plan(*arguments: Any) -> tuple[object, ...]:
        planned.append(arguments[-1])
        if len(planned) == 1 and not is_possible:
            raise PlanError("No room.")
        return ()

    async def take_all(*_: object) -> Any:
        return [], {}

    async def attending(_nodes: int) -> Any:
        return cluster._control.membership

    async def look_once(_sites: object) -> None:
        pass

    monkeypatch.setattr(subject_of_patches, "plan_replicas", plan)
    cluster = Planned(monkeypatch, tmp_path).cluster
    cluster._attending, cluster._surveys.take_all = attending, take_all
    cluster._left.look_once = look_once
    bar(cluster)
    settings = Settings.model_validate({"model": "demo", "replicas": 2})
    declared: Any = SimpleNamespace(served=SimpleNamespace(names=["demo"]), settings=settings)
    assert asyncio.run(cluster.candidate_nodes(declared, 1)) == []
    avoided = {frozenset({"n1", "n2"}): UNREACHABLE}
    assert planned == [avoided, *([] if is_possible else [{}])]


@pytest.mark.parametrize("is_possible", [True, False])
def test_plans_avoid_a_link_that_broke_twice_unless_nothing_else_fits(
    is_possible: bool,  # noqa: FBT001 - as pytest gives it
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    planned: list[list[Any]] = []

    async def place(_order: object, *, avoided: Any, **_: object) -> Any:
        planned.append([*avoided])
        if avoided and not is_possible:
            raise PlanError("No room.")
        return Placement((), (), None)

    monkeypatch.setattr(subject_of_patches, "place_on_cluster", place)
    cluster = Planned(monkeypatch, tmp_path).cluster
    order = order_of(tmp_path)
    with caplog.at_level(logging.INFO):
        asyncio.run(cluster._place(order, cluster._control.membership, []))
        bar(cluster)
        asyncio.run(cluster._place(order, cluster._control.membership, []))
    assert planned == [[], [("n1", "n2")], *([] if is_possible else [[]])]
    assert "Plans avoid the link between n2 and n1 until" in caplog.text
    assert (
        "Using links that were lost repeatedly, because without them: No room." in caplog.text
    ) != is_possible


@pytest.mark.parametrize(
    ("is_patch_possible", "is_plan_possible"), [(True, True), (False, True), (False, False)]
)
def test_patches_avoid_a_link_that_broke_twice_unless_no_plan_does(
    is_patch_possible: bool,  # noqa: FBT001 - as pytest gives it
    is_plan_possible: bool,  # noqa: FBT001
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    planned = Planned(monkeypatch, tmp_path)
    cluster = planned.cluster

    async def place(_order: object, *, others: Others, **_: object) -> Any:
        assert others.siblings == {"n4"}, "the instance itself takes no room from its plan"
        if not is_plan_possible:
            raise PlanError("No room.")
        return Placement((), (), None)

    async def plan(order: object, remains: object, room: Room) -> Any:
        if room.cluster.links and not is_patch_possible:
            raise PlanError("No room.")
        return await planned.plan(order, remains, room)

    monkeypatch.setattr(subject_of_patches, "place_on_cluster", place)
    monkeypatch.setattr(subject_of_patches, "plan_patch", plan)
    order = order_of(tmp_path)
    remains = Remains("one", 1, cast("Any", None), frozenset(), frozenset())
    for instance, node in (("one", "n2"), ("two", "n4")):
        cluster._live.add(instance, order, SimpleNamespace(plan=None, nodes=[SimpleNamespace(node=node)]))
    bar(cluster)
    if is_plan_possible and not is_patch_possible:
        with pytest.raises(PlanError):
            asyncio.run(cluster.plan_patch(order, remains))
        assert planned.closed == 1
    else:
        room = asyncio.run(cluster.plan_patch(order, remains)).room
        links = {frozenset(("n1", "n2")): UNREACHABLE} if is_patch_possible else {}
        assert (room.cluster.links, planned.closed) == (links, 0)


@pytest.mark.parametrize("change", ["", "node", "memory", "link"])
def test_a_patch_uses_an_early_plan_if_nothing_has_changed_since(
    change: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned = Planned(monkeypatch, tmp_path)
    cluster = planned.cluster
    order = order_of(tmp_path)
    remains = Remains("one", 1, Placement((), (), None), frozenset(), frozenset({"n3"}))

    async def run() -> None:
        early = await cluster.plan_patch(order, remains)
        if change == "node":
            there: Any = SimpleNamespace(node="n2", session=2, links_port=0)
            cluster._control.membership = Membership({"n2": there})
        elif change == "memory":
            rank = SimpleNamespace(node="n2", memory_bytes=1)
            plan = SimpleNamespace(stages=[SimpleNamespace(ranks=[rank])])
            cluster._live.add("other", order, SimpleNamespace(plan=plan, nodes=()))
        elif change == "link":
            cluster._surveys._usual._found["n2", "n1"] = FoundLink("n2", "n1"), None
        await cluster.patch(order, remains, early)

    asyncio.run(run())
    assert (planned.used, planned.plans) == (([2], 2) if change else ([1], 1))
    assert planned.closed == bool(change), "connections of a plan without use are closed"


@pytest.mark.parametrize("had", [True, False], ids=["it has layers", "it has none"])
def test_no_patch_has_layers_on_a_machine_that_was_drained_since_it_was_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, had: bool
) -> None:
    planned = Planned(monkeypatch, tmp_path)
    cluster, order = planned.cluster, order_of(tmp_path)
    before = Placement((), cast("Any", ((SimpleNamespace(site=planned),),)) if had else (), None)
    remains = Remains("one", 1, before, frozenset(), frozenset())

    async def offer(placement: Any, _offer: object) -> Any:
        """Read the model, for so long that a machine is drained."""
        cluster._control.membership = cluster._control.membership.apply(Drained("n2"))
        return placement

    monkeypatch.setattr(subject_of_patches, "offered", offer)
    if had:
        assert asyncio.run(cluster.patch(order, remains, None)).instance == "one"
    else:
        with pytest.raises(NodeDrained, match="n2 was drained while its layers were planned"):
            asyncio.run(cluster.patch(order, remains, None))


def test_an_instance_is_planned_again_if_a_machine_was_drained_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster: Any = Planned(monkeypatch, tmp_path).cluster
    members: Any = {node: SimpleNamespace(node=node, session=1, links_port=0) for node in ("n1", "n2")}
    cluster._control.membership = Membership(members)
    placed: list[str] = []

    async def return_usable(*_: object) -> Any:
        return cluster._control.membership.usable

    async def place(_order: object, membership: Membership, _sites: object) -> Any:
        placed.append(max(membership.members))
        return SimpleNamespace(nodes=[SimpleNamespace(node=placed[-1])], plan=None, ranks=())

    async def offer(placement: Any, _offer: object) -> Any:
        cluster._control.membership = cluster._control.membership.apply(Drained("n2"))
        return placement

    async def return_none(*_: object) -> None:
        pass

    monkeypatch.setattr(subject_of_patches, "offered", offer)
    monkeypatch.setattr(subject_of_patches, "new_instance", lambda _: f"demo-{len(placed)}")  # pyright: ignore[reportUnknownLambdaType, reportUnknownArgumentType]
    cluster._attending, cluster._place = return_usable, place
    cluster._left.look_once = cluster._left.adopt = return_none
    epoch = asyncio.run(cluster.next_epoch(order_of(tmp_path)))
    assert (epoch.instance, placed, {*cluster._live.names}) == ("demo-2", ["n2", "n1"], {"demo-2"})


def test_an_early_plan_is_closed_if_the_model_must_be_loaded_as_a_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned = Planned(monkeypatch, tmp_path)
    cluster = planned.cluster
    order = order_of(tmp_path)
    remains = Remains("one", 1, Placement((), (), None), frozenset(), frozenset())

    def without_barred(*_: object) -> Order:
        raise PlanError("It needs a backend that is barred.")

    async def run() -> None:
        early = await cluster.plan_patch(order, remains)
        monkeypatch.setattr(cluster._step_down, "without_barred", without_barred)
        await cluster.patch(order, remains, early)

    with pytest.raises(PlanError, match="barred"):
        asyncio.run(run())
    assert planned.closed == 1


def test_a_node_that_returns_while_the_instance_is_patched_may_have_nothing_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned = Planned(monkeypatch, tmp_path)
    cluster = planned.cluster
    order = order_of(tmp_path)
    nodes = [SimpleNamespace(node=node) for node in ("n2", "n3")]
    cluster._live.add("one", order, SimpleNamespace(plan=None, nodes=nodes))
    may_have: list[bool] = []

    async def settle(_nodes: object) -> None:
        may_have.extend(cluster._live.may_have("one", node) for node in ("n2", "n3"))

    monkeypatch.setattr(cluster._control, "settle", settle)
    remains = Remains("one", 1, Placement((), (), None), frozenset(), frozenset({"n3"}))
    asyncio.run(cluster.patch(order, remains, None))
    assert may_have == [True, False]
