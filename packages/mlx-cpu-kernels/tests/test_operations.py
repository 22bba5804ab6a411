"""Operations of the native kernels: equal to MLX's own within rounding, for every layout that MLX takes."""

# pyright: reportUnknownMemberType=false, reportArgumentType=false, reportPrivateUsage=false
# MLX's stubs take an unpacked list for any later parameter. One test replaces what `install` loads.
from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from mlx_cpu_kernels import operations
from mlx_cpu_kernels.build import Target, find_binary
from mlx_cpu_kernels.packages import Unavailable
from mlx_cpu_kernels.selfcheck import Operation

Numbers = NDArray[np.float64]


def _can_be_built() -> bool:
    """Report whether the kernels are there, or should be: this machine has a compiler."""
    try:
        return find_binary(Target.installed()) is not None or shutil.which("g++") is not None
    except Unavailable:
        return False


pytestmark = pytest.mark.skipif(not _can_be_built(), reason="this machine has no native kernels and no g++")

TYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}
UNITS = {mx.float16: 2.0**-10, mx.bfloat16: 2.0**-7}
"""Distance from one number of a type to the next, as a part of the number."""

bits = st.sampled_from([2, 3, 4, 5, 6, 8])
group_sizes = st.sampled_from([32, 64, 128])
types = st.sampled_from(sorted(TYPES))
row_counts = st.one_of(st.integers(1, 20), st.sampled_from([33, 64, 100]))


@pytest.fixture(autouse=True)
def installed() -> Iterator[None]:
    """Compute on the CPU with the kernels, and give MLX its own operations back."""
    before = mx.default_device()
    mx.set_default_device(mx.Device(mx.cpu))
    report = operations.install()
    assert report.active, report.detail
    yield
    operations.uninstall()
    mx.set_default_device(before)


def numbers(seed: int, *shape: int) -> mx.array:
    return mx.array(np.random.default_rng(seed).standard_normal(shape).astype(np.float32))


def exact(array: mx.array) -> Numbers:
    return np.array(array.astype(mx.float32)).astype(np.float64)


def own(name: str, *arguments: mx.array, **options: Any) -> mx.array:
    return operations.stock(name)(*arguments, **options)


def assert_close(ours: mx.array, theirs: Numbers, dtype: mx.Dtype, noise: Numbers | float = 0.0) -> None:
    """Compare with the exact result: float32 within 1e-5 of the largest, half types within a unit of their last place.

    `noise` is allowed besides: what rounding arguments to float32 makes of the result.
    """
    assert ours.dtype == dtype
    assert ours.shape == theirs.shape
    most = np.abs(theirs).max(initial=0.0)
    allowed = 1e-5 * most + (np.abs(theirs) * UNITS[dtype] if dtype in UNITS else 0.0)
    assert np.all(np.abs(exact(ours) - theirs) <= allowed + noise)


@given(st.data(), bits, group_sizes, types, types)
@settings(max_examples=60, deadline=None)
def test_a_product_is_that_of_the_dequantized_weights(
    data: st.DataObject, bits: int, group_size: int, type_name: str, scales_name: str
) -> None:
    transpose = data.draw(st.booleans())
    rows, others = data.draw(row_counts), data.draw(st.sampled_from([32, 40, 64, 129, 192]))
    if not transpose:
        others = (others + 31) // 32 * 32
    columns = group_size * data.draw(st.integers(1, 5))
    options: dict[str, Any] = {"bits": bits, "group_size": group_size}
    weights = mx.quantize(numbers(1, others, columns).astype(TYPES[scales_name]), **options)
    dense = exact(
        own("dequantize", *(weights[0], *(part.astype(mx.float32) for part in weights[1:])), **options)
    )
    inner = columns if transpose else others
    x = data.draw(st.sampled_from(LAYOUTS))(rows, inner).astype(TYPES[type_name])
    expected = exact(x) @ (dense.T if transpose else dense)
    ours = mx.quantized_matmul(x, *weights, transpose=transpose, **options)
    wide = TYPES[type_name] if type_name == scales_name else mx.float32
    assert_close(ours, expected, wide)


def _plain(rows: int, inner: int) -> mx.array:
    return numbers(2, rows, inner)


