"""Proposals of better splits, and moves to them, with models and moves that only record what is asked of them."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.eventually import run_tasks_until
from tests.planner.clusters import cluster_of, model_of, node_of, shared_model
from tests.planner.test_replan import REQUEST, Clock, loaded_on, machines
from tests.profiles import made_up_profile

from mlx_ring.api.ops.status import ProposalStatus
from mlx_ring.api.service import Moved
from mlx_ring.cluster.membership import Member, Membership
from mlx_ring.cluster.quarantine import HungBackend
from mlx_ring.core.errors import Conflict, PlanError, RingError
from mlx_ring.core.types import LayerRange
from mlx_ring.engine.step_times import StageTimes, StepTimes
from mlx_ring.head import replanning as subject
from mlx_ring.head.moves import Choose
from mlx_ring.head.replanning import Better, Compared, Present, ReplanMode, Replanning
from mlx_ring.head.status import ClusterView
from mlx_ring.host.interfaces import TrustedInterface
from mlx_ring.models.model_source import find_model
from mlx_ring.planner.place import place
from mlx_ring.planner.profiles import ClusterProfile, ModelProfile, NodeProfile, StepRatios
from mlx_ring.planner.replan import (
    LEAST_GAIN,
    Comparison,
    Situation,
    StageChange,
    compare,
    describe,
    needs_pause,
    pause_s,
    stages_of,
)
from mlx_ring.planner.request import Demand, PlanRequest
from mlx_ring.rpc.link_profile import UNREACHABLE, LinkProfile
from mlx_ring.settings.settings_sources import load_settings

LOOK_S = 10.0


@pytest.fixture(autouse=True)
def sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    def sizes_of(*_: object) -> ModelProfile:
        return model_of(28)

    monkeypatch.setattr(subject, "sizes_of", sizes_of)


class FakeHosted:
    """Model on two equal machines, whose steps are measured at each look."""

    model_id = "demo"

    def __init__(self) -> None:
        self.settings: Any = SimpleNamespace(
            strategy="auto",
            tp=1,
            tp_shares=(),
            resume="on",
            link="grpc",
            backend="auto",
            link_step_down="implicit",
        )
        self.served: Any = SimpleNamespace(folder=None, names=["demo"])
        self.state, self.open_requests = "ready", 0
        self.steps = 0
        self.service: Any = SimpleNamespace(
            info=SimpleNamespace(name="demo-1"),
            engine=SimpleNamespace(step_times=self.times),
            recoveries=SimpleNamespace(load_s=5.0),
            placement=None,
        )
        self.replicas: list[Any] = [SimpleNamespace(service=self.service, placement=None)]
        self.instances = [self.service]
        self.is_moving = False

    def times(self) -> StepTimes:
        self.steps += 1
        return StepTimes((StageTimes(self.steps, (), ()),))


class Head(Replanning):
    """Proposals for one model, whose machines change by hand."""

    def __init__(self, mode: ReplanMode = "ask", problem: RingError | None = None) -> None:
        self.hosted, self.problem, self.moves = FakeHosted(), problem, list[str]()
        self.refusal, self.is_comparable = "", True
        self.clock = Clock()
        models = cast("Any", [self.hosted])
        super().__init__(mode, lambda: cast("Any", self), lambda: models, cast("Any", self), self.clock)
        self.now = self.beside = machines(1, 1)
        self.request = REQUEST
        self.loaded = loaded_on(self.now)

    def _why_not(self, hosted: Any) -> str:
        del hosted
        return "" if self.is_comparable else "it is loading"

    def cluster_view(self) -> ClusterView:
        return ClusterView("node-0")

    def present(self) -> Present:
        return Present(self.request, self.loaded, self.now, self.beside, self.refusal)

    def _compared(self, hosted: Any, machines: Any) -> list[Compared]:
        del hosted, machines
        return [Compared(self.hosted.replicas[0], self.present())]

    async def split_again(self, hosted: FakeHosted, choose: Choose, *, may_pause: bool) -> Moved | None:
        choice = await choose()
        if choice is None:
            return None
        if choice.refusal is not None:
            raise choice.refusal
        assert choice.replica is hosted.replicas[0]
        way = choice.way
        self.moves.append(way)
        if self.problem is not None and not may_pause:
            raise self.problem
        found = compare(Situation(model_of(28), *self.present()))
        assert found is not None
        self.loaded = stages_of(found.planned)
        self.hosted.service.info.name += "1"
        return Moved("demo", way, 2, 1.0)

    def change(self, now: ClusterProfile, beside: ClusterProfile | None = None) -> None:
        self.now, self.beside = now, beside or now

    async def look_for(self, seconds: float) -> None:
        for _ in range(int(seconds / LOOK_S)):
            await self.look(cast("Any", self.hosted))
            self.clock.now += LOOK_S


def test_a_lasting_gain_is_proposed_while_it_lasts_and_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def run() -> None:
        head = Head()
        await head.look_for(60)
        head.change(machines(1, 4))
        await head.look_for(60)
        assert not head.proposals()
        await head.look_for(60)
        (proposal,) = head.proposals()
        assert (proposal.model, proposal.way, proposal.is_due, proposal.load_s) == (
            "demo",
            "beside",
            True,
            5.0,
        )
        assert proposal.loaded is not None
        assert proposal.loaded.tokens_per_s < proposal.planned.tokens_per_s
        assert caplog.text.count("Run: mlx-ring replan demo\n") == 1
        head.change(machines(1, 1))
        await head.look_for(10)
        assert not head.proposals()
        assert not head.moves

    asyncio.run(run())


def test_a_model_moves_by_itself_where_no_answer_pauses() -> None:
    async def run() -> None:
        head = Head("auto")
        head.change(machines(1, 4))
        await head.look_for(70)
        assert head.moves == ["beside"]
        await head.look_for(600)
        assert head.moves == ["beside"]
        assert not head.proposals()

    asyncio.run(run())


def test_a_gain_has_to_pay_for_the_weights_that_are_fetched() -> None:
    """Let a fast machine join, over a fast or a slow link."""

    async def run(link: LinkProfile) -> tuple[float, float]:
        head = Head("auto")
        await head.look_for(20)
        head.change(replace(machines(1, 1, 0.1), links={}, usual_link=link))
        proposal = await head.propose(cast("Any", head.hosted))
        assert proposal is not None
        assert proposal.gain is not None
        while not head.moves and head.clock.now < 4000:
            await head.look_for(LOOK_S)
        return head.clock.now - 20, proposal.fetch_s / proposal.gain

    fast_s, least_s = asyncio.run(run(LinkProfile(100e-6, 1e10)))
    assert least_s < 10
    slow_s, least_s = asyncio.run(run(LinkProfile(100e-6, 1e7)))
    assert slow_s > least_s > fast_s


def test_a_model_that_would_pause_asks() -> None:
    async def run() -> None:
        head = Head("auto")
        head.hosted.settings.link = "ring"
        head.change(machines(1, 4), machines(1, 4, gigabytes=0.5))
        await head.look_for(120)
        assert not head.moves
        (proposal,) = head.proposals()
        assert (proposal.way, proposal.pause_s, proposal.needs_pause) == ("after", 5.0, True)
        assert "With --link ring, workers cannot get other neighbours" in str(proposal.why)
        with pytest.raises(
            Conflict, match=r"would pause for about 5 s\. .* allow that: mlx-ring replan demo --pause"
        ):
            await head.replan(cast("Any", head.hosted), may_pause=False)
        assert not head.moves
        _, moved = await head.replan(cast("Any", head.hosted), may_pause=True)
        assert moved is not None
        assert head.moves == ["after"]

    asyncio.run(run())


def test_workers_change_their_stages_by_themselves_if_the_pause_is_short(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def run() -> None:
        head = Head("auto")
        head.refusal = "--model-memory allows one."
        head.change(machines(1, 4))
        proposal = await head.propose(cast("Any", head.hosted))
        assert proposal is not None
        assert (proposal.way, proposal.why, proposal.pause_s) == ("ranges", head.refusal, 1.0)
        assert proposal.gained_bytes
        # If a machine has no room for more layers until it has dropped others, it loads them in the pause.
        found = Comparison(None, place(model_of(28), machines(1, 4), REQUEST), "ranges", "")
        change = StageChange("node-0", found.planned.stages[0].weight_bytes, fits_beside=False)
        late = replace(found, changes=(change,))
        assert pause_s(late, 5.0) == pytest.approx(6.0)
        assert (pause_s(late, None), needs_pause(late, None), needs_pause(late, 5.0)) == (None, True, True)
        assert not needs_pause(late, 3.0)
        await head.look_for(120)
        assert head.moves == ["ranges"]

    asyncio.run(run())
    assert "after a pause in which only layers that move are loaded: layers of" in caplog.text


def yielding_to(share: float) -> ClusterProfile:
    """Return two equal machines of which the second one's user leaves it a share of its speed, on a fast link."""
    first, second = machines(1, 1 / share).nodes
    cluster = cluster_of(first, replace(second, speed_share=share))
    return replace(cluster, links={}, usual_link=LinkProfile(500e-6, 1e10))


