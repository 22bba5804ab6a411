"""A sequence's part of a step: what is said of it to the workers, and what they say back."""

from __future__ import annotations

from collections.abc import Iterator

from mlx_ring.core.errors import ProtocolError
from mlx_ring.core.types import TokenLogprob
from mlx_ring.engine.sequence import Sequence
from mlx_ring.rpc.protos import step_pb2
from mlx_ring.rpc.protos.step_pb2 import Want

_NEXT_TOKEN = Want(where=Want.LAST, what=Want.TOKEN)
_SEED_MASK = (1 << 64) - 1
_MOST_CANDIDATES = (1 << 32) - 1


def open_operation(sequence: Sequence) -> step_pb2.CacheOperation:
    """What makes the sequence known; said once, before its first row."""
    opened = step_pb2.Open(
        sequence=sequence.id,
        sampling=_sampling(sequence),
        seed=sequence.request.sampling.seed & _SEED_MASK,
        eos=sorted(sequence.ends),
        prompt_length=sequence.prompt_length,
        max_length=sequence.max_length,
    )
    return step_pb2.CacheOperation(open=opened)


def free_operation(sequence_id: int) -> step_pb2.CacheOperation:
    return step_pb2.CacheOperation(free=step_pb2.Free(sequence=sequence_id))


def prefill_row(sequence: Sequence, end: int) -> step_pb2.Row:
    """The prompt's tokens from where its KV ends up to `end`."""
    start = sequence.scheduled
    ids = sequence.request.prompt_tokens[start:end]
    return step_pb2.Row(
        sequence=sequence.id,
        start=start,
        tokens=step_pb2.Tokens(ids=ids),
        wants=_prefill_wants(sequence, start, end),
    )


def decode_row(sequence: Sequence) -> step_pb2.Row:
    """The token that the sequence's previous step sampled."""
    return step_pb2.Row(
        sequence=sequence.id, start=sequence.scheduled, token=sequence.output[-1], wants=[_NEXT_TOKEN]
    )


def read_result(row: step_pb2.Row, result: step_pb2.RowResult | None) -> RowReading:
    """What the last stage found for a row.

    Raises:
        ProtocolError: something that the row wants is not there.
    """
    result = step_pb2.RowResult() if result is None else result
    for want in row.wants:
        if want.what == Want.TOKEN and not result.tokens:
            raise ProtocolError(f"The last stage sampled no token for sequence {row.sequence}.")
        if want.what == Want.LOGPROBS and len(result.logprobs) != len(want.targets):
            raise ProtocolError(
                f"The last stage gave {len(result.logprobs)} of {len(want.targets)} log-probabilities "
                f"for sequence {row.sequence}."
            )
    return tuple(map(_token_logprob, result.tokens)), tuple(map(_token_logprob, result.logprobs))


RowReading = tuple[tuple[TokenLogprob, ...], tuple[TokenLogprob, ...]]
"""The sampled tokens, and the prompt's log-probabilities."""


def _prefill_wants(sequence: Sequence, start: int, end: int) -> Iterator[Want]:
    """Position p scores the prompt's token p + 1, which may begin the next chunk; the last samples."""
    top = sequence.request.prompt_logprobs
    targets = sequence.request.prompt_tokens[start + 1 : end + 1]
    if top is not None and targets:
        yield Want(
            where=Want.LISTED,
            what=Want.LOGPROBS,
            listed=range(len(targets)),
            targets=targets,
            top_logprobs=top,
        )
    if end == sequence.prompt_length and sequence.wants_tokens:
        yield _NEXT_TOKEN


def _sampling(sequence: Sequence) -> step_pb2.Sampling:
    sampling = sequence.request.sampling
    return step_pb2.Sampling(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=min(sampling.top_k, _MOST_CANDIDATES),
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        logit_bias=dict(sampling.logit_bias),
        logprobs=sampling.logprobs,
        top_logprobs=sampling.top_logprobs,
        min_tokens=min(sampling.min_tokens, sequence.max_length),
    )


def _token_logprob(given: step_pb2.TokenLogprobs) -> TokenLogprob:
    if len(given.top_tokens) != len(given.top_logprobs):
        raise ProtocolError(
            f"The last stage gave {len(given.top_tokens)} likely tokens and {len(given.top_logprobs)} "
            "log-probabilities of them."
        )
    return TokenLogprob(
        given.token, given.logprob, tuple(zip(given.top_tokens, given.top_logprobs, strict=True))
    )
