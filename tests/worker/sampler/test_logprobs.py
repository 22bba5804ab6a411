"""Log-probabilities of tokens and prompts."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mlx_ring.worker.sampler import prompt_logprobs, token_logprobs

VOCABULARY = 1000


@pytest.fixture
def logits() -> mx.array:
    return mx.array(np.random.default_rng(0).normal(size=(70, VOCABULARY)).astype(np.float32) * 4)


def log_softmax(logits: mx.array) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    values = np.array(logits, dtype=np.float64)
    return values - np.log(np.exp(values).sum(axis=-1, keepdims=True))


def test_log_probabilities_are_the_log_softmax_of_the_raw_logits(logits: mx.array) -> None:
    exact = log_softmax(logits)
    tokens = [index * 7 for index in range(70)]
    for row, result in enumerate(token_logprobs(logits, tokens, 5)):
        order = np.argsort(-exact[row], kind="stable")[:5]
        assert result.token == tokens[row]
        assert result.logprob == pytest.approx(exact[row, tokens[row]], abs=2e-5)
        assert list(result.top_tokens) == order.tolist()
        assert list(result.top_logprobs) == pytest.approx(exact[row][order].tolist(), abs=2e-5)


def test_each_row_may_have_its_own_number_of_alternatives(logits: mx.array) -> None:
    results = token_logprobs(logits[:3], mx.array([1, 2, 3], dtype=mx.int32), [0, 20, 5000])
    assert [len(result.top_tokens) for result in results] == [0, 20, VOCABULARY]


def test_the_chosen_tokens_value_is_the_same_with_and_without_alternatives(logits: mx.array) -> None:
    with_top = token_logprobs(logits[:2], [5, 6], 3)
    without = token_logprobs(logits[1:2], [6], 0)
    assert without[0].logprob == with_top[1].logprob


def test_log_probabilities_of_a_prompt_in_chunks_equal_those_at_once(logits: mx.array) -> None:
    targets = [(index * 13) % VOCABULARY for index in range(70)]
    assert prompt_logprobs(logits, targets, 3) == token_logprobs(logits, targets, 3)


def test_half_precision_logits_are_normalized_in_float32(logits: mx.array) -> None:
    half = logits[:4].astype(mx.bfloat16)
    assert token_logprobs(half, [1, 2, 3, 4], 2) == token_logprobs(half.astype(mx.float32), [1, 2, 3, 4], 2)


def test_token_at_minus_infinity_has_log_probability_minus_infinity(logits: mx.array) -> None:
    masked = mx.where(mx.arange(VOCABULARY) == 3, -mx.inf, logits[:1])
    assert token_logprobs(masked, [3], 0)[0].logprob == -np.inf
