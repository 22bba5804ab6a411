"""Picks a token for each row: rows alike in kind are drawn together, whatever their parameters."""

from __future__ import annotations

from typing import TYPE_CHECKING

import mlx.core as mx

from mlx_ring.worker.sampler import draw
from mlx_ring.worker.sampler.adjust import adjust

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mlx_ring.worker.sampler.parameters import SamplerRow

    _Draw = Callable[[mx.array, Sequence[SamplerRow]], mx.array]


def sample(logits: mx.array, rows: Sequence[SamplerRow]) -> mx.array:
    """Draws one token for each row: (rows, vocabulary) logits of any float type -> (rows,) int32.

    The result is lazy unless a row has top-p without a top-k of at most 256, where the number of
    candidates must be looked at. Raises RequestError for parameters that cannot be applied.
    """
    if not rows:
        return mx.zeros((0,), dtype=mx.int32)
    vocabulary = logits.shape[1]
    logits = adjust(logits.astype(mx.float32), rows)
    kinds: dict[_Draw, list[int]] = {}
    for index, row in enumerate(rows):
        kinds.setdefault(_kind(row, vocabulary), []).append(index)
    parts = [
        (chosen, kind(draw.take(logits, chosen), [rows[index] for index in chosen]))
        for kind, chosen in kinds.items()
    ]
    return draw.reassemble(parts)


def _kind(row: SamplerRow, vocabulary: int) -> _Draw:
    sampling = row.sampling
    if sampling.greedy:
        return draw.greedy
    if sampling.top_p < 1.0 or 0 < sampling.top_k < vocabulary:
        return draw.among_largest
    return draw.in_two_levels
