"""Sampling of one token for each row, and log-probabilities. Rows of one kind are drawn together, whatever their parameters.

Logit bias, `min_tokens` and penalties only read and write the entries that they change: at most the tokens of the
sequence, not the vocabulary.

Log-probabilities are those of the model's own distribution: raw logits, before bias, penalties and temperature. This
matches OpenAI's API and vLLM's default (`logprobs_mode="raw_logprobs"`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, cast

import mlx.core as mx

from mlx_ring.rpc.protos import step_pb2
from mlx_ring.worker.sampler import draw
from mlx_ring.worker.sampler.draw import largest, log_total

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mlx_ring.worker.sampler.draw import SamplerRow
    from mlx_ring.worker.tensor import Group, SplitHead

    _Draw = Callable[[mx.array, Sequence[SamplerRow]], mx.array]


@dataclass(slots=True)
class _Edits:
    """Columns of equal length: an entry's index in the flattened logits, and the changes to it."""

    place: list[int] = field(default_factory=list[int])
    bias: list[float] = field(default_factory=list[float])
    factor: list[float] = field(default_factory=list[float])
    penalty: list[float] = field(default_factory=list[float])
    barred: list[bool] = field(default_factory=list[bool])


def adjust(logits: mx.array, rows: Sequence[SamplerRow], first: int = 0) -> mx.array:
    """Adjust (rows, tokens) float32, in this order and for each row alone; `first` is the first token's id.

    - Logit bias is added (OpenAI).
    - The logits of tokens in prompt and answer are divided by the repetition penalty if positive, else
      multiplied by it (Keskar et al. 2019, arXiv:1909.05858, as in Hugging Face and vLLM).
    - The frequency penalty times a token's count in the answer, and the presence penalty if the count is not
      0, are subtracted (OpenAI).
    - The EOS set is -inf while the answer is shorter than `min_tokens`.

    Tokens without a logit here are skipped.
    """
    width = logits.shape[1]
    edits, counted = _Edits(), list[draw.CountedEffects]()
    for index, row in enumerate(rows):
        if _changes(row):
            arrays = _collect(edits, index * width - first, range(first, first + width), row)
            if arrays is not None:
                place, factor, penalty = arrays
                counted.append((place + (index * width - first), factor, penalty))
    if not counted and not edits.place:
        return logits
    flat = changed = mx.flatten(logits)
    if counted:
        place, factor, penalty = (mx.concatenate(list(column)) for column in zip(*counted, strict=True))
        value = _edited(flat[place], mx.zeros(place.shape), factor, penalty)
        changed = mx.put_along_axis(changed, place, value, axis=0)
    if edits.place:
        # These are computed from the logits before the change of the counted tokens, some of which they replace.
        place = mx.array(edits.place, dtype=mx.int64)
        factor, penalty = mx.array(edits.factor, dtype=mx.float32), mx.array(edits.penalty, dtype=mx.float32)
        value = _edited(flat[place], mx.array(edits.bias, dtype=mx.float32), factor, penalty)
        value = mx.where(mx.array(edits.barred), -mx.inf, value)
        changed = mx.put_along_axis(changed, place, value, axis=0)
    return mx.reshape(changed, logits.shape)


def _edited(value: mx.array, bias: mx.array, factor: mx.array, penalty: mx.array) -> mx.array:
    value = value + bias
    return mx.where(value > 0, value / factor, value * factor) - penalty


def bar(logits: mx.array, rows: Sequence[SamplerRow], first: int = 0) -> mx.array:
    """Return (rows, tokens) with -inf for tokens that are not allowed; `first` is the first token's id.

    Masks are bytes: unpacking the bits of 152k logits in MLX takes a CPU twice as long as all of this.
    """
    import numpy as np  # slow to import, and only grammars need it

    width = logits.shape[1]
    allowed = np.zeros((len(rows), width), np.bool_)
    for index, row in enumerate(rows):
        if row.allowed is None:
            allowed[index] = True
        else:
            part = row.allowed[first : first + width]
            allowed[index, : len(part)] = part
    return mx.where(mx.array(cast("list[list[bool]]", allowed)), logits, -mx.inf)


