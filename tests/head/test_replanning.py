"""Proposals of better splits, and moves to them, with models and moves that only record what is asked of them."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tests.planner.clusters import cluster_of, model_of, node_of
from tests.planner.test_replan import REQUEST, Clock, loaded_on, machines

from mlx_ring.api.service import Moved
from mlx_ring.cluster.membership import Membership
from mlx_ring.core.errors import Conflict, PlanError, RingError
from mlx_ring.engine.step_times import StageTimes, StepTimes
from mlx_ring.head.replanning import ReplanMode, Replanning, describe
from mlx_ring.head.status import ClusterView
from mlx_ring.planner.profiles import ClusterProfile
from mlx_ring.planner.replan import Situation, compare, stages_of

LOOK_S = 10.0


class FakeHosted:
    """Model on two equal machines, whose steps are measured at each look."""

    model_id = "demo"

    def __init__(self) -> None:
        self.settings: Any = SimpleNamespace(strategy="auto", tp=1, tp_shares=())
        self.error: RingError | None = None
        self.steps = 0
        self.service: Any = SimpleNamespace(
            info=SimpleNamespace(name="demo-1"),
            engine=SimpleNamespace(step_times=self.times),
            recoveries=SimpleNamespace(last_load_s=5.0),
        )
        self.instances = [self.service]

    def times(self) -> StepTimes:
        self.steps += 1
        return StepTimes((StageTimes(self.steps, (), ()),))


class Head(Replanning):
    """Proposals for one model, whose machines change by hand."""

    def __init__(self, mode: ReplanMode = "ask", problem: RingError | None = None) -> None:
        self.hosted, self.problem, self.moves = FakeHosted(), problem, list[bool]()
        self.clock = Clock()
        models = cast("Any", [self.hosted])
        super().__init__(mode, lambda: cast("Any", self), lambda: models, cast("Any", self), self.clock)
        self.now = self.beside = machines(1, 1)
        self.loaded = loaded_on(self.now)

    def _why_not(self, hosted: Any) -> str:
        del hosted
        return ""

    def _compared(self, hosted: Any, machines: Any) -> Situation:
        del hosted, machines
        return Situation(model_of(28), REQUEST, self.loaded, self.now, self.beside)

    async def split_again(self, hosted: FakeHosted, *, may_pause: bool) -> Moved:
        self.moves.append(may_pause)
        if self.problem is not None:
            raise self.problem
        found = compare(self._compared(hosted, None))
        assert found is not None
        self.loaded = stages_of(found.planned)
        self.hosted.service.info.name += "1"
        return Moved("demo", "beside", 2, 1.0)

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
        assert caplog.text.count("Run: mlx-ring replan") == 1
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
        assert head.moves == [False]
        await head.look_for(600)
        assert head.moves == [False]
        assert not head.proposals()

    asyncio.run(run())


def test_a_model_that_would_pause_asks() -> None:
    async def run() -> None:
        head = Head("auto")
        head.change(machines(1, 4), machines(1, 4, gigabytes=0.5))
        await head.look_for(120)
        assert not head.moves
        (proposal,) = head.proposals()
        assert proposal.way == "after"
        with pytest.raises(
            Conflict, match=r"would pause for about 5 s: .* allow a pause: `mlx-ring replan --pause`"
        ):
            await head.replan(cast("Any", head.hosted), may_pause=False)
        assert not head.moves
        _, moved = await head.replan(cast("Any", head.hosted), may_pause=True)
        assert moved is not None
        assert head.moves == [True]

    asyncio.run(run())


def test_a_failed_move_is_not_repeated_at_once(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        head = Head("auto", PlanError("There is no room."))
        head.change(machines(1, 4))
        await head.look_for(70 + 240)
        assert head.moves == [False]
        assert "demo keeps its split: There is no room." in caplog.text
        await head.look_for(20)
        assert head.moves == [False, False]

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


def test_memory_that_no_longer_suffices_is_said_without_a_gain() -> None:
    head = Head()
    first, second = machines(1, 1).nodes
    smaller = node_of("node-1", second.memory_bytes / 16e9)
    head.change(cluster_of(first, smaller))
    proposal = asyncio.run(head.propose(cast("Any", head.hosted)))
    assert proposal is not None
    assert (proposal.gain, proposal.loaded) == (None, None)
    found = compare(head._compared(head.hosted, None))
    assert found is not None
    assert describe("demo", found).startswith("The machines of demo no longer have the memory")


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
        return Refused(hosted, members)._why_not(cast("Any", hosted))

    assert why(1) == "only one machine may have layers"
    hosted.settings.strategy = "custom"
    assert "--strategy custom, or --tp" in why()
    hosted.settings.strategy, hosted.error = "auto", PlanError("It is lost.")
    assert why() == "it does not serve now"
    with pytest.raises(Conflict, match="No other split of demo can be looked for: it does not serve now"):
        asyncio.run(Refused(hosted, 2).propose(cast("Any", hosted)))
