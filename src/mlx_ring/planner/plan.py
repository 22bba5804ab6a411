"""A plan: which machine gets which layers, why, and what is to be expected. Values only.

How many layers each machine gets by the simple strategies. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from typing import Any, Literal, get_args

from mlx_ring.core.errors import PlanError
from mlx_ring.core.types import LayerRange

Strategy = Literal["auto", "uniform", "memory", "compute", "balanced", "custom", "tensor", "hybrid"]
STRATEGIES: tuple[Strategy, ...] = get_args(Strategy)
Aim = Literal["latency", "throughput"]
AIMS: tuple[Aim, ...] = get_args(Aim)


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
    aim: Aim
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
        return {**asdict(self), "kind": self.kind}


def proportional_counts(layers: int, shares: Sequence[float]) -> tuple[int, ...]:
    """Whole numbers of layers in proportion to `shares`, one at least each: largest remainders first.

    Raises:
        PlanError: a share is not positive, or there are more shares than layers.
    """
    for share in shares:
        if not 0 < share < float("inf"):
            raise PlanError(f"A share of {share} was given; every share must be more than 0.")
    if not 1 <= len(shares) <= layers:
        raise PlanError(
            f"{len(shares)} shares were given and the model has {layers} layers: each machine needs a layer."
        )
    exact = [Fraction(share) for share in shares]
    total = sum(exact)
    wanted = [share * layers / total for share in exact]
    counts = [max(1, int(count)) for count in wanted]
    while sum(counts) != layers:
        missing = 1 if sum(counts) < layers else -1
        able = [place for place, count in enumerate(counts) if count + missing >= 1]
        # Of two that lack alike, the earlier gets the layer.
        place = max(able, key=lambda place: (missing * (wanted[place] - counts[place]), -missing * place))
        counts[place] += missing
    return tuple(counts)


def given_counts(layers: int, counts: Sequence[int]) -> tuple[int, ...]:
    """Exact numbers of layers, as somebody gave them.

    Raises:
        PlanError: they are not the model's.
    """
    if sum(counts) != layers or min(counts, default=0) < 1:
        raise PlanError(
            f"The layers given are {', '.join(map(str, counts))}, which is {sum(counts)} of {layers}: "
            "each machine needs one or more, and together they must be all."
        )
    return tuple(counts)
