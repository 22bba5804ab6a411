"""Attention of the native kernels: equal to MLX's and mlx-lm's own within rounding, with every mask."""

# pyright: reportUnknownMemberType=false, reportArgumentType=false
# MLX's stubs take an unpacked list for any later parameter.
from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from comparison import assert_close, exact, needs_kernels, numbers
from hypothesis import given
from hypothesis import strategies as st
from property_examples import examples

from mlx_cpu_kernels import operations
from mlx_cpu_kernels.selfcheck import Operation

pytestmark = [needs_kernels, pytest.mark.usefixtures("installed")]


def _masks(batch: int, heads: int, tokens: int, length: int) -> dict[str, mx.array | str | None]:
    shown = numbers(8, tokens, length) > -0.5
    shown = shown | (mx.arange(length) == 0)
    return {
        "none": None,
        "causal": "causal",
        "boolean": shown,
        "of each entry": mx.broadcast_to(shown, (batch, 1, tokens, length)),
        "additive": numbers(9, heads, tokens, length),
        "left padding": mx.arange(length)[None, None, None] >= mx.arange(batch)[:, None, None, None],
    }


@given(
    st.data(), st.integers(1, 3), st.sampled_from([(1, 1), (4, 4), (6, 2), (9, 3), (16, 1)]), st.booleans()
)
@examples(2)
def test_attention_equals_mlxs(
    data: st.DataObject,
    batch: int,
    heads_of: tuple[int, int],
    has_sinks: bool,
) -> None:
    heads, kv_heads = heads_of
    tokens = data.draw(st.sampled_from([1, 2, 5, 16, 49, 100]))
    length = tokens + data.draw(st.sampled_from([0, 1, 30, 127, 128, 300]))
    size, width = data.draw(st.sampled_from([(64, 64), (40, 40), (128, 128), (96, 64), (24, 20)]))
    q = numbers(5, batch, tokens, heads, size).swapaxes(1, 2)
    # Parts of a cache's buffers.
    k = numbers(6, batch, kv_heads, length + 5, size)[:, :, :length]
    v = numbers(7, batch, kv_heads, length + 5, width)[:, :, :length]
    masks = _masks(batch, heads, tokens, length)
    options: dict[str, Any] = {
        "scale": size**-0.5,
        "mask": masks[data.draw(st.sampled_from(sorted(masks)))],
        "sinks": numbers(10, heads) if has_sinks else None,
    }
    theirs = operations.stock("scaled_dot_product_attention")(q, k, v, **options)
    assert_close(mx.fast.scaled_dot_product_attention(q, k, v, **options), exact(theirs), mx.float32)


def _quantized(seed: int, shape: tuple[int, ...], length: int, options: dict[str, Any]) -> list[mx.array]:
    """Return a part of a quantized cache's buffers, as mlx-lm and mlx-ring pass them."""
    parts = mx.quantize(numbers(seed, *shape), **options)
    return [part[:, :, :length] for part in parts]


def _base() -> Any:
    base: Any = pytest.importorskip("mlx_lm.models.base")
    operations.install()
    return base


@pytest.mark.slow
@given(
    *(st.data(), st.integers(1, 3), st.sampled_from([(1, 1), (4, 4), (6, 2), (9, 3), (16, 1)])),
    *(st.sampled_from([4, 8]), st.sampled_from([(32, 64), (64, 128), (32, 96), (128, 256)])),
)
@examples(2)
def test_attention_over_quantized_keys_and_values_equals_mlx_lms(
    data: st.DataObject, batch: int, heads_of: tuple[int, int], bits: int, sizes: tuple[int, int]
) -> None:
    base, (heads, kv_heads), (group_size, size) = _base(), heads_of, sizes
    tokens = data.draw(st.sampled_from([1, 2, 5, 16, 49]))
    length = tokens + data.draw(st.sampled_from([0, 1, 30, 127, 128, 300]))
    options: dict[str, Any] = {"group_size": group_size, "bits": bits}
    keys = _quantized(6, (batch, kv_heads, length + 5, size), length, options)
    values = _quantized(7, (batch, kv_heads, length + 5, size), length, options)
    masks = _masks(batch, 1, tokens, length)
    window = mx.arange(length) > mx.arange(length - tokens, length)[:, None] - 20
    masks["sliding"] = window & (mx.arange(length) <= mx.arange(length - tokens, length)[:, None])
    mask = masks[data.draw(st.sampled_from(sorted(masks)))]
    q = numbers(5, batch, tokens, heads, size).swapaxes(1, 2)
    cache = SimpleNamespace(bits=bits, group_size=group_size)
    ours = base.scaled_dot_product_attention(q, keys, values, cache, scale=size**-0.5, mask=mask)
    theirs = _stock_attention()(q + 0, keys, values, scale=size**-0.5, mask=mask, **options)
    assert_close(ours, exact(theirs), mx.float32)


def _stock_attention() -> Operation:
    return operations.stock("quantized_scaled_dot_product_attention")


def test_attention_that_the_kernels_lack_is_mlx_lms() -> None:
    """Give masks of each head, types that mix, and sinks, which mlx-lm refuses."""
    base, options = _base(), {"group_size": 32, "bits": 8}
    kv = mx.quantize(numbers(6, 1, 4, 20, 64), **options)
    q, mask = numbers(5, 1, 4, 3, 64), numbers(8, 4, 3, 20)
    attend = base.quantized_scaled_dot_product_attention
    for queries, shown in ((q, mask), (q.astype(mx.float16), None)):
        theirs = _stock_attention()(queries + 0, kv, kv, scale=0.1, mask=shown, **options)
        assert mx.array_equal(attend(queries, kv, kv, scale=0.1, mask=shown, **options), theirs)
    cache = SimpleNamespace(**options)
    with pytest.raises(ValueError, match="does not support attention sinks"):
        base.scaled_dot_product_attention(q, kv, kv, cache, scale=0.1, mask=None, sinks=numbers(9, 4))


def test_attention_over_quantized_keys_and_values_can_be_differentiated() -> None:
    base, kv = _base(), mx.quantize(numbers(6, 1, 2, 20, 64), group_size=32, bits=8)

    def loss(attend: Operation) -> Callable[[mx.array], mx.array]:
        return lambda q: attend(q * 1, kv, kv, scale=0.1, mask="causal", group_size=32, bits=8).sum()

    q, ours = numbers(5, 1, 4, 3, 64), base.quantized_scaled_dot_product_attention
    assert_close(mx.grad(loss(ours))(q), exact(mx.grad(loss(_stock_attention()))(q)), mx.float32)


def test_large_scores_do_not_overflow() -> None:
    q, k, v = numbers(5, 1, 2, 20, 64) * 300, numbers(6, 1, 2, 200, 64), numbers(7, 1, 2, 200, 64)
    ours = mx.fast.scaled_dot_product_attention(q, k, v, scale=1.0)
    theirs = operations.stock("scaled_dot_product_attention")(q, k, v, scale=1.0)
    assert (
        np.abs(exact(ours) - exact(theirs)).max() < 1e-3
    )  # scores of 10,000 have three digits behind the point
