"""Log-probabilities under the model's own distribution: raw logits, before bias, penalties and temperature.

This matches OpenAI's API and vLLM's default (`logprobs_mode="raw_logprobs"`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import mlx.core as mx

from mlx_ring.rpc.protos import step_pb2
from mlx_ring.worker.sampler.draw import largest, log_total

if TYPE_CHECKING:
    from collections.abc import Sequence

_POSITIONS_AT_ONCE = 32
"""Positions at a time, which bounds the working memory of a long prompt: some ten arrays of positions x vocabulary."""


class LazyLogprobs:
    """Lazy log-probabilities of one token for each row of (rows, vocabulary), and of the most likely ones.

    `tops` gives the number of those for each row; above the vocabulary's size it means all.
    """

    def __init__(self, logits: mx.array, tokens: mx.array, tops: Sequence[int]) -> None:
        vocabulary = logits.shape[1]
        logits = logits.astype(mx.float32)
        total = log_total(logits)
        self._tops = [min(count, vocabulary) for count in tops]
        self._tokens = tokens.astype(mx.int32)
        self._own = (mx.take_along_axis(logits, self._tokens[:, None], axis=-1) - total)[:, 0]
        self.arrays = [self._tokens, self._own]
        if most := max(self._tops, default=0):
            values, self._top_tokens = largest(logits, most)
            self._top_logprobs = values - total
            self.arrays += [self._top_tokens, self._top_logprobs]

    def read(self) -> list[step_pb2.TokenLogprobs]:
        """Evaluate, and return one for each row."""
        tokens, own = _ints(self._tokens), _floats(self._own)
        if not any(self._tops):
            return [
                step_pb2.TokenLogprobs(token=token, logprob=value)
                for token, value in zip(tokens, own, strict=True)
            ]
        top_tokens = cast("list[list[int]]", self._top_tokens.tolist())
        top_logprobs = cast("list[list[float]]", self._top_logprobs.tolist())
        rows = zip(tokens, own, self._tops, top_tokens, top_logprobs, strict=True)
        return [
            step_pb2.TokenLogprobs(
                token=token, logprob=value, top_tokens=near[:count], top_logprobs=theirs[:count]
            )
            for token, value, count, near, theirs in rows
        ]


def token_logprobs(
    logits: mx.array, tokens: mx.array | Sequence[int], top: int | Sequence[int]
) -> list[step_pb2.TokenLogprobs]:
    """Return, for each row of (rows, vocabulary), the log-probability of its token and of the `top` most likely ones.

    `top` is one number or one for each row. Evaluates.
    """
    chosen = tokens if isinstance(tokens, mx.array) else mx.array(list(tokens), mx.int32)
    return LazyLogprobs(logits, chosen, [top] * logits.shape[0] if isinstance(top, int) else top).read()


def prompt_logprobs(logits: mx.array, targets: Sequence[int], top: int) -> list[step_pb2.TokenLogprobs]:
    """Return `token_logprobs` for many positions (positions, vocabulary), a few at a time to bound memory."""
    results: list[step_pb2.TokenLogprobs] = []
    for start in range(0, len(targets), _POSITIONS_AT_ONCE):
        span = slice(start, start + _POSITIONS_AT_ONCE)
        results += token_logprobs(logits[span], targets[span], top)
    return results


def _ints(values: mx.array) -> list[int]:
    return cast("list[int]", values.tolist())


def _floats(values: mx.array) -> list[float]:
    return cast("list[float]", values.tolist())
