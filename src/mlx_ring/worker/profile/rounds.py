"""Repeats measurements in turns, so that a machine's moods fall on all of them alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

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


def seconds_of(work: Callable[[], None]) -> float:
    """How long it takes, once."""
    started = time.perf_counter()
    work()
    return max(time.perf_counter() - started, 1e-9)
