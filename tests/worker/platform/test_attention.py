"""Attention for x86 CPUs, compared with MLX's own."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.examples import examples

from mlx_ring.worker.platform import attention

stock = mx.fast.scaled_dot_product_attention
CPU = mx.Device(mx.cpu)


def arrays(
    batch: int, kv_heads: int, repeats: int, count: int, length: int
) -> tuple[mx.array, mx.array, mx.array]:
    keys = mx.random.split(mx.random.key(batch + 10 * count + 1000 * length), 3)
    queries = mx.random.normal((batch, kv_heads * repeats, count, 16), key=keys[0], stream=CPU)
    rest = [
        mx.random.normal((batch, kv_heads, length + 7, width), key=key, stream=CPU)
        for key, width in zip(keys[1:], (16, 8), strict=True)
    ]
    return queries, rest[0][:, :, :length], rest[1][:, :, :length]


def mask_of(kind: str, batch: int, heads: int, count: int, length: int) -> Any:
    if kind == "none":
        return None
    if kind == "causal":
        return "causal"
    shape = {
        "plain": (count, length),
        "rows": (batch, 1, count, length),
        "heads": (batch, heads, count, length),
        "numbers": (1, heads, count, length),
    }[kind]
    draws = mx.random.uniform(shape=shape, key=mx.random.key(3), stream=CPU)
    if kind == "numbers":
        return draws * 3 - 1
    shown = draws < 0.6
    return shown | (mx.arange(length) == 0)


@examples(1.2)
@given(
    kind=st.sampled_from(["none", "causal", "plain", "rows", "heads", "numbers"]),
    batch=st.integers(1, 3),
    kv_heads=st.sampled_from([1, 2, 4]),
    repeats=st.sampled_from([1, 2, 3]),
    count=st.integers(2, 9),
    before=st.sampled_from([0, 1, 30, 300]),
    small=st.booleans(),
)
def test_evaluated_attention_equals_mlxs(
    kind: str, batch: int, kv_heads: int, repeats: int, count: int, before: int, *, small: bool
) -> None:
    length = before + count
    queries, keys, values = arrays(batch, kv_heads, repeats, count, length)
    mask = mask_of(kind, batch, kv_heads * repeats, count, length)
    with pytest.MonkeyPatch.context() as patch:
        if small:
            patch.setattr(attention, "_BLOCK", 64)
            patch.setattr(attention, "_LEAST_QUERIES", 2)
        ours = attention.attend(queries, keys, values, scale=0.3, mask=mask)
    theirs = stock(queries, keys, values, scale=0.3, mask=mask, stream=CPU)
    assert ours.shape == theirs.shape
    assert mx.allclose(ours, theirs, rtol=1e-5, atol=2e-6)


@examples(0.8)
@given(
    kind=st.sampled_from(["none", "causal", "plain", "rows", "heads", "numbers"]),
    batch=st.integers(1, 3),
    kv_heads=st.sampled_from([1, 2]),
    repeats=st.sampled_from([1, 2, 3]),
    length=st.sampled_from([1, 2, 30, 300]),
)
def test_attention_of_single_tokens_equals_mlxs(
    kind: str, batch: int, kv_heads: int, repeats: int, length: int
) -> None:
    given_arrays = arrays(batch, kv_heads, repeats, 1, length)
    mask = mask_of(kind, batch, kv_heads * repeats, 1, length)
    with attention.fitting(at_once=False):
        ours = mx.fast.scaled_dot_product_attention(*given_arrays, scale=0.3, mask=mask)
    theirs = stock(*given_arrays, scale=0.3, mask=mask, stream=CPU)
    assert ours.shape == theirs.shape
    assert mx.allclose(ours, theirs, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("count", [1, 3])
def test_unsupported_inputs_use_mlxs_attention(count: int, *, sinks: bool) -> None:
    queries, keys, values = arrays(1, 2, 2, count, 9)
    if sinks:
        options: dict[str, Any] = {"sinks": mx.zeros((4,))}
    else:
        queries, keys, values = (array.astype(mx.bfloat16) for array in (queries, keys, values))
        options = {}
    with attention.fitting(at_once=True):
        ours = mx.fast.scaled_dot_product_attention(
            queries, keys, values, scale=0.3, mask="causal", **options
        )
    assert mx.array_equal(ours, stock(queries, keys, values, scale=0.3, mask="causal", **options))


def test_attention_is_replaced_only_within_the_context() -> None:
    with attention.fitting(at_once=True):
        assert mx.fast.scaled_dot_product_attention is not stock
    assert mx.fast.scaled_dot_product_attention is stock
