"""Attention on an x86 CPU without native kernels, with NumPy's exponential for long chunks.

MLX's own takes 10.7 ns a number there (mlx 0.32.4, AVX-512: it is not vectorized, and calls the C library for every
multiply-add), NumPy's takes 0.5 ns. A chunk of 512 tokens behind 4,000 spends three quarters of its
attention on it. MLX has no lazy operation to replace it, so the scores are evaluated while the
forward pass is built. Such a pass cannot be undone, and is not built ahead.

In every pass the queries that share a KV head are multiplied with it together, so that it is read once.
"""

from __future__ import annotations

import platform
from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import mlx.core as mx

from mlx_cpu_kernels.operations import are_installed

if TYPE_CHECKING:
    from numpy.typing import NDArray

    _Numbers = NDArray[Any]

WORTH_IT = 4096
"""Number of scores of one head from which evaluating at once pays."""
_BLOCK = 1 << 19
"""Number of scores that are made, used and dropped together, near the core."""
_LEAST_QUERIES = 32
"""Least number of queries in a block: with fewer, memory bounds the product."""

_stock = mx.fast.scaled_dot_product_attention


def is_slow_here() -> bool:
    """Report whether this process computes with MLX's slow exponential."""
    is_x86 = platform.machine() in {"x86_64", "AMD64"}
    return is_x86 and mx.default_device() == mx.Device(mx.cpu) and not are_installed()


@contextmanager
def fitting(*, at_once: bool) -> Generator[None]:
    """Build forward passes with attention that suits the CPU; with `at_once` those of several tokens are computed now."""
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
    has_head_masks = isinstance(mask, mx.array) and mask.ndim > 2 and mask.shape[-3] > 1  # noqa: PLR2004 - more axes than (queries, keys)
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
    """Compute what `mx.fast.scaled_dot_product_attention` does: `(batch, heads, tokens, width)`, float32. Evaluates.

    It works in blocks of queries, whose scores stay in the cache between the two products that make and use them.
    With "causal" a block skips keys behind its last query.
    """
    batch, heads, count, width = queries.shape
    kv_heads, length = keys.shape[1:3]
    repeats = heads // kv_heads
    split = (queries * scale).reshape(batch, kv_heads, repeats, count, width)
    is_causal = isinstance(mask, str)
    shown = None if mask is None or is_causal else _read_mask(mask, batch, kv_heads, repeats)
    rows, together = _blocks(batch * repeats, kv_heads, count, length)
    by_heads: list[mx.array] = []
    for low in range(0, kv_heads, together):
        of_heads = slice(low, low + together)
        outputs: list[mx.array] = []
        for begin in range(0, count, rows):
            end = min(count, begin + rows)
            seen = length - count + end if is_causal else length
            block = split[:, of_heads, :, begin:end].reshape(batch, -1, repeats * (end - begin), width)
            scores = block @ keys[:, of_heads, :seen].swapaxes(-1, -2)
            mx.eval(scores)
            numbers = _numbers(scores).reshape(batch, -1, repeats, end - begin, seen)
            part = _triangle(end - begin) if is_causal else _part_of(shown, of_heads, begin, end)
            sums = _exponentials(numbers, part)
            output = (scores @ values[:, of_heads, :seen]) / mx.array(
                sums.reshape(batch, -1, sums.shape[2] * sums.shape[3], 1)
            )
            mx.eval(output)
            outputs.append(output.reshape(batch, -1, repeats, end - begin, values.shape[-1]))
        by_heads.append(outputs[0] if len(outputs) == 1 else mx.concatenate(outputs, axis=3))
    whole = by_heads[0] if len(by_heads) == 1 else mx.concatenate(by_heads, axis=1)
    return whole.reshape(batch, heads, count, -1)


def _blocks(rows_of_token: int, kv_heads: int, count: int, length: int) -> tuple[int, int]:
    """Return the number of queries and KV heads in a block."""
    rows = min(count, max(_LEAST_QUERIES, _BLOCK // (rows_of_token * length)))
    return rows, max(1, min(kv_heads, _BLOCK // (rows_of_token * rows * length)))


def _read_mask(mask: mx.array, batch: int, kv_heads: int, repeats: int) -> _Numbers:
    """Return `(batch, KV heads or 1, repeats or 1, tokens, keys)`: booleans, or numbers to add."""
    import numpy as np  # slow to import, and most workers have kernels

    mx.eval(mask)
    numbers = _numbers(mask)
    numbers = numbers.reshape((1,) * (4 - numbers.ndim) + numbers.shape)
    split = (1, 1) if numbers.shape[1] == 1 else (kv_heads, repeats)
    numbers = numbers.reshape(numbers.shape[0], *split, *numbers.shape[2:])
    return np.broadcast_to(numbers, (batch, *numbers.shape[1:]))


def _part_of(shown: _Numbers | None, heads: slice, begin: int, end: int) -> _Numbers | None:
    """Return the mask of a block."""
    if shown is None:
        return None
    return (shown[:, heads] if shown.shape[1] > 1 else shown)[..., begin:end, :]


def _triangle(count: int) -> _Numbers:
    """Return the mask for the last keys, which are the block's own: `(1, 1, 1, count, count)`."""
    import numpy as np

    return np.tril(np.ones((count, count), np.bool_))[None, None, None]


def _numbers(array: mx.array) -> _Numbers:
    """Return an evaluated array's own memory."""
    import numpy as np

    return cast("_Numbers", np.asarray(array))


def _exponentials(scores: _Numbers, shown: _Numbers | None) -> _Numbers:
    """Replace scores `(batch, KV heads, repeats, tokens, keys)` by their exponentials; return the sums over keys."""
    import numpy as np

    if shown is not None:
        masked = scores[..., scores.shape[-1] - shown.shape[-1] :]
        if shown.dtype == np.bool_:
            np.copyto(masked, np.finfo(np.float32).min, where=~shown)
        else:
            masked += shown
    scores -= scores.max(axis=-1, keepdims=True)
    np.exp(scores, out=scores)
    return cast("_Numbers", scores.sum(axis=-1))