def _changes(row: SamplerRow) -> bool:
    """Report whether the row's parameters can change its logits; most cannot."""
    sampling = row.sampling
    return sampling.penalizes or bool(sampling.logit_bias) or bool(sampling.min_tokens and row.eos)


def _collect(edits: _Edits, offset: int, ids: range, row: SamplerRow) -> draw.CountedEffects | None:
    """Collect a row's edits, and return those of the tokens that its history has counted."""
    sampling = row.sampling
    bias = dict(sampling.logit_bias)
    barred = row.eos if row.position - row.prompt_length < sampling.min_tokens else frozenset[int]()
    history = draw.History() if row.history is None else row.history
    answer: Counter[int] = Counter()
    repeated: set[int] = set()
    if sampling.penalizes:
        answer, repeated = history.read(row, ids)
    tokens = [token for token in repeated | answer.keys() | bias.keys() | barred if token in ids]
    factor, penalty = history.effects(row, tokens, answer, repeated)
    edits.place += [offset + token for token in tokens]
    edits.bias += [bias.get(token, 0.0) for token in tokens]
    edits.factor += factor
    edits.penalty += penalty
    edits.barred += [token in barred for token in tokens]
    return history.counted


def sample(logits: mx.array, rows: Sequence[SamplerRow]) -> mx.array:
    """Draw one token for each row: (rows, vocabulary) logits of any float type -> (rows,) int32.

    The result is lazy unless a row has top-p without a top-k of at most 256, because then the number of
    candidates must be read. Raises RequestError for parameters that cannot be applied.
    """
    if not rows:
        return mx.zeros((0,), dtype=mx.int32)
    for row in rows:
        row.sampling.check(logits.shape[1])
    parts: list[tuple[list[int], mx.array]] = []
    for (kind, _), chosen in _kinds(rows, logits.shape[1]).items():
        members = [rows[index] for index in chosen]
        parts.append((chosen, kind(_changed(draw.take(logits, chosen), members), members)))
    return draw.reassemble(parts)


class LazySample:
    """Tokens as `sample` draws them, without reading any value, to be evaluated with other arrays.

    Parameters must have been checked. A row with top-p may need more candidates than were taken. Then
    `read` draws it again, and everything computed from its lazy token is void.
    """

    def __init__(
        self,
        logits: mx.array,
        rows: Sequence[SamplerRow],
        head: SplitHead | None = None,
        group: Group | None = None,
    ) -> None:
        """Build the draws.

        With `head`, the logits are this rank's part of the vocabulary; only rows with noise need all parts. With `group`,
        all ranks use rank 0's tokens, also where it draws again, because unlike hardware may compute different bits.
        """
        in_doubt: list[_InDoubt] = []
        parts: list[tuple[list[int], mx.array]] = []
        kinds = _kinds(rows, head.vocabulary if head is not None else logits.shape[1])
        for (kind, _), chosen in kinds.items():
            theirs = draw.take(logits, chosen)
            members = [rows[index] for index in chosen]
            if head is not None and kind is draw.greedy:
                parts.append((chosen, head.best(_changed(theirs, members, head.first))))
                continue
            if head is not None:
                # In the model's type, which takes half the bytes of float32.
                theirs = head.logits(theirs)
            theirs = _changed(theirs, members)
            if kind is draw.among_largest:
                tokens, settled = draw.among_few(theirs, members)
                if settled is not None:
                    in_doubt.append(_InDoubt(chosen, settled, theirs, members))
            else:
                tokens = kind(theirs, members)
            parts.append((chosen, tokens))
        self._in_doubt = in_doubt
        self._group = group
        self.tokens = draw.reassemble(parts)
        """(rows,) int32."""
        # The best tokens of all parts come from comparisons alone, which are the same on any hardware.
        if group is not None and (head is None or any(kind is not draw.greedy for kind, _ in kinds)):
            self._agree(group)

    def _agree(self, group: Group) -> None:
        """Take rank 0's tokens, and its finding of where candidates suffice, in one exchange."""
        flags = [each.settled.astype(mx.int32) for each in self._in_doubt]
        whole = group.from_first(mx.concatenate([self.tokens, *flags]))
        self.tokens, begin = whole[: self.tokens.shape[0]], self.tokens.shape[0]
        for place, each in enumerate(self._in_doubt):
            end = begin + len(each.chosen)
            self._in_doubt[place] = replace(each, settled=whole[begin:end] != 0)
            begin = end

    @property
    def arrays(self) -> list[mx.array]:
        """Arrays to evaluate."""
        return [self.tokens, *(each.settled for each in self._in_doubt)]

    def read(self) -> tuple[list[int], list[int]]:
        """Evaluate. Return the tokens, and the rows whose token differs from the lazy one.

        The ranks of a group call it together.
        """
        tokens = cast("list[int]", self.tokens.tolist())
        changed: list[int] = []
        for row, token in (pair for each in self._in_doubt for pair in each.draw_again(self._group)):
            if tokens[row] != token:
                tokens[row] = token
                changed.append(row)
        return tokens, changed


