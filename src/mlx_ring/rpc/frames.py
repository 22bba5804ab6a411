"""A frame on a link: a small protobuf header, then an array's raw bytes.

Layout: 4 bytes little-endian length of the header, the header
(`worker_pb2.FrameHeader`), the payload. Protobuf alone would copy the payload
twice on each side; this copies it once.

Compresses what goes over a link, without loss, where that is sooner than sending it as it is.

Of a floating-point number only the high byte says little: sign and exponent are much alike among activations. The other
bytes are noise. So a frame that is packed has all high bytes first, compressed, and then the other bytes as they were;
whoever unpacks knows from these how many there are, and lets no frame grow beyond twice its size.

Whether it pays is found on the frames themselves: the first of each size is packed and unpacked on trial.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import zstandard
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


Bytes = memoryview | bytes
Part: TypeAlias = "np.ndarray[tuple[int, ...], np.dtype[Any]]"

_WIDTHS = {
    **dict.fromkeys(("bool", "uint8", "int8"), 1),
    **dict.fromkeys(("uint16", "int16", "float16", "bfloat16"), 2),
    **dict.fromkeys(("uint32", "int32", "float32"), 4),
    **dict.fromkeys(("uint64", "int64"), 8),
}
_SMALLEST_BYTES = 512
"""A packet takes as long, however little is in it."""
_MARGIN = 0.95
"""What packing saves must be worth it."""
_TRIED_AGAIN = 512
"""Frames of a size, until one is on trial again."""
_TRIALS = 2
"""Of one frame; the quicker counts, for the first may be the very first."""


# ---- one tensor


def pack(dtype: str, data: Bytes, compressor: zstandard.ZstdCompressor | None = None) -> tuple[int, bytes]:
    """The packed bytes, and how many of them are the compressed part; 0 and nothing where it would not be shorter."""
    width = _WIDTHS.get(dtype, 1)
    if width == 1 or not len(data):
        return 0, b""
    octets = np.frombuffer(data, np.uint8).reshape(-1, width)
    high = (compressor or _compressor()).compress(np.ascontiguousarray(octets[:, -1]).data)
    if len(high) >= len(octets):
        return 0, b""
    return len(high), b"".join((high, *(np.ascontiguousarray(part).data for part in _low_parts(octets))))


def unpack(dtype: str, packed_bytes: int, payload: Bytes) -> bytes:
    """The tensor's bytes.

    Raises:
        ProtocolError: these are no packed numbers, or would be more than they say.
    """
    width = _WIDTHS.get(dtype, 1)
    low = memoryview(payload)[packed_bytes:]
    if width == 1 or packed_bytes > len(payload) or len(low) % (width - 1):
        raise ProtocolError(
            f"A frame of {len(payload)} bytes, {packed_bytes} of them packed, has no {dtype} numbers."
        )
    count = len(low) // (width - 1)
    octets = np.empty((count, width), np.uint8)
    octets[:, -1] = np.frombuffer(_decompressed(payload[:packed_bytes], count), np.uint8)
    for part in _low_parts(octets):
        part[:] = np.frombuffer(low[: part.nbytes], part.dtype)
        low = low[part.nbytes :]
    return octets.tobytes()


def _low_parts(octets: np.ndarray[tuple[int, ...], np.dtype[np.uint8]]) -> Iterator[Part]:
    """All but the high bytes, as views of numbers half as wide, a quarter as wide and so on: those are copied quickly."""
    begin, wide = 0, octets.shape[1] // 2
    while wide:
        yield octets[:, begin : begin + wide].view(f"<u{wide}")[:, 0]
        begin, wide = begin + wide, wide // 2


def _decompressed(data: Bytes, count: int) -> bytes:
    """Exactly so many bytes; a frame that announces others is not decompressed at all."""
    try:
        announced = zstandard.frame_content_size(data)
        if announced != count:
            raise ProtocolError(
                f"The packed part of a frame announces {announced} bytes; there are {count} numbers."
            )
        return zstandard.ZstdDecompressor().decompress(data, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise ProtocolError(f"The packed part of a frame cannot be read: {error}.") from error


def _compressor() -> zstandard.ZstdCompressor:
    """Its entropy coder is what shortens high bytes; looking for what repeats hardly does, so it is kept short."""
    parameters = zstandard.ZstdCompressionParameters.from_level(
        1, strategy=zstandard.STRATEGY_FAST, min_match=7, hash_log=6, write_content_size=True
    )
    return zstandard.ZstdCompressor(compression_params=parameters)


# ---- whether it pays


@dataclass(frozen=True, slots=True)
class Trial:
    """What packing did to one frame."""

    nbytes: int
    packed_bytes: int
    """Of the whole frame, packed."""
    seconds: float
    """For packing and unpacking it."""


def pays(trial: Trial, bytes_per_s: float) -> bool:
    """Whether such a frame is there sooner when it is packed, over a link of that throughput."""
    plain_s = trial.nbytes / bytes_per_s
    return trial.packed_bytes / bytes_per_s + trial.seconds < _MARGIN * plain_s


def describe_benefit(trial: Trial, bytes_per_s: float) -> str:
    """The reason of `pays`, as a sentence's part."""
    saved_s = (trial.nbytes - trial.packed_bytes) / bytes_per_s
    return (
        f"{trial.nbytes} bytes become {trial.packed_bytes}, which saves {1e3 * saved_s:.2f} ms at "
        f"{bytes_per_s / 1e6:.1f} MB/s and takes {1e3 * trial.seconds:.2f}"
    )


