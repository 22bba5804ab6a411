"""Products with quantized weights: equal to MLX's own within rounding, for every layout that MLX takes."""

# pyright: reportUnknownMemberType=false, reportArgumentType=false
# MLX's stubs take an unpacked list for any later parameter.
from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import mlx.core as mx
import numpy as np
import pytest
from comparison import (
    LAYOUTS,
    MODES,
    TYPES,
    assert_close,
    dense_of,
    exact,
    formats,
    needs_kernels,
    numbers,
    own,
    row_counts,
    types,
    unit_of,
)
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from property_examples import examples

from mlx_cpu_kernels import operations
from mlx_cpu_kernels.selfcheck import Operation

pytestmark = [needs_kernels, pytest.mark.usefixtures("installed")]


@pytest.mark.slow
@given(st.data(), formats, types, types)
@examples(2)
def test_a_product_is_that_of_the_dequantized_weights(
    data: st.DataObject, options: dict[str, Any], type_name: str, scales_name: str
) -> None:
    transpose = data.draw(st.booleans())
    rows, others = data.draw(row_counts), data.draw(st.sampled_from([32, 40, 64, 129, 192]))
    if not transpose:
        others = (others + 31) // 32 * 32
    columns = unit_of(options) * data.draw(st.integers(1, 9))
    parts = mx.quantize(numbers(1, others + 3, columns).astype(TYPES[scales_name]), **options)
    parts = [part[3:] for part in parts] if data.draw(st.booleans()) else [part[:others] for part in parts]
    inner = columns if transpose else others
    x = data.draw(st.sampled_from(LAYOUTS))(rows, inner).astype(TYPES[type_name])
    dense = dense_of(parts, options)
    ours = mx.quantized_matmul(x, *parts, transpose=transpose, **options)
    is_narrow = type_name == scales_name or "mode" in options  # whose scales have no type
    assert_close(
        ours, exact(x) @ (dense.T if transpose else dense), TYPES[type_name] if is_narrow else mx.float32
    )


@pytest.mark.parametrize("transpose", [True, False])
@pytest.mark.parametrize("shape", [(2, 3, 4, 5), (2, 3, 1, 5), (1, 1, 6, 1)])
@pytest.mark.parametrize("quantization", [{"bits": 8, "group_size": 32}, {"mode": "nvfp4"}])
def test_several_matrices_are_broadcast_as_by_mlx(
    shape: tuple[int, ...], transpose: bool, quantization: dict[str, Any]
) -> None:
    """Multiply as attention over a quantized KV cache does: several heads of queries share a KV head."""
    batch, heads, repeats, count = shape
    keys = mx.quantize(numbers(3, batch, heads, 1, 96, 64), **quantization)
    parts = [part[..., :32, :] if transpose else part for part in keys]  # a part of the cache's buffer
    x = numbers(4, batch, heads, repeats, count, 64 if transpose else 96)
    options: dict[str, Any] = {**quantization, "transpose": transpose}
    ours, theirs = mx.quantized_matmul(x, *parts, **options), own("quantized_matmul", x, *parts, **options)
    assert_close(ours, exact(theirs), mx.float32)


def _times_matrices(x: mx.array, indices: mx.array | None, options: dict[str, Any]) -> mx.array:
    parts = mx.quantize(numbers(3, 4, 40, 64), **options)
    if indices is None:
        return mx.quantized_matmul(x, *parts, **options)
    return mx.gather_qmm(x, *parts, rhs_indices=indices, **options)


