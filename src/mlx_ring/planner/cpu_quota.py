"""Machines that may compute for a part of the time only, as a container's share of the processors has it. Pure.

Linux grants a control group a quota in each period (`cpu.max`; Turner, Rao and Rao, 2010: "CPU bandwidth control for CFS").
Who has used it up waits for the next period. So a stage that finds its quota untouched computes at full speed at first,
and one that always computes gets its share: how long a step takes depends on how long it is, and on how busy the stage is.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Seconds = NDArray[np.float64]
_MOMENTS = 8
"""Of a period, at which a step may begin."""


@dataclass(frozen=True, slots=True)
class CpuQuota:
    """Part of the time of the threads that compute."""

    share: float
    """More than 0, and less than 1."""
    period_s: float

    def clock_s(self, computing_s: Seconds) -> Seconds:
        """How long so many seconds of computing last where the quota is untouched: the mean over when they may begin."""
        moments = (np.arange(_MOMENTS) + 0.5) / _MOMENTS * self.period_s
        return np.mean([self._from(moment, computing_s) for moment in moments], axis=0)

    def _from(self, moment_s: float, computing_s: Seconds) -> Seconds:
        quota, to_end = self.share * self.period_s, self.period_s - moment_s
        rest = computing_s - min(quota, to_end)
        # The last quota is used from the beginning of its period on.
        whole = np.ceil(rest / quota) - 1
        return np.where(rest <= 0, computing_s, to_end + whole * (self.period_s - quota) + rest)

    def steady_s(self, computing_s: Seconds) -> Seconds:
        """How long they last for who always computes."""
        return computing_s / self.share


def lone_stream(
    clock_s: Sequence[float],
    steady_s: Sequence[float],
    around_s: float,
    machines: Sequence[str] | None = None,
) -> tuple[list[float], float]:
    """What one stream finds: seconds of each stage, and from token to token.

    A stage's quota is untouched when a token comes around again, unless all the others together are too quick for that:
    then it makes the pace.

    Args:
        clock_s: by stage, where the quota is untouched.
        steady_s: by stage, where it always computes.
        around_s: of all hops.
        machines: of each stage; several of one machine have its quota together. Each has one of its own unless given.
    """
    unhindered = sum(clock_s) + around_s
    owners = machines or list(map(str, range(len(steady_s))))
    totals: dict[str, float] = defaultdict(float)
    for owner, steady in zip(owners, steady_s, strict=True):
        totals[owner] += steady
    slowest = max(totals, key=totals.__getitem__)
    late = max(0.0, totals[slowest] - unhindered)
    times = [
        clock + late * steady / totals[slowest] if owner == slowest else clock
        for owner, clock, steady in zip(owners, clock_s, steady_s, strict=True)
    ]
    return times, unhindered + late