@dataclass(frozen=True, slots=True)
class _InDoubt:
    """Rows that may need more candidates than were taken."""

    chosen: list[int]
    """Row numbers."""
    settled: mx.array
    """(chosen,) true if the candidates sufficed."""
    logits: mx.array
    """(chosen, vocabulary), adjusted."""
    rows: Sequence[SamplerRow]

    def draw_again(self, group: Group | None) -> list[tuple[int, int]]:
        """Evaluate. Return row number and token of rows whose candidates did not suffice, on all ranks those of rank 0."""
        flags = cast("list[bool]", self.settled.tolist())
        places = [place for place, flag in enumerate(flags) if not flag]
        if not places:
            return []
        if group is None or group.rank == 0:
            tokens = draw.among_more(draw.take(self.logits, places), [self.rows[place] for place in places])
        else:
            tokens = mx.zeros((len(places),), mx.int32)
        if group is not None:
            tokens = group.from_first(tokens)
        numbers = [self.chosen[place] for place in places]
        return list(zip(numbers, cast("list[int]", tokens.tolist()), strict=True))


def _changed(logits: mx.array, rows: Sequence[SamplerRow], first: int = 0) -> mx.array:
    """Apply a row's parameters, history and grammar to its logits."""
    logits = adjust(logits.astype(mx.float32), rows, first)
    return logits if all(row.allowed is None for row in rows) else bar(logits, rows, first)


def _kinds(rows: Sequence[SamplerRow], vocabulary: int) -> dict[tuple[_Draw, bool], list[int]]:
    """Return the rows to draw in each way, ascending.

    Rows with a grammar are separate, so that others do not pay for it.
    """
    kinds: dict[tuple[_Draw, bool], list[int]] = {}
    for index, row in enumerate(rows):
        kinds.setdefault((_kind(row, vocabulary), row.allowed is not None), []).append(index)
    return kinds


def _kind(row: SamplerRow, vocabulary: int) -> _Draw:
    sampling = row.sampling
    if sampling.greedy:
        return draw.greedy
    if sampling.top_p < 1.0 or 0 < sampling.top_k < vocabulary:
        return draw.among_largest
    return draw.in_two_levels


# ---- log-probabilities

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


def prompt_logprobs(
    logits: mx.array, targets: Sequence[int], top: int, head: Callable[[mx.array], mx.array] | None = None
) -> list[step_pb2.TokenLogprobs]:
    """Return `token_logprobs` for many positions (positions, vocabulary), a few at a time to bound memory.

    With a `head`, the positions are its input (positions, hidden).
    """
    results: list[step_pb2.TokenLogprobs] = []
    for start in range(0, len(targets), _POSITIONS_AT_ONCE):
        span = slice(start, start + _POSITIONS_AT_ONCE)
        few = logits[span] if head is None else head(logits[span])
        results += token_logprobs(few, targets[span], top)
    return results


def _ints(values: mx.array) -> list[int]:
    return cast("list[int]", values.tolist())


def _floats(values: mx.array) -> list[float]:
    return cast("list[float]", values.tolist())
