"""Types of GGUF's tensors, and their blocks as affine groups of 32 weights, which MLX computes with. Pure.

A group's weight is `scale * q + bias` with an unsigned integer q. Blocks of all types but Q6_K are such groups: their
scales and biases are exact in float32. Workers compute in float32 on CPUs; in half precision they are rounded, as any
scale is. Q6_K has a scale for every 16 weights, and MLX none below 32. Two of its blocks become one group of 8 bits, in
steps of a quarter of the larger scale. Weights of the larger scale stay exact, the others are rounded to such a step.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from mlx_ring.models.gguf import GROUP, BlockType

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]
Groups = tuple[Bytes, Floats, Floats]
"""Integers (groups, 32), and each group's scale and bias."""
_LOW, _HALF = np.uint8(15), np.uint8(4)
"""Mask of a byte's low half, and its bits."""


def to_groups(kind: BlockType, data: Bytes) -> Groups:
    """Return the groups of consecutive blocks, in order.

    Args:
        kind: a quantized type.
        data: (bytes,) whole blocks.
    """
    return _READERS[kind.name](data.reshape(-1, kind.nbytes))


def pack(integers: Bytes, bits: int) -> Bytes:
    """Pack integers (groups, 32) of 4, 5 or 8 bits as MLX does: little-endian, without gaps. (groups, 4 * bits)."""
    if bits == 8:  # noqa: PLR2004 - whole bytes
        return integers
    if bits == 4:  # noqa: PLR2004 - two in a byte
        return integers[:, 0::2] | (integers[:, 1::2] << _HALF)
    eights = integers.reshape(-1, 8).astype("<u8")
    words = np.bitwise_or.reduce(eights << (np.arange(8, dtype="<u8") * np.uint64(bits)), axis=1)
    return words.astype("<u8").view(np.uint8).reshape(-1, 8)[:, :bits].reshape(-1, 4 * bits)


def _float(data: Bytes, at: int) -> Floats:
    """Return the float16 at a place of each block, as (blocks,)."""
    return np.ascontiguousarray(data[:, at : at + 2]).view("<f2")[:, 0].astype(np.float32)


def _nibbles(data: Bytes) -> Bytes:
    """Return the low halves of bytes, then the high ones: (..., n) to (..., 2n)."""
    return np.concatenate([data & _LOW, data >> _HALF], axis=-1)


def _fifth_bits(data: Bytes, at: int) -> Bytes:
    """Return the 32 bits at a place of each block, as (blocks, 32) of 0 or 16."""
    return np.unpackbits(data[:, at : at + 4], axis=1, bitorder="little") << _HALF


def _q4_0(data: Bytes) -> Groups:
    scale = _float(data, 0)
    return _nibbles(data[:, 2:]), scale, -8 * scale


def _q4_1(data: Bytes) -> Groups:
    return _nibbles(data[:, 4:]), _float(data, 0), _float(data, 2)


def _q5_0(data: Bytes) -> Groups:
    scale = _float(data, 0)
    return _nibbles(data[:, 6:]) | _fifth_bits(data, 2), scale, -16 * scale


def _q5_1(data: Bytes) -> Groups:
    return _nibbles(data[:, 8:]) | _fifth_bits(data, 4), _float(data, 0), _float(data, 2)


def _q8_0(data: Bytes) -> Groups:
    scale = _float(data, 0)
    return data[:, 2:] ^ np.uint8(0x80), scale, -128 * scale


def _scales_of_k(data: Bytes) -> tuple[Floats, Floats]:
    """Return scale and bias of the eight groups of each block of Q4_K or Q5_K."""
    low, middle, high = data[:, 4:8], data[:, 8:12], data[:, 12:16]
    factors = np.concatenate([low & 63, (high & 15) | ((low >> 6) << 4)], axis=1)
    minima = np.concatenate([middle & 63, (high >> 4) | ((middle >> 6) << 4)], axis=1)
    return (
        (_float(data, 0)[:, None] * factors).reshape(-1),
        (-_float(data, 2)[:, None] * minima).reshape(-1),
    )


def _q4_k(data: Bytes) -> Groups:
    return _nibbles(data[:, 16:].reshape(-1, 4, 32)).reshape(-1, GROUP), *_scales_of_k(data)


def _q5_k(data: Bytes) -> Groups:
    high = (
        np.unpackbits(data[:, 16:48].reshape(-1, 32, 1), axis=2, bitorder="little").transpose(0, 2, 1)
        << _HALF
    )
    low = _nibbles(data[:, 48:].reshape(-1, 4, 32)).reshape(-1, 8, 32)
    return (low | high).reshape(-1, GROUP), *_scales_of_k(data)


def _q6_k(data: Bytes) -> Groups:
    """Return 8-bit groups of 32, each of two blocks of 16.

    With the larger scale s of the two, the steps are s/4. The larger block's weights s * q for q in [-32, 31] are 4 * q
    steps, exactly; the other's are rounded to the next step.
    """
    low = _nibbles(data[:, :128].reshape(-1, 2, 64)).reshape(-1, 2, 4, 32)
    twos = data[:, 128:192].reshape(-1, 2, 1, 32) >> np.array([0, 2, 4, 6], np.uint8)[:, None]
    signed = (low | ((twos & np.uint8(3)) << _HALF)).astype(np.float32) - 32
    blocks = signed.reshape(-1, 2, 16)
    scales = (data[:, 192:208].view(np.int8).astype(np.float32) * _float(data, 208)[:, None]).reshape(-1, 2)
    first, second = scales[:, 0], scales[:, 1]
    larger: Floats = np.where(np.abs(first) >= np.abs(second), first, second).astype(np.float32)
    ratios = np.divide(4 * scales, larger[:, None], out=np.zeros_like(scales), where=larger[:, None] != 0)
    steps = np.rint(blocks * ratios[:, :, None]).reshape(-1, GROUP)
    return np.clip(steps + 128, 0, 255).astype(np.uint8), larger / np.float32(4), np.float32(-32) * larger


_READERS: dict[str, Callable[[Bytes], Groups]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
