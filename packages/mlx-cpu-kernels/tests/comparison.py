"""Arrays, ways in which they lie in memory, and the comparison of results: for all tests of the kernels."""

# pyright: reportUnknownMemberType=false, reportArgumentType=false
# MLX's stubs take an unpacked list for any later parameter.
from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import strategies as st
from numpy.typing import NDArray

from mlx_cpu_kernels import operations
from mlx_cpu_kernels.build import Target, find_binary
from mlx_cpu_kernels.packages import Unavailable

Numbers = NDArray[np.float64]


def _can_be_built() -> bool:
    """Report whether the kernels are there, or should be: this machine has a compiler."""
    try:
        return find_binary(Target.installed()) is not None or shutil.which("g++") is not None
    except Unavailable:
        return False


needs_kernels = pytest.mark.skipif(
    not _can_be_built(), reason="this machine has no native kernels and no g++"
)

TYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}
UNITS = {mx.float16: 2.0**-10, mx.bfloat16: 2.0**-7}
"""Distance from one number of a type to the next, as a part of the number."""
MODES = {"mxfp4": 32, "nvfp4": 16, "mxfp8": 32}
"""Modes of quantization that are not affine, with their groups."""

types = st.sampled_from(sorted(TYPES))
row_counts = st.one_of(st.integers(1, 20), st.sampled_from([33, 64, 100]))
formats = st.one_of(
    st.fixed_dictionaries(
        {"bits": st.sampled_from([2, 3, 4, 5, 6, 8]), "group_size": st.sampled_from([32, 64, 128])}
    ),
    st.fixed_dictionaries({"mode": st.sampled_from(sorted(MODES))}),
)
"""Options of `mx.quantize`."""


def unit_of(options: dict[str, Any]) -> int:
    """Return the number of columns of which a matrix has a multiple."""
    return max(32, options.get("group_size", 32))


def numbers(seed: int, *shape: int) -> mx.array:
    return mx.array(np.random.default_rng(seed).standard_normal(shape).astype(np.float32))


def exact(array: mx.array) -> Numbers:
    return np.array(array.astype(mx.float32)).astype(np.float64)


def own(name: str, *arguments: mx.array, **options: Any) -> mx.array:
    return operations.stock(name)(*arguments, **options)


def dense_of(parts: list[mx.array] | tuple[mx.array, ...], options: dict[str, Any]) -> Numbers:
    """Return the numbers of quantized weights, as MLX's own operation does in float32."""
    weights, *others = parts
    if "mode" in options:
        return exact(own("dequantize", weights, *others, **options, dtype=mx.float32))
    return exact(own("dequantize", weights, *(part.astype(mx.float32) for part in others), **options))


def assert_close(ours: mx.array, theirs: Numbers, dtype: mx.Dtype, noise: Numbers | float = 0.0) -> None:
    """Compare with the exact result: float32 within 1e-5 of the largest, half types within a unit of their last place.

    `noise` is allowed besides: what rounding arguments to float32 makes of the result.
    """
    assert ours.dtype == dtype
    assert ours.shape == theirs.shape
    most = np.abs(theirs).max(initial=0.0)
    allowed = 1e-5 * most + (np.abs(theirs) * UNITS[dtype] if dtype in UNITS else 0.0)
    assert np.all(np.abs(exact(ours) - theirs) <= allowed + noise)


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