@pytest.mark.parametrize("options", [{"bits": 4, "group_size": 32}, {"mode": "mxfp4"}])
@pytest.mark.parametrize("indices", [None, mx.array([[1, 3, 0, 2]]), mx.array([[[2]]])])
@pytest.mark.parametrize("leading", [(1, 4), (2, 1), (1,)])
def test_products_with_several_matrices_are_compiled_for_any_shape(
    leading: tuple[int, ...], indices: mx.array | None, options: dict[str, Any]
) -> None:
    """Compile once for all numbers of entries, heads and rows, though x, matrices and indices are broadcast."""

    def compute(x: mx.array) -> mx.array:
        return _times_matrices(x, indices, options)

    multiply = cast("Operation", mx.compile(compute, shapeless=True))
    rows = 5 if indices is None else 1
    for entries in (3, 5, 1):
        x = numbers(entries, entries, *leading, rows, 64)
        assert mx.array_equal(multiply(x), _times_matrices(x, indices, options)).item()


@given(formats, types, st.integers(1, 9), st.integers(1, 4), st.booleans())
@examples(1.2)
def test_experts_compute_their_own_rows(
    options: dict[str, Any], type_name: str, tokens: int, chosen: int, transpose: bool
) -> None:
    columns = unit_of(options) * 2
    experts = mx.quantize(numbers(5, 6, 40, columns), **options)
    dense = dense_of(experts, options)
    x = numbers(6, tokens, 1, 1, columns if transpose else 40).astype(TYPES[type_name])
    indices = mx.array(np.random.default_rng(tokens).integers(0, 6, (tokens, chosen)))
    ours = mx.gather_qmm(x, *experts, rhs_indices=indices, transpose=transpose, **options)
    dense = dense if transpose else dense.swapaxes(1, 2)
    expected = np.einsum("tk,tcnk->tcn", exact(x)[:, 0, 0], dense[np.array(indices)])[:, :, None]
    assert_close(ours, expected, TYPES[type_name] if "mode" in options else mx.float32)


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_numbers_of_an_earlier_product_do_not_stay(rows: int) -> None:
    """Fill the memory that a product uses for a while with NaN, then multiply with fewer rows of weights."""
    options: dict[str, Any] = {"bits": 4, "group_size": 32, "transpose": False}
    broken = mx.quantize(numbers(1, 260, 64) * float("nan"), bits=4, group_size=32)
    mx.eval(mx.quantized_matmul(numbers(2, 1, 260), *broken, **options))
    weights = mx.quantize(numbers(3, 101, 64), bits=4, group_size=32)
    x = numbers(4, rows, 101)
    theirs = own("quantized_matmul", x, *weights, **options)
    assert_close(mx.quantized_matmul(x, *weights, **options), exact(theirs), mx.float32)


def test_rows_that_are_copied_in_several_blocks() -> None:
    """Multiply more rows than are kept at once: 32 MB of them."""
    weights = mx.quantize(numbers(3, 40, 16384), bits=4, group_size=128)
    x = numbers(4, 500, 16384)
    expected = exact(x) @ exact(own("dequantize", *weights, bits=4, group_size=128)).T
    assert_close(mx.quantized_matmul(x, *weights, bits=4, group_size=128), expected, mx.float32)


def test_scales_and_biases_may_lie_differently() -> None:
    weights, scales, biases = mx.quantize(numbers(1, 40, 128), bits=4, group_size=32)
    wide = mx.concatenate([scales, scales], axis=1)[:, :4]
    x = numbers(2, 3, 128)
    for parts in ((weights, wide, biases), (weights, scales, mx.broadcast_to(biases[:1], biases.shape))):
        theirs = own("quantized_matmul", x, *parts, bits=4, group_size=32)
        assert_close(mx.quantized_matmul(x, *parts, bits=4, group_size=32), exact(theirs), mx.float32)
        whole = own("dequantize", *parts, bits=4, group_size=32)
        assert_close(mx.dequantize(*parts, bits=4, group_size=32), exact(whole), mx.float32)


def test_products_without_depth_are_zero() -> None:
    empty = (mx.zeros((8, 0), mx.uint32), mx.zeros((8, 0)), mx.zeros((8, 0)))
    assert mx.array_equal(mx.quantized_matmul(mx.zeros((3, 0)), *empty), mx.zeros((3, 8)))
    experts, chosen = [part[None] for part in empty], mx.array([0, 0])
    assert mx.array_equal(
        mx.gather_qmm(mx.zeros((2, 1, 0)), *experts, rhs_indices=chosen), mx.zeros((2, 1, 8))
    )


