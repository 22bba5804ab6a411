"""Proposals of better splits when machines yield, join, lose memory, or come back."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tests.head.replanning_heads import Head, equal_layers, remembered
from tests.planner.clusters import cluster_of, model_of, node_of
from tests.planner.test_replan import REQUEST, machines

from mlx_ring.engine.step_times import StepTimes
from mlx_ring.head import replanning as subject
from mlx_ring.planner.place import place
from mlx_ring.planner.profiles import ClusterProfile, StepRatios
from mlx_ring.planner.replan import (
    LEAST_GAIN,
    Situation,
    compare,
    describe,
    stages_of,
)
from mlx_ring.planner.request import Demand, PlanRequest
from mlx_ring.rpc.link_profile import LinkProfile


@pytest.fixture(autouse=True)
def sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subject, "sizes_of", equal_layers)


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


def test_a_machine_that_is_back_gets_layers_although_nothing_was_compared_before_its_loss() -> None:
    async def run() -> None:
        head = Head("off")
        head.request = PlanRequest(Demand(4096, 1), strategy="uniform")
        head.loaded = stages_of(place(model_of(28), machines(1), head.request))
        first = await head.propose(cast("Any", head.hosted))
        assert first is None or not first.unused
        head.hosted.replicas[0].had = {"node-0": frozenset(range(14)), "node-1": frozenset(range(14, 28))}
        proposal = await head.propose(cast("Any", head.hosted))
        assert proposal is not None
        assert proposal.unused == ["node-1"]

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
