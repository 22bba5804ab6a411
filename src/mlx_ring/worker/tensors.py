"""Conversion between arrays and wire tensors: the array's own bytes, never through another dtype.

An MLX array is a buffer and can be made from one. Its stubs do not declare this, hence the casts.
"""

from __future__ import annotations

import math
from typing import cast

import mlx.core as mx

from mlx_ring.core.errors import ProtocolError
from mlx_ring.rpc.links import WireTensor
from mlx_ring.rpc.protos import tensor_pb2

_DTYPES = {
    str(dtype).removeprefix("mlx.core."): dtype
    for dtype in (
        mx.bool_, mx.uint8, mx.uint16, mx.uint32, mx.uint64, mx.int8, mx.int16, mx.int32, mx.int64,
        mx.float16, mx.bfloat16, mx.float32,
    )
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


def dtype_by_name(name: str) -> mx.Dtype:
    """Return MLX's dtype of that name. Raises `ProtocolError` for one that is not sent."""
    try:
        return _DTYPES[name]
    except KeyError:
        raise ProtocolError(f"dtype {name!r} cannot be sent; supported are {', '.join(_DTYPES)}.") from None


def dtype_name(dtype: mx.Dtype) -> str:
    """Return the dtype's name on the wire."""
    return _NAMES[dtype]


def to_wire(array: mx.array, tokens: tuple[int, ...] = ()) -> WireTensor:
    """Read an array's bytes in place. It is evaluated if necessary, and copied if it is not row-major."""
    mx.eval(array)
    data = memoryview(cast("bytes", array)) if array.size else memoryview(b"")
    if not data.c_contiguous:
        return to_wire(mx.contiguous(array), tokens)
    return WireTensor(_NAMES[array.dtype], tuple(array.shape), data.cast("B"), tokens)


def from_wire(tensor: WireTensor) -> mx.array:
    """Make the array. Raises `ProtocolError` when bytes, shape and dtype disagree."""
    dtype = dtype_by_name(tensor.dtype)
    expected = math.prod(tensor.shape) * dtype.size
    if len(tensor.data) != expected:
        raise ProtocolError(
            f"A {tensor.dtype} tensor of shape {tensor.shape} has {expected} bytes; {len(tensor.data)} came."
        )
    if not expected:
        return mx.zeros(tensor.shape, dtype)
    octets = mx.array(cast("list[int]", memoryview(tensor.data)))
    return octets.view(dtype).reshape(tensor.shape)


def to_message(array: mx.array) -> tensor_pb2.Tensor:
    """Return an array as a message field, for small results."""
    wire = to_wire(array)
    return tensor_pb2.Tensor(dtype=wire.dtype, shape=wire.shape, data=bytes(wire.data))


def from_message(message: tensor_pb2.Tensor) -> mx.array:
    """Return the array of a message."""
    return from_wire(WireTensor(message.dtype, tuple(message.shape), message.data))
