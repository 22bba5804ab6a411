"""Products with quantized weights on CPUs without native kernels, for more than a row or two.

MLX's own operation takes as long for each row of x as for the first. Here tiles of the weights are converted to float32,
which takes as long as one or two rows, and are multiplied by the BLAS. A tile's weights are exactly those that MLX's own
operation multiplies by.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

FEWEST_ROWS = {2: 3, 3: 4, 4: 3, 5: 4, 6: 4, 8: 2}
"""Number of rows from which converting pays, by bits of a weight."""
_FEWEST_OF_MODE = {"mxfp4": 12, "nvfp4": 12, "mxfp8": 2}
"""The same for modes other than affine: MLX's own products of 4 bits are three times as fast there."""
_ROWS_OF_AN_EXPERT = 3
"""Mean number of rows of an expert from which converting all of them pays."""
_DEFAULTS = {"affine": (64, 4), "mxfp4": (32, 4), "nvfp4": (16, 4), "mxfp8": (32, 8)}
"""Group and bits of each mode where none are given."""
_TILE_WEIGHTS = 1 << 18
"""Weights that are converted at once: their float32 stay in a cache. `machine.TILE_BYTES` follows from it."""
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
    given = _Format.of(mode, group_size, bits, scales, biases)
    rows = math.prod(x.shape[:-1]) if w.ndim == 2 else x.shape[-2]  # noqa: PLR2004 - one matrix for all rows
    if given is None or stream is not None or rows < given.fewest_rows:
        return own(x, w, scales, biases, transpose, group_size, bits, mode, stream=stream)
    dtype = given.result_type(x)
    x = x.astype(mx.float32)
    step = max(1, _TILE_WEIGHTS // (scales.shape[-1] * given.group_size)) if w.ndim == 2 else w.shape[-2]  # noqa: PLR2004 - as above
    firsts = range(0, w.shape[-2], step)
    tiles = (given.tile(w, first, step) for first in firsts)
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
    given = _Format.of(mode, group_size, bits, scales, biases)
    rows = 0 if rhs_indices is None else rhs_indices.size * x.shape[-2]
    is_stacked = w.ndim == 3 and transpose  # noqa: PLR2004 - experts, outputs, words
    if given is None or not is_stacked or rows < given.fewest_rows_of_an_expert * w.shape[0]:
        quantization = (group_size, bits, mode, global_scale)
        return own(x, w, scales, biases, lhs_indices, rhs_indices, transpose, *quantization, **others)
    dtype = given.result_type(x)
    x = x.astype(mx.float32)
    step = max(_LEAST_OUTPUTS, _TILE_WEIGHTS // (w.shape[0] * scales.shape[-1] * given.group_size))
    tiles = (given.tile(w, first, step) for first in range(0, w.shape[1], step))
    parts = [mx.gather_mm(x, tile.swapaxes(-1, -2), lhs_indices, rhs_indices, **others) for tile in tiles]
    return _joined(parts).astype(dtype)


def to_float32(
    w: mx.array, scales: mx.array, biases: mx.array | None, group_size: int, bits: int, mode: str = "affine"
) -> mx.array:
    """Return quantized weights (..., words) as float32 (..., weights): the values of `mx.dequantize`, faster.

    The scales of other modes than affine are bytes, and there are no biases.
    """
    if mode == "mxfp8":
        numbers = mx.from_fp8(w.view(mx.uint8), mx.float32)
    elif mode == "affine":
        numbers = _integers(w, bits).astype(mx.float32)
    else:
        numbers = _twice_e2m1(_integers(w, bits)).astype(mx.float32)
    groups = numbers.reshape(*w.shape[:-1], -1, group_size)
    if biases is not None:
        scale, bias = (part.astype(mx.float32)[..., None] for part in (scales, biases))
        return (groups * scale + bias).flatten(-2)
    scale = mx.from_fp8(scales, mx.float32) if mode == "nvfp4" else _power_of_two(scales)
    scale = scale * 0.5 if mode != "mxfp8" else scale
    return (groups * scale[..., None]).flatten(-2)


def _integers(w: mx.array, bits: int) -> mx.array:
    """Return (..., words) as bytes (..., weights) whose lowest bits are the weights'."""
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
    return mx.stack(fields, -1) if len(fields) > 1 else fields[0]


def _twice_e2m1(codes: mx.array) -> mx.array:
    """Return twice the numbers that codes of four bits are, as integers from -12 to 12.

    The lowest bit is the mantissa, two bits are the exponent, and one is the sign.
    """
    magnitude = codes & 7
    twice = ((magnitude & 1 | 2) << (magnitude >> 1)) >> 1
    twice = twice - (magnitude == 0).astype(mx.uint8)
    return twice.astype(mx.int8) * (1 - 2 * (codes >> 3).astype(mx.int8))


def _power_of_two(exponents: mx.array) -> mx.array:
    """Return 2^(byte - 127) for bytes up to 254, and infinity for 255, as MLX does."""
    power = (exponents.astype(mx.uint32) << 23).view(mx.float32)
    return mx.maximum(power, 2.0**-127)


@dataclass(frozen=True, slots=True)
class _Format:
    """How weights are quantized, with what belongs to them."""

    mode: str
    group_size: int
    bits: int
    scales: mx.array
    biases: mx.array | None

    @staticmethod
    def of(
        mode: str, group_size: int | None, bits: int | None, scales: mx.array, biases: mx.array | None
    ) -> _Format | None:
        """Return the format, or nothing where MLX's own operation is to judge the arguments."""
        if mode not in _DEFAULTS or (mode == "affine") != (biases is not None):
            return None
        size, width = _DEFAULTS[mode]
        found = _Format(mode, group_size or size, bits or width, scales, biases)
        if mode == "affine":
            return found if found.bits in FEWEST_ROWS else None
        is_mode_s = (found.group_size, found.bits) == (size, width) and scales.dtype == mx.uint8
        return found if is_mode_s else None

    @property
    def fewest_rows(self) -> int:
        return FEWEST_ROWS[self.bits] if self.mode == "affine" else _FEWEST_OF_MODE[self.mode]

    @property
    def fewest_rows_of_an_expert(self) -> int:
        return _ROWS_OF_AN_EXPERT if self.mode == "affine" else _FEWEST_OF_MODE[self.mode]

    def result_type(self, x: mx.array) -> mx.Dtype:
        """Return the type that MLX gives to the product."""
        if self.biases is None:
            return x.dtype
        first, second, third = (mx.zeros((), each.dtype) for each in (x, self.scales, self.biases))
        return (first + second + third).dtype

    def tile(self, w: mx.array, first: int, count: int) -> mx.array:
        """Return some rows of each matrix as float32."""
        rows = slice(first, first + count)
        biases = self.biases if self.biases is None else self.biases[..., rows, :]
        quantization = self.group_size, self.bits, self.mode
        return to_float32(w[..., rows, :], self.scales[..., rows, :], biases, *quantization)


def _joined(parts: list[mx.array]) -> mx.array:
    return parts[0] if len(parts) == 1 else mx.concatenate(parts, -1)


def _sum(parts: Iterable[mx.array]) -> mx.array:
    first, *others = parts
    for part in others:
        first = first + part
    return first
