"""Products without native kernels: equal to MLX's own within rounding, and given back."""

# pyright: reportUnknownMemberType=false, reportArgumentType=false
# MLX's stubs take an unpacked list for any later parameter.
from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from comparison import MODES, TYPES, exact, numbers
from hypothesis import given
from hypothesis import strategies as st
from property_examples import examples

from mlx_cpu_kernels import fallback, operations, speed_up
from mlx_cpu_kernels.machine import TILE_BYTES, scratch_bytes

bits = st.sampled_from([2, 3, 4, 5, 6, 8])
group_sizes = st.sampled_from([32, 64, 128])


@pytest.fixture(autouse=True)
def on_the_cpu() -> Iterator[None]:
    """Compute on the CPU with MLX's own operations, and give them back."""
    before = mx.default_device()
    mx.set_default_device(mx.Device(mx.cpu))
    operations.uninstall()
    yield
    operations.uninstall()
    mx.set_default_device(before)


def assert_close(ours: mx.array, theirs: mx.array, tolerance: float = 1e-5) -> None:
    assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
    assert np.abs(exact(ours) - exact(theirs)).max() <= tolerance * np.abs(exact(theirs)).max()


@given(bits, group_sizes, st.sampled_from(sorted(TYPES)), st.integers(1, 3))
@examples(0.8)
def test_converted_weights_are_those_that_mlx_dequantizes(
    bits: int, group_size: int, type_name: str, groups: int
) -> None:
    weights = numbers(bits, 2, 5, group_size * groups).astype(TYPES[type_name])
    w, scales, biases = mx.quantize(weights, group_size=group_size, bits=bits)
    wide = scales.astype(mx.float32), biases.astype(mx.float32)
    theirs = mx.dequantize(w, *wide, group_size=group_size, bits=bits)
    assert mx.array_equal(fallback.to_float32(w, scales, biases, group_size, bits), theirs)