def _batched(rows: int, inner: int) -> mx.array:
    return numbers(2, 2, rows, inner)


def _strided(rows: int, inner: int) -> mx.array:
    return numbers(2, rows * 2, inner)[::2]


def _transposed(rows: int, inner: int) -> mx.array:
    return numbers(2, inner, rows).T


def _swapped(rows: int, inner: int) -> mx.array:
    return numbers(2, rows, 3, inner).swapaxes(0, 1)


def _broadcast(rows: int, inner: int) -> mx.array:
    return mx.broadcast_to(numbers(2, 1, inner), (rows, inner))


def _part(rows: int, inner: int) -> mx.array:
    return numbers(2, 3, rows, inner + 7)[1:, :, 7:]


LAYOUTS: list[Callable[[int, int], mx.array]] = [
    *(_plain, _batched, _strided, _transposed, _swapped, _broadcast, _part),
]


@pytest.mark.parametrize("transpose", [True, False])
@pytest.mark.parametrize("shape", [(2, 3, 4, 5), (2, 3, 1, 5), (1, 1, 6, 1)])
def test_several_matrices_are_broadcast_as_by_mlx(shape: tuple[int, ...], transpose: bool) -> None:
    """Multiply as attention over a quantized KV cache does: several heads of queries share a KV head."""
    batch, heads, repeats, count = shape
    keys = mx.quantize(numbers(3, batch, heads, 1, 96, 64), bits=8, group_size=32)
    parts = [part[..., :32, :] if transpose else part for part in keys]  # a part of the cache's buffer
    x = numbers(4, batch, heads, repeats, count, 64 if transpose else 96)
    options: dict[str, Any] = {"bits": 8, "group_size": 32, "transpose": transpose}
    ours, theirs = mx.quantized_matmul(x, *parts, **options), own("quantized_matmul", x, *parts, **options)
    assert_close(ours, exact(theirs), mx.float32)


def _times_matrices(x: mx.array, indices: mx.array | None) -> mx.array:
    parts = mx.quantize(numbers(3, 4, 40, 64), bits=4, group_size=32)
    if indices is None:
        return mx.quantized_matmul(x, *parts, bits=4, group_size=32)
    return mx.gather_qmm(x, *parts, rhs_indices=indices, bits=4, group_size=32)


@pytest.mark.parametrize("indices", [None, mx.array([[1, 3, 0, 2]]), mx.array([[[2]]])])
@pytest.mark.parametrize("leading", [(1, 4), (2, 1), (1,)])
def test_products_with_several_matrices_are_compiled_for_any_shape(
    leading: tuple[int, ...], indices: mx.array | None
) -> None:
    """Compile once for all numbers of entries, heads and rows, though x, matrices and indices are broadcast."""

    def times_matrices(x: mx.array) -> mx.array:
        return _times_matrices(x, indices)

    multiply = mx.compile(times_matrices, shapeless=True)
    rows = 5 if indices is None else 1
    for entries in (3, 5, 1):
        x = numbers(entries, entries, *leading, rows, 64)
        assert mx.array_equal(multiply(x), times_matrices(x)).item()


@given(bits, group_sizes, types, st.integers(1, 9), st.integers(1, 4), st.booleans())
@settings(max_examples=30, deadline=None)
def test_experts_compute_their_own_rows(
    bits: int, group_size: int, type_name: str, tokens: int, chosen: int, transpose: bool
) -> None:
    options: dict[str, Any] = {"bits": bits, "group_size": group_size}
    experts = mx.quantize(numbers(5, 6, 40, group_size * 2), **options)
    dense = exact(own("dequantize", *experts, **options))
    x = numbers(6, tokens, 1, 1, group_size * 2 if transpose else 40).astype(TYPES[type_name])
    indices = mx.array(np.random.default_rng(tokens).integers(0, 6, (tokens, chosen)))
    ours = mx.gather_qmm(x, *experts, rhs_indices=indices, transpose=transpose, **options)
    dense = dense if transpose else dense.swapaxes(1, 2)
    expected = np.einsum("tk,tcnk->tcn", exact(x)[:, 0, 0], dense[np.array(indices)])[:, :, None]
    assert_close(ours, expected, mx.float32)


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
    """Multiply more rows than are kept at once: 16 MB of them."""
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


