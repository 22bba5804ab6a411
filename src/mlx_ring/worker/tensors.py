"""Conversion between arrays and wire tensors: the array's own bytes, never through another dtype.

An MLX array is a buffer and can be made from one. Its stubs do not declare this, hence the casts.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import cast

import mlx.core as mx

from mlx_ring.core.errors import ProtocolError, RingError
from mlx_ring.rpc.failures import error_to_failure
from mlx_ring.rpc.frames import Bytes, Frame
from mlx_ring.rpc.links import WireTensor
from mlx_ring.rpc.protos import tensor_pb2, worker_pb2

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


Kind = tuple[str, int, int]
"""Type, heads and width of an array of KV."""


def token_bytes(kinds: Iterable[Kind]) -> int:
    """Return the bytes of one token of arrays of KV."""
    return sum(heads * width * dtype_by_name(dtype).size for dtype, heads, width in kinds)


def join_parts(parts: Iterable[tuple[int, Bytes]], kind: Kind) -> mx.array:
    """Return an array of KV, `(heads, tokens, width)`, of parts with their numbers of tokens."""
    dtype, heads, width = kind
    arrays = [
        from_wire(WireTensor(dtype, (heads, tokens, width), memoryview(data))) for tokens, data in parts
    ]
    return arrays[0] if len(arrays) == 1 else mx.concatenate(arrays, axis=1)


def kv_frame(tokens: tuple[int, int], arrays: Sequence[WireTensor]) -> Frame:
    """Return the frame of some tokens' KV in several layers; the arrays of each layer follow each other."""
    payload = b"".join(array.data for array in arrays)
    part = worker_pb2.KvPart(
        start=tokens[0],
        end=tokens[1],
        arrays=[worker_pb2.KvArray(dtype=array.dtype, shape=array.shape) for array in arrays],
        checksum=zlib.crc32(payload),
    )
    return Frame(worker_pb2.FrameHeader(kv=part), payload)


def failed_kv_frame(error: RingError) -> Frame:
    """Return the frame after which no KV follows."""
    return Frame(worker_pb2.FrameHeader(kv=worker_pb2.KvPart(failure=error_to_failure(error))))


def read_kv_part(
    part: worker_pb2.KvPart, payload: memoryview, layers: Mapping[int, Sequence[Kind]]
) -> dict[int, tuple[memoryview, ...]]:
    """Return the arrays of each layer, as parts of the payload of `kv_frame`.

    Args:
        part: what the frame's header says.
        payload: the frame's payload.
        layers: kinds of the arrays of each layer, as they are here.

    Raises:
        ProtocolError: it is damaged, or the arrays are others.
    """
    if zlib.crc32(payload) != part.checksum:
        raise ProtocolError(f"the checksum of tokens [{part.start}, {part.end}) is wrong")
    tokens, place, found = part.end - part.start, 0, dict[int, tuple[memoryview, ...]]()
    rest = [(each.dtype, tuple(each.shape)) for each in part.arrays]
    for layer, kinds in layers.items():
        expected = [(dtype, (heads, tokens, width)) for dtype, heads, width in kinds]
        given, rest = rest[: len(expected)], rest[len(expected) :]
        if given != expected:
            raise ProtocolError(f"layer {layer} is {_described(given)} there, {_described(expected)} here")
        ends = [*accumulate((token_bytes([kind]) * tokens for kind in kinds), initial=place)]
        found[layer] = tuple(payload[start:end] for start, end in pairwise(ends))
        place = ends[-1]
    if rest or place != len(payload):
        raise ProtocolError(f"{len(payload)} bytes came for {place}")
    return found


def _described(arrays: Iterable[tuple[str, tuple[int, ...]]]) -> str:
    return ", ".join(f"{dtype} {shape}" for dtype, shape in arrays) or "empty"