def test_an_expert_that_is_not_there_is_refused() -> None:
    experts = mx.quantize(numbers(5, 3, 32, 64))
    product = mx.gather_qmm(numbers(6, 1, 1, 64), *experts, rhs_indices=mx.array([3]))
    with pytest.raises(RuntimeError, match="no matrix has the index 3"):
        mx.eval(product)


@given(formats, types, st.booleans())
@examples(0.8)
def test_dequantized_weights_equal_mlxs(options: dict[str, Any], type_name: str, is_sliced: bool) -> None:
    dtype = TYPES[type_name]
    parts = mx.quantize(numbers(7, 3, 33, unit_of(options) * 3).astype(dtype), **options)
    parts = [part[1:, ::2] for part in parts] if is_sliced else parts
    as_is = mx.dequantize(*parts, **options)
    assert_close(as_is, dense_of(parts, options), mx.bfloat16 if "mode" in options else dtype)
    if "mode" in options:
        assert mx.array_equal(as_is, own("dequantize", *parts, **options))
        assert_close(mx.dequantize(*parts, **options, dtype=dtype), dense_of(parts, options), dtype)


@pytest.mark.parametrize("mode", MODES)
def test_every_byte_is_the_number_that_it_is_for_mlx(mode: str) -> None:
    """Take each scale with each number, also those that are infinite or none."""
    every = mx.arange(256, dtype=mx.uint32).astype(mx.uint8)
    weights = mx.broadcast_to(every, (256, 256)).view(mx.uint32)
    groups = weights.nbytes // 256 * (1 if mode == "mxfp8" else 2) // MODES[mode]
    scales = mx.broadcast_to(every[:, None], (256, groups))
    ours, theirs = (
        dequantize(weights, scales, mode=mode, dtype=mx.float32)
        for dequantize in (mx.dequantize, operations.stock("dequantize"))
    )
    assert mx.array_equal(ours, theirs, equal_nan=True)


@pytest.mark.parametrize("rows", [1, 3, 40])
@pytest.mark.parametrize("exponent", [-124, -110, 110, 121])
@pytest.mark.parametrize(
    "options", [{"bits": 2}, {"bits": 4}, {"bits": 8}, {"mode": "mxfp4"}, {"mode": "mxfp8"}]
)
def test_products_of_tiny_and_of_huge_numbers_are_as_exact(
    options: dict[str, Any], exponent: int, rows: int
) -> None:
    weights = mx.quantize(numbers(1, 40, 256), **options)
    x = numbers(2, rows, 256) * 2.0**exponent
    ours = mx.quantized_matmul(x, *weights, **options)
    assert_close(ours, exact(x) @ dense_of(weights, options).T, mx.float32)


def _without_columns(options: dict[str, Any], columns: int, meant: list[int]) -> list[mx.array]:
    """Quantize 40 rows of a matrix whose weights in some columns are zero, beside others in their groups."""
    weights, scales, *_ = mx.quantize(numbers(1, 40, columns), **options)
    words = cast("NDArray[np.uint32]", np.array(weights))
    bits = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little").reshape(40, columns, -1)
    width = bits.shape[-1]
    zero = 0 if "mode" in options else 1 << (width - 1)
    bits[:, meant] = [zero >> bit & 1 for bit in range(width)]
    packed = np.packbits(bits.reshape(40, -1), axis=1, bitorder="little").view(np.uint32)
    biases = [] if "mode" in options else [scales * -float(zero)]
    return [mx.array(packed), scales, *biases]


