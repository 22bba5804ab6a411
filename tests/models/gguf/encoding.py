"""An encoder of K-quants, from the public description of their blocks: plain rounding, without llama.cpp's search."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float64]
Blocks = tuple[Bytes, Floats]
"""Blocks (count, bytes), and the weights (count, 256) that they stand for."""


def encode_k(kind: str, weights: Floats) -> Blocks:
    """Encode weights (any shape, whole blocks of 256) as Q4_K, Q5_K or Q6_K."""
    blocks = weights.astype(np.float64).reshape(-1, 256)
    return _encode_q6(blocks) if kind == "Q6_K" else _encode_affine(blocks, 4 if kind == "Q4_K" else 5)


def _halves(values: Floats) -> tuple[Bytes, Floats]:
    """Round to float16: (count, 2) bytes, and the numbers that they are."""
    rounded = values.astype("<f2")
    return rounded.view(np.uint8).reshape(-1, 2), rounded.astype(np.float64)


def _ratio(values: Floats, unit: Floats) -> Floats:
    return np.divide(values, unit, out=np.zeros_like(values), where=unit != 0)


def _encode_affine(blocks: Floats, bits: int) -> Blocks:
    """Eight groups of 32: `scale * factor * q - low * minimum`, with factor and minimum of 6 bits each."""
    groups = blocks.reshape(-1, 8, 32)
    minima = np.maximum(-groups.min(axis=2), 0)
    scales = (groups.max(axis=2) + minima) / ((1 << bits) - 1)
    scale_bytes, scale = _halves(scales.max(axis=1) / 63)
    low_bytes, low = _halves(minima.max(axis=1) / 63)
    factors = np.clip(np.rint(_ratio(scales, scale[:, None] + 0 * scales)), 0, 63)
    lows = np.clip(np.rint(_ratio(minima, low[:, None] + 0 * minima)), 0, 63)
    step, offset = (scale[:, None] * factors)[:, :, None], (low[:, None] * lows)[:, :, None]
    q = np.clip(np.rint(_ratio(groups + offset, step + 0 * groups)), 0, (1 << bits) - 1)
    f, m, values = factors.astype(np.uint8), lows.astype(np.uint8), q.astype(np.uint8)
    packed = np.concatenate(
        [
            f[:, :4] | (f[:, 4:] >> 4) << 6,
            m[:, :4] | (m[:, 4:] >> 4) << 6,
            (f[:, 4:] & 15) | (m[:, 4:] & 15) << 4,
        ],
        axis=1,
    )
    pairs = values.reshape(-1, 4, 2, 32)
    nibbles = ((pairs[:, :, 0] & 15) | (pairs[:, :, 1] & 15) << 4).reshape(-1, 128)
    parts = [scale_bytes, low_bytes, packed, nibbles]
    if bits > 4:
        high = (values >> 4) << np.arange(8, dtype=np.uint8)[:, None]
        parts.insert(3, np.bitwise_or.reduce(high, axis=1))
    return np.concatenate(parts, axis=1).astype(np.uint8), (step * q - offset).reshape(-1, 256)


def _encode_q6(blocks: Floats) -> Blocks:
    """Sixteen groups of 16: `scale * factor * (q - 32)`, with a signed factor of 8 bits and q of 6."""
    groups = blocks.reshape(-1, 16, 16)
    scales = np.abs(groups).max(axis=2) / 31
    scale_bytes, scale = _halves(scales.max(axis=1) / 127)
    factors = np.clip(np.rint(_ratio(scales, scale[:, None] + 0 * scales)), 0, 127)
    step = (scale[:, None] * factors)[:, :, None]
    q = np.clip(np.rint(_ratio(groups, step + 0 * groups)), -32, 31)
    values = (q + 32).astype(np.uint8).reshape(-1, 2, 4, 32)  # [side][quarter][place]
    low = ((values[:, :, :2] & 15) | (values[:, :, 2:] & 15) << 4).reshape(-1, 128)
    high = np.bitwise_or.reduce((values >> 4) << np.array([[0], [2], [4], [6]], np.uint8), axis=2).reshape(
        -1, 64
    )
    signed = factors.astype(np.int8).view(np.uint8)
    return np.concatenate([low, high, signed, scale_bytes], axis=1).astype(np.uint8), (step * q).reshape(
        -1, 256
    )
