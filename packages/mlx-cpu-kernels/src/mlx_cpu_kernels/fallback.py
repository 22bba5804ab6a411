"""Products with quantized weights on CPUs without native kernels, for more than a row or two.

MLX's own operation takes as long for each row of x as for the first. Here tiles of the weights are converted to float32,
which takes as long as one or two rows, and are multiplied by the BLAS. A tile's weights are exactly those that MLX's own
operation multiplies by.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import mlx.core as mx

FEWEST_ROWS = {2: 3, 3: 4, 4: 3, 5: 4, 6: 4, 8: 2}
"""Number of rows from which converting pays, by bits of a weight."""
_ROWS_OF_AN_EXPERT = 3
"""Mean number of rows of an expert from which converting all of them pays."""
_TILE_WEIGHTS = 1 << 18
"""Weights that are converted at once: their float32 stay in a cache. `scratch.TILE_BYTES` follows from it."""
_LEAST_OUTPUTS = 16
"""Least number of an expert's outputs in a tile."""
_BITS_OF_BYTE = 8

Operation = Callable[..., mx.array]


def multiply(
    own: Operation,
    x: mx.array,
    w: mx.array,
    scales: mx.array,
    biases: mx.array | None = None,
    transpose: bool = True,  # noqa: FBT001, FBT002 - as MLX has it
    group_size: int | None = None,
    bits: int | None = None,
    mode: str = "affine",
    *,
    stream: mx.Stream | mx.Device | None = None,
) -> mx.array:
    """Compute `mx.quantized_matmul`: (..., rows, inputs) by a matrix, in MLX's type of result; `own` is MLX's."""
    size, width = group_size or _GROUP, bits or _BITS
    rows = math.prod(x.shape[:-1]) if w.ndim == 2 else x.shape[-2]  # noqa: PLR2004 - one matrix for all rows
    if mode != "affine" or biases is None or stream is not None or rows < FEWEST_ROWS[width]:
        return own(x, w, scales, biases, transpose, group_size, bits, mode, stream=stream)
    dtype = _result_type(x, scales, biases)
    x = x.astype(mx.float32)
    step = max(1, _TILE_WEIGHTS // (scales.shape[-1] * size)) if w.ndim == 2 else w.shape[-2]  # noqa: PLR2004 - as above
    packed = w, scales, biases
    firsts = range(0, w.shape[-2], step)
    tiles = (_tile(packed, first, step, size, width) for first in firsts)
    if transpose:
        return _joined([x @ tile.swapaxes(-1, -2) for tile in tiles]).astype(dtype)
    parts = (x[..., first : first + step] @ tile for first, tile in zip(firsts, tiles, strict=True))
    return _sum(parts).astype(dtype)


def gather(
    own: Operation,
    x: mx.array,
    w: mx.array,
    scales: mx.array,
    biases: mx.array | None = None,
    lhs_indices: mx.array | None = None,
    rhs_indices: mx.array | None = None,
    transpose: bool = True,  # noqa: FBT001, FBT002 - as MLX has it
    group_size: int | None = None,
    bits: int | None = None,
    mode: str = "affine",
    global_scale: mx.array | None = None,
    **others: Any,
) -> mx.array:
    """Compute `mx.gather_qmm`: rows by the matrices of their experts, (experts, outputs, words); `own` is MLX's."""
    rows = 0 if rhs_indices is None else rhs_indices.size * x.shape[-2]
    is_stacked = w.ndim == 3 and transpose  # noqa: PLR2004 - experts, outputs, words
    if mode != "affine" or biases is None or not is_stacked or rows < _ROWS_OF_AN_EXPERT * w.shape[0]:
        quantization = (group_size, bits, mode, global_scale)
        return own(x, w, scales, biases, lhs_indices, rhs_indices, transpose, *quantization, **others)
    size, width = group_size or _GROUP, bits or _BITS
    dtype = _result_type(x, scales, biases)
    x = x.astype(mx.float32)
    step = max(_LEAST_OUTPUTS, _TILE_WEIGHTS // (w.shape[0] * scales.shape[-1] * size))
    tiles = (_tile((w, scales, biases), first, step, size, width) for first in range(0, w.shape[1], step))
    parts = [mx.gather_mm(x, tile.swapaxes(-1, -2), lhs_indices, rhs_indices, **others) for tile in tiles]
    return _joined(parts).astype(dtype)


_GROUP, _BITS = 64, 4
"""MLX's defaults."""


def to_float32(w: mx.array, scales: mx.array, biases: mx.array, group_size: int, bits: int) -> mx.array:
    """Return affinely quantized weights (..., words) as float32 (..., weights): the values of `mx.dequantize`, faster."""
    count = math.lcm(bits, _BITS_OF_BYTE)  # bits that hold whole weights and whole bytes
    unit = w.view(mx.uint8).reshape(*w.shape[:-1], -1, count // _BITS_OF_BYTE)
    mask = (1 << bits) - 1

    def field(offset: int) -> mx.array:
        byte, shift = divmod(offset, _BITS_OF_BYTE)
        value = unit[..., byte] >> shift if shift else unit[..., byte]
        if shift + bits > _BITS_OF_BYTE:
            value = value | unit[..., byte + 1] << (_BITS_OF_BYTE - shift)
        return value & mask if shift + bits != _BITS_OF_BYTE else value

    fields = [field(offset) for offset in range(0, count, bits)]
    integers = (mx.stack(fields, -1) if len(fields) > 1 else fields[0]).astype(mx.float32)
    groups = integers.reshape(*w.shape[:-1], -1, group_size)
    scale, bias = (part.astype(mx.float32)[..., None] for part in (scales, biases))
    return (groups * scale + bias).flatten(-2)


def _tile(
    packed: tuple[mx.array, mx.array, mx.array], first: int, count: int, group_size: int, bits: int
) -> mx.array:
    """Return some rows of each matrix as float32."""
    w, scales, biases = (part[..., first : first + count, :] for part in packed)
    return to_float32(w, scales, biases, group_size, bits)


def _result_type(*arrays: mx.array) -> mx.Dtype:
    """Return the type that MLX gives to a product of these."""
    return sum((mx.zeros((), array.dtype) for array in arrays), start=mx.zeros((), arrays[0].dtype)).dtype


def _joined(parts: list[mx.array]) -> mx.array:
    return parts[0] if len(parts) == 1 else mx.concatenate(parts, -1)


def _sum(parts: Iterable[mx.array]) -> mx.array:
    first, *others = parts
    for part in others:
        first = first + part
    return first
