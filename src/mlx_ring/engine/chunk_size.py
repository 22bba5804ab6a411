"""Size of prefill chunks, from measured times of steps. Pure.

A chunk delays every running sequence by its own time on the slowest stage. The time of a token without chunks is
known from decode steps; the promised ratio leaves the rest to chunks. Unused time is saved for some steps, so that a
short prompt is read in few chunks and a long one in small ones. A stream's tokens therefore keep the promised ratio
on average, and exceed it only by the time that the saved steps left.
"""

from __future__ import annotations

import math

from mlx_ring.core.engine_stats import StepTiming

SMALLEST_CHUNK = 2
_SMALLEST_ALONE = 160
"""Smallest chunk of a prompt alone: smaller ones would mostly read the weights."""
_CHUNKS_PER_STAGE = 6
"""Chunks per stage of a prompt alone. More of them read the weights too often; fewer fill and drain the pipeline
too slowly."""
_STEPS_SAVED = 8
"""Number of decode steps whose unused time is saved at most."""
_WEIGHT = 0.25
"""Weight of the newest measurement in a running mean."""
_MARGIN = 0.9


class RunningMean:
    """An exponentially weighted mean; None before the first value."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value: float | None = None

    def add(self, value: float) -> None:
        self.value = value if self.value is None else self.value + _WEIGHT * (value - self.value)


class ChunkSizer:
    """Costs of steps, and the sizes of chunks that follow from them."""

    def __init__(self, stages: int, *, chunk: int, max_itl_ratio: float) -> None:
        self._stages = stages
        self._chunk = chunk
        self._ratio = max_itl_ratio
        self._decode_us = [RunningMean() for _ in range(stages)]
        """Time of one decode step without drafts, by stage."""
        self._any_decode_us = [RunningMean() for _ in range(stages)]
        """Time of one decode step with or without drafts, by stage."""
        self._token_us = [RunningMean() for _ in range(stages)]
        """Time of one prefilled token, by stage."""
        self._credit_us = 0.0
        """Time saved for prompts; below 0, prompts took more than their share."""
        self._earned_us = 0.0
        """Time that the last decode step added."""
        self._charged: dict[int, float] = {}
        """Time charged for each step with chunks beside decode."""
        self._draft_us = [RunningMean() for _ in range(stages)]
        """Time that a draft token adds to a decode step, by stage."""

    def record(self, timing: StepTiming, *, is_prefill: bool) -> None:
        """Learn from one rank's answer."""
        stage = timing.rank.stage
        if not timing.tokens:
            return
        if is_prefill:
            self._token_us[stage].add(timing.compute_us / timing.tokens)
            self._settle(timing)
            return
        self._any_decode_us[stage].add(timing.compute_us)
        if timing.tokens == timing.rows:
            self._decode_us[stage].add(timing.compute_us)
        elif (plain := self._decode_us[stage].value) is not None:
            self._draft_us[stage].add(max(0.0, timing.compute_us - plain) / (timing.tokens - timing.rows))
        if stage == 0:
            self._earn()

    def chunk(self, remaining: int, prompt: int, *, beside_decode: bool) -> int:
        """Return the most tokens of a chunk, alone or beside running sequences; 0 if decode must go first.

        Args:
            remaining: tokens of the prompt that are left.
            prompt: tokens that had to be computed when the prompt began.
            beside_decode: True beside running sequences, whose tokens must not wait long.
        """
        if beside_decode:
            return self._beside_decode()
        if self._stages == 1:
            return self._chunk
        even = max(_SMALLEST_ALONE, -(-prompt // (_CHUNKS_PER_STAGE * self._stages)))
        if remaining <= _SMALLEST_ALONE * 3 // 2:
            return min(self._chunk, remaining)
        # The last chunk is small because the first stages are idle while it passes the later ones.
        return min(self._chunk, even, max(_SMALLEST_ALONE, -(-remaining // 2)))

    def _earn(self) -> None:
        """Save the time that a decode step leaves to prompts, which is the same on every stage as on the slowest."""
        slowest = max(
            plain.value or step.value or 0.0
            for plain, step in zip(self._decode_us, self._any_decode_us, strict=True)
        )
        self._earned_us = (self._ratio - 1.0) * _MARGIN * slowest
        self._credit_us = min(self._most_us, self._credit_us + self._earned_us)

    @property
    def _most_us(self) -> float:
        """Most time that can be saved."""
        return min(self._chunk * self._slowest_token_us, _STEPS_SAVED * self._earned_us)

    @property
    def _slowest_token_us(self) -> float:
        return max(mean.value or 0.0 for mean in self._token_us)

    def _beside_decode(self) -> int:
        """Return the size of a chunk beside decode; 0 until more time is saved."""
        token_us = self._slowest_token_us
        if not token_us:
            return min(self._chunk, SMALLEST_CHUNK)
        if self._credit_us < SMALLEST_CHUNK * token_us or self._is_saving:
            return 0
        return min(self._chunk, int(self._credit_us / token_us))

    @property
    def _is_saving(self) -> bool:
        """True while the time of one step is too little for a chunk, which reads the weights as a step does.

        Then the time of several steps goes into one larger chunk.
        """
        return (self._ratio - 1.0) * _MARGIN < 1.0 and self._credit_us < self._most_us

    def sent(self, step: int, tokens: int, *, beside_decode: bool) -> None:
        """Charge the prompt tokens of a step that is sent."""
        if beside_decode:
            cost_us = tokens * self._slowest_token_us
            self._credit_us -= cost_us
            self._charged[step] = cost_us

    def _settle(self, timing: StepTiming) -> None:
        """Correct the charge of a chunk to its measured time."""
        slowest = max(range(self._stages), key=lambda stage: self._token_us[stage].value or 0.0)
        if timing.rank.stage == slowest and (charged := self._charged.pop(timing.step, None)) is not None:
            self._credit_us += charged - timing.compute_us
        while self._charged and next(iter(self._charged)) < timing.step:
            del self._charged[next(iter(self._charged))]

    def verifying_cost(self, draft_tokens: int) -> float:
        """Return the relative cost of a decode step with so many draft tokens, on the stage where it is highest.

        Infinite until a step without drafts was timed; for several draft tokens, until one with a draft was.
        """
        if not draft_tokens:
            return 1.0
        plain = [mean.value for mean in self._decode_us]
        ratios = [
            1.0 + draft_tokens * draft.value / step
            for draft, step in zip(self._draft_us, plain, strict=True)
            if draft.value is not None and step
        ]
        if not all(plain) or (draft_tokens > 1 and not ratios):
            return math.inf
        return max(ratios, default=1.0)
