"""A frame on a link: a small protobuf header, then an array's raw bytes.

Layout: 4 bytes little-endian length of the header, the header
(`worker_pb2.FrameHeader`), the payload. Protobuf alone would copy the payload
twice on each side; this copies it once.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from google.protobuf.message import DecodeError

from mlx_ring.core.errors import ProtocolError
from mlx_ring.rpc.protos import worker_pb2

_LENGTH = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class Frame:
    """One message of a link. `payload` is empty for a hello and for a tombstone."""

    header: worker_pb2.FrameHeader
    payload: memoryview | bytes = b""
    problem: str = ""
    """Why what came is no frame; the header is then empty."""


def encode_frame(frame: Frame) -> bytes:
    header = frame.header.SerializeToString()
    return b"".join((_LENGTH.pack(len(header)), header, frame.payload))


def decode_frame(data: bytes) -> Frame:
    """Read a frame; its payload is a view of `data`. Raises `ProtocolError` for anything else."""
    if len(data) < _LENGTH.size:
        raise ProtocolError(f"A link frame has {len(data)} bytes; it needs at least {_LENGTH.size}.")
    (length,) = _LENGTH.unpack_from(data)
    end = _LENGTH.size + length
    if end > len(data):
        raise ProtocolError(f"A link frame's header should have {length} bytes; {len(data)} came in all.")
    try:
        header = worker_pb2.FrameHeader.FromString(data[_LENGTH.size : end])
    except DecodeError as error:
        raise ProtocolError(f"A link frame's header of {length} bytes cannot be read: {error}.") from error
    return Frame(header, memoryview(data)[end:])


def receive_frame(data: bytes) -> Frame:
    """As `decode_frame`; what is no frame comes with its problem, for gRPC tells nobody of a decoder that raises."""
    try:
        return decode_frame(data)
    except ProtocolError as error:
        return Frame(worker_pb2.FrameHeader(), problem=str(error))