@pytest.mark.parametrize("mode", MODES)
def test_every_byte_is_the_number_that_it_is_for_mlx(mode: str) -> None:
    every = mx.arange(256, dtype=mx.uint32).astype(mx.uint8)
    weights = mx.broadcast_to(every, (256, 256)).view(mx.uint32)
    bits = 8 if mode == "mxfp8" else 4
    scales = mx.broadcast_to(every[:, None], (256, 256 * 8 // bits // MODES[mode]))
    ours = fallback.to_float32(weights, scales, None, MODES[mode], bits, mode)
    assert mx.array_equal(ours, mx.dequantize(weights, scales, mode=mode, dtype=mx.float32), equal_nan=True)


@pytest.mark.slow
@given(st.sampled_from(sorted(MODES)), st.sampled_from(sorted(TYPES)), st.integers(1, 30), st.booleans())
@examples(0.8)
def test_products_of_other_modes_are_mlx_s_own(mode: str, x_type: str, rows: int, transpose: bool) -> None:
    packed = mx.quantize(numbers(1, 2080, 96), mode=mode)
    if x_type != "float32":
        rows += 12  # MLX's own, which computes fewer, sums half types in half precision
    x = numbers(2, rows, 96 if transpose else 2080).astype(TYPES[x_type])
    options: dict[str, Any] = {"mode": mode, "transpose": transpose}
    ours = fallback.multiply(mx.quantized_matmul, x, *packed, **options)
    exact_one = mx.quantized_matmul(x.astype(mx.float32), *packed, **options)
    assert ours.dtype == x.dtype
    assert_close(ours, exact_one.astype(x.dtype), 1e-5 if x_type == "float32" else 0.01)


@pytest.mark.parametrize("mode", MODES)
def test_experts_of_other_modes_are_mlx_s_own(mode: str) -> None:
    packed = mx.quantize(numbers(1, 4, 40, 64), mode=mode)
    chosen = mx.sort(mx.array(np.random.default_rng(0).integers(0, 4, 60), mx.uint32))
    x, options = numbers(2, 60, 1, 64), {"rhs_indices": chosen, "mode": mode}
    ours = fallback.gather(mx.gather_qmm, x, *packed, **options, sorted_indices=True)
    assert_close(ours, mx.gather_qmm(x, *packed, **options, sorted_indices=True))


def test_wrong_arguments_get_mlx_s_own_error() -> None:
    packed, x = mx.quantize(numbers(1, 40, 64)), numbers(2, 20, 64)
    for options in ({"mode": "mxfp4"}, {"mode": "fp4"}, {"bits": 7}):
        with pytest.raises(ValueError, match=r"mode|Scale type|bits"):
            fallback.multiply(mx.quantized_matmul, x, *packed, **options)


@pytest.mark.slow
@given(st.data(), bits, group_sizes, st.sampled_from(sorted(TYPES)), st.sampled_from(sorted(TYPES)))
@examples(1.2)
def test_a_product_is_mlx_s_own(
    data: st.DataObject, bits: int, group_size: int, x_type: str, scales_type: str
) -> None:
    transpose, rows = data.draw(st.booleans()), data.draw(st.integers(1, 12))
    others, batch = data.draw(st.sampled_from([32, 96, 2080])), data.draw(st.sampled_from([(), (2,), (2, 3)]))
    columns = group_size * data.draw(st.integers(1, 3))
    matrices = batch if data.draw(st.booleans()) else ()
    options: dict[str, Any] = {"bits": bits, "group_size": group_size, "transpose": transpose}
    weights = numbers(1, *matrices, others, columns).astype(TYPES[scales_type])
    packed = mx.quantize(weights, bits=bits, group_size=group_size)
    x = numbers(2, *batch, rows, columns if transpose else others).astype(TYPES[x_type])
    ours = fallback.multiply(mx.quantized_matmul, x, *packed, **options)
    wide = (part.astype(mx.float32) for part in packed[1:])
    theirs = mx.quantized_matmul(x.astype(mx.float32), packed[0], *wide, **options)
    own = mx.quantized_matmul(x, *packed, **options)
    # MLX's own sums half types in half precision: the longer the sum, the farther off.
    off = np.abs(exact(own) - exact(theirs)).max() / np.abs(exact(theirs)).max()
    assert_close(ours, theirs.astype(own.dtype), 1e-5 if own.dtype == mx.float32 else 0.01 + off)


@pytest.mark.parametrize("tile", [1 << 10, 1 << 18])
@pytest.mark.parametrize("bits", [3, 4, 8])
def test_experts_products_are_mlx_s_own(monkeypatch: pytest.MonkeyPatch, tile: int, bits: int) -> None:
    monkeypatch.setattr(fallback, "_TILE_WEIGHTS", tile)
    packed = mx.quantize(numbers(1, 4, 40, 64), group_size=32, bits=bits)
    chosen = mx.sort(mx.array(np.random.default_rng(0).integers(0, 4, 30), mx.uint32))
    x, options = numbers(2, 30, 1, 64), {"rhs_indices": chosen, "group_size": 32, "bits": bits}
    ours = fallback.gather(mx.gather_qmm, x, *packed, **options, sorted_indices=True)
    assert_close(ours, mx.gather_qmm(x, *packed, **options, sorted_indices=True))
    few = {**options, "rhs_indices": chosen[:2]}
    assert_close(fallback.gather(mx.gather_qmm, x[:2], *packed, **few), mx.gather_qmm(x[:2], *packed, **few))


def test_it_is_in_mlx_s_place_until_kernels_are_or_it_is_given_back() -> None:
    own = mx.quantized_matmul
    assert operations.install_fallback()
    assert operations.install_fallback()
    assert mx.quantized_matmul is not own
    assert operations.stock("quantized_matmul") is own
    assert not operations.are_installed()
    report = operations.install()
    assert operations.are_installed() == report.active
    operations.uninstall()
    assert mx.quantized_matmul is own


def test_the_report_says_why_there_are_no_kernels() -> None:
    report = speed_up(kernels=False)
    assert not report.kernels
    assert "switched off" in str(report)


def test_scratch_counts_the_rows_of_x_or_the_tiles() -> None:
    assert scratch_bytes(576, 512) == TILE_BYTES
    assert scratch_bytes(65536, 512) == TILE_BYTES
    assert scratch_bytes(1 << 20, 512) == 4 * 4096 * 272 * 96
    assert scratch_bytes(1 << 20, 10) == max(TILE_BYTES, 4 * 4096 * 272 * 10)
