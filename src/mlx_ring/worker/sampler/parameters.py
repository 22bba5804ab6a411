"""Sampling parameters of a sequence, converted once from the wire's message."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from mlx_ring.core.errors import RequestError
from mlx_ring.core.types import PENALTIES, Sampling
from mlx_ring.rpc.sampling import decode_sampling

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from mlx_ring.rpc.protos import step_pb2

_GREEDY_BELOW = 1e-5
"""Temperature below which sampling is greedy, as in vLLM: dividing by less changes nothing."""


@dataclass(frozen=True, slots=True)
class Parameters(Sampling):
    """Sampling parameters of one sequence, and what follows from them."""

    @classmethod
    def from_message(cls, message: step_pb2.Sampling) -> Parameters:
        return decode_sampling(message, cls)

    @property
    def greedy(self) -> bool:
        return self.temperature < _GREEDY_BELOW

    @property
    def penalizes(self) -> bool:
        """True if the history changes the logits."""
        return any(getattr(self, each.name) != each.default for each in PENALTIES)

    def check(self, vocabulary: int) -> None:
        """Check that the values can be applied to `vocabulary` logits. Raises RequestError, which names the field."""
        for token, bias in self.logit_bias:
            if not 0 <= token < vocabulary:
                raise RequestError(
                    f"logit_bias names token {token}, but this model's tokens are 0 to {vocabulary - 1}.",
                    param="logit_bias",
                )
            if math.isnan(bias):
                raise RequestError(f"logit_bias of token {token} is not a number.", param="logit_bias")
        if not (math.isfinite(self.repetition_penalty) and self.repetition_penalty > 0):
            raise RequestError(
                f"repetition_penalty is {self.repetition_penalty}; give a number above 0.",
                param="repetition_penalty",
            )
        for field in fields(self):
            value: object = getattr(self, field.name)
            if isinstance(value, float) and not math.isfinite(value):
                raise RequestError(f"{field.name} is {value}; give a finite number.", param=field.name)


@dataclass(frozen=True, slots=True)
class SamplerRow:
    """One token to draw: row i of the logits is the distribution of the token at `position`."""

    sampling: Parameters
    seed: int
    """Seed of any 64 bits."""
    position: int
    """Index in the sequence (prompt and answer) of the token that is drawn."""
    tokens: Sequence[int]
    """Prompt and answer. Only tokens before `position` count, so rows of one sequence may share it."""
    prompt_length: int
    """Number of tokens in the prompt; the answer follows."""
    eos: frozenset[int] = frozenset()
    """Tokens that are barred until `min_tokens` were drawn."""
    allowed: NDArray[np.bool_] | None = None
    """(vocabulary,) true for tokens that a grammar allows here; None allows all. Tokens beyond its end are barred."""
