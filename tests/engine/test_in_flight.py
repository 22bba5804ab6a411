"""Steps in flight: answers of ranks in their order, the step that all wait for, and deadlines."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.engine.pipeline import PLAIN, Pipeline
from tests.engine.timings import timing

from mlx_ring.core.errors import ProtocolError
from mlx_ring.core.types import RankId
from mlx_ring.engine.in_flight import StepDeadlines, StepSize
from mlx_ring.rpc.protos import step_pb2

CHUNK_2 = replace(PLAIN, prefill_chunk=2)
ONE = StepSize(rows=1, tokens=1, context_tokens=0, is_decode=True)
CHUNK = StepSize(rows=1, tokens=512, context_tokens=0, is_decode=False)


def test_a_chunk_counts_as_in_flight_until_every_rank_has_answered() -> None:
    pipeline = Pipeline((1, 2), PLAIN)
    pipeline.add(40)
    pipeline.run(0)
    pipeline.run(1)
    assert len(pipeline.twin.sent) == 3
    pipeline.run(1, 1)
    assert len(pipeline.twin.sent) == 4


def test_an_answer_of_another_epoch_or_instance_is_dropped() -> None:
    pipeline = Pipeline((1,))
    pipeline.add(3)
    for stale in (
        step_pb2.StepDone(instance="demo", epoch=0, step=1),
        step_pb2.StepDone(instance="other", epoch=1, step=1),
    ):
        assert pipeline.scheduler.on_answer(stale, now=1.0) == []
    assert pipeline.scheduler.stats().steps_completed == 0


@pytest.mark.parametrize(
    ("stage", "rank", "step"),
    [(0, 0, 2), (0, 0, 9), (1, 0, 1), (0, 1, 1)],
    ids=["skipped step", "unsent step", "unknown stage", "unknown rank"],
)
def test_an_answer_out_of_order_or_of_an_unknown_rank_is_refused(stage: int, rank: int, step: int) -> None:
    pipeline = Pipeline((1,), CHUNK_2)
    pipeline.add(6)
    done = step_pb2.StepDone(instance="demo", epoch=1, stage=stage, rank=rank, step=step)
    with pytest.raises(ProtocolError):
        pipeline.scheduler.on_answer(done, now=1.0)


def test_the_oldest_unanswered_step_is_reported_with_rank_and_wait() -> None:
    pipeline = Pipeline((1, 1), CHUNK_2)
    assert pipeline.scheduler.in_flight.oldest_unanswered(9.0) is None
    pipeline.add(6)
    first = pipeline.scheduler.in_flight.oldest_unanswered(4.0)
    assert first is not None
    assert (first.rank, first.step, first.waited_s, first.is_late) == (RankId(0, 0), 1, 4.0, False)
    pipeline.run(0)
    second = pipeline.scheduler.in_flight.oldest_unanswered(26.0)
    assert second is not None
    assert (second.rank, second.step, second.waited_s, second.is_late) == (RankId(1, 0), 1, 25.0, True), (
        "since the first stage has answered"
    )


def test_a_step_that_waits_for_a_load_between_steps_is_late_only_past_its_end() -> None:
    pipeline = Pipeline((1, 1), CHUNK_2)
    pipeline.add(6)
    in_flight = pipeline.scheduler.in_flight
    waited: list[tuple[float, bool]] = []
    for now, is_loading in ((10.0, True), (40.0, True), (61.0, False)):
        in_flight.record_started(RankId(0, 0), 0, now, is_loading=is_loading)
        in_flight.record_started(RankId(1, 0), 0, now, is_loading=False)
        owed = in_flight.oldest_unanswered(now)
        assert owed is not None
        waited.append((owed.waited_s, owed.is_late))
    assert waited == [(0.0, False), (0.0, False), (21.0, True)]


def test_without_a_minimum_no_step_has_a_deadline() -> None:
    assert StepDeadlines(0.0, lambda _stage, _size: 9.0).of(0, ONE) == 0.0


def test_the_first_step_of_a_kind_has_a_longer_deadline() -> None:
    deadlines = StepDeadlines(30.0)
    assert deadlines.of(0, ONE) == deadlines.of(0, CHUNK) == 120.0
    deadlines.record(timing(1, 10_000))
    assert deadlines.of(0, ONE) == 30.0
    assert deadlines.of(0, CHUNK) == 120.0, "no chunk was measured yet"
    assert deadlines.of(1, ONE) == 120.0, "the other stage has no measured step"


def test_a_long_prediction_extends_the_deadline() -> None:
    deadlines = StepDeadlines(30.0, lambda stage, size: 0.05 * size.tokens * (stage + 1))
    assert deadlines.of(0, ONE) == 120.0
    assert deadlines.of(1, CHUNK) == 20 * 51.2


def test_a_measured_time_above_the_prediction_extends_the_deadline() -> None:
    deadlines = StepDeadlines(30.0, lambda _stage, _size: 1.0)
    deadlines.record(timing(1, 4_000_000, tokens=100, is_decode=False))
    assert deadlines.of(0, CHUNK) == 20 * 512 * 0.04


def test_steps_with_only_operations_have_a_deadline_too() -> None:
    nothing = StepSize(rows=0, tokens=0, context_tokens=0, is_decode=False)
    deadlines = StepDeadlines(30.0, lambda _stage, _size: 99.0)
    assert deadlines.of(0, nothing) == 120.0
    deadlines.record(timing(1, 10_000))
    assert deadlines.of(0, nothing) == 30.0


@given(st.lists(st.integers(1, 60_000_000), min_size=1, max_size=50))
def test_a_step_ten_times_as_slow_as_the_last_one_is_never_late(times_us: list[int]) -> None:
    deadlines = StepDeadlines(30.0)
    for compute_us in times_us:
        deadlines.record(timing(1, compute_us))
    assert deadlines.of(0, ONE) > 10 * times_us[-1] / 1e6
