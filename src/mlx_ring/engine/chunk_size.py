"""How large a prompt's chunk may be, from how long steps were found to take. Pure.

A chunk delays every running sequence by its own time on the slowest stage. The time that a token takes without
chunks is known from decode steps; what the promised ratio leaves over is the chunks'. What they do not use is kept for some
steps: a short prompt that comes to streams which were left in peace is read in few pieces, a long one in small ones. So a
stream's tokens take the promised ratio together, and besides no more than what so many steps before them left over.
"""

from __future__ import annotations

import math

from mlx_ring.core.engine_stats import StepTiming

SMALLEST_CHUNK = 2
_SMALLEST_ALONE = 160
"""Smaller chunks would keep a stage busy with reading its weights."""
_CHUNKS_PER_STAGE = 6
"""A prompt alone is cut into so many: with more of them reading the weights again costs more than it saves in
filling and draining the pipeline, with fewer of them the other way round."""
_STEPS_SAVED = 8
"""Time that so many decode steps leave over can be spent at once."""
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


class ChunkSizer:
    """Learns what steps cost and sizes chunks."""

    def __init__(self, stages: int, *, chunk: int, max_itl_ratio: float) -> None:
        self._stages = stages
        self._chunk = chunk
        self._ratio = max_itl_ratio
        self._decode_us = [RunningMean() for _ in range(stages)]
        """By stage: one decode step without drafts."""
        self._any_decode_us = [RunningMean() for _ in range(stages)]
        """By stage: one decode step, with drafts or without."""
        self._token_us = [RunningMean() for _ in range(stages)]
        """By stage: one token of the last chunks."""
        self._credit_us = 0.0
        """Time that running sequences owe to prompts; below 0, prompts to them."""
        self._earned_us = 0.0
        """With the last decode step."""
        self._charged: dict[int, float] = {}
        """By step with chunks beside decoding, the time that was taken for it."""
        self._draft_us = [RunningMean() for _ in range(stages)]
        """By stage: what a draft token adds to a decode step."""

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
        """Most tokens of a chunk of a prompt, alone or beside running sequences that must not wait long: there 0 is none yet.

        `prompt` is what had to be computed when it began, `remaining` what is left of it.
        """
        if beside_decode:
            return self._beside_decode()
        if self._stages == 1:
            return self._chunk
        even = max(_SMALLEST_ALONE, -(-prompt // (_CHUNKS_PER_STAGE * self._stages)))
        if remaining <= _SMALLEST_ALONE * 3 // 2:
            return min(self._chunk, remaining)
        # While the last chunk goes through the later stages, the first ones have nothing to do: it is a small one.
        return min(self._chunk, even, max(_SMALLEST_ALONE, -(-remaining // 2)))

    def _earn(self) -> None:
        """A decode step has given time to prompts: on every stage as much as on the slowest."""
        slowest = max(
            plain.value or step.value or 0.0
            for plain, step in zip(self._decode_us, self._any_decode_us, strict=True)
        )
        self._earned_us = (self._ratio - 1.0) * _MARGIN * slowest
        self._credit_us = min(self._most_us, self._credit_us + self._earned_us)

    @property
    def _most_us(self) -> float:
        """That can be saved."""
        return min(self._chunk * self._slowest_token_us, _STEPS_SAVED * self._earned_us)

    @property
    def _slowest_token_us(self) -> float:
        return max(mean.value or 0.0 for mean in self._token_us)

    def _beside_decode(self) -> int:
        """0: decoding has to earn more first."""
        token_us = self._slowest_token_us
        if not token_us:
            return min(self._chunk, SMALLEST_CHUNK)
        if self._credit_us < SMALLEST_CHUNK * token_us or self._is_saving:
            return 0
        return min(self._chunk, int(self._credit_us / token_us))

    @property
    def _is_saving(self) -> bool:
        """Whether one step's time is too little for any chunk, which reads the weights as a step does.

        Then what several steps leave over goes into one larger chunk.
        """
        return (self._ratio - 1.0) * _MARGIN < 1.0 and self._credit_us < self._most_us

    def sent(self, step: int, tokens: int, *, beside_decode: bool) -> None:
        """A step goes out with so many tokens of prompts."""
        if beside_decode:
            cost_us = tokens * self._slowest_token_us
            self._credit_us -= cost_us
            self._charged[step] = cost_us

    def _settle(self, timing: StepTiming) -> None:
        """A chunk has cost what it cost, not what it was thought to."""
        slowest = max(range(self._stages), key=lambda stage: self._token_us[stage].value or 0.0)
        if timing.rank.stage == slowest and (charged := self._charged.pop(timing.step, None)) is not None:
            self._credit_us += charged - timing.compute_us
        while self._charged and next(iter(self._charged)) < timing.step:
            del self._charged[next(iter(self._charged))]

    def verifying_cost(self, draft_tokens: int) -> float:
        """A decode step with so many draft tokens over one without, on the stage where it is dearest.

        Infinite before a step without drafts was timed; and for more than one draft token, before any was.
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
