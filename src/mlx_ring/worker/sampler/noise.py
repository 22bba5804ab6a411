"""Gumbel noise as a function of (seed, position, index), with no state.

The key of a position is BLAKE2b over (seed, position); the bits of an index are that key mixed with
the index by a 32-bit integer hash (two keyed rounds of Wellons' `lowbias32`,
https://github.com/skeeto/hash-prospector). Both are integer arithmetic of our own, so
the bits are the same on every device and with every release of MLX.
"""

from __future__ import annotations

import struct
from hashlib import blake2b
from typing import TYPE_CHECKING

import mlx.core as mx

if TYPE_CHECKING:
    from collections.abc import Iterable

_MASK = (1 << 64) - 1


def keys(draws: Iterable[tuple[int, int]]) -> mx.array:
    """(rows, 4) uint32 from (seed, position) pairs: words 0 and 1 key the tokens, 2 and 3 the blocks."""
    words = [struct.unpack("<4I", _digest(seed, position)) for seed, position in draws]
    return mx.array(words, dtype=mx.uint32)


def _digest(seed: int, position: int) -> bytes:
    return blake2b(
        struct.pack("<QQ", seed & _MASK, position & _MASK), digest_size=16, person=b"mlx-ring noise"
    ).digest()


def bits(key: mx.array, index: mx.array) -> mx.array:
    """Uniform uint32 of `index`'s shape (rows, n) or (1, n), from (rows, 2) key words."""
    mixed = _mix(index.astype(mx.uint32) * 0x9E3779B9 + key[:, :1])
    return _mix(mixed ^ key[:, 1:])


def _mix(value: mx.array) -> mx.array:
    value = (value ^ (value >> 16)) * 0x7FEB352D
    value = (value ^ (value >> 15)) * 0x846CA68B
    return value ^ (value >> 16)


def gumbel(key: mx.array, index: mx.array) -> mx.array:
    """Standard Gumbel noise in float32, between -2.9 and 22.9.

    Written with log1p so that the winning (large) end keeps all 32 bits.
    """
    uniform = (bits(key, index).astype(mx.float32) + 0.5) * 2.0**-32
    return -mx.log(-mx.log1p(-mx.minimum(uniform, 1 - 2.0**-24)))
