"""Installation of the kernels: what MLX does with its operations, and what the self-check refuses."""

# pyright: reportUnknownMemberType=false, reportArgumentType=false, reportPrivateUsage=false
# MLX's stubs take an unpacked list for any later parameter. One test replaces what `install` loads.
from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import mlx.core as mx
import pytest
from comparison import UNITS, assert_close, exact, needs_kernels, numbers

from mlx_cpu_kernels import operations
from mlx_cpu_kernels.selfcheck import Operation

pytestmark = [needs_kernels, pytest.mark.usefixtures("installed")]


FUNCTIONS: dict[str, tuple[Callable[[mx.array], mx.array], Callable[[int], mx.array]]] = {
    "norm": (lambda x: mx.fast.rms_norm(x, None, 1e-5), lambda rows: numbers(9, rows, 3, 128)),
    "dequantized": (
        lambda x: mx.dequantize(x, mx.ones((3, 2)), mx.ones((3, 2))),
        lambda rows: (mx.arange(rows * 48, dtype=mx.uint32) * 12345).reshape(rows, 3, 16),
    ),
    "rotation": (
        lambda x: mx.fast.rope(x, 64, traditional=False, base=1e4, scale=1.0, offset=3),
        lambda rows: numbers(9, rows, 1, 2, 3, 64),
    ),
    "attention": (
        lambda x: mx.fast.scaled_dot_product_attention(x, x, x, scale=0.1, mask="causal"),
        lambda rows: numbers(9, rows, 1, 2, 3, 64),
    ),
}
"""Operations that MLX's own can map, and arguments with a number of entries."""


@pytest.mark.parametrize("name", FUNCTIONS)
def test_layers_can_be_mapped(name: str) -> None:
    """Map as MLX's own operations can; its products with quantized weights cannot."""
    compute, entries = FUNCTIONS[name]
    x = entries(5)
    expected = mx.stack([compute(entry) for entry in x])
    assert_close(mx.vmap(compute)(x), exact(expected), mx.float32)


SHAPELESS: dict[str, tuple[Callable[[mx.array], mx.array], Callable[[int], mx.array]]] = {
    "product": (
        lambda x: mx.quantized_matmul(x, *mx.quantize(numbers(8, 40, 128))),
        lambda rows: numbers(9, rows, 128),
    ),
    "norm": FUNCTIONS["norm"],
    "rotation": (FUNCTIONS["rotation"][0], lambda rows: numbers(9, 1, 2, rows, 64)),
    "attention": (FUNCTIONS["attention"][0], lambda rows: numbers(9, 1, 2, rows, 64)),
}


@pytest.mark.parametrize("name", SHAPELESS)
def test_a_compiled_function_without_shapes_takes_others(name: str) -> None:
    compute, entries = SHAPELESS[name]
    compiled = cast("Operation", mx.compile(compute, shapeless=True))
    for rows in (1, 4):
        x = entries(rows)
        assert_close(compiled(x), exact(compute(x)), mx.float32)


def _is_half(x: mx.array) -> bool:
    return x.dtype in UNITS


WRONG: dict[str, tuple[str, Callable[[tuple[Any, ...], dict[str, Any]], bool]]] = {
    "one number of bits": ("quantized_matmul", lambda _, options: options.get("bits") == 5),
    "an early end of a block": ("quantized_matmul", lambda given, _: given[0].shape[-1] % 256 != 0),
    "few rows": ("quantized_matmul", lambda given, _: given[0].shape[-2] == 1),
    "many rows": ("quantized_matmul", lambda given, _: given[0].shape[-2] > 16),
    "large matrices": ("quantized_matmul", lambda given, _: given[1].shape[0] > 500),
    "straight products": ("quantized_matmul", lambda _, options: not options.get("transpose", True)),
    "half types": ("quantized_matmul", lambda given, _: _is_half(given[0])),
    "half scales": ("dequantize", lambda given, _: _is_half(given[1])),
    "experts": ("gather_qmm", lambda _, __: True),
    "mxfp4": ("quantized_matmul", lambda _, options: options.get("mode") == "mxfp4"),
    "experts in nvfp4": ("gather_qmm", lambda _, options: options.get("mode") == "nvfp4"),
    "numbers of mxfp8": ("dequantize", lambda _, options: options.get("mode") == "mxfp8"),
    "norms of half types": ("rms_norm", lambda given, _: _is_half(given[0])),
    "norms without weights": ("rms_norm", lambda given, _: given[1] is None),
    "given frequencies": ("rope", lambda _, options: options["base"] is None),
    "masks": ("scaled_dot_product_attention", lambda _, options: isinstance(options.get("mask"), mx.array)),
    "causal masks": ("scaled_dot_product_attention", lambda _, options: options.get("mask") is not None),
    "sinks": ("scaled_dot_product_attention", lambda _, options: "sinks" in options),
    "attention in half types": ("scaled_dot_product_attention", lambda given, _: _is_half(given[0])),
    "activations": ("swiglu", lambda _, __: True),
    "products by heads": ("heads", lambda _, __: True),
    "norms of heads": ("heads", lambda given, _: bool(given[4])),
    "gated products": ("gated_layer", lambda _, __: True),
    "tokens with their cache": ("attended_token", lambda _, __: True),
    "appended rows": ("append", lambda _, __: True),
    "products with a residual": ("added", lambda _, __: True),
    "residuals of half types": ("added", lambda given, _: _is_half(given[0])),
}
"""Kinds of arguments, each with the operation and a test of its arguments."""


@pytest.mark.slow
@pytest.mark.parametrize("kind", WRONG)
def test_kernels_that_compute_something_else_are_not_installed(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Make the results of one kind of arguments a fiftieth too large."""
    operations.uninstall()
    right, (name, is_meant) = operations._load(), WRONG[kind]

    class Wrong:
        def __getattr__(self, attribute: str) -> Any:
            return compute if attribute == name else getattr(right, attribute)

    def compute(*arguments: Any, **options: Any) -> Any:
        result = getattr(right, name)(*arguments, **options)
        if not is_meant(arguments, options):
            return result
        if not isinstance(result, mx.array):
            return [(each * 1.02).astype(each.dtype) for each in result]
        return (result * 1.02).astype(result.dtype)

    monkeypatch.setattr(operations, "_load", Wrong)
    stock = mx.quantized_matmul
    report = operations.install()
    assert not report.active
    assert f"wrong result of {name} with {{" in report.detail
    assert mx.quantized_matmul is stock
