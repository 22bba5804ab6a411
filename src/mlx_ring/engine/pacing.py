"""How large a prompt's chunk may be, from how long steps were found to take. Pure.

A chunk delays every running sequence by its own time on the slowest stage. The time that a token takes without
chunks is known from decode steps; what the promised ratio leaves over is the chunk's.
"""

from __future__ import annotations

from mlx_ring.engine.stats import StepTiming

SMALLEST_CHUNK = 16
_SMALLEST_ALONE = 128
"""Smaller chunks would keep a stage busy with reading its weights."""
_CHUNKS_PER_STAGE = 8
"""A prompt alone is cut so that filling and draining the pipeline cost an eighth at most."""
_WEIGHT = 0.25
"""Of the newest measurement in a running mean."""
_MARGIN = 0.9


class RunningMean:
    """An exponentially weighted mean; None before the first value."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value: float | None = None

    def add(self, value: float) -> None:
        self.value = value if self.value is None else self.value + _WEIGHT * (value - self.value)


class Pacing:
    """Learns what steps cost and sizes chunks."""

    def __init__(self, stages: int, *, chunk: int, max_itl_ratio: float) -> None:
        self._stages = stages
        self._chunk = chunk
        self._ratio = max_itl_ratio
        self._decode_us = [RunningMean() for _ in range(stages)]
        """By stage: one decode step without drafts."""
        self._token_us = [RunningMean() for _ in range(stages)]
        """By stage: one token of the last chunks."""
        self._draft_us = [RunningMean() for _ in range(stages)]
        """By stage: what a draft token adds to a decode step."""

    def note(self, timing: StepTiming, *, is_prefill: bool) -> None:
        """Learn from one rank's answer."""
        stage = timing.rank.stage
        if not timing.tokens:
            return
        if is_prefill:
            self._token_us[stage].add(timing.compute_us / timing.tokens)
        elif timing.tokens == timing.rows:
            self._decode_us[stage].add(timing.compute_us)
        elif (plain := self._decode_us[stage].value) is not None:
            self._draft_us[stage].add(max(0.0, timing.compute_us - plain) / (timing.tokens - timing.rows))

    def chunk(self, remaining: int, decode_groups: int) -> int:
        """Most tokens of a chunk now, where so many groups are decoding."""
        if decode_groups:
            return self._beside_decode(decode_groups)
        if self._stages == 1:
            return self._chunk
        even = -(-remaining // (_CHUNKS_PER_STAGE * self._stages))
        return min(self._chunk, max(_SMALLEST_ALONE, even))

    def _beside_decode(self, decode_groups: int) -> int:
        token_us = max((mean.value or 0.0 for mean in self._token_us), default=0.0)
        decode = [mean.value or 0.0 for mean in self._decode_us]
        if not token_us or not all(decode):
            return min(self._chunk, SMALLEST_CHUNK)
        cycle = max(max(decode) * decode_groups, sum(decode))
        allowed = (self._ratio - 1.0) * cycle * _MARGIN
        return int(min(self._chunk, max(SMALLEST_CHUNK, allowed / token_us)))

    def verifying_cost(self, draft_tokens: int) -> float:
        """A decode step with so many draft tokens over one without, on the stage where it is dearest; 1 if unknown."""
        ratios = [
            1.0 + draft_tokens * draft.value / plain.value
            for draft, plain in zip(self._draft_us, self._decode_us, strict=True)
            if draft.value is not None and plain.value
        ]
        return max(ratios, default=1.0)
