from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_ring.core.errors import ProtocolError
from mlx_ring.core.generation import GenerateRequest
from mlx_ring.core.types import SamplingParams, TokenLogprob
from mlx_ring.engine.rows import decode_row, open_operation, prefill_row, read_result
from mlx_ring.engine.sequence import Limits, Sequence, make_sequence
from mlx_ring.rpc.protos.step_pb2 import RowResult, TokenLogprobs, Want

LIMITS = Limits(context_length=100, vocab_size=1000, eos=frozenset({7, 3}))


def make(
    prompt: int, sampling: SamplingParams | None = None, *, prompt_logprobs: int | None = None
) -> Sequence:
    tokens = tuple(range(100, 100 + prompt))
    request = GenerateRequest("r", tokens, sampling or SamplingParams(), prompt_logprobs)
    return make_sequence(5, request, LIMITS, now=0.0)


@given(st.integers(1, 40), st.integers(1, 15))
def test_chunks_score_every_prompt_token_but_the_first(prompt: int, chunk: int) -> None:
    sequence = make(prompt, prompt_logprobs=2)
    scored: list[tuple[int, int]] = []
    while not sequence.is_prefilled:
        end = min(sequence.scheduled + chunk, prompt)
        row = prefill_row(sequence, end)
        for want in row.wants:
            if want.what == Want.LOGPROBS:
                assert want.top_logprobs == 2
                scored += [(row.start + at, to) for at, to in zip(want.listed, want.targets, strict=True)]
        sequence.scheduled = end
    assert scored == [(position, 101 + position) for position in range(prompt - 1)]


def test_only_the_last_chunk_samples() -> None:
    sequence = make(5)
    assert not prefill_row(sequence, 3).wants
    sequence.scheduled = 3
    row = prefill_row(sequence, 5)
    assert (row.start, list(row.tokens.ids)) == (3, [103, 104])
    assert [(want.where, want.what) for want in row.wants] == [(Want.LAST, Want.TOKEN)]


def test_a_prompt_that_is_only_scored_samples_nothing() -> None:
    row = prefill_row(make(5, SamplingParams(max_tokens=0), prompt_logprobs=0), 5)
    assert [want.what for want in row.wants] == [Want.LOGPROBS]


def test_a_decode_row_feeds_the_last_token_where_the_kv_ends() -> None:
    sequence = make(2)
    sequence.scheduled = 2
    sequence.commit([TokenLogprob(42, -1.0)], now=1.0)
    row = decode_row(sequence)
    assert (row.sequence, row.start, row.token, row.WhichOneof("input")) == (5, 2, 42, "token")


def test_the_open_operation_has_all_sampling_parameters() -> None:
    sampling = SamplingParams(
        temperature=0.5, top_k=2**40, seed=-1, logit_bias=((3, -2.0),), min_tokens=4, stop_token_ids=(9,)
    )
    opened = open_operation(make(2, sampling)).open
    assert (opened.sequence, opened.prompt_length, opened.max_length) == (5, 2, 100)
    assert list(opened.eos) == [3, 7, 9]
    assert opened.seed == 2**64 - 1
    assert opened.sampling.top_k == 2**32 - 1
    assert dict(opened.sampling.logit_bias) == {3: -2.0}
    assert (opened.sampling.temperature, opened.sampling.min_tokens) == (0.5, 4)


def test_a_result_is_read_with_its_top_logprobs() -> None:
    row = prefill_row(make(1), 1)
    token = TokenLogprobs(token=4, logprob=-0.5, top_tokens=[4, 6], top_logprobs=[-0.5, -1.0])
    sampled, scored, _ = read_result(row, RowResult(sequence=5, tokens=[token]))
    assert sampled == (TokenLogprob(4, -0.5, ((4, -0.5), (6, -1.0))),)
    assert scored == ()


@pytest.mark.parametrize(
    "result",
    [
        None,
        RowResult(sequence=5),
        RowResult(sequence=5, tokens=[TokenLogprobs(token=4)]),
        RowResult(
            sequence=5, tokens=[TokenLogprobs(token=4, top_tokens=[1])], logprobs=[TokenLogprobs(token=101)]
        ),
    ],
)
def test_an_incomplete_result_is_refused(result: RowResult | None) -> None:
    row = prefill_row(make(2, prompt_logprobs=0), 2)
    with pytest.raises(ProtocolError):
        read_result(row, result)
