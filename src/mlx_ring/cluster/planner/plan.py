"""A plan: which machine gets which layers, why, and what is to be expected. Values only."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from mlx_ring.core.types import LayerRange

Strategy = Literal["auto", "uniform", "memory", "compute", "balanced", "custom"]
STRATEGIES: tuple[Strategy, ...] = get_args(Strategy)
Aim = Literal["latency", "throughput"]
AIMS: tuple[Aim, ...] = get_args(Aim)


@dataclass(frozen=True, slots=True)
class StagePlan:
    """One machine's part."""

    node: str
    layers: LayerRange
    weight_bytes: int
    memory_bytes: int
    """Weights, KV as promised, and working memory."""
    usable_bytes: int
    token_s: float
    """One token of one stream."""
    why: str


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A machine that gets no layers."""

    node: str
    why: str


@dataclass(frozen=True, slots=True)
class Prediction:
    """What counting bytes, operations and hops gives; a limit that a running server comes near to."""

    token_s: float
    """From one token of a single stream to the next."""
    tokens_per_s: float
    """Of all the promised sequences together."""
    first_token_s: float
    """Of a prompt of `prompt_tokens`."""
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class Plan:
    """Stages in the pipeline's order."""

    model: str
    strategy: Strategy
    aim: Aim
    context_tokens: int
    sequences: int
    kv_bits: int
    stages: tuple[StagePlan, ...]
    left_out: tuple[LeftOut, ...]
    prediction: Prediction
    remarks: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        """For `--json`: names as here, units in them."""
        return asdict(self)