@given(st.data(), formats, st.integers(1, 20), st.floats(3, 6))
@examples(2)
def test_outliers_that_meet_weights_of_zero_leave_the_others_exact(
    data: st.DataObject, options: dict[str, Any], rows: int, exponent: float
) -> None:
    """Put outliers into single columns, into an eighth of each group, and into a whole group."""
    group, groups = unit_of(options), data.draw(st.integers(1, 9))
    each = options.get("group_size") or MODES[options["mode"]]
    columns = group * groups
    meant = {
        "one": [data.draw(st.integers(0, columns - 1))],
        "some": [column for column in range(columns) if column % each < each // 8],
        "a group": list(range(each)) if columns > each else [0],
    }[data.draw(st.sampled_from(["one", "some", "a group"]))]
    parts = _without_columns(options, columns, meant)
    x = exact(numbers(2, rows, columns))
    outlying = data.draw(st.integers(0, rows - 1))
    x[outlying, meant] = 10.0**exponent * np.sign(x[outlying, meant])
    activations = mx.array(x.astype(np.float32))
    expected = exact(activations) @ dense_of(parts, options).T
    ours = mx.quantized_matmul(activations, *parts, **options)
    for row in range(rows):
        assert_close(ours[row], expected[row], mx.float32)


@pytest.mark.parametrize("rows", [1, 3, 40])
@pytest.mark.parametrize("options", [{"bits": 3}, {"bits": 4}, {"bits": 8}, {"mode": "nvfp4"}])
def test_an_infinite_number_is_multiplied_as_by_mlx(options: dict[str, Any], rows: int) -> None:
    weights = mx.quantize(numbers(1, 40, 256), **options)
    x = numbers(2, rows, 256)
    x[rows - 1, 77] = float("inf")
    ours = mx.quantized_matmul(x, *weights, **options)
    theirs = own("quantized_matmul", x, *weights, **options)
    assert mx.array_equal(ours[-1], theirs[-1], equal_nan=True)
    assert_close(ours[:-1], exact(theirs[:-1]), mx.float32)


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
@pytest.mark.parametrize("mode", MODES)
def test_numbers_that_are_not_finite_do_not_get_lost(mode: str, value: float) -> None:
    weights = mx.quantize(numbers(1, 40, 256), mode=mode)
    x = numbers(2, 3, 256)
    x[1, 77] = value
    ours = mx.quantized_matmul(x, *weights, mode=mode)
    assert not mx.any(mx.isfinite(ours[1])).item()
    assert mx.all(mx.isfinite(ours[::2])).item()


@pytest.mark.parametrize("rows", [1, 3, 40])
@pytest.mark.parametrize(("mode", "scale"), [("mxfp4", 255), ("mxfp8", 255), ("nvfp4", 127)])
def test_the_scale_that_is_no_number_makes_its_own_column_none(mode: str, scale: int, rows: int) -> None:
    # By their definitions E8M0's 255 and E4M3's 127 are NaN. MLX reads 255 as infinity: where all products of the group
    # have one sign it gives that, here it may be NaN.
    weights, scales, *_ = mx.quantize(numbers(1, 40, 256), mode=mode)
    scales[7, 2] = scale
    x = numbers(2, rows, 256)
    ours = mx.quantized_matmul(x, weights, scales, mode=mode)
    theirs = own("quantized_matmul", x, weights, scales, mode=mode)
    assert mx.isfinite(ours).tolist() == mx.isfinite(theirs).tolist()
    others = mx.arange(40) != 7
    assert_close(mx.where(others, ours, 0), mx.where(others, theirs, 0), mx.float32)


def test_embeddings_and_layers_of_other_modes_are_computed() -> None:
    """Call modules of mlx.nn, as models do."""
    from mlx import nn

    embedding: Any = nn.Embedding(50, 64).to_quantized(mode="mxfp4", group_size=32, bits=4)
    linear: Any = nn.Linear(64, 40).to_quantized(mode="nvfp4", group_size=16, bits=4)
    tokens, x = mx.array([[3, 9, 49]]), numbers(1, 2, 64)
    ours: list[mx.array] = [embedding(tokens), embedding.as_linear(x), linear(x)]
    mx.eval(ours)
    operations.uninstall()
    theirs: list[mx.array] = [embedding(tokens), embedding.as_linear(x), linear(x)]
    assert mx.array_equal(ours[0], theirs[0])
    for one, other in zip(ours[1:], theirs[1:], strict=True):
        assert_close(one, exact(other), mx.float32)


def _is_an_expert(path: str, module: object) -> bool:
    return "experts" in path and hasattr(module, "to_quantized")


@pytest.mark.parametrize("tokens", [1, 40])
def test_gpt_oss_in_mxfp4_computes_what_mlx_s_own_operations_do(tokens: int) -> None:
    gpt_oss: Any = pytest.importorskip("mlx_lm.models.gpt_oss")
    from mlx import nn

    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 2, "head_dim": 32}
    mx.random.seed(3)
    model: Any = gpt_oss.Model(gpt_oss.ModelArgs(vocab_size=128, sliding_window=16, **sizes, **experts))
    nn.quantize(model, mode="mxfp4", group_size=32, bits=4, class_predicate=_is_an_expert)
    prompt = mx.arange(tokens)[None] % 128
    ours = model(prompt)
    mx.eval(ours)
    operations.uninstall()
    assert_close(ours, exact(model(prompt)), mx.float32)


