"""Repetition of measurements in turns, so that changes of the machine's speed affect all of them alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import mlx.core as mx

LEAST_ROUNDS = 3

Measurement = Callable[[], float]
"""Function that does something once and returns a figure, of which the median counts."""


@dataclass(frozen=True, slots=True)
class Measured:
    """Result of one measurement."""

    median: float
    spread: float
    """Distance from the first quarter to the third, over the median."""

    @classmethod
    def of(cls, values: list[float]) -> Measured:
        """Summarize at least two values."""
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, abs(high - low) / abs(median) if median else 0.0)


def in_turns(
    measurements: Mapping[str, Measurement], until: float, clock: Callable[[], float] = time.monotonic
) -> dict[str, Measured]:
    """Run every measurement once a round until the time is up, but a few rounds at least.

    Args:
        until: on the clock, seconds.
    """
    values = {name: list[float]() for name in measurements}
    rounds = 0
    while rounds < LEAST_ROUNDS or clock() < until:
        for name, measure in measurements.items():
            values[name].append(measure())
        rounds += 1
    return {name: Measured.of(found) for name, found in values.items()}


Stopwatch = Callable[[Callable[[], None]], float]
"""Function that measures how long something takes, once, in seconds."""


def stopwatch(threads: int, cores: float | None) -> Stopwatch:
    """Return a stopwatch: by the clock, or by the granted time if a control group grants the computing thread less than a core.

    How much of a second that is depends on when the measurement falls into the group's period; planning counts with it.
    With several threads some wait while others compute, so the time of all is no measure.
    """
    is_part = cores is not None and cores < 1 and threads == 1 and mx.default_device() == mx.Device(mx.cpu)
    return partial(_seconds_of, time.process_time if is_part else time.perf_counter)


def _seconds_of(clock: Callable[[], float], work: Callable[[], None]) -> float:
    started = clock()
    work()
    return max(clock() - started, 1e-9)
