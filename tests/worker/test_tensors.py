"""Conversion between arrays, wire tensors and messages."""

from __future__ import annotations

import mlx.core as mx
import pytest

from mlx_ring.core.errors import ProtocolError
from mlx_ring.rpc.links import WireTensor
from mlx_ring.worker.tensors import from_message, from_wire, to_message, to_wire


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16, mx.int32, mx.uint32, mx.bool_])
@pytest.mark.parametrize("shape", [(3, 5), (1,), (0, 4), (2, 1, 7)])
def test_array_survives_the_round_trip_bit_for_bit(dtype: mx.Dtype, shape: tuple[int, ...]) -> None:
    array = (mx.random.normal(shape, key=mx.random.key(1)) * 10).astype(dtype)
    wire = to_wire(array)
    back = from_wire(WireTensor(wire.dtype, wire.shape, bytes(wire.data)))
    assert back.dtype == dtype
    assert mx.array_equal(back, array)


def test_bfloat16_is_sent_as_its_own_two_bytes() -> None:
    wire = to_wire(mx.array([1.0, -2.0], mx.bfloat16))
    assert (wire.dtype, bytes(wire.data)) == ("bfloat16", b"\x80\x3f\x00\xc0")


def test_transposed_array_is_sent_in_row_major_order() -> None:
    array = mx.arange(6, dtype=mx.int32).reshape(2, 3).T
    assert mx.array_equal(from_message(to_message(array)), array)


def test_bytes_that_do_not_fit_the_shape_are_refused_with_both_numbers() -> None:
    with pytest.raises(ProtocolError, match=r"shape \(2, 2\) has 16 bytes; 3 came"):
        from_wire(WireTensor("float32", (2, 2), b"abc"))


def test_unknown_dtype_is_refused_by_name() -> None:
    with pytest.raises(ProtocolError, match="'float8'"):
        from_wire(WireTensor("float8", (1,), b"a"))
