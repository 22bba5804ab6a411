"""Reference of the sampler, written plainly: float64, the whole vocabulary, one row at a time, a full sort."""

from __future__ import annotations

import struct
from hashlib import blake2b
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    from mlx_ring.worker.sampler import SamplerRow

    Floats = NDArray[np.float64]


def adjusted(logits: Floats, row: SamplerRow) -> Floats:
    sampling = row.sampling
    out = logits.astype(np.float64).copy()
    for token, bias in sampling.logit_bias:
        out[token] += bias
    history = list(row.tokens[: row.position])
    for token in {token for token in history if token < len(out)}:
        penalty = sampling.repetition_penalty
        out[token] = out[token] / penalty if out[token] > 0 else out[token] * penalty
    answer = history[row.prompt_length :]
    for token in {token for token in answer if token < len(out)}:
        out[token] -= sampling.frequency_penalty * answer.count(token) + sampling.presence_penalty
    if len(answer) < sampling.min_tokens:
        out[[token for token in row.eos if token < len(out)]] = -np.inf
    return out


def kept(scaled: Floats, row: SamplerRow) -> tuple[NDArray[np.bool_], float]:
    """Return the tokens that min-p, top-k and top-p keep, and the least distance (in probability) to a threshold."""
    sampling = row.sampling
    weights = np.exp(scaled - scaled.max())
    order = np.lexsort((np.arange(len(weights)), -weights))
    keep = weights >= sampling.min_p
    near = np.abs(weights - sampling.min_p).min() if sampling.min_p else 1.0
    if 0 < sampling.top_k < len(weights):
        keep[order[sampling.top_k :]] = False
    if sampling.top_p < 1.0:
        ordered = np.where(keep, weights, 0.0)[order]
        before = (np.cumsum(ordered) - ordered) / ordered.sum()
        near = min(near, np.abs(before - sampling.top_p).min())
        keep[order[before >= sampling.top_p]] = False
    return keep, float(near)


def probabilities(logits: Floats, row: SamplerRow) -> Floats:
    scaled = adjusted(logits, row) / row.sampling.temperature
    keep, _ = kept(scaled, row)
    weights = np.where(keep, np.exp(scaled - scaled.max()), 0.0)
    return weights / weights.sum()


def words(seed: int, position: int) -> tuple[int, int, int, int]:
    digest = blake2b(struct.pack("<QQ", seed, position), digest_size=16, person=b"mlx-ring noise")
    return struct.unpack("<4I", digest.digest())


def bits(first: int, second: int, index: int) -> int:
    return _mix(_mix((index * 0x9E3779B9 + first) % 2**32) ^ second)


def _mix(value: int) -> int:
    value = (value ^ (value >> 16)) * 0x7FEB352D % 2**32
    value = (value ^ (value >> 15)) * 0x846CA68B % 2**32
    return value ^ (value >> 16)


def gumbel(first: int, second: int, indices: Iterable[int]) -> Floats:
    uniform = np.array([(bits(first, second, index) + 0.5) / 2**32 for index in indices])
    return -np.log(-np.log1p(-np.minimum(uniform, 1 - 2**-24)))


def token(logits: Floats, row: SamplerRow) -> tuple[int, float]:
    """Return the token that the sampler must draw, and its lead: below 1e-4 rounding may choose another."""
    changed = adjusted(logits, row)
    if row.sampling.greedy:
        best = np.sort(changed)
        return int(changed.argmax()), float(best[-1] - best[-2])
    scaled = (changed - changed.max()) / row.sampling.temperature
    keep, near = kept(scaled, row)
    scaled = np.where(keep, scaled, -np.inf)
    k0, k1, k2, k3 = words(row.seed, row.position)
    vocabulary = len(scaled)
    if row.sampling.top_p < 1.0 or 0 < row.sampling.top_k < vocabulary:
        ids = np.arange(vocabulary)
    else:
        blocks = -(-vocabulary // 128)
        of_block = np.arange(vocabulary) % blocks
        mass = np.array([np.exp(scaled[of_block == block]).sum() for block in range(blocks)])
        with np.errstate(divide="ignore"):
            score = np.log(mass) + gumbel(k2, k3, range(blocks))
        ids = np.flatnonzero(of_block == score.argmax())
        near = min(near, _lead(score))
    score = scaled[ids] + gumbel(k0, k1, (int(index) for index in ids))
    return int(ids[score.argmax()]), min(near, _lead(score))


def _lead(score: Floats) -> float:
    if len(score) == 1:
        return 1.0
    second, first = np.sort(score)[-2:]
    return float(first - second) if np.isfinite(second) else 1.0
