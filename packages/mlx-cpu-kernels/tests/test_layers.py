"""Norms, rotations and activations of the native kernels: equal to MLX's own within rounding."""

# pyright: reportUnknownMemberType=false, reportArgumentType=false
# MLX's stubs take an unpacked list for any later parameter.
from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from comparison import LAYOUTS, TYPES, assert_close, exact, needs_kernels, numbers, types
from hypothesis import given
from hypothesis import strategies as st
from property_examples import examples

from mlx_cpu_kernels import operations
from mlx_cpu_kernels.selfcheck import Operation

pytestmark = [needs_kernels, pytest.mark.usefixtures("installed")]


@given(st.integers(1, 40), st.integers(1, 600), st.booleans(), st.sampled_from(LAYOUTS))
@examples(0.8)
def test_rows_are_normalized(
    rows: int,
    size: int,
    is_weighted: bool,
    layout: Callable[[int, int], mx.array],
) -> None:
    x, weight = layout(rows, size), numbers(3, size) if is_weighted else None
    expected = exact(x) / np.sqrt((exact(x) ** 2).mean(-1, keepdims=True) + 1e-5)
    expected = expected * (exact(weight) if weight is not None else 1)
    assert_close(mx.fast.rms_norm(x, weight, 1e-5), expected, mx.float32)


@given(st.integers(1, 40), st.integers(1, 600), st.sampled_from(LAYOUTS), types, *[st.booleans()] * 2)
@examples(1.2)
def test_layers_are_normalized(
    rows: int,
    size: int,
    layout: Callable[[int, int], mx.array],
    type_name: str,
    is_weighted: bool,
    has_bias: bool,
) -> None:
    dtype = TYPES[type_name]
    x = (layout(rows, size) * 3 + 1).astype(dtype)
    weight, bias = (numbers(seed, size).astype(dtype) for seed in (3, 4))
    given = (weight if is_weighted else None, bias if has_bias else None)
    around = exact(x) - exact(x).mean(-1, keepdims=True)
    deviation = np.sqrt((around**2).mean(-1, keepdims=True) + 1e-3)
    scale = exact(weight) if is_weighted else np.ones(size)
    expected = around / deviation * scale + (exact(bias) if has_bias else 0)
    # The mean is rounded to float32, which counts where all numbers are near it.
    noise = 2e-7 * np.abs(exact(x)).max(-1, keepdims=True) / deviation * np.abs(scale)
    assert_close(mx.fast.layer_norm(x, *given, 1e-3), expected, dtype, noise)


def test_a_norm_of_few_numbers_far_from_zero_is_exact() -> None:
    x = mx.array([[1000.0, 1000.25, 1000.5]])
    around = exact(x) - exact(x).mean(-1, keepdims=True)
    expected = around / np.sqrt((around**2).mean(-1, keepdims=True) + 1e-3)
    assert_close(mx.fast.layer_norm(x, None, None, 1e-3), expected, mx.float32)


@pytest.mark.parametrize("name", ["gelu_approx", "gelu_fast_approx"])
@pytest.mark.parametrize("shape", [(1, 7), (3, 1536), (2, 5, 33), (0, 4)])
def test_activations_equal_mlxs(name: str, shape: tuple[int, ...]) -> None:
    from mlx import nn

    operations.install()
    x = numbers(3, *shape) * 4
    ours: Operation = getattr(nn, name)
    stock = operations.stock(name)
    assert ours is not stock
    module: Any = nn.GELU("tanh" if name == "gelu_approx" else "fast")
    assert mx.array_equal(module(x), ours(x))
    assert_close(ours(x), exact(stock(x)), mx.float32)

    def loss(activate: Operation) -> Callable[[mx.array], mx.array]:
        return lambda x: activate(x).sum()

    assert_close(mx.grad(loss(ours))(x), exact(mx.grad(loss(stock))(x)), mx.float32)
    half = x.astype(mx.float16)
    assert mx.array_equal(ours(half), stock(half))
    operations.uninstall()
    assert getattr(nn, name) is stock


