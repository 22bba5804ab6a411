"""Attention on an x86 CPU, for long chunks with NumPy's exponential.

MLX's own takes 10.7 ns a number there (mlx 0.32.4, AVX-512: it is not vectorised, and calls the C library for every
multiply-add), NumPy's takes 0.5 ns. A chunk of 512 tokens behind 4,000 spends three quarters of its
attention on it. MLX has no lazy operation to put in its place, so the scores are evaluated while the
forward pass is built: such a pass cannot be undone, and is not built ahead.

In every pass the queries that share a KV head are multiplied with it together, so that it is read once.
"""

from __future__ import annotations

import platform
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, cast

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

_Numbers = NDArray[Any]

WORTH_IT = 4096
"""Scores of one head from which on it pays to stop for them."""
_BLOCK = 1 << 22
"""Scores that are held at once."""
_CACHED = 1 << 16
"""Scores that stay in a core's cache from the first operation on them to the last."""

_stock = mx.fast.scaled_dot_product_attention


def is_slow_here() -> bool:
    """Whether this machine computes with MLX's slow exponential."""
    return mx.default_device() == mx.Device(mx.cpu) and platform.machine() in {"x86_64", "AMD64"}


@contextmanager
def fitting(*, at_once: bool) -> Generator[None]:
    """Forward passes built meanwhile attend as suits the CPU; with `at_once` those of several tokens are computed now."""
    mx.fast.scaled_dot_product_attention = _attend_at_once if at_once else _attend
    try:
        yield
    finally:
        mx.fast.scaled_dot_product_attention = _stock


def _attend_at_once(queries: mx.array, keys: mx.array, values: mx.array, **options: Any) -> mx.array:
    if queries.shape[2] > 1 and _is_plain(queries, **options):
        return attend(queries, keys, values, scale=options["scale"], mask=options.get("mask"))
    return _attend(queries, keys, values, **options)


def _attend(queries: mx.array, keys: mx.array, values: mx.array, **options: Any) -> mx.array:
    batch, heads, count, _ = queries.shape
    kv_heads, mask = keys.shape[1], options.get("mask")
    has_head_masks = isinstance(mask, mx.array) and mask.ndim > 2 and mask.shape[-3] > 1  # noqa: PLR2004 - behind (queries, keys)
    if count > 1 or heads == kv_heads or has_head_masks or not _is_plain(queries, **options):
        return _stock(queries, keys, values, **options)
    folded = (queries * options["scale"]).reshape(batch, kv_heads, heads // kv_heads, -1)
    scores = folded @ keys.swapaxes(-1, -2)
    if isinstance(mask, mx.array):
        is_shown = mask.dtype == mx.bool_
        scores = mx.where(mask, scores, mx.finfo(scores.dtype).min) if is_shown else scores + mask
    return (mx.softmax(scores, axis=-1, precise=True) @ values).reshape(batch, heads, 1, -1)


def _is_plain(queries: mx.array, *, scale: float, mask: Any = None, **others: Any) -> bool:
    del scale, mask
    return queries.dtype == mx.float32 and not any(value is not None for value in others.values())


def attend(
    queries: mx.array, keys: mx.array, values: mx.array, *, scale: float, mask: mx.array | str | None = None
) -> mx.array:
    """As `mx.fast.scaled_dot_product_attention` does: `(batch, heads, tokens, width)`, float32. Evaluates."""
    batch, heads, count, _ = queries.shape
    kv_heads, length = keys.shape[1:3]
    repeats = heads // kv_heads
    folded = (queries * scale).reshape(batch, kv_heads, repeats * count, -1)
    shown = _read_mask(mask, batch, kv_heads, repeats, count, length)
    together = max(1, _BLOCK // (batch * repeats * count * length))
    outputs: list[mx.array] = []
    for low in range(0, kv_heads, together):
        high = min(kv_heads, low + together)
        scores = folded[:, low:high] @ keys[:, low:high].swapaxes(-1, -2)
        mx.eval(scores)
        numbers = _numbers(scores).reshape(batch, high - low, repeats, count, length)
        sums = _exponentials(numbers, shown, low)
        output = (scores @ values[:, low:high]) / mx.array(sums.reshape(batch, high - low, -1, 1))
        mx.eval(output)
        outputs.append(output)
    whole = outputs[0] if len(outputs) == 1 else mx.concatenate(outputs, axis=1)
    return whole.reshape(batch, heads, count, -1)


def _read_mask(
    mask: mx.array | str | None, batch: int, kv_heads: int, repeats: int, count: int, length: int
) -> _Numbers | None:
    """What to show: `(batch, KV heads or 1, repeats or 1, tokens, keys)`, booleans or numbers to add.

    For "causal" it has columns for the last keys only, `(1, 1, 1, tokens, tokens)`: those before are seen by all.
    """
    if mask is None:
        return None
    if isinstance(mask, str):
        return np.tril(np.ones((count, count), np.bool_))[None, None, None]
    mx.eval(mask)
    numbers = _numbers(mask)
    numbers = numbers.reshape((1,) * (4 - numbers.ndim) + numbers.shape)
    split = (1, 1) if numbers.shape[1] == 1 else (kv_heads, repeats)
    numbers = numbers.reshape(numbers.shape[0], *split, *numbers.shape[2:])
    return np.broadcast_to(numbers, (batch, *split, count, length))


def _numbers(array: mx.array) -> _Numbers:
    """An evaluated array's own memory."""
    return cast("_Numbers", np.asarray(array))


def _exponentials(scores: _Numbers, shown: _Numbers | None, first_head: int) -> _Numbers:
    """Replace scores `(batch, KV heads, repeats, tokens, keys)` by their exponentials; the sums over keys."""
    batch, heads, repeats, count, length = scores.shape
    sums = np.empty(scores.shape[:-1], np.float32)
    if scores.size <= _CACHED and (shown is None or shown.shape[1] == 1):
        _in_place(scores, shown, sums)
        return sums
    rows = max(1, _CACHED // (repeats * length))
    for index in np.ndindex(batch, heads):
        mask = None
        if shown is not None:
            mask = shown[
                index[0] if shown.shape[0] > 1 else 0, first_head + index[1] if shown.shape[1] > 1 else 0
            ]
        for low in range(0, count, rows):
            part = slice(low, low + rows)
            _in_place(scores[index][:, part], None if mask is None else mask[:, part], sums[index][:, part])
    return sums


def _in_place(scores: _Numbers, shown: _Numbers | None, sums: _Numbers) -> None:
    if shown is not None:
        masked = scores[..., scores.shape[-1] - shown.shape[-1] :]
        if shown.dtype == np.bool_:
            np.copyto(masked, np.finfo(np.float32).min, where=~shown)
        else:
            masked += shown
    scores -= scores.max(axis=-1, keepdims=True)
    np.exp(scores, out=scores)
    np.sum(scores, axis=-1, out=sums)
