"""A plan: which machine gets which layers, why, and what is to be expected. Values only.

How many layers each machine gets by the simple strategies. Pure.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from mlx_ring.core.types import LayerRange
from mlx_ring.planner.request import Objective
from mlx_ring.settings.strategies import Strategy


@dataclass(frozen=True, slots=True)
class RankPlan:
    """One worker of a stage, and what it holds."""

    node: str
    share: float
    """Of every layer that the stage has; the shares of a stage add up to 1."""
    weight_bytes: int
    memory_bytes: int
    """Weights, KV as promised, and working memory."""
    usable_bytes: int


@dataclass(frozen=True, slots=True)
class StagePlan:
    """Some of the layers: one machine's part, or that of several that compute every layer together."""

    node: str
    """The machine of rank 0, which takes activations and hands them on."""
    layers: LayerRange
    weight_bytes: int
    memory_bytes: int
    """Weights, KV as promised, and working memory."""
    usable_bytes: int
    token_s: float
    """One token of one stream."""
    why: str
    ranks: tuple[RankPlan, ...]
    """Who computes its layers, rank 0 first. Bytes above are of all of them together."""

    @property
    def is_shared(self) -> bool:
        """Whether several ranks compute each layer."""
        return len(self.ranks) > 1


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
    objective: Objective
    context_tokens: int
    sequences: int
    kv_bits: int
    stages: tuple[StagePlan, ...]
    left_out: tuple[LeftOut, ...]
    prediction: Prediction
    remarks: tuple[str, ...]

    @property
    def kind(self) -> str:
        """What the machines do: `single`, `pipeline`, `tensor` or `hybrid`."""
        if any(stage.is_shared for stage in self.stages):
            return "tensor" if len(self.stages) == 1 else "hybrid"
        return "single" if len(self.stages) == 1 else "pipeline"

    def as_json(self) -> dict[str, Any]:
        """For `--json`: names as here, units in them."""
        fields = {"aim" if name == "objective" else name: value for name, value in asdict(self).items()}
        return {**fields, "kind": self.kind}