def test_an_expert_that_is_not_there_is_refused() -> None:
    experts = mx.quantize(numbers(5, 3, 32, 64))
    product = mx.gather_qmm(numbers(6, 1, 1, 64), *experts, rhs_indices=mx.array([3]))
    with pytest.raises(RuntimeError, match="no matrix has the index 3"):
        mx.eval(product)


@given(st.integers(1, 40), st.integers(1, 600), st.booleans(), st.sampled_from(LAYOUTS))
@settings(max_examples=40, deadline=None)
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
@settings(max_examples=60, deadline=None)
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
@settings(max_examples=60, deadline=None)
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
@settings(max_examples=100, deadline=None)
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


@given(
    *(st.data(), st.integers(1, 3), st.sampled_from([(1, 1), (4, 4), (6, 2), (9, 3), (16, 1)])),
    *(st.sampled_from([4, 8]), st.sampled_from([(32, 64), (64, 128), (32, 96), (128, 256)])),
)
@settings(max_examples=100, deadline=None)
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


@given(bits, group_sizes, types, st.booleans())
@settings(max_examples=30, deadline=None)
def test_dequantized_weights_equal_mlxs(bits: int, group_size: int, type_name: str, is_sliced: bool) -> None:
    options: dict[str, Any] = {"bits": bits, "group_size": group_size}
    parts = mx.quantize(numbers(7, 3, 33, group_size * 3).astype(TYPES[type_name]), **options)
    parts = [part[1:, ::2] for part in parts] if is_sliced else parts
    expected = own("dequantize", *(parts[0], *(part.astype(mx.float32) for part in parts[1:])), **options)
    assert_close(mx.dequantize(*parts, **options), exact(expected), TYPES[type_name])


@pytest.mark.parametrize(
    ("x", "options", "message"),
    [
        (mx.zeros((3, 100)), {}, r"Last dimension of first input with shape \(\.\.\., 100\) does not match"),
        (mx.zeros((3, 128)), {"bits": 7}, "bits"),
        (mx.zeros((3, 128)), {"group_size": 48}, "group"),
    ],
)
def test_wrong_arguments_get_mlxs_own_error(x: mx.array, options: dict[str, Any], message: str) -> None:
    weights = mx.quantize(numbers(8, 40, 128))
    with pytest.raises(ValueError, match=message):
        mx.quantized_matmul(x, *weights, **options)


@pytest.mark.parametrize("mode", ["mxfp4", "mxfp8", "nvfp4"])
def test_other_modes_are_mlxs(mode: str) -> None:
    weights = mx.quantize(numbers(8, 40, 128), mode=mode)
    x = numbers(9, 3, 128)
    assert mx.array_equal(
        mx.quantized_matmul(x, *weights, mode=mode), own("quantized_matmul", x, *weights, mode=mode)
    )


def test_a_product_is_lazy_and_can_be_compiled_and_differentiated() -> None:
    weights = mx.quantize(numbers(8, 40, 128))
    x = numbers(9, 3, 128)

    def loss(operation: Callable[..., mx.array]) -> Callable[[mx.array], mx.array]:
        return lambda x: (operation(x, *weights) ** 2).sum()

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


def _is_half(x: mx.array) -> bool:
    return x.dtype in UNITS


WRONG: dict[str, tuple[str, Callable[[tuple[Any, ...], dict[str, Any]], bool]]] = {
    "one number of bits": ("quantized_matmul", lambda _, options: options["bits"] == 5),
    "an early end of a block": ("quantized_matmul", lambda given, _: given[0].shape[-1] % 256 != 0),
    "few rows": ("quantized_matmul", lambda given, _: given[0].shape[-2] == 1),
    "many rows": ("quantized_matmul", lambda given, _: given[0].shape[-2] > 16),
    "large matrices": ("quantized_matmul", lambda given, _: given[1].shape[0] > 500),
    "straight products": ("quantized_matmul", lambda _, options: not options.get("transpose", True)),
    "half types": ("quantized_matmul", lambda given, _: _is_half(given[0])),
    "half scales": ("dequantize", lambda given, _: _is_half(given[1])),
    "experts": ("gather_qmm", lambda _, __: True),
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
