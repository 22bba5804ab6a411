"""Logit bias, `min_tokens` and penalties: the changes that depend on a row's parameters and history.

Only the entries that change are read and written: at most the tokens of the sequence, not the vocabulary.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import mlx.core as mx

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mlx_ring.worker.sampler.parameters import SamplerRow


@dataclass(slots=True)
class _Edits:
    """Columns of equal length: an entry's place in the flattened logits and what happens to it."""

    place: list[int] = field(default_factory=list[int])
    bias: list[float] = field(default_factory=list[float])
    factor: list[float] = field(default_factory=list[float])
    penalty: list[float] = field(default_factory=list[float])
    barred: list[bool] = field(default_factory=list[bool])


def adjust(logits: mx.array, rows: Sequence[SamplerRow], first: int = 0) -> mx.array:
    """Applies to (rows, tokens) float32, in this order and for each row alone; `first` is the first token's id.

    - Logit bias is added (OpenAI).
    - The logits of tokens in prompt and answer are divided by the repetition penalty where positive, else
      multiplied by it (Keskar et al. 2019, arXiv:1909.05858, as Hugging Face and vLLM have it).
    - The frequency penalty times a token's count in the answer, and the presence penalty where that is not
      0, are subtracted (OpenAI).
    - The EOS set is -inf while the answer is shorter than `min_tokens`.

    Tokens that have no logit there are passed over.
    """
    width = logits.shape[1]
    edits = _Edits()
    for index, row in enumerate(rows):
        if _changes(row):
            _collect(edits, index * width - first, range(first, first + width), row)
    if not edits.place:
        return logits
    flat = mx.flatten(logits)
    place = mx.array(edits.place, dtype=mx.int64)
    value = flat[place] + mx.array(edits.bias, dtype=mx.float32)
    factor = mx.array(edits.factor, dtype=mx.float32)
    value = mx.where(value > 0, value / factor, value * factor)
    value = value - mx.array(edits.penalty, dtype=mx.float32)
    value = mx.where(mx.array(edits.barred), -mx.inf, value)
    return mx.reshape(mx.put_along_axis(flat, place, value, axis=0), logits.shape)


def _changes(row: SamplerRow) -> bool:
    """Whether anything can be changed; most rows are left alone."""
    sampling = row.sampling
    return sampling.penalises or bool(sampling.logit_bias) or bool(sampling.min_tokens and row.eos)


def _collect(edits: _Edits, offset: int, ids: range, row: SamplerRow) -> None:
    sampling = row.sampling
    bias = dict(sampling.logit_bias)
    barred = row.eos if row.position - row.prompt_length < sampling.min_tokens else frozenset[int]()
    answer: Counter[int] = Counter()
    repeated: set[int] = set()
    if sampling.penalises:
        answer.update(row.tokens[row.prompt_length : row.position])
    if sampling.repetition_penalty != 1.0:
        repeated.update(row.tokens[: row.position])
    changed = repeated | answer.keys() | bias.keys() | barred
    tokens = [token for token in changed if token in ids]
    edits.place += [offset + token for token in tokens]
    edits.bias += [bias.get(token, 0.0) for token in tokens]
    edits.factor += [sampling.repetition_penalty if token in repeated else 1.0 for token in tokens]
    frequency, presence = sampling.frequency_penalty, sampling.presence_penalty
    edits.penalty += [frequency * answer[token] + presence if token in answer else 0.0 for token in tokens]
    edits.barred += [token in barred for token in tokens]