def layers_of(head: Head) -> list[int]:
    return [len(span) for span, _ in head.loaded]


def test_a_machine_that_yields_gets_fewer_layers_and_has_them_back_afterwards() -> None:
    """Let no steps be measured, because nobody asks while the user works."""

    async def run() -> None:
        head = Head("auto")
        head.hosted.service.engine.step_times = StepTimes
        await head.look_for(60)
        equal = layers_of(head)
        head.change(yielding_to(0.25))
        await head.look_for(20)
        assert head.moves == ["beside"]
        assert sum(layers_of(head)) == sum(equal)
        assert layers_of(head)[1:] < equal[1:]
        await head.look_for(600)
        assert head.moves == ["beside"]
        # Giving them back needs four times the patience.
        head.change(yielding_to(1.0))
        await head.look_for(40)
        assert head.moves == ["beside"]
        await head.look_for(10)
        assert head.moves == ["beside", "beside"]
        assert layers_of(head) == equal
        await head.look_for(600)
        assert len(head.moves) == 2

    asyncio.run(run())


def test_a_user_who_comes_before_the_first_look_counts_at_once() -> None:
    async def run() -> None:
        head = Head("auto")
        head.hosted.service.engine.step_times = StepTimes
        head.change(yielding_to(0.25))
        await head.look_for(20)
        assert head.moves == ["beside"]

    asyncio.run(run())


