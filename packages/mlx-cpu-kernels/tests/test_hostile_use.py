"""Arguments and uses that nobody means well: results are MLX's own, or its errors."""

# pyright: reportUnknownMemberType=false, reportArgumentType=false
# MLX's stubs take an unpacked list for any later parameter.
from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from comparison import assert_close, exact, needs_kernels, numbers, own

from mlx_cpu_kernels import operations

pytestmark = [needs_kernels, pytest.mark.usefixtures("installed")]


def _result(compute: Callable[[], mx.array]) -> mx.array | str:
    """Return a result, or the text of an error."""
    try:
        result = compute()
        mx.eval(result)
    except (ValueError, TypeError, RuntimeError) as error:
        return str(error)
    return result


def _assert_mlxs(name: str, *arguments: Any, **options: Any) -> None:
    """Check for the result of MLX's own operation, or for its error."""
    module = mx.fast if hasattr(mx.fast, name) else mx
    ours = _result(lambda: getattr(module, name)(*arguments, **options))
    theirs = _result(lambda: own(name, *arguments, **options))
    if isinstance(ours, str) or isinstance(theirs, str):
        assert ours == theirs
        return
    assert np.array_equal(np.isnan(exact(ours)), np.isnan(exact(theirs)))
    assert_close(mx.nan_to_num(ours), exact(mx.nan_to_num(theirs)), theirs.dtype)


@pytest.mark.parametrize(
    "shape", [(64,), (1, 1, 1, 1, 64), (3, 63), (64, 3)], ids=lambda shape: f"x of {shape}"
)
def test_products_of_any_shape_are_mlxs(shape: tuple[int, ...]) -> None:
    _assert_mlxs("quantized_matmul", numbers(1, *shape), *mx.quantize(numbers(2, 40, 64)))


@pytest.mark.parametrize("shape", [(0, 64), (2, 0, 64)])
def test_products_without_rows_are_empty(shape: tuple[int, ...]) -> None:
    """Expect what MLX's own does in any process that survives it."""
    product = mx.quantized_matmul(mx.zeros(shape), *mx.quantize(numbers(2, 40, 64)))
    mx.eval(product)
    assert product.shape == (*shape[:-1], 40)


def test_products_with_wrong_parts_are_mlxs_errors() -> None:
    weights, scales, biases = mx.quantize(numbers(2, 40, 64))
    x = numbers(1, 3, 64)
    for parts in (
        (weights, scales[:3], biases[:3]),
        (weights, scales),
        (weights, scales.astype(mx.float16), biases),
        (weights.view(mx.int32), scales, biases),
    ):
        _assert_mlxs("quantized_matmul", x, *parts)
    _assert_mlxs("quantized_matmul", x, weights, scales, biases, group_size=32)
    _assert_mlxs("quantized_matmul", x.astype(mx.int32), weights, scales, biases)


def test_views_that_run_backwards_are_mlxs() -> None:
    parts = [part[::-1] for part in mx.quantize(numbers(2, 40, 64))]
    _assert_mlxs("quantized_matmul", numbers(1, 3, 64)[::-1, ::-1], *parts)
    heads = [numbers(seed, 1, 2, length, 64)[:, :, ::-1, ::-1] for seed, length in ((3, 4), (4, 9), (5, 9))]
    _assert_mlxs("scaled_dot_product_attention", *heads, scale=0.1)


@pytest.mark.parametrize("mask", ["causal", None])
@pytest.mark.parametrize(("queries", "keys"), [(9, 5), (9, 1), (3, 0), (0, 5)])
def test_attention_to_fewer_keys_than_queries_is_mlxs(queries: int, keys: int, mask: str | None) -> None:
    q, k, v = numbers(1, 1, 4, queries, 64), numbers(2, 1, 2, keys, 64), numbers(3, 1, 2, keys, 64)
    _assert_mlxs("scaled_dot_product_attention", q, k, v, scale=0.1, mask=mask)


def test_attention_to_fewer_quantized_keys_than_queries_is_mlx_lms() -> None:
    base: Any = pytest.importorskip("mlx_lm.models.base")
    operations.install()
    name, options = "quantized_scaled_dot_product_attention", {"group_size": 32, "bits": 8}
    kv = mx.quantize(numbers(2, 1, 2, 5, 64), **options)
    ours, theirs = (
        attend(numbers(1, 1, 4, 9, 64), kv, kv, scale=0.1, mask="causal", **options)
        for attend in (getattr(base, name), operations.stock(name))
    )
    assert_close(ours, exact(theirs), mx.float32)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("place", ["queries", "keys", "values"])
@pytest.mark.parametrize("mask", [None, "causal", "array"])
def test_attention_with_what_is_no_finite_number_is_mlxs(place: str, mask: str | None, value: float) -> None:
    parts = {"queries": numbers(1, 1, 4, 5, 64), "keys": numbers(2, 1, 2, 5, 64)}
    parts["values"] = numbers(3, 1, 2, 5, 64)
    parts[place][0, 0, 2, 3] = value
    shown = mx.arange(5) != 4 if mask == "array" else mask
    _assert_mlxs("scaled_dot_product_attention", *parts.values(), scale=0.1, mask=shown)


@pytest.mark.parametrize("shown", [False, -float("inf")])
def test_queries_that_see_nothing_are_mlxs(shown: bool | float) -> None:
    q, k, v = numbers(1, 1, 4, 3, 64), numbers(2, 1, 2, 5, 64), numbers(3, 1, 2, 5, 64)
    _assert_mlxs("scaled_dot_product_attention", q, k, v, scale=0.1, mask=mx.full((3, 5), shown))


def _computed_often(x: mx.array, weights: list[mx.array]) -> list[mx.array]:
    with mx.stream(mx.new_stream(mx.Device(mx.cpu))):
        results = [mx.fast.rms_norm(mx.quantized_matmul(x + 0, *weights), None, 1e-5) for _ in range(100)]
        for result in results:
            mx.eval(result)
        return results


def test_threads_that_compute_at_once_get_the_same() -> None:
    weights, x = list(mx.quantize(numbers(1, 700, 256))), numbers(2, 5, 256)
    mx.eval(weights)
    operations.install(threads=2)
    expected = _computed_often(x, weights)[0]
    with ThreadPoolExecutor(4) as pool:
        for results in pool.map(_computed_often, [x] * 4, [weights] * 4):
            assert all(mx.array_equal(each, expected).item() for each in results)
