"""What the last stage gives back: which positions it needs, and the answers made from them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import cast

import mlx.core as mx

from mlx_ring.core.errors import ProtocolError
from mlx_ring.rpc.protos import step_pb2
from mlx_ring.worker.sampler import SamplerRow, prompt_logprobs, sample, token_logprobs
from mlx_ring.worker.sequences import OpenSequence, SequenceTable
from mlx_ring.worker.tensors import to_message

Want = step_pb2.Want


@dataclass(slots=True)
class RowOutput:
    """One row of a step on the last stage."""

    row: step_pb2.Row
    count: int
    """Tokens fed."""
    offsets: tuple[int, ...]
    """Into the row, ascending: where the model's head ran."""
    values: mx.array | None = None
    """(offsets, vocabulary) logits or (offsets, hidden); absent without wants."""

    def at(self, offsets: Sequence[int]) -> mx.array:
        """The values at some of the row's offsets."""
        if self.values is None:
            raise ProtocolError(f"Sequence {self.row.sequence} has no outputs at {list(offsets)}.")
        if tuple(offsets) == self.offsets:
            return self.values
        where = {offset: index for index, offset in enumerate(self.offsets)}
        return self.values[mx.array([where[offset] for offset in offsets])]


def wants_hidden(row: step_pb2.Row) -> bool:
    """Whether a row asks for hidden states. Raises `ProtocolError` if it asks for logits too."""
    kinds = {want.what == Want.HIDDEN for want in row.wants}
    if len(kinds) > 1:
        raise ProtocolError(f"The row of sequence {row.sequence} wants hidden states and logits at once.")
    return kinds == {True}


def wanted_offsets(row: step_pb2.Row, count: int) -> tuple[int, ...]:
    """Every offset at which some want of the row needs a result."""
    return tuple(sorted({offset for want in row.wants for offset in _offsets(want, count)}))


def _offsets(want: step_pb2.Want, count: int) -> Sequence[int]:
    if want.where == Want.LAST:
        return (count - 1,)
    if want.where == Want.ALL:
        return range(count)
    for offset in want.listed:
        if offset >= count:
            raise ProtocolError(f"A result is wanted at offset {offset} of a row of {count} tokens.")
    return want.listed


def row_results(outputs: Iterable[RowOutput], sequences: SequenceTable) -> list[step_pb2.RowResult]:
    """Sample, look up and pack what each row wants. One sampling pass serves all rows."""
    outputs = [output for output in outputs if output.row.wants]
    results = [step_pb2.RowResult(sequence=output.row.sequence) for output in outputs]
    _sample_all(outputs, results, sequences)
    for output, result in zip(outputs, results, strict=True):
        for want in output.row.wants:
            _look_up(want, output, result)
    return results


def _look_up(want: step_pb2.Want, output: RowOutput, result: step_pb2.RowResult) -> None:
    offsets = _offsets(want, output.count)
    if want.what == Want.LOGPROBS:
        if len(want.targets) != len(offsets):
            raise ProtocolError(
                f"{len(offsets)} positions want log-probabilities of {len(want.targets)} tokens."
            )
        result.logprobs.extend(prompt_logprobs(output.at(offsets), want.targets, want.top_logprobs))
    elif want.what == Want.LOGITS:
        result.logits.CopyFrom(to_message(output.at(offsets)))
    elif want.what == Want.HIDDEN:
        result.hidden.CopyFrom(to_message(output.at(offsets)))


@dataclass(frozen=True, slots=True)
class _Draw:
    """One row's share of the sampling pass."""

    output: RowOutput
    result: step_pb2.RowResult
    state: OpenSequence
    offsets: Sequence[int]


def _sample_all(
    outputs: Sequence[RowOutput], results: Sequence[step_pb2.RowResult], sequences: SequenceTable
) -> None:
    draws = [
        _Draw(output, result, sequences[output.row.sequence], _offsets(want, output.count))
        for output, result in zip(outputs, results, strict=True)
        for want in output.row.wants
        if want.what == Want.TOKEN
    ]
    if not draws:
        return
    parts = [draw.output.at(draw.offsets) for draw in draws]
    logits = parts[0] if len(parts) == 1 else mx.concatenate(parts)
    rows = [_sampler_row(draw, offset) for draw in draws for offset in draw.offsets]
    tokens = cast("list[int]", sample(logits, rows).tolist())
    begin = 0
    for draw in draws:
        end = begin + len(draw.offsets)
        accepted = _accept(tokens[begin:end], draw.output.row.draft)
        _pack(draw, logits[begin : begin + len(accepted)], accepted)
        draw.state.sampled = accepted[-1]
        begin = end


def _sampler_row(draw: _Draw, offset: int) -> SamplerRow:
    position = draw.output.row.start + offset + 1
    return draw.state.sampler_row(position)


def _accept(sampled: Sequence[int], draft: Sequence[int]) -> list[int]:
    """The sampled tokens that stand: as long as each draft token equals what was sampled in its place."""
    accepted: list[int] = []
    for index, token in enumerate(sampled):
        accepted.append(token)
        if index >= len(draft) or token != draft[index]:
            break
    return accepted


def _pack(draw: _Draw, logits: mx.array, tokens: Sequence[int]) -> None:
    sampling = draw.state.opened.sampling
    if sampling.logprobs:
        draw.result.tokens.extend(token_logprobs(logits, tokens, sampling.top_logprobs))
    else:
        draw.result.tokens.extend(step_pb2.TokenLogprobs(token=token) for token in tokens)
