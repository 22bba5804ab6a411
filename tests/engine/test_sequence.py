from __future__ import annotations

import pytest

from mlx_ring.core.errors import ContextExceeded, RequestError
from mlx_ring.core.generation import GenerateRequest
from mlx_ring.core.types import SamplingParams, TokenLogprob
from mlx_ring.engine.sequence import Limits, Sequence, make_sequence

EOS = 7
LIMITS = Limits(context_length=10, vocab_size=100, eos=frozenset({EOS}))


def make(
    sampling: SamplingParams | None = None, *, prompt: int = 4, prompt_logprobs: int | None = None
) -> Sequence:
    tokens = tuple(range(10, 10 + prompt))
    request = GenerateRequest("r", tokens, sampling or SamplingParams(), prompt_logprobs)
    return make_sequence(1, request, LIMITS, now=0.0)


def sampled(*tokens: int) -> list[TokenLogprob]:
    return [TokenLogprob(token, -1.0) for token in tokens]


def commit(sequence: Sequence, *tokens: int) -> list[int]:
    return [token.token for token in sequence.commit(sampled(*tokens), now=1.0)]


@pytest.mark.parametrize(
    ("sampling", "param"),
    [
        (SamplingParams(logit_bias=((100, 1.0),)), "logit_bias"),
        (SamplingParams(logit_bias=((-1, 1.0),)), "logit_bias"),
        (SamplingParams(stop_token_ids=(5, 100)), "stop_token_ids"),
        (SamplingParams(max_tokens=-1), "max_tokens"),
        (SamplingParams(min_tokens=-1), "min_tokens"),
        (SamplingParams(top_k=-1), "top_k"),
        (SamplingParams(top_logprobs=-2), "top_logprobs"),
    ],
)
def test_an_invalid_sampling_value_is_refused_by_name(sampling: SamplingParams, param: str) -> None:
    with pytest.raises(RequestError, match=param) as refused:
        make(sampling)
    assert refused.value.param == param


@pytest.mark.parametrize("prompt", [(), (100,), (-1, 3)])
def test_an_empty_prompt_or_an_unknown_token_is_refused(prompt: tuple[int, ...]) -> None:
    with pytest.raises(RequestError) as refused:
        make_sequence(1, GenerateRequest("r", prompt, SamplingParams()), LIMITS, now=0.0)
    assert refused.value.param == "prompt"


def test_a_prompt_without_room_for_an_answer_exceeds_the_context() -> None:
    with pytest.raises(ContextExceeded) as refused:
        make(prompt=10)
    assert (refused.value.prompt_tokens, refused.value.context_tokens) == (10, 10)
    assert make(prompt=9).max_length == 10


def test_a_prompt_that_fills_the_context_can_be_scored() -> None:
    sequence = make(SamplingParams(max_tokens=0), prompt=10, prompt_logprobs=0)
    assert not sequence.wants_tokens
    assert sequence.finish_reason == "length"


def test_max_length_is_bounded_by_max_tokens_and_the_context() -> None:
    assert make().max_length == 10
    assert make(SamplingParams(max_tokens=3)).max_length == 7
    assert make(SamplingParams(max_tokens=500)).max_length == 10


def test_an_answer_ends_with_its_end_token() -> None:
    sequence = make()
    assert commit(sequence, 20, EOS, 21) == [20, EOS]
    assert sequence.finish_reason == "stop"


def test_commit_drops_tokens_beyond_max_tokens() -> None:
    sequence = make(SamplingParams(max_tokens=2))
    assert commit(sequence, 20) == [20]
    assert sequence.finish_reason is None
    assert commit(sequence, 21, 22) == [21]
    assert sequence.finish_reason == "length"


def test_ignore_eos_does_not_ignore_stop_token_ids() -> None:
    sequence = make(SamplingParams(ignore_eos=True, stop_token_ids=(8,)))
    assert commit(sequence, EOS, 8, 20) == [EOS, 8]
    assert sequence.finish_reason == "stop"
