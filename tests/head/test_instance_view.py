"""Recoveries of a replica: what they measure and report, and what ends them."""

# A model is composed without its files, and lives are read from the queue.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import asyncio
import logging
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tests.engine.engines import make_request, scripted
from tests.engine.successions import LOSS, Succession, run_to

from mlx_ring.core.engine_stats import Meter
from mlx_ring.core.errors import NodeDrained, NotReady
from mlx_ring.core.generation import RequestStream
from mlx_ring.engine.live_request import LiveRequest
from mlx_ring.head.instance_view import (
    MOST_LOSSES,
    PROMPT_LOSSES,
    STEADY_S,
    WINDOW_S,
    InstanceService,
    Recoveries,
)
from mlx_ring.head.model import HostedModel


class Clock:
    """A clock that tests set."""

    now = 0.0

    def __call__(self) -> float:
        return self.now

    def wait(self, seconds: float) -> None:
        self.now += seconds


def loaded(clock: Clock, meter: Meter) -> Recoveries:
    """Return the recoveries of an instance whose first load took four seconds."""
    recoveries = Recoveries("demo", meter, clock)
    recoveries.record_plan()
    clock.wait(4.0)
    recoveries.record_load()
    assert recoveries.status is None
    return recoveries


def lose(recoveries: Recoveries, clock: Clock) -> None:
    """Lose the instance, and load it again without requests."""
    recoveries.record_loss(LOSS, 0.0)
    recoveries.record_plan()
    clock.wait(1.0)
    recoveries.record_load()
    recoveries.record_resumed([])


def measured(meter: Meter) -> dict[str, float]:
    """Return the sums of the recorded parts."""
    return {part: round(seen.total, 3) for part, seen in meter.recovery_s.items() if sum(seen.counts)}


def request() -> LiveRequest:
    return cast("LiveRequest", SimpleNamespace(has_ended=False, on_resumed=None))


def answer(live: LiveRequest, *, has_token: bool = True) -> None:
    """Deliver a request's first new token, or end it without one."""
    assert live.on_resumed is not None
    live.on_resumed(has_token)


def test_a_recovery_is_measured_reported_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    clock, meter, lives = Clock(), Meter(), [request(), request()]
    recoveries, phases = loaded(clock, meter), list[tuple[str, float, float | None]]()

    def look() -> None:
        status = recoveries.status
        assert status is not None
        phases.append((status.phase, status.elapsed_s, status.remaining_s))

    with caplog.at_level(logging.INFO):
        for _ in range(2):
            recoveries.record_loss(LOSS, 0.0625)
            clock.wait(0.125)
            recoveries.record_loss(LOSS, 9.0)  # a better reason of the same loss
            look()
            clock.wait(0.125)
            recoveries.record_plan()
            clock.wait(0.5)
            look()
            clock.wait(0.5)
            recoveries.record_load()
            recoveries.record_resumed(lives)
            clock.wait(0.5)
            answer(lives[0])
            look()
            clock.wait(0.25)
            answer(lives[1])
            assert recoveries.status is None
    assert phases == [
        ("planning", 0.125, None),
        ("loading", 0.75, 3.5),
        ("replaying", 1.75, None),
        ("planning", 0.125, 0.125 + 1.0 + 0.75),
        ("loading", 0.75, 0.5 + 0.75),
        ("replaying", 1.75, 0.25),
    ]
    assert measured(meter) == {"detect": 0.125, "plan": 0.5, "load": 2.0, "replay": 1.5, "first_token": 1.0}
    assert [record.message for record in caplog.records] == 2 * [
        "Recovered demo in 2.06 s: detect 0.06 s, plan 0.25 s, load 1.00 s, replay 0.75 s; 2 requests resumed"
    ]