def test_rows_that_end_within_a_chunk_are_mlxs() -> None:
    """Multiply by 48 columns, which three groups of 16 have."""
    weights, x = mx.quantize(numbers(8, 40, 48), mode="nvfp4"), numbers(9, 3, 48)
    theirs = own("quantized_matmul", x, *weights, mode="nvfp4")
    assert mx.array_equal(mx.quantized_matmul(x, *weights, mode="nvfp4"), theirs)


@pytest.mark.parametrize(
    ("x", "options", "message"),
    [
        (mx.zeros((3, 100)), {}, r"Last dimension of first input with shape \(\.\.\., 100\) does not match"),
        (mx.zeros((3, 128)), {"bits": 7}, "bits"),
        (mx.zeros((3, 128)), {"group_size": 48}, "group"),
        (mx.zeros((3, 128)), {"mode": "mxfp4"}, "Scale type must be uint8"),
        (mx.zeros((3, 128)), {"mode": "fp4"}, "fp4"),
    ],
)
def test_wrong_arguments_get_mlxs_own_error(x: mx.array, options: dict[str, Any], message: str) -> None:
    weights = mx.quantize(numbers(8, 40, 128))
    with pytest.raises(ValueError, match=message):
        mx.quantized_matmul(x, *weights, **options)


@pytest.mark.parametrize("options", [{}, {"mode": "mxfp4"}])
def test_a_product_is_lazy_and_can_be_compiled_and_differentiated(options: dict[str, Any]) -> None:
    weights = mx.quantize(numbers(8, 40, 128), **options)
    x = numbers(9, 3, 128)

    def loss(operation: Callable[..., mx.array]) -> Callable[[mx.array], mx.array]:
        return lambda x: (operation(x, *weights, **options) ** 2).sum()

    stock = operations.stock("quantized_matmul")
    assert_close(mx.grad(loss(mx.quantized_matmul))(x), exact(mx.grad(loss(stock))(x)), mx.float32)
    compiled = mx.compile(loss(mx.quantized_matmul))(x)
    assert compiled.item() == pytest.approx(loss(stock)(x).item(), rel=1e-5)


def test_several_threads_compute_the_same() -> None:
    weights = mx.quantize(numbers(8, 700, 256))
    one = [mx.quantized_matmul(numbers(9, rows, 256), *weights) for rows in (1, 5, 40)]
    mx.eval(one)
    operations.install(threads=3)
    for rows, alone in zip((1, 5, 40), one, strict=True):
        assert mx.array_equal(mx.quantized_matmul(numbers(9, rows, 256), *weights), alone)
