"""What the sampler needs to know of a sequence, converted once from the wire's message."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mlx_ring.core.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from mlx_ring.rpc.protos import step_pb2

_GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy, as in vLLM: dividing by them says nothing more."""


@dataclass(frozen=True, slots=True)
class Parameters:
    """`step_pb2.Sampling` with every "off" in one form: 0 for `top_k` and `min_p`, 1 for the ratios."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0

    @classmethod
    def from_message(cls, message: step_pb2.Sampling) -> Parameters:
        return cls(
            temperature=message.temperature,
            top_p=message.top_p or 1.0,
            top_k=message.top_k,
            min_p=message.min_p,
            repetition_penalty=message.repetition_penalty or 1.0,
            presence_penalty=message.presence_penalty,
            frequency_penalty=message.frequency_penalty,
            logit_bias=tuple(sorted(message.logit_bias.items())),
            min_tokens=message.min_tokens,
        )

    @property
    def greedy(self) -> bool:
        return self.temperature < _GREEDY_BELOW

    @property
    def penalises(self) -> bool:
        """Whether the history changes the logits."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    def check(self, vocabulary: int) -> None:
        """Raises RequestError, naming the field, where the values cannot be applied to `vocabulary` logits."""
        for token, bias in self.logit_bias:
            if not 0 <= token < vocabulary:
                raise RequestError(
                    f"logit_bias names token {token}, but this model's tokens are 0 to {vocabulary - 1}.",
                    param="logit_bias",
                )
            if math.isnan(bias):
                raise RequestError(f"logit_bias of token {token} is not a number.", param="logit_bias")
        for name, value in (
            ("temperature", self.temperature),
            ("top_p", self.top_p),
            ("min_p", self.min_p),
            ("presence_penalty", self.presence_penalty),
            ("frequency_penalty", self.frequency_penalty),
        ):
            if not math.isfinite(value):
                raise RequestError(f"{name} is {value}; give a finite number.", param=name)
        if not (math.isfinite(self.repetition_penalty) and self.repetition_penalty > 0):
            raise RequestError(
                f"repetition_penalty is {self.repetition_penalty}; give a number above 0.",
                param="repetition_penalty",
            )


@dataclass(frozen=True, slots=True)
class SamplerRow:
    """One token to draw: row i of the logits is the distribution of the token at `position`."""

    sampling: Parameters
    seed: int
    """Any 64 bits."""
    position: int
    """Index in the sequence (prompt and answer) of the token that is drawn."""
    tokens: Sequence[int]
    """Prompt and answer; only those before `position` count, so rows of one sequence may share it."""
    prompt_length: int
    """Tokens before this are the prompt, those after it the answer."""
    eos: frozenset[int] = frozenset()
    """Barred until `min_tokens` were drawn."""
    allowed: NDArray[np.bool_] | None = None
    """(vocabulary,): the tokens that a grammar allows here; None: all. Those beyond its end are barred."""
