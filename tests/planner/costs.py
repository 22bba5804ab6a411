"""Costs of a step on a stage, in seconds unless a name says microseconds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mlx_ring.rpc.protos import step_pb2


def tokens_fed(row: step_pb2.Row) -> int:
    """Return the tokens by which the row's KV cache grows."""
    return (len(row.tokens.ids) or 1) + len(row.draft)


def is_prefill(step: step_pb2.Step) -> bool:
    """Return True if the step has a part of a prompt."""
    return any(row.HasField("tokens") for row in step.rows)


@dataclass(frozen=True, slots=True)
class LinearCost:
    """A stage's time for a step by what is in it. Operations alone cost nothing."""

    per_step_s: float
    """Reading the weights once."""
    per_token_s: float
    per_context_s: float = 0.0
    """Cost of each token that a token attends to."""
    per_row_s: float = 0.0

    def __call__(self, step: step_pb2.Step) -> float:
        if not step.rows:
            return 0.0
        fed = [tokens_fed(row) for row in step.rows]
        # A row's token i looks back at `start + i` others.
        seen = sum(
            tokens * row.start + tokens * (tokens - 1) / 2 for row, tokens in zip(step.rows, fed, strict=True)
        )
        each = self.per_row_s * len(fed) + self.per_token_s * sum(fed) + self.per_context_s * seen
        return self.per_step_s + each


@dataclass(frozen=True, slots=True)
class MeasuredCost:
    """Measured mean time of a stage for a step of each kind."""

    decode_us: float
    prefill_us: float = 0.0
    """A step with a chunk of a prompt."""

    def __call__(self, step: step_pb2.Step) -> float:
        if not step.rows:
            return 0.0
        return (self.prefill_us if is_prefill(step) else self.decode_us) / 1e6


StepCost = LinearCost | MeasuredCost


@dataclass(frozen=True, slots=True)
class StageCosts:
    """A cost for each stage, as `Times.stage_s` asks for it."""

    stages: Sequence[StepCost]

    def __call__(self, stage: int, step: step_pb2.Step) -> float:
        return self.stages[stage](step)
