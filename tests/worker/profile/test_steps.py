"""Measurements in turns, by a clock that the test sets."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest

from mlx_ring.worker.profile.steps import LEAST_ROUNDS, Measured, in_turns, stopwatch


def test_all_measurements_are_made_equally_often() -> None:
    clock = iter(range(100))
    calls: list[str] = []

    def measure(name: str) -> float:
        calls.append(name)
        return 1.0

    in_turns({"a": lambda: measure("a"), "b": lambda: measure("b")}, 7.0, lambda: float(next(clock)))
    assert calls == ["a", "b"] * (len(calls) // 2)
    assert len(calls) > 2 * LEAST_ROUNDS


def test_some_rounds_are_made_even_after_the_time_is_up() -> None:
    values = iter([3.0, 1.0, 2.0])
    found = in_turns({"a": lambda: next(values)}, 0.0, lambda: 1e9)
    assert found["a"].median == 2.0


def test_median_and_spread_are_reported() -> None:
    found = Measured.of([1.0, 2.0, 3.0, 4.0, 100.0])
    assert (found.median, found.spread) == (3.0, pytest.approx(2 / 3))


@pytest.mark.parametrize("cores", [None, 0.5, 8.0])
def test_measured_seconds_are_always_positive(cores: float | None) -> None:
    assert stopwatch(2, cores)(lambda: None) > 0


@pytest.fixture
def clocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the clocks, so that wall time runs four times as fast as the process's time."""
    wall, process = itertools.count(0.0, 4.0), itertools.count(0.0, 1.0)
    both = SimpleNamespace(perf_counter=lambda: next(wall), process_time=lambda: next(process))
    monkeypatch.setattr("mlx_ring.worker.profile.steps.time", both)


@pytest.mark.usefixtures("clocks")
def test_waiting_counts_if_a_whole_core_is_granted() -> None:
    assert stopwatch(1, 1.0)(lambda: None) == 4.0


@pytest.mark.usefixtures("clocks")
def test_waiting_counts_if_several_threads_compute() -> None:
    assert stopwatch(2, 0.5)(lambda: None) == 4.0


@pytest.mark.usefixtures("clocks")
def test_waiting_does_not_count_if_less_than_a_core_is_granted() -> None:
    assert stopwatch(1, 0.5)(lambda: None) == 1.0
