"""Deadlines of steps in flight, learned from measured and predicted times."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from tests.engine.timings import timing

from mlx_ring.engine.in_flight import StepDeadlines, StepSize

ONE = StepSize(rows=1, tokens=1, context_tokens=0, is_decode=True)
CHUNK = StepSize(rows=1, tokens=512, context_tokens=0, is_decode=False)


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
