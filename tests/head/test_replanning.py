"""Proposals of better splits, and moves to them, with models and moves that only record what is asked of them."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.eventually import run_tasks_until
from tests.head.replanning_heads import LOOK_S, FakeHosted, Head, equal_layers, remembered
from tests.planner.clusters import model_of
from tests.planner.test_replan import REQUEST, machines

from mlx_ring.cluster.membership import Membership
from mlx_ring.core.errors import Conflict, PlanError
from mlx_ring.head import replanning as subject
from mlx_ring.head.replanning import Compared, Replanning
from mlx_ring.head.status import ClusterView
from mlx_ring.planner.place import place
from mlx_ring.planner.replan import (
    Comparison,
    StageChange,
    needs_pause,
    pause_s,
)
from mlx_ring.rpc.link_profile import LinkProfile


@pytest.fixture(autouse=True)
def sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subject, "sizes_of", equal_layers)


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
