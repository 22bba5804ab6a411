"""Repeats measurements in turns, so that a machine's moods fall on all of them alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import mlx.core as mx

LEAST_ROUNDS = 3

Measurement = Callable[[], float]
"""Does something once and returns what it found: of these the median counts."""


@dataclass(frozen=True, slots=True)
class Found:
    """What one measurement gave."""

    median: float
    spread: float
    """From the first quarter to the third, over the median."""

    @classmethod
    def of(cls, values: list[float]) -> Found:
        """Of at least two values."""
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, abs(high - low) / abs(median) if median else 0.0)


def in_turns(
    measurements: Mapping[str, Measurement], until: float, clock: Callable[[], float] = time.monotonic
) -> dict[str, Found]:
    """Every measurement once a round, until the clock says so; a few rounds at least.

    Args:
        until: on the clock, seconds.
    """
    values = {name: list[float]() for name in measurements}
    rounds = 0
    while rounds < LEAST_ROUNDS or clock() < until:
        for name, measure in measurements.items():
            values[name].append(measure())
        rounds += 1
    return {name: Found.of(found) for name, found in values.items()}


Stopwatch = Callable[[Callable[[], None]], float]
"""How long something takes, once, in seconds."""


def stopwatch(threads: int, cores: float | None) -> Stopwatch:
    """By the clock; where a control group grants the one thread that computes less than a core, by the time that was granted.

    How much of a second that is depends on when the measurement falls into the group's period; planning counts with it.
    Of several threads some wait while others compute, so that the time of all tells too little.
    """
    is_part = cores is not None and cores < 1 and threads == 1 and mx.default_device() == mx.Device(mx.cpu)
    return partial(_seconds_of, time.process_time if is_part else time.perf_counter)


def _seconds_of(clock: Callable[[], float], work: Callable[[], None]) -> float:
    started = clock()
    work()
    return max(clock() - started, 1e-9)
