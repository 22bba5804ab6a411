"""Log-probabilities under the model's own distribution: raw logits, before bias, penalties and temperature.

That is OpenAI's meaning and vLLM's default (`logprobs_mode="raw_logprobs"`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import mlx.core as mx

from mlx_ring.rpc.protos import step_pb2
from mlx_ring.worker.sampler.weights import largest, log_total

if TYPE_CHECKING:
    from collections.abc import Sequence

_POSITIONS_AT_ONCE = 32
"""Bounds the working memory of a long prompt: some ten arrays of positions x vocabulary."""


def token_logprobs(
    logits: mx.array, tokens: mx.array | Sequence[int], top: int | Sequence[int]
) -> list[step_pb2.TokenLogprobs]:
    """For each row of (rows, vocabulary), the log-probability of its token and of the `top` most likely ones.

    `top` is one number or one for each row; above the vocabulary's size it means all. Evaluates.
    """
    rows, vocabulary = logits.shape
    tops = [min(count, vocabulary) for count in ([top] * rows if isinstance(top, int) else top)]
    logits = logits.astype(mx.float32)
    chosen = (tokens if isinstance(tokens, mx.array) else mx.array(list(tokens))).astype(mx.int32)
    total = log_total(logits)
    own = (mx.take_along_axis(logits, chosen[:, None], axis=-1) - total)[:, 0]
    most = max(tops, default=0)
    if not most:
        pairs = zip(_ints(chosen), _floats(own), strict=True)
        return [step_pb2.TokenLogprobs(token=token, logprob=value) for token, value in pairs]
    values, ids = largest(logits, most)
    top_tokens = cast("list[list[int]]", ids.tolist())
    top_logprobs = cast("list[list[float]]", (values - total).tolist())
    return [
        step_pb2.TokenLogprobs(
            token=token, logprob=value, top_tokens=near[:count], top_logprobs=theirs[:count]
        )
        for token, value, count, near, theirs in zip(
            _ints(chosen), _floats(own), tops, top_tokens, top_logprobs, strict=True
        )
    ]


def prompt_logprobs(logits: mx.array, targets: Sequence[int], top: int) -> list[step_pb2.TokenLogprobs]:
    """`token_logprobs` for many positions (positions, vocabulary), a few at a time to bound memory."""
    results: list[step_pb2.TokenLogprobs] = []
    for start in range(0, len(targets), _POSITIONS_AT_ONCE):
        span = slice(start, start + _POSITIONS_AT_ONCE)
        results += token_logprobs(logits[span], targets[span], top)
    return results


def _ints(values: mx.array) -> list[int]:
    return cast("list[int]", values.tolist())


def _floats(values: mx.array) -> list[float]:
    return cast("list[float]", values.tolist())
