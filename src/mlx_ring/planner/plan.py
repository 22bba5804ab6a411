"""A plan: the layers of each machine, the reasons, and the predicted times. Values only."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from typing import Any, Generic, TypeVar

from mlx_ring.core.errors import PlanError
from mlx_ring.core.types import LayerRange
from mlx_ring.planner.catalogue import accuracy
from mlx_ring.planner.request import Objective
from mlx_ring.settings.strategies import Strategy

_Seconds = TypeVar("_Seconds")


@dataclass(frozen=True, slots=True)
class Times(Generic[_Seconds]):
    """Wall-clock times of a step, without and with a CPU quota in effect."""

    unhindered: _Seconds
    """Time on a machine that was idle before."""
    steady: _Seconds
    """Time on a machine that computes all the time."""


@dataclass(frozen=True, slots=True)
class RankPlan:
    """One worker of a stage."""

    node: str
    share: float
    """Share of every layer of the stage; the shares of a stage add up to 1."""
    weight_bytes: int
    memory_bytes: int
    """Weights, promised KV cache and working memory."""
    usable_bytes: int


@dataclass(frozen=True, slots=True)
class StagePlan:
    """Consecutive layers of one machine, or of several that compute each layer together."""

    node: str
    """Machine of rank 0, which receives and sends activations."""
    layers: LayerRange
    weight_bytes: int
    memory_bytes: int
    """Weights, promised KV cache and working memory."""
    usable_bytes: int
    token_s: float
    """Seconds of one token of a single stream."""
    why: str
    ranks: tuple[RankPlan, ...]
    """Workers that compute its layers, rank 0 first. The bytes above are their sums."""

    @property
    def is_shared(self) -> bool:
        """True if several ranks compute each layer."""
        return len(self.ranks) > 1


WHY_LEFT_OUT: Mapping[Objective, str] = {
    "latency": "no plan with it answers a request sooner",
    "first-token": "no plan with it has an earlier first token",
    "throughput": "no plan with it has a higher throughput",
    "memory": "with it the fullest machine would be as full",
}
"""Reason for which a machine that could have layers gets none, by objective."""


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A machine that gets no layers."""

    node: str
    why: str


@dataclass(frozen=True, slots=True)
class Prediction:
    """Times predicted by counting bytes, operations and hops; a running server comes close to them."""

    token_s: float
    """Seconds from one token of a stream to the next, with `users` streams."""
    tokens_per_s: float
    """Throughput of all promised sequences together."""
    fewer_tokens_per_s: float
    """The same of all but one of them."""
    first_token_s: float
    """Seconds to the first token of a prompt of `prompt_tokens`: of the last user's, if several arrive at once."""
    prompt_tokens: int
    request_s: float
    """Seconds of a whole request: the first token, and an answer of `answer_tokens`."""
    answer_tokens: int
    users: int = 1
    """Number of such requests at once."""

    def minimized_s(self, objective: Objective) -> float:
        """Return the seconds that an objective minimizes, without end over a broken link; less is better."""
        if objective == "throughput":
            return 1 / self.tokens_per_s if self.tokens_per_s else math.inf
        return self.first_token_s if objective == "first-token" else self.request_s


@dataclass(frozen=True, slots=True)
class Ranges:
    """Ranges in which measurements are to be expected: the prediction over and times the factor by which it may be off."""

    tokens_per_s: tuple[float, float]
    """Speed of one stream."""
    first_token_s: tuple[float, float]
    request_s: tuple[float, float]


def ranges_of(predicted: Prediction, *, is_measured: bool) -> Ranges:
    """Return the ranges of a prediction for machines that were all measured, or were not."""
    decode, prefill = (accuracy("measured" if is_measured else kind) for kind in ("decode", "prefill"))
    speed, first_s = 1 / predicted.token_s, predicted.first_token_s
    answer_s = predicted.request_s - first_s
    return Ranges(
        (speed / decode, speed * decode),
        (first_s / prefill, first_s * prefill),
        (first_s / prefill + answer_s / decode, first_s * prefill + answer_s * decode),
    )


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
        """Kind of the plan: `single`, `pipeline`, `tensor` or `hybrid`."""
        if any(stage.is_shared for stage in self.stages):
            return "tensor" if len(self.stages) == 1 else "hybrid"
        return "single" if len(self.stages) == 1 else "pipeline"

    def as_json(self) -> dict[str, Any]:
        """Return the fields for `--json`."""
        # Programs read the objective under its former name.
        fields = {"aim" if name == "objective" else name: value for name, value in asdict(self).items()}
        return {**fields, "kind": self.kind}


def nodes_of(plans: Iterable[Plan]) -> set[str]:
    """Return the names of the machines with layers."""
    return {rank.node for plan in plans for stage in plan.stages for rank in stage.ranks}


def stage_texts(plans: Iterable[Plan]) -> Iterator[str]:
    """Yield the machines and layers of each stage."""
    for plan in plans:
        for stage in plan.stages:
            yield f"{'+'.join(rank.node for rank in stage.ranks)} {stage.layers.start}-{stage.layers.end - 1}"


# ---- numbers of layers


def proportional_counts(layers: int, shares: Sequence[float]) -> tuple[int, ...]:
    """Return numbers of layers in proportion to `shares`, each at least one, by largest remainder.

    Raises:
        PlanError: a share is not positive, or there are more shares than layers.
    """
    for share in shares:
        if not 0 < share < float("inf"):
            raise PlanError(f"A share of {share} was given; every share must be more than 0.")
    if not 1 <= len(shares) <= layers:
        raise PlanError(
            f"{len(shares)} shares were given, but the model has {layers} layers: each machine needs a layer."
        )
    exact = [Fraction(share) for share in shares]
    scale = math.lcm(*(share.denominator for share in exact))
    parts = [int(share * scale) for share in exact]
    total = sum(parts)
    counts = [max(1, part * layers // total) for part in parts]
    while sum(counts) != layers:
        step = 1 if sum(counts) < layers else -1
        candidates = [place for place, count in enumerate(counts) if count + step >= 1]
        # The earlier of two with the same remainder gets the layer.
        rest = [step * (part * layers - count * total) for part, count in zip(parts, counts, strict=True)]
        place = max(candidates, key=lambda place: (rest[place], -step * place))
        counts[place] += step
    return tuple(counts)


def given_counts(layers: int, counts: Sequence[int]) -> tuple[int, ...]:
    """Return the given numbers of layers.

    Raises:
        PlanError: they do not add up to the model's layers, or one is less than one.
    """
    if sum(counts) != layers or min(counts, default=0) < 1:
        raise PlanError(
            f"The layers given are {', '.join(map(str, counts))}, which is {sum(counts)} of {layers}: "
            "each machine needs one or more, and the sum must be all layers."
        )
    return tuple(counts)
