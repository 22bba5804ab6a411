"""Detection of silent nodes and workers and of stuck ranks, reasons of broken links, and the scheduler's configuration from settings."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Sequence
from dataclasses import fields
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tests.eventually import run_tasks_until
from tests.head.watched_instance import FakeChild, Watching, watch_and

from mlx_ring.cluster.agent_link import LocalAgent
from mlx_ring.core.engine_stats import Policy
from mlx_ring.core.errors import NodeLost, RingError, WorkerLost, WorkerStuck
from mlx_ring.core.types import RankId
from mlx_ring.engine.engine import Engine
from mlx_ring.engine.in_flight import Unanswered
from mlx_ring.head import instance_watch as subject
from mlx_ring.head.instance_watch import StuckWatch
from mlx_ring.head.served_model import policy_of
from mlx_ring.rpc.protos import agent_pb2, hello_pb2, worker_pb2
from mlx_ring.settings.config import Settings


def unanswered(waited_s: float, step: int = 5, deadline_s: float = 30.0) -> Unanswered:
    return Unanswered(RankId(1, 0), step, waited_s, deadline_s)


def test_rank_that_is_late_twice_with_the_same_step_is_stuck() -> None:
    watch = StuckWatch()
    assert watch.look(unanswered(29.0)) is None
    assert watch.look(unanswered(31.0)) is None
    assert watch.look(unanswered(32.0)) == unanswered(32.0)


def test_after_a_pause_of_the_head_a_rank_whose_answer_has_arrived_is_not_stuck() -> None:
    watch = StuckWatch()
    assert watch.look(unanswered(500.0)) is None
    assert watch.look(unanswered(500.0, step=6)) is None
    assert watch.look(None) is None
    assert watch.look(unanswered(40.0, step=6)) is None


def test_without_a_deadline_no_rank_is_stuck() -> None:
    watch = StuckWatch()
    assert [watch.look(unanswered(1e9, deadline_s=0.0)) for _ in range(3)] == [None] * 3


def worker(*, instance: str = "demo", alive: bool = True, silent_s: float = 0.0) -> agent_pb2.WorkerState:
    return agent_pb2.WorkerState(instance=instance, alive=alive, silent_s=silent_s)


RUNNING = [worker(), worker(instance="other", alive=False)]


NONE: list[agent_pb2.WorkerState] = []


@pytest.mark.parametrize(
    ("workers", "are_alive"),
    [
        ((RUNNING, RUNNING, NONE), True),
        ((RUNNING, [worker(alive=False)], RUNNING), False),
        (([worker(), worker(silent_s=2.0)], RUNNING, RUNNING), False),
        ((RUNNING, NONE, RUNNING), False),
        ((RUNNING, None, RUNNING), False),
    ],
)
def test_broken_link_has_no_better_reason_if_the_workers_at_its_ends_run(
    monkeypatch: pytest.MonkeyPatch,
    workers: tuple[list[agent_pb2.WorkerState] | None, ...],
    *,
    are_alive: bool,
) -> None:
    monkeypatch.setattr(subject, "_ENDED_AFTER_S", 0.0)

    def agent(states: list[agent_pb2.WorkerState] | None) -> Any:
        async def look(_hello: object, _timeout_s: float) -> agent_pb2.AgentEvent | None:
            return None if states is None else agent_pb2.AgentEvent(workers=states)

        return SimpleNamespace(look=look)

    sites = [
        SimpleNamespace(node=node, link=agent(states)) for node, states in zip("abc", workers, strict=True)
    ]

    async def run() -> bool:
        placement = cast("Any", SimpleNamespace(nodes=sites, ranks=()))
        watch = subject.InstanceWatch("demo", placement, lambda _: None, lambda _: None, (), is_cluster=True)
        return await watch.are_alive("ab", hello_pb2.Hello())

    assert asyncio.run(run()) == are_alive


def test_fields_of_the_policy_are_settings_or_follow_from_some() -> None:
    settings = Settings(max_queued_requests=7, num_speculative_tokens=3, prefix_cache="off")
    policy = policy_of(settings)
    assert (policy.max_queued_requests, policy.num_speculative_tokens, policy.prefix_cache) == (7, 3, False)
    assert {each.name for each in fields(Policy)} - Settings.model_fields.keys() == {
        "steps_ahead",
        "long_chunk",
        "kv_owners",
    }


def test_a_silent_node_pauses_the_engine_until_it_speaks(monkeypatch: pytest.MonkeyPatch) -> None:
    async def act(watching: Watching) -> None:
        watching.pass_time(1.75)
        assert not watching.engine.is_paused
        watching.pass_time(1.5)
        assert watching.engine.is_paused
        assert watching.suspicions[-1] == "n2 has sent nothing for 3.2 s"
        assert watching.watch.suspects == ({"n2"}, set())
        watching.watch.on_node_message("n2")
        watching.pass_time(0.25)
        assert not watching.engine.is_paused
        assert (watching.losses, watching.suspicions[-1]) == ([], "")
        assert watching.watch.suspects == (set(), set())

    watch_and(act, monkeypatch)


def test_a_wait_that_ends_in_time_is_recorded_with_its_prediction(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)

    async def act(watching: Watching) -> None:
        watching.pass_time(2.5)
        watching.watch.on_node_message("n2")
        watching.pass_time(0.25)
        assert watching.losses == []
        taken = watching.meter.way_taken_s["wait"]
        assert (sum(taken.counts), taken.total) == (1, 0.75)
        assert 0.0 < watching.meter.way_predicted_s["wait"].total < 1.5

    watch_and(act, monkeypatch, recovery_s=2.0)
    assert re.search(
        r"Ways back of tiny-1: wait \(1\), predicted 0.\d+ s, took 0.75 s \(recovery: 2.00 s\)", caplog.text
    )


@pytest.mark.parametrize(
    ("history", "recovery_s", "lost_after_s"),
    [
        ((), None, 3.5),
        ((), 2.0, 3.5),
        ([None] * 8, 60.0, 3.5),
        ([None] * 8, None, 3.5),
        ([None] * 8, 1.0, 2.0),
        ([2.2] * 8, 1.0, 3.5),
    ],
)
def test_a_suspect_is_waited_for_while_that_is_predicted_to_be_cheaper(
    monkeypatch: pytest.MonkeyPatch,
    history: Sequence[float | None],
    recovery_s: float | None,
    lost_after_s: float,
) -> None:
    async def act(watching: Watching) -> None:
        watching.pass_time(lost_after_s - 0.25)
        assert not watching.losses
        watching.pass_time(0.25)
        (loss,) = watching.losses
        assert isinstance(loss, NodeLost)
        assert f"sent nothing for {lost_after_s:g} s" in str(loss)

    watch_and(act, monkeypatch, history=history, recovery_s=recovery_s)


def test_a_silent_agent_of_the_only_machine_is_not_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        watching = Watching(monkeypatch, is_cluster=False)
        async with watching.watch.watching(hello_pb2.Hello()):
            await watching.report()
            watching.pass_time(3.0)
            await watching.report()
            watching.pass_time(3.0)
            assert not watching.agent.is_silent
            watching.pass_time(1.0)
            assert watching.agent.suspicions == [True, False, True]
        (loss,) = watching.losses
        assert str(loss) == "The agent of n2 has sent nothing for 3.5 s."
        assert watching.agent.is_silent
        child: Any = FakeChild()
        link: Any = watching.agent
        agent = LocalAgent(child, link)
        assert not await agent.answers()
        await agent.stop()
        assert child.graces == [(0.0, False)]

    asyncio.run(run())


def test_a_node_that_stays_silent_is_lost_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async def act(watching: Watching) -> None:
        watching.pass_time(10.0)
        (loss,) = watching.losses
        assert isinstance(loss, NodeLost)
        assert str(loss) == "Node n2, which has stage 0, was lost: it sent nothing for 3.5 s."

    watch_and(act, monkeypatch)


def test_a_node_that_speaks_after_the_loss_resumes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    async def act(watching: Watching) -> None:
        watching.pass_time(4.0)
        (watching.engine.error,) = watching.losses
        watching.watch.on_node_message("n2")
        watching.pass_time(1.0)
        assert watching.engine.is_paused
        assert watching.suspicions[-1] != ""

    watch_and(act, monkeypatch)


def test_a_pause_of_the_head_is_nobody_s_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    async def act(watching: Watching) -> None:
        for _ in range(3):
            watching.now_s += 3600.0
            watching.watch.judge()
            assert not watching.engine.is_paused
        assert watching.losses == []

    watch_and(act, monkeypatch)


def test_answers_to_steps_prove_that_node_and_worker_live(monkeypatch: pytest.MonkeyPatch) -> None:
    async def act(watching: Watching) -> None:
        await watching.report(silent_s=2.2)
        for _ in range(20):
            watching.engine.answered_at = {RankId(0, 0): watching.now_s}
            watching.pass_time(0.5)
            assert not watching.engine.is_paused
        assert watching.losses == []

    watch_and(act, monkeypatch)


def test_a_silent_worker_pauses_the_engine_until_it_answers_or_is_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def act(watching: Watching) -> None:
        for silent_s, is_paused in ((1.9, False), (2.2, True), (0.0, False), (2.9, True)):
            await watching.report(silent_s)
            watching.pass_time(0.25)
            assert watching.engine.is_paused == is_paused
            assert watching.watch.suspects == (set(), {RankId(0, 0)} if is_paused else set())
        await watching.report(3.1)
        (loss,) = watching.losses
        assert isinstance(loss, WorkerStuck)
        assert loss.is_workers_own

    watch_and(act, monkeypatch)


def test_a_rank_that_loads_for_the_next_plan_is_given_ten_minutes(monkeypatch: pytest.MonkeyPatch) -> None:
    async def act(watching: Watching) -> None:
        watching.engine.loading.clear()
        for kind, seconds in (("load", 40.0), ("load", 599.0), ("load", 601.0), ("device", 40.0)):
            await watching.report(waits=worker_pb2.Wait(kind=kind, seconds=seconds))
        assert watching.engine.loading == [True, True, False, False]

    watch_and(act, monkeypatch)


def test_only_a_node_that_leaves_for_good_is_lost_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async def act(watching: Watching) -> None:
        watching.watch.on_node_left("n1", "it left the cluster", is_final=True)
        watching.watch.on_node_left("n2", "its connection was lost", is_final=False)
        assert watching.losses == []
        watching.watch.on_node_left("n2", "it left the cluster", is_final=True)
        assert len(watching.losses) == 1

    watch_and(act, monkeypatch)


def test_reports_that_break_off_continue_in_another_call(monkeypatch: pytest.MonkeyPatch) -> None:
    async def act(watching: Watching) -> None:
        watching.agent.reports.put_nowait(WorkerLost("The agent's call broke."))
        await watching.report()
        assert watching.losses == []
        for reason in ("The agent ended.", "Nothing answers."):
            watching.agent.reports.put_nowait(WorkerLost(reason))
        await run_tasks_until(lambda: watching.losses)
        assert [(type(loss), str(loss)) for loss in watching.losses] == [(NodeLost, "The agent ended.")]
        assert watching.agent.waits[-3:] == [True, False, False]

    watch_and(act, monkeypatch)


@pytest.mark.parametrize(("stays", "epoch"), [(None, 2), (7, 1)], ids=["new", "staying"])
def test_a_worker_that_dies_while_others_load_is_lost_at_once(
    monkeypatch: pytest.MonkeyPatch, stays: int | None, epoch: int
) -> None:
    async def run() -> None:
        watching = Watching(monkeypatch, stays=stays)
        async with watching.watch.watching(hello_pb2.Hello()):
            await watching.report(alive=False, epoch=1, pid=5)
            assert watching.losses == [], "it was of the epoch before"
            await watching.report(phase="loading", epoch=epoch, pid=7, silent_s=5.0)
            assert watching.losses == []
            await watching.report(alive=False, epoch=epoch, pid=7)
            (loss,) = watching.losses
            assert (type(loss), loss.node) == (WorkerLost, "n2")
            assert str(loss).endswith(
                "(pid 7) ended by signal 9 (SIGKILL) while the instance was loaded. Memory may have run out: lower "
                "--memory-utilization of n2, or end other programs there."
            )
            assert watching.watch.lost_ranks == {RankId(0, 0)}

    asyncio.run(run())


def test_workers_of_an_earlier_epoch_or_another_node_say_nothing_about_the_instance(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def run() -> None:
        watching = Watching(monkeypatch)
        async with watching.watch.watching(hello_pb2.Hello()):
            await watching.watch.begin()
            await watching.report(epoch=1)
            assert not watching.watch.first_report.done()
            await watching.report()
            assert watching.watch.first_report.done()
            await watching.report(epoch=1, alive=False)
            await watching.report(epoch=1, silent_s=9.0)
            assert watching.losses == []

    asyncio.run(run())


def test_a_worker_that_hangs_before_its_first_report_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        watching = Watching(monkeypatch)
        async with watching.watch.watching(hello_pb2.Hello()):
            await watching.watch.begin()
            await watching.report(phase="loading", silent_s=3.1)
            assert [type(loss) for loss in watching.losses] == [WorkerStuck]

    asyncio.run(run())


def test_a_node_that_leaves_for_a_moment_before_its_first_report_is_only_silent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def run() -> None:
        watching = Watching(monkeypatch)
        watching.watch.on_node_left("n2", "its connection was lost", is_final=False)
        watching.pass_time(3.0)
        assert watching.losses == []
        watching.watch.on_node_message("n2")
        watching.pass_time(3.0)
        assert watching.losses == []
        watching.pass_time(0.5)
        assert [type(loss) for loss in watching.losses] == [NodeLost]

    asyncio.run(run())


@pytest.mark.parametrize(("reported", "begun"), [(4, 5), (5, 5), (6, 6)])
def test_the_last_step_that_a_stuck_rank_has_begun_is_known(
    monkeypatch: pytest.MonkeyPatch, reported: int, begun: int
) -> None:
    """Let a rank owe step 5; it may have begun the next one before it waits for the device."""
    monkeypatch.setattr(subject, "LOOK_S", 0.0)

    def blame_late(*_: object) -> RingError:
        return WorkerStuck("Its worker is stuck.").of_worker()

    monkeypatch.setattr(subject, "blame_late", blame_late)

    async def act(watching: Watching) -> None:
        await watching.report(last_step=reported)
        assert watching.watch.begun_by_stuck == {}
        await watching.watch.find_stuck(cast("Engine", watching.engine))
        assert watching.watch.lost_ranks == {RankId(0, 0)}
        assert watching.watch.begun_by_stuck == {RankId(0, 0): begun}

    watch_and(act, monkeypatch)
