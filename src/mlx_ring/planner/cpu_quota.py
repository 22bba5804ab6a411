"""CPU quotas of containers: machines that may compute for part of the time only. Pure.

Linux grants a control group a quota in each period (`cpu.max`; Turner, Rao and Rao, 2010: "CPU bandwidth control for CFS").
A group that has used up its quota waits for the next period. A stage that finds its quota unused computes at full speed
at first; one that computes all the time gets its share on average. A step's duration depends on both its length and the load.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Seconds = NDArray[np.float64]
_MOMENTS = 8
"""Number of moments in a period at which a step may begin, for averaging."""


@dataclass(frozen=True, slots=True)
class CpuQuota:
    """Part of the time that the computing threads may use."""

    share: float
    """Share between 0 and 1, both excluded."""
    period_s: float

    def clock_s(self, computing_s: Seconds) -> Seconds:
        """Return the wall-clock seconds of a computation that finds the quota unused, averaged over its start."""
        moments = (np.arange(_MOMENTS) + 0.5) / _MOMENTS * self.period_s
        return np.mean([self._from(moment, computing_s) for moment in moments], axis=0)

    def _from(self, moment_s: float, computing_s: Seconds) -> Seconds:
        quota, to_end = self.share * self.period_s, self.period_s - moment_s
        rest = computing_s - min(quota, to_end)
        # The last quota is used from the beginning of its period.
        whole = np.ceil(rest / quota) - 1
        return np.where(rest <= 0, computing_s, to_end + whole * (self.period_s - quota) + rest)

    def steady_s(self, computing_s: Seconds) -> Seconds:
        """Return the wall-clock seconds of a computation on a machine that computes all the time."""
        return computing_s / self.share


def lone_stream(
    clock_s: Sequence[float],
    steady_s: Sequence[float],
    around_s: float,
    machines: Sequence[str] | None = None,
) -> tuple[list[float], float]:
    """Return the seconds of each stage, and the seconds from token to token, for a single stream.

    A stage has its whole quota again when the next token arrives, unless the other stages together are too fast for that.
    It then sets the pace.

    Args:
        clock_s: seconds by stage, with an unused quota.
        steady_s: seconds by stage, if it computes all the time.
        around_s: seconds of all hops.
        machines: machine of each stage; stages of one machine share its quota. By default each has its own.
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