@dataclass(slots=True)
class _Size:
    """Frames of about one size."""

    trial: Trial
    packs: bool
    frames: int = 0
    nbytes: int = 0


@dataclass(slots=True)
class Packer:
    """Packs the frames of one link that are better packed. Only the thread that sends calls `packed`."""

    bytes_per_s: float
    """Of the link, measured."""
    clock: Callable[[], float] = time.perf_counter
    _compressor: zstandard.ZstdCompressor = field(default_factory=_compressor)
    _sizes: dict[int, _Size] = field(default_factory=dict[int, _Size])
    _frames: int = 0
    _tensor_bytes: int = 0
    _sent_bytes: int = 0

    def packed(self, frame: Frame) -> Frame:
        """The frame to send instead, or the same."""
        if not frame.header.HasField("activation"):
            return frame
        sent = self._packed(frame) if len(frame.payload) >= _SMALLEST_BYTES else frame
        self._frames += 1
        self._tensor_bytes += len(frame.payload)
        self._sent_bytes += len(sent.payload)
        return sent

    def use(self) -> worker_pb2.LinkUse:
        """What became of the frames so far; any thread may ask."""
        sizes = list(self._sizes.values())
        use = worker_pb2.LinkUse(
            frames=self._frames,
            tensor_bytes=self._tensor_bytes,
            sent_bytes=self._sent_bytes,
            why="nothing was sent yet that is worth it",
        )
        if sizes:
            most = max(sizes, key=lambda size: size.nbytes)
            use.compresses, use.why = most.packs, describe_benefit(most.trial, self.bytes_per_s)
        return use

    def _packed(self, frame: Frame) -> Frame:
        size = self._size(frame)
        size.frames += 1
        size.nbytes += len(frame.payload)
        if not size.packs:
            return frame
        high, payload = pack(frame.header.activation.dtype, frame.payload, self._compressor)
        if not high:
            return frame
        header = worker_pb2.FrameHeader()
        header.CopyFrom(frame.header)
        header.activation.packed_bytes = high
        return Frame(header, payload)

    def _size(self, frame: Frame) -> _Size:
        """What is known of frames of about this size; now and then one is tried again."""
        key = len(frame.payload).bit_length()
        size = self._sizes.get(key)
        if size is None or size.frames % _TRIED_AGAIN == 0:
            trial = self._try(frame)
            fresh = _Size(trial, pays(trial, self.bytes_per_s))
            if size is not None:
                fresh.frames, fresh.nbytes = size.frames, size.nbytes
            self._sizes[key] = size = fresh
        return size

    def _try(self, frame: Frame) -> Trial:
        dtype, seconds, packed_bytes = frame.header.activation.dtype, float("inf"), len(frame.payload)
        for _ in range(_TRIALS):
            started = self.clock()
            high, payload = pack(dtype, frame.payload, self._compressor)
            if not high:
                return Trial(len(frame.payload), len(frame.payload), self.clock() - started)
            unpack(dtype, high, payload)
            seconds, packed_bytes = min(seconds, self.clock() - started), len(payload)
        return Trial(len(frame.payload), packed_bytes, seconds)