@pytest.mark.parametrize("phase", ["loading", "replaying"])
def test_a_loss_in_a_recovery_begins_another_one(phase: str) -> None:
    clock, meter = Clock(), Meter()
    recoveries = loaded(clock, meter)
    recoveries.record_loss(LOSS, 0.0)
    recoveries.record_plan()
    clock.wait(3.0)
    if phase == "replaying":
        recoveries.record_load()
        recoveries.record_resumed([request()])
        clock.wait(2.0)
    recoveries.record_loss(LOSS, 0.0)
    assert recoveries.status is not None
    assert (recoveries.status.phase, recoveries.status.elapsed_s) == ("planning", 0.0)
    recoveries.record_plan()
    clock.wait(1.0)
    recoveries.record_load()
    recoveries.record_resumed([])
    assert measured(meter) == {"detect": 0.0, "plan": 0.0, "load": 1.0}


def test_neither_the_first_load_nor_an_unloaded_model_is_a_recovery() -> None:
    recoveries = Recoveries("demo", Meter(), Clock())
    recoveries.record_loss(LOSS, 0.0)
    assert recoveries.status is None
    recoveries = loaded(Clock(), Meter())
    recoveries.record_loss(NotReady("The model was unloaded."), 0.0)
    assert recoveries.status is None


def test_a_resumed_request_counts_once_it_has_a_new_token() -> None:
    async def run() -> None:
        succession = Succession(scripted(b"abcdef"))
        recoveries = Recoveries("demo", succession.meter)
        recoveries.record_plan()
        succession.load()
        recoveries.record_load()
        streams = succession.submit(make_request(), make_request(5))
        run_to(succession, streams[0], 3)
        for _ in range(2):
            recoveries.record_loss(LOSS, 0.0)
            succession.lose()
            recoveries.record_plan()
            lives = list(succession.held._held)
            succession.load()
            recoveries.record_load()
            recoveries.record_resumed(lives)
            # The second loss comes before a new token.
        assert recoveries.status is not None
        succession.finish()
        assert recoveries.status is None
        assert all(text_ended(stream) for stream in streams)
        assert sum(succession.meter.recovery_s["replay"].counts) == 1

    asyncio.run(run())


def text_ended(stream: RequestStream) -> bool:
    return stream.take()[-1].finish_reason is not None


# ---- the limit


def test_pauses_grow_after_several_losses_and_pass_with_time() -> None:
    clock = Clock()
    recoveries = loaded(clock, Meter())
    pauses = list[float]()
    for _ in range(MOST_LOSSES):
        assert recoveries.refusal is None
        lose(recoveries, clock)
        pauses.append(recoveries.pause_s)
    assert pauses == [0.0] * PROMPT_LOSSES + [1.0, 2.0, 4.0, 8.0, 16.0] + [30.0] * 5
    assert str(recoveries.refusal).startswith("The model was lost 15 times in a row")
    clock.wait(WINDOW_S)
    assert (recoveries.pause_s, recoveries.refusal) == (0.0, None)


def runs_none(_home: object) -> bool:
    return False


def test_after_too_many_losses_interrupted_requests_end_and_new_ones_are_refused() -> None:
    clock = Clock()

    async def run() -> None:
        succession = Succession(scripted(b"abcdef"))
        recoveries = loaded(clock, succession.meter)
        service = SimpleNamespace(recoveries=recoveries, error=LOSS, runs=runs_none)
        model: Any = HostedModel.__new__(HostedModel)
        model.replicas = [SimpleNamespace(service=service)]
        model.settings, model.meters = SimpleNamespace(resume="on"), [succession.meter]
        model.served = SimpleNamespace(names=["demo"])
        model._held, model._has_served, model._leaving = succession.held, True, None
        model._stopping = None
        succession._hold = model.hold
        for lost in range(1, MOST_LOSSES + 1):
            succession.load()
            (stream,) = succession.submit(make_request())
            run_to(succession, stream, 2)
            lose(recoveries, clock)
            succession.lose()
            is_last = lost == MOST_LOSSES
            assert isinstance(stream.error, NotReady) == is_last
            assert model.keeps_requests == (not is_last)

    asyncio.run(run())