@given(st.data(), st.integers(1, 3), st.integers(1, 5), st.integers(1, 9), st.booleans())
@examples(1.2)
def test_heads_are_rotated(
    data: st.DataObject, batch: int, heads: int, tokens: int, traditional: bool
) -> None:
    size = data.draw(st.sampled_from([32, 40, 64, 128]))
    dims = data.draw(st.sampled_from([size, size // 2, 16]))
    x = numbers(4, batch, tokens, heads, size).swapaxes(1, 2)
    first = data.draw(st.integers(0, 30_000))
    offset = data.draw(
        st.sampled_from([first, mx.array(first), mx.array([first + 7 * entry for entry in range(batch)])])
    )
    own_frequencies = mx.exp(mx.arange(dims // 2) * 0.1)
    given = data.draw(
        st.sampled_from([{"base": 1e4}, {"base": 5e5}, {"base": None, "freqs": own_frequencies}])
    )
    options: dict[str, Any] = {"traditional": traditional, "scale": 1.0, "offset": offset, **given}
    theirs = operations.stock("rope")(x, dims, **options)
    assert_close(mx.fast.rope(x, dims, **options), exact(theirs), mx.float32)


@pytest.mark.parametrize("shape", [(1, 7), (3, 1536), (2, 5, 33)])
def test_the_gated_activation_equals_mlxs(shape: tuple[int, ...]) -> None:
    activations: Any = pytest.importorskip("mlx_lm.models.activations")
    llama: Any = pytest.importorskip("mlx_lm.models.llama")
    operations.install()
    assert llama.swiglu is activations.swiglu
    gate, up = numbers(3, *shape) * 30, numbers(4, *shape)
    expected = exact(gate) / (1 + np.exp(-exact(gate))) * exact(up)
    assert_close(llama.swiglu(gate, up), expected, mx.float32)
    half = llama.swiglu(gate.astype(mx.float16), up.astype(mx.float16))
    assert half.dtype == mx.float16
    operations.uninstall()
    assert llama.swiglu is activations.swiglu
    assert_close(llama.swiglu(gate, up), expected, mx.float32)


@pytest.mark.parametrize("name", ["swiglu", "gelu_approx", "gelu_fast_approx"])
def test_very_negative_numbers_become_zero_as_by_mlx(name: str) -> None:
    """Expect NaN of minus infinity, and minus zero of the others."""
    from mlx import nn

    activations: Any = pytest.importorskip("mlx_lm.models.activations")
    operations.install()
    values = [-math.inf, -3e38, -1e20, -1e5, -200.0, -104.0, -88.00001, math.nan, math.inf, 3e38]
    x = mx.array(values * 2)
    more = [mx.ones_like(x)] if name == "swiglu" else []
    ours = getattr(activations if more else nn, name)(x, *more)
    theirs = x * mx.sigmoid(x) if more else operations.stock(name)(x)
    assert mx.array_equal(ours, theirs, equal_nan=True)
    assert np.signbit(exact(ours)[1:7]).all()
    near = mx.array([-88.0, -87.0, -80.0])  # not zero yet
    assert mx.all(activations.swiglu(near, mx.ones_like(near)) < 0).item()


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_half_types_are_rounded_once(dtype: mx.Dtype) -> None:
    """Expect the result of float32, rounded: within a unit of the last place."""
    x, weight = (array.astype(dtype) for array in (numbers(3, 3, 64), numbers(4, 64)))
    wide, wide_weight = x.astype(mx.float32), weight.astype(mx.float32)
    norm = operations.stock("rms_norm")(wide, wide_weight, 1e-5)
    assert_close(mx.fast.rms_norm(x, weight, 1e-5), exact(norm), dtype)
    q = numbers(5, 1, 2, 4, 64).astype(dtype)
    attended = operations.stock("scaled_dot_product_attention")(*[q.astype(mx.float32)] * 3, scale=0.1)
    assert_close(mx.fast.scaled_dot_product_attention(q, q, q, scale=0.1), exact(attended), dtype)
    options: dict[str, Any] = {"traditional": False, "base": 1e4, "scale": 1.0, "offset": 3}
    turned = operations.stock("rope")(q.astype(mx.float32), 64, **options)
    assert_close(mx.fast.rope(q, 64, **options), exact(turned), dtype)


def test_integers_are_mlxs() -> None:
    with pytest.raises(ValueError, match="unsupported type int32"):
        mx.fast.rms_norm(mx.zeros((2, 64), mx.int32), None, 1e-5)


def test_layers_can_be_differentiated() -> None:
    """Expect the gradients of MLX's own operations."""
    q, kv = numbers(5, 1, 2, 4, 64), numbers(6, 1, 2, 4, 64)

    def loss(norm: Operation, rope: Operation, attend: Operation) -> Callable[[mx.array], mx.array]:
        def compute(x: mx.array) -> mx.array:
            turned = rope(norm(x, None, 1e-5), 64, traditional=False, base=1e4, scale=1.0, offset=3)
            return attend(turned, kv, kv, scale=0.1, mask="causal").sum()

        return compute

    ours = loss(mx.fast.rms_norm, mx.fast.rope, mx.fast.scaled_dot_product_attention)
    theirs = loss(*map(operations.stock, ("rms_norm", "rope", "scaled_dot_product_attention")))
    assert_close(mx.grad(ours)(q), exact(mx.grad(theirs)(q)), mx.float32)
