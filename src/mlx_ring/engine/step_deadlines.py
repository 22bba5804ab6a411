"""How long a rank may take for a step before it counts as stuck. Pure.

A deadline finds who will never answer, not who is slow. So it is many times what the step is expected to take, by
what was predicted and by what was measured, whichever is more; and never less than a time in which a machine that
is busy with something else for a moment comes back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mlx_ring.engine.stats import StepTiming

_TIMES = 20.0
"""As long as expected."""
_UNTRIED = 4.0
"""Times the least, where a stage has not done a step of the kind yet: kernels are compiled, memory is taken."""
_WEIGHT = 0.25
"""Of the newest measurement, where it is less than the mean; where it is more, it counts whole."""


@dataclass(frozen=True, slots=True)
class StepSize:
    """What is in a step, as far as its time goes."""

    rows: int
    tokens: int
    context_tokens: int
    """That a row looks back at, in the mean."""
    is_decode: bool


Predict = Callable[[int, StepSize], float]
"""Seconds that a stage, given by its number, was predicted to compute for a step."""


class StepDeadlines:
    """Learns what steps take, and says how long to wait for one."""

    def __init__(self, least_s: float, predict: Predict | None = None) -> None:
        """`least_s` is the least that is waited, for whatever step; with 0 nothing is ever late."""
        self._least_s = least_s
        self._predict = predict
        self._seconds: dict[tuple[int, bool], float] = {}
        """By stage and kind: of a decode step, of a token of a chunk."""

    def note(self, timing: StepTiming) -> None:
        """Learn from one rank's answer."""
        if not timing.tokens:
            return
        seconds = timing.compute_us / 1e6 / (1 if timing.is_decode else timing.tokens)
        kind = timing.rank.stage, timing.is_decode
        mean = self._seconds.get(kind, seconds)
        self._seconds[kind] = max(seconds, mean + _WEIGHT * (seconds - mean))

    def of(self, stage: int, size: StepSize) -> float:
        """Seconds; 0: none."""
        if not self._least_s:
            return 0.0
        measured = self._measured_s(stage, size)
        least = self._least_s * (_UNTRIED if measured is None else 1.0)
        predicted = 0.0 if self._predict is None or not size.rows else self._predict(stage, size)
        return max(least, _TIMES * max(predicted, measured or 0.0))

    def _measured_s(self, stage: int, size: StepSize) -> float | None:
        """None where nothing alike was measured. Operations alone are taken for a decode step."""
        seconds = self._seconds.get((stage, size.is_decode or not size.rows))
        return seconds if seconds is None or size.is_decode else seconds * max(1, size.tokens)