def test_losses_of_a_steady_instance_do_not_count() -> None:
    clock = Clock()
    recoveries = loaded(clock, Meter())
    for _ in range(2 * MOST_LOSSES):
        clock.wait(STEADY_S)
        lose(recoveries, clock)
    assert (recoveries.pause_s, recoveries.refusal) == (0.0, None)


def test_losses_do_not_count_once_the_interrupted_answers_have_continued() -> None:
    clock = Clock()
    recoveries = loaded(clock, Meter())
    for _ in range(2 * MOST_LOSSES):
        recoveries.record_loss(LOSS, 0.0)
        recoveries.record_plan()
        recoveries.record_load()
        recoveries.record_resumed([live := request()])
        answer(live)
        assert (recoveries.pause_s, recoveries.refusal) == (0.0, None)


def test_losses_count_in_a_row_however_long_each_load_takes() -> None:
    clock = Clock()
    recoveries = loaded(clock, Meter())
    for _ in range(MOST_LOSSES):
        assert recoveries.refusal is None
        recoveries.record_loss(LOSS, 0.0)
        recoveries.record_plan()
        clock.wait(WINDOW_S / 2)
        recoveries.record_load()
        recoveries.record_resumed([request()])
        # The replay takes longer than a steady instance needs, and gives no token.
        clock.wait(STEADY_S)
    recoveries.record_loss(LOSS, 0.0)
    assert recoveries.refusal is not None


def test_an_answer_that_ends_without_a_token_is_no_success(caplog: pytest.LogCaptureFixture) -> None:
    clock, meter = Clock(), Meter()
    recoveries = loaded(clock, meter)
    for _ in range(PROMPT_LOSSES + 1):
        recoveries.record_loss(LOSS, 0.0)
        recoveries.record_plan()
        recoveries.record_load()
        recoveries.record_resumed([live := request()])
        with caplog.at_level(logging.INFO):
            answer(live, has_token=False)
    assert recoveries.status is None
    assert recoveries.pause_s == 1.0
    assert "first_token" not in measured(meter)
    assert caplog.records[-1].message.endswith("; 0 requests resumed")


def test_the_first_load_of_a_replica_that_takes_over_requests_is_no_recovery() -> None:
    meter = Meter()
    recoveries = loaded(Clock(), meter)
    live = request()
    recoveries.record_resumed([live])
    assert live.on_resumed is None
    assert not measured(meter)


def test_a_model_refuses_only_if_all_its_replicas_were_lost_too_often() -> None:
    clock = Clock()
    broken, steady = loaded(clock, Meter()), loaded(clock, Meter())
    for _ in range(MOST_LOSSES):
        lose(broken, clock)
    model: Any = HostedModel.__new__(HostedModel)
    model.replicas = [SimpleNamespace(service=SimpleNamespace(recoveries=each)) for each in (broken, steady)]
    assert model._refusal is None
    model.replicas.pop()
    assert model._refusal is not None


def test_a_loss_is_logged_once_and_an_end_on_purpose_is_no_error(caplog: pytest.LogCaptureFixture) -> None:
    service = InstanceService(4, 0, Recoveries("demo", Meter()))
    with caplog.at_level(logging.INFO):
        for error in (
            LOSS,
            LOSS,
            NodeDrained("n2 is needed for something else."),
            NotReady("It is unloaded."),
        ):
            service.lose(error)
    assert [(record.levelname, record.message) for record in caplog.records] == [
        ("ERROR", str(LOSS)),
        ("INFO", "n2 is needed for something else."),
        ("INFO", "It is unloaded."),
    ]


def test_each_load_start_and_loss_wakes_those_that_wait_for_one() -> None:
    service = InstanceService(4, 0, Recoveries("demo", Meter()))
    engine: Any = SimpleNamespace(error=None, oldest_unanswered=lambda: None, lose=str)
    for change in (
        lambda: service.begin("demo-1", 1, cast("Any", None)),
        lambda: service.serve(engine),
        lambda: service.lose(LOSS),
        lambda: service.lose(NotReady("It was unloaded.")),
    ):
        waited = service.changed
        assert not waited.is_set()
        change()
        assert waited.is_set()
