"""Request for a plan: the promised load, the strategy and the objective. Values only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from mlx_ring.settings.strategies import Strategy

Objective = Literal["latency", "throughput", "first-token", "memory"]
OBJECTIVES: tuple[Objective, ...] = get_args(Objective)

_FULL_PRECISION_BITS, _SCALE_AND_BIAS_NUMBERS = 16, 2
_QUANTIZED_GROUP = 64


@dataclass(frozen=True, slots=True)
class Demand:
    """Load that a plan must be able to serve."""

    context_tokens: int
    sequences: int
    kv_bits: int = 16
    typical_tokens: int | None = None
    """Mean context of decoded tokens; None for half of `context_tokens`."""

    @property
    def mean_context_tokens(self) -> int:
        """Context of a decoded token on average, for which steps are predicted."""
        return self.context_tokens // 2 if self.typical_tokens is None else self.typical_tokens

    def kv_factor(self, number_bytes: int = 2) -> float:
        """Return the size of the KV cache relative to an unquantized one.

        Quantized groups of 64 numbers have a scale and a bias of `number_bytes` each.
        """
        if self.kv_bits >= _FULL_PRECISION_BITS:
            return 1.0
        overhead_bits = 8 * _SCALE_AND_BIAS_NUMBERS * number_bytes / _QUANTIZED_GROUP
        return (self.kv_bits + overhead_bits) / (8 * number_bytes)


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """Requirements of a plan."""

    demand: Demand
    strategy: Strategy = "auto"
    objective: Objective = "latency"
    proportions: tuple[float, ...] = ()
    """Relative numbers of layers by machine, for the strategy `custom`."""
    counts: tuple[int, ...] = ()
    """Numbers of layers by machine, for the strategy `custom`; used instead of proportions."""
    allows_tensor: bool = True
    """True if machines may compute layers together where the link between them is trusted."""
    prompt_tokens: int = 1024
    """Length of a request's prompt."""
    answer_tokens: int = 256
    """Length of a request's answer."""
    users: int = 1
    """Number of such requests at once."""

    @property
    def streams(self) -> int:
        """Number of streams at once for which times are minimized."""
        return self.demand.sequences if self.objective == "throughput" else self.users

    @property
    def minimized_tokens(self) -> int:
        """Number of answer tokens whose time `auto` minimizes after the first."""
        return 0 if self.objective == "first-token" else self.answer_tokens