def test_a_user_who_leaves_during_the_move_gets_the_layers_all_the_same() -> None:
    async def run() -> None:
        head = Head("auto")
        head.hosted.service.engine.step_times = StepTimes
        await head.look_for(20)
        head.change(yielding_to(0.25))
        await head.look_for(20)
        assert head.moves == ["beside"]
        head.change(yielding_to(1.0))
        await head.look_for(50)
        assert head.moves == ["beside", "beside"]

    asyncio.run(run())


def test_a_user_who_comes_and_goes_moves_a_model_a_few_times_a_day() -> None:
    async def run() -> None:
        head = Head("auto")
        head._compare = remembered(head._compare)  # pyright: ignore[reportPrivateUsage]
        for _ in range(60):
            for share in (0.25, 1.0):
                head.change(yielding_to(share))
                await head.look_for(180)
        # Each move needs four times the patience of the one before: 10, 40 and 160 s.
        assert len(head.moves) == 3

    asyncio.run(run())


def test_less_memory_under_pressure_is_a_reason_without_a_gain() -> None:
    async def run() -> None:
        head = Head()
        await head.look_for(20)
        first, second = head.now.nodes
        head.change(cluster_of(first, replace(second, memory_bytes=second.memory_bytes // 16)))
        await head.look_for(30)
        (proposal,) = head.proposals()
        assert proposal.gain is None

    asyncio.run(run())


def test_a_failed_move_is_not_repeated_at_once(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        head = Head("auto", PlanError("There is no room."))
        head.change(machines(1, 4))
        await head.look_for(70 + 240)
        assert head.moves == ["beside"]
        assert "demo keeps its split: There is no room." in caplog.text
        await head.look_for(20)
        assert head.moves == ["beside", "beside"]

    asyncio.run(run())


def test_machines_that_join_count_sooner_than_speeds_and_without_steps() -> None:
    async def run() -> None:
        head = Head()
        head.hosted.service.engine.step_times = StepTimes
        await head.look_for(20)
        first, second = machines(1, 1).nodes
        head.change(cluster_of(first, second, node_of("new", gb_s=800, tflops=30)))
        await head.look_for(20)
        (proposal,) = head.proposals()
        assert "new" in {node for stage in proposal.planned.stages for node in stage.nodes}

    asyncio.run(run())


def test_a_machine_that_joins_before_the_first_look_counts_as_new() -> None:
    async def run() -> None:
        head = Head()
        head.hosted.service.engine.step_times = StepTimes
        plan = place(model_of(28), head.now, REQUEST)
        head.hosted.service.placement = SimpleNamespace(plan=plan)
        first, second = head.now.nodes
        head.change(cluster_of(first, second, node_of("new", gb_s=800, tflops=30)))
        await head.look_for(20)
        assert len(head.proposals()) == 1

    asyncio.run(run())


def test_memory_that_no_longer_suffices_is_said_without_a_gain() -> None:
    head = Head()
    first, second = machines(1, 1).nodes
    smaller = node_of("node-1", second.memory_bytes / 16e9)
    head.change(cluster_of(first, smaller))

    async def run() -> None:
        head.change(machines(1, 1))
        await head.look_for(10)
        head.change(cluster_of(first, smaller))
        proposal = await head.propose(cast("Any", head.hosted))
        assert proposal is not None
        assert (proposal.gain, proposal.loaded) == (None, None)

    asyncio.run(run())
    found = compare(Situation(model_of(28), *head.present(), has_less_memory=True))
    assert found is not None
    assert describe("demo", found).startswith("The machines of demo no longer have the memory")


def test_a_machine_that_is_back_gets_layers_without_a_gain_if_the_strategy_uses_all(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def run() -> None:
        head = Head("auto")
        head.request = PlanRequest(Demand(4096, 1), strategy="uniform")
        all_machines = head.now
        head.loaded = stages_of(place(model_of(28), all_machines, head.request))
        await head.look_for(30)
        # A loss, after which all layers are on the other machine.
        head.change(machines(1))
        head.loaded = stages_of(place(model_of(28), head.now, head.request))
        head.hosted.service.info.name = "demo-2"
        await head.look_for(30)
        head.change(all_machines)
        proposal = await head.propose(cast("Any", head.hosted))
        assert proposal is not None
        assert proposal.unused == ["node-1"]
        assert proposal.gain is not None
        assert proposal.gain < LEAST_GAIN
        await head.look_for(30)
        assert head.moves == ["beside"]
        assert "its strategy uses all machines" in caplog.text
        await head.look_for(300)
        assert head.moves == ["beside"]

    asyncio.run(run())


def test_a_machine_that_is_back_before_a_look_gets_layers_although_no_step_is_computed() -> None:
    async def run() -> None:
        head = Head("auto")
        head.request = PlanRequest(Demand(4096, 1), strategy="uniform")
        head.hosted.service.engine.step_times = lambda: StepTimes(())
        (first, (second, _)) = stages_of(place(model_of(28), head.now, head.request))
        head.loaded = first, (second, first[1])
        await head.look_for(10)
        assert not head.moves
        await head.look_for(10)
        assert head.moves == ["beside"]

    asyncio.run(run())


class TwoReplicas(Head):
    """Proposals for two replicas, each on two machines of its own. One may lose one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.request = PlanRequest(Demand(4096, 1), strategy="uniform")
        names = ("demo-1", "demo-2")
        services = [
            SimpleNamespace(info=SimpleNamespace(name=name), recoveries=SimpleNamespace(load_s=5.0))
            for name in names
        ]
        self.hosted.replicas = [SimpleNamespace(service=service) for service in services]
        nodes = machines(1, 1, 1, 1).nodes
        self.used: list[tuple[NodeProfile, ...]] = [nodes[:2], nodes[2:]]
        self.free: tuple[NodeProfile, ...] = ()

    def _compared(self, hosted: Any, machines: Any) -> list[Compared]:
        del hosted, machines
        found = list[Compared]()
        for replica, used in zip(self.hosted.replicas, self.used, strict=True):
            loaded = stages_of(place(model_of(28), replace(self.now, nodes=used), self.request))
            now = replace(self.now, nodes=(*used, *self.free))
            found.append(Compared(replica, Present(self.request, loaded, now, now, "")))
        return found


@pytest.mark.parametrize("lost", [0, 1])
def test_a_machine_that_is_back_goes_to_the_replica_with_fewer_machines(lost: int) -> None:
    async def run() -> None:
        head = TwoReplicas()
        assert await head.propose(cast("Any", head.hosted)) is None
        stays, back = head.used[lost]
        head.used[lost], head.free = (stays,), (back,)
        proposal = await head.propose(cast("Any", head.hosted))
        assert proposal is not None
        assert (proposal.instance, proposal.unused) == (f"demo-{1 + lost}", [back.name])

    asyncio.run(run())


def test_the_best_split_is_kept() -> None:
    head = Head()
    assert asyncio.run(head.propose(cast("Any", head.hosted))) is None
    assert asyncio.run(head.replan(cast("Any", head.hosted), may_pause=True)) == (None, None)
    assert not head.moves


class Refused(Replanning):
    """Proposals for a model for which there may be nothing to choose."""

    def __init__(self, hosted: FakeHosted, members: int) -> None:
        nodes: Any = {
            f"n{number}": SimpleNamespace(node=f"n{number}", machine="m") for number in range(members)
        }
        view = ClusterView("n0", Membership(nodes))
        here: Any = SimpleNamespace(cluster_view=lambda: view)
        super().__init__("ask", lambda: here, lambda: cast("Any", [hosted]), cast("Any", None))


def test_it_is_said_why_there_is_nothing_to_choose() -> None:
    hosted = FakeHosted()

    def why(members: int = 2) -> str:
        return Refused(hosted, members)._why_not(cast("Any", hosted))  # pyright: ignore[reportPrivateUsage]

    assert why(0) == why(1) == "fewer than two machines may have layers"
    hosted.settings.strategy = "custom"
    assert why() == "--strategy custom gives the split"
    hosted.settings.strategy, hosted.state = "auto", "loading"
    assert why() == "it is loading"
    with pytest.raises(Conflict, match="No other split of demo can be looked for: it is loading"):
        asyncio.run(Refused(hosted, 2).propose(cast("Any", hosted)))


# ---- replicas and several models


class ReplicasHead(Head):
    """Proposals for two replicas on two machines each, of which the second one's last machine gets slow."""

    def __init__(self) -> None:
        super().__init__()
        service: Any = SimpleNamespace(
            **{**vars(self.hosted.service), "info": SimpleNamespace(name="demo-2")}
        )
        self.hosted.replicas.append(SimpleNamespace(service=service, placement=None))

    def _compared(self, hosted: Any, machines: Any) -> list[Compared]:
        del machines
        (first, second), now = hosted.replicas, self.present()
        renamed = replace(now.cluster, nodes=tuple(replace(n, name=f"b-{n.name}") for n in now.cluster.nodes))
        loaded = tuple((span, ((f"b-{name}", share),)) for span, ((name, share),) in now.loaded)
        slow = Present(now.request, loaded, renamed, renamed, "")
        return [Compared(first, now._replace(cluster=self.fast, beside=self.fast)), Compared(second, slow)]

    fast = machines(1, 1)

    async def split_again(self, hosted: FakeHosted, choose: Choose, *, may_pause: bool) -> Moved | None:
        del hosted, may_pause
        choice = await choose()
        assert choice is not None
        self.moves.append(choice.replica.service.info.name)
        return Moved("demo", choice.way, 2, 1.0)


def test_the_replica_that_gains_most_moves(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        head = ReplicasHead()
        await head.look_for(20)
        assert await head.propose(cast("Any", head.hosted)) is None
        head.change(machines(1, 4))
        await head.look_for(120)
        (proposal,) = head.proposals()
        assert (proposal.model, proposal.instance) == ("demo", "demo-2")
        assert {node for stage in proposal.planned.stages for node in stage.nodes} <= {"b-node-0", "b-node-1"}
        assert (await head.replan(cast("Any", head.hosted), may_pause=False))[1] is not None
        assert head.moves == ["demo-2"]

    asyncio.run(run())
    assert "A replica of demo would be " in caplog.text


def member(node: str) -> Member:
    return Member(node, f"{node}-machine", "", 0, "", made_up_profile(), memory_utilization=0.75, session=1)


def replica_on(*nodes: str) -> Any:
    sites = [SimpleNamespace(node=node) for node in nodes]
    ranges = [LayerRange(14 * place, 14 * place + 14) for place in range(len(nodes))]
    ranks = [[SimpleNamespace(site=site, share=1.0)] for site in sites]
    service = SimpleNamespace(error=None, view={}.get)
    return SimpleNamespace(
        service=service, placement=SimpleNamespace(nodes=sites, ranges=ranges, ranks=ranks)
    )


class Machines:
    """Machines that are connected."""

    link_profiles: Mapping[frozenset[str], LinkProfile] = MappingProxyType({})

    def __init__(self, *nodes: str) -> None:
        self.view = ClusterView("a", Membership({node: member(node) for node in nodes}))

    def cluster_view(self) -> ClusterView:
        return self.view


def hosted_on(tmp_path: Path, *replicas: Any, **changes: Any) -> FakeHosted:
    hosted = FakeHosted()
    hosted.settings = load_settings({"state_dir": str(tmp_path), **changes})
    hosted.replicas = [*replicas]
    hosted.instances = [replica.service for replica in replicas]
    return hosted


def test_a_replica_is_compared_on_its_machines_and_those_without_a_replica(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subject, "plan_request", lambda *_: REQUEST)  # pyright: ignore[reportUnknownLambdaType, reportUnknownArgumentType]
    hosted = hosted_on(tmp_path, replica_on("a", "b"), replica_on("c", "d"))
    here: Any = Machines(*"abcde")
    head = Replanning("ask", lambda: here, lambda: cast("Any", [hosted]), cast("Any", None))
    compared = head._compared(cast("Any", hosted), here)  # pyright: ignore[reportPrivateUsage]
    assert [[node.name[0] for node in now.cluster.nodes] for _, now in compared] == [[*"abe"], [*"cde"]]
    assert [[ranks[0][0][0] for _, ranks in now.loaded] for _, now in compared] == [[*"ab"], [*"cd"]]
    assert {now.request.demand.sequences for _, now in compared} == {REQUEST.demand.sequences // 2}
    hosted.replicas[0].service.error = PlanError("It is loaded again.")
    ((_, now),) = head._compared(cast("Any", hosted), here)  # pyright: ignore[reportPrivateUsage]
    assert [node.name[0] for node in now.cluster.nodes] == [*"cde"]


def test_it_is_said_for_which_models_no_split_is_looked_for(tmp_path: Path) -> None:
    here: Any = Machines(*"abc")
    models = {
        "common": hosted_on(tmp_path, replica_on("a", "b"), replica_on("b", "c")),
        "given": hosted_on(tmp_path, replica_on("a", "b"), strategy="custom", nodes=2, proportions="1,1"),
        "compared": hosted_on(tmp_path, replica_on("a", "b"), replica_on("c")),
        "loading": hosted_on(tmp_path, replica_on("a", "b"), replica_on("b", "c")),
    }
    for name, hosted in models.items():
        hosted.model_id = name
    models["loading"].state = "loading"

    def refusals(mode: ReplanMode, machines: Any) -> list[tuple[str, str]]:
        hosted: Any = [*models.values()]
        found = Replanning(mode, lambda: machines, lambda: hosted, cast("Any", None)).refusals()
        return [(each.model, each.why) for each in found]

    assert refusals("ask", here) == [
        ("common", "No other split of common can be looked for: its replicas have machines in common."),
        ("given", "No other split of given can be looked for: --strategy custom gives the split."),
    ]
    assert [model for model, why in refusals("off", here) if "--replan off" in why] == [
        *("common", "given", "compared")
    ]
    assert refusals("ask", Machines("a")) == refusals("ask", None) == []


# ---- machines that share layers

CABLE = LinkProfile(20e-6, 5e9, trusted=True)


def trusting(*nodes: str) -> Any:
    """Return machines whose cables are trusted with collectives."""
    here: Any = Machines(*nodes)
    trusted = {
        node: replace(member(node), trusted=(TrustedInterface("en5", f"10.0.8.{ord(node)}", "10.0.8.0/24"),))
        for node in nodes
    }
    here.view = replace(here.view, membership=Membership(trusted))
    here.link_profiles = {frozenset(pair): CABLE for pair in combinations(nodes, 2)}
    return here


def shared_on(tmp_path: Path, nodes: str, **changes: Any) -> FakeHosted:
    """Return a model of which two ranks, or one, share all layers."""
    hosted = hosted_on(tmp_path, replica_on(), nodes=2, trusted_interface="lo", **changes)
    hosted.served.folder = find_model("demo").folder
    placement = hosted.replicas[0].placement
    placement.nodes = [SimpleNamespace(node=node) for node in nodes]
    placement.ranges = [LayerRange(0, 8)]
    placement.ranks = [[SimpleNamespace(site=site, share=1.0) for site in placement.nodes]]
    placement.plan = None
    hosted.replicas[0].service.recoveries = SimpleNamespace(load_s=5.0)
    hosted.replicas[0].service.info = SimpleNamespace(name="demo-1")
    return hosted


def proposed(hosted: FakeHosted, here: Any) -> ProposalStatus | None:
    models: Any = [hosted]
    head = Replanning("ask", lambda: here, lambda: models, cast("Any", None))
    return asyncio.run(head.propose(models[0]))


def groups_of(found: ProposalStatus | None) -> list[list[str]] | None:
    return None if found is None else [stage.nodes for stage in found.planned.stages]


@pytest.fixture
def shared_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    def sizes_of(*_: object) -> ModelProfile:
        return shared_model(8, layer_bytes=50_000_000)

    monkeypatch.setattr(subject, "sizes_of", sizes_of)


BARRED = HungBackend("ring", None, 2, "It hung.", 1.0)
MACHINES = [*map("{}-machine".format, "ab")]


@pytest.mark.usefixtures("shared_sizes")
def test_machines_that_would_share_layers_are_proposed_unless_their_backend_hung(tmp_path: Path) -> None:
    hosted, here = shared_on(tmp_path, "a"), trusting(*"ab")
    found = proposed(hosted, here)
    assert groups_of(found) == [MACHINES]
    assert found is not None
    assert found.gain is not None
    assert found.gain > 0.15
    here.view = replace(here.view, hung=[BARRED])
    assert MACHINES not in (groups_of(proposed(hosted, here)) or [])
    hosted.settings = hosted.settings.model_copy(update={"link_step_down": "off"})
    assert groups_of(proposed(hosted, here)) == [MACHINES]


@pytest.mark.usefixtures("shared_sizes")
@pytest.mark.parametrize(("present", "planned"), [("aa", [MACHINES]), ("ab", None)])
def test_ranks_of_one_machine_are_proposed_to_spread_over_those_that_joined(
    tmp_path: Path, present: str, planned: list[list[str]] | None
) -> None:
    found = proposed(shared_on(tmp_path, present, tp=2), trusting(*"ab"))
    assert groups_of(found) == planned
    assert found is None or (found.way == "beside" and found.gain is not None and found.gain > 0.15)


def test_a_strategy_over_all_machines_is_compared_without_those_out_of_reach(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    hosted, here = shared_on(tmp_path, "a", strategy="uniform"), trusting(*"abc")
    here.link_profiles[frozenset("ac")] = here.link_profiles[frozenset("bc")] = UNREACHABLE
    here.link_profiles[frozenset("ab")] = replace(CABLE, round_trip_s=10.0)
    assert proposed(hosted, here) is None, "over a and b, it would not be faster"
    assert not caplog.records, "it is compared again and again"


def test_a_model_that_moves_for_long_delays_no_look_at_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subject, "_LOOK_S", 0.0)

    async def run() -> None:
        first, second, moves = FakeHosted(), FakeHosted(), asyncio.Event()
        looks = {first: 0, second: 0}
        head = Replanning("auto", lambda: None, lambda: cast("Any", [first, second]), cast("Any", None))

        async def look(hosted: Any) -> None:
            looks[hosted] += 1
            if hosted is first:
                await moves.wait()

        monkeypatch.setattr(head, "look", look)
        looking = asyncio.create_task(head.keep_looking())
        await run_tasks_until(lambda: looks[second] == 5)
        assert looks[first] == 1
        moves.set()
        await run_tasks_until(lambda: looks[first] > 1)
        looking.cancel()
        await asyncio.wait([looking])

    asyncio.run(run())


def test_a_machine_that_joins_without_a_gain_shortens_no_later_wait() -> None:
    async def run() -> None:
        head = Head("auto")
        await head.look_for(20)
        first, second = machines(1, 1).nodes
        slow = node_of("new", gb_s=1, tflops=0.01)
        head.change(cluster_of(first, second, slow))
        await head.look_for(20)
        head.change(cluster_of(first, replace(second, ratios=StepRatios(4, 4)), slow))
        await head.look_for(60)
        assert not head.moves
        await head.look_for(10)
        assert head.moves == ["beside"]

    asyncio.run(run())


def test_time_without_a_look_does_not_count() -> None:
    async def run() -> None:
        head = Head("auto")
        head.change(machines(1, 4))
        await head.look_for(20)
        head.clock.now += 3600
        await head.look_for(10)
        head.is_comparable = False
        await head.look_for(600)
        head.is_comparable = True
        await head.look_for(60)
        assert not head.moves
        await head.look_for(10)
        assert head.moves == ["beside"]

    asyncio.run(run())


def test_a_model_that_may_have_no_second_instance_asks_for_a_pause() -> None:
    async def run() -> None:
        head = Head()
        head.refusal = "--model-memory allows one."
        head.change(machines(1, 4))
        await head.look_for(120)
        assert not head.moves
        assert [(one.way, one.why) for one in head.proposals()] == [("ranges", "--model-memory allows one.")]
        head.hosted.settings.resume, head.hosted.open_requests = "off", 2
        with pytest.raises(Conflict, match="2 requests of demo would end, because of --resume off"):
            await head.replan(cast("Any", head.hosted), may_pause=True)
        assert not head.moves

    asyncio.run(run())


def test_the_split_that_another_caller_has_moved_to_is_not_loaded_again() -> None:
    async def run() -> None:
        head = Head()
        head.change(machines(1, 4))
        await head.look_for(120)
        assert head.proposals()
        assert (await head.replan(cast("Any", head.hosted), may_pause=False))[1] is not None
        assert not head.proposals()
        assert await head.replan(cast("Any", head.hosted), may_pause=False) == (None, None)
        assert head.moves == ["beside"]

    asyncio.run(run())


def test_the_loop_survives_errors(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    errors = [PlanError("There is no room."), ZeroDivisionError("It is broken.")]
    monkeypatch.setattr(subject, "_LOOK_S", 0.0)

    async def run() -> None:
        head = Head()

        def fail(*_: object) -> list[Compared]:
            if errors:
                raise errors.pop()
            head.is_comparable = False
            raise PlanError("There is no room.")

        monkeypatch.setattr(head, "_compared", fail)
        looking = asyncio.create_task(head.keep_looking())
        await run_tasks_until(lambda: not head.is_comparable)
        assert not looking.done()
        looking.cancel()

    asyncio.run(run())
    assert "It is broken." in caplog.text


RATIOS = st.sampled_from((1.0, 4.0))


@given(st.lists(st.tuples(RATIOS, RATIOS, st.integers(1, 60)), min_size=1, max_size=20))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_speeds_that_come_and_go_move_a_model_a_few_times_a_day(
    phases: list[tuple[float, float, int]],
) -> None:
    async def run() -> None:
        head = Head("auto")
        head._compare = remembered(head._compare)  # pyright: ignore[reportPrivateUsage]
        for first, second, looks in phases:
            head.change(machines(first, second))
            await head.look_for(looks * LOOK_S)
        # Each move needs four times the patience of the one before.
        assert len(head.moves) <= math.log(head.clock.now / 60 * 3 + 1, 4) + 1

    asyncio.run(run())


def remembered(compare_now: Callable[..., Awaitable[Better | None]]) -> Any:
    """Return a comparison that remembers what it found, because a search takes a while."""
    found: dict[object, Better | None] = {}

    async def compared(hosted: Any, replicas: list[Compared]) -> Better | None:
        ((_, now),) = replicas
        key = now.loaded, tuple(node.ratios for node in now.cluster.nodes)
        if key not in found:
            found[key] = await compare_now(hosted, replicas)
        return found[key]

    return compared
