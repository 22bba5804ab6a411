"""Exponentials, sums and order over whole vocabularies, with the same bits for a row in any batch.

Sums are trees of elementwise additions, whose order is the row's alone: a library's reduction may
choose its order by the shape of the batch. On a Linux CPU `mx.exp` and `mx.sort` of 152k logits
take 1.3 and 11 ms; `exponential` takes a quarter, and `largest` sorts only what can be among the largest.
"""

from __future__ import annotations

import mlx.core as mx

_LOG2_E = 1.4426950408889634
_ROUND = 12582912.0
"""1.5 * 2**23: a float32 plus this holds its nearest integer in the low bits."""
_EXP2 = (
    0.0013276471524387066,
    0.009675541330674553,
    0.05550713274945486,
    0.24022119723933952,
    0.6931469670638745,
    1.0,
)
"""2**x on [-1/2, 1/2], highest power first: least maximal relative error, 8e-8."""
_SUM_BLOCKS = 128
_SELECT_WIDTH = 32


def exponential(x: mx.array) -> mx.array:
    """exp(x) in float32 for x <= 0, to 2e-7 of its value; below exp(-86) a positive number under 1e-37."""
    power = mx.maximum(x * _LOG2_E, -125.0)
    shifted = power + _ROUND
    fraction = power - (shifted - _ROUND)
    result = fraction * _EXP2[0]
    for coefficient in _EXP2[1:-1]:
        result = (result + coefficient) * fraction
    result = result + _EXP2[-1]
    return (result.view(mx.int32) + (shifted.view(mx.int32) << 23)).view(mx.float32)


def maximum(logits: mx.array) -> mx.array:
    """(rows, 1): each row's largest logit, or 0 where all are -inf, so that it can be subtracted."""
    top = mx.max(logits, axis=-1, keepdims=True)
    return mx.where(top == -mx.inf, 0.0, top)


def sum_strided(weights: mx.array) -> mx.array:
    """(rows, n) -> (rows, blocks): the sum over each block of `in_blocks`."""
    summed = in_blocks(weights, 0.0)
    while (width := summed.shape[1]) > 1:
        summed = summed[:, : width // 2] + summed[:, width // 2 :]
    return summed[:, 0]


def in_blocks(values: mx.array, fill: float) -> mx.array:
    """(rows, n) -> (rows, 128, blocks), padded with `fill`: block j holds the columns j, j + blocks, ..."""
    rows, columns = values.shape
    padding = -columns % _SUM_BLOCKS
    if padding:
        values = mx.pad(values, [(0, 0), (0, padding)], constant_values=fill)
    return mx.reshape(values, (rows, _SUM_BLOCKS, -1))


def total(weights: mx.array) -> mx.array:
    """(rows, n) -> (rows, 1): the sum of each row."""
    while weights.shape[1] > 1:
        weights = sum_strided(weights)
    return weights


def log_total(logits: mx.array) -> mx.array:
    """(rows, 1): log of the sum of exp of each row."""
    top = maximum(logits)
    return top + mx.log(total(exponential(logits - top)))


def largest(logits: mx.array, count: int) -> tuple[mx.array, mx.array]:
    """The `count` largest of each row, (rows, count) values and int32 ids: by value, then by lowest id.

    Exact: an entry among the `count` largest lies in one of the `count` blocks with the largest maxima,
    where equal maxima go to the lower block.
    """
    rows, columns = logits.shape
    if count * _SELECT_WIDTH * 2 > columns or columns % _SELECT_WIDTH:
        ids = mx.broadcast_to(mx.arange(columns, dtype=mx.int32), (rows, columns))
        return _first(logits, ids, count)
    blocks = mx.reshape(logits, (rows, -1, _SELECT_WIDTH))
    maxima = mx.max(blocks, axis=-1)
    index = mx.broadcast_to(mx.arange(maxima.shape[1], dtype=mx.int32), maxima.shape)
    chosen = mx.partition(_keys(maxima, index), count - 1, axis=-1)[:, :count].astype(mx.int32)
    ids = mx.flatten(chosen[:, :, None] * _SELECT_WIDTH + mx.arange(_SELECT_WIDTH), start_axis=1)
    return _first(mx.take_along_axis(logits, ids, axis=-1), ids, count, source=logits)


def _first(
    values: mx.array, ids: mx.array, count: int, source: mx.array | None = None
) -> tuple[mx.array, mx.array]:
    keys = _keys(values, ids)
    if count < keys.shape[1]:
        keys = mx.partition(keys, count - 1, axis=-1)[:, :count]
    ids = mx.sort(keys, axis=-1).astype(mx.int32)
    return mx.take_along_axis(values if source is None else source, ids, axis=-1), ids


def _keys(values: mx.array, ids: mx.array) -> mx.array:
    """int64 that grows as the value falls, then as the id grows; the low 32 bits are the id."""
    bits = (values + 0.0).view(mx.int32)  # -0.0 becomes 0.0
    falling = mx.where(bits < 0, bits & 0x7FFFFFFF, ~bits).astype(mx.int64)
    return (falling << 32) | ids.astype(mx.int64)
