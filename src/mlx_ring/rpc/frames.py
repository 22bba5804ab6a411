"""Frames of a link: a small protobuf header, then an array's raw bytes, perhaps compressed.

Layout: 4 bytes little-endian length of the header, the header
(`worker_pb2.FrameHeader`), the payload. Protobuf alone would copy the payload
twice on each side; this copies it once.

Frames are compressed without loss if that is faster than sending them as they are. Only the high byte of a
floating-point number compresses well, because sign and exponent are similar among activations; the other bytes are
noise. So a packed frame has all high bytes first, compressed, and then the other bytes unchanged. Their number tells
the receiver how many numbers there are, and it lets no frame grow beyond twice its size.

The first frames of each size are packed and unpacked on trial, to measure whether packing pays.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeAlias

import zstandard
from google.protobuf.message import DecodeError

from mlx_ring.core.errors import ProtocolError
from mlx_ring.rpc.protos import worker_pb2

if TYPE_CHECKING:
    import numpy as np

_LENGTH = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class Frame:
    """One message of a link. `payload` is empty for a hello and for a tombstone."""

    header: worker_pb2.FrameHeader
    payload: memoryview | bytes = b""
    problem: str = ""
    """Reason why the received bytes are no frame; the header is then empty."""


def encode_frame(frame: Frame) -> bytes:
    header = frame.header.SerializeToString()
    return b"".join((_LENGTH.pack(len(header)), header, frame.payload))


def decode_frame(data: bytes) -> Frame:
    """Decode a frame; its payload is a view of `data`. Raises `ProtocolError` for anything else."""
    if len(data) < _LENGTH.size:
        raise ProtocolError(f"A link frame has {len(data)} bytes; it needs at least {_LENGTH.size}.")
    (length,) = _LENGTH.unpack_from(data)
    end = _LENGTH.size + length
    if end > len(data):
        raise ProtocolError(
            f"A link frame's header should have {length} bytes, but the frame has {len(data)}."
        )
    try:
        header = worker_pb2.FrameHeader.FromString(data[_LENGTH.size : end])
    except DecodeError as error:
        raise ProtocolError(f"A link frame's header of {length} bytes cannot be read: {error}.") from error
    return Frame(header, memoryview(data)[end:])


def receive_frame(data: bytes) -> Frame:
    """Decode a frame, and return a problem instead of raising, because gRPC hides a decoder's exception."""
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
"""Size below which packing is not tried: a packet takes equally long with less in it."""
_MARGIN = 0.95
"""Ratio that packing must reach to be worth it."""
_TRIED_AGAIN = 512
"""Number of frames of a size until one is on trial again."""
_TRIALS = 2
"""Number of trials of one frame. The faster one counts, because the first may warm up."""


# ---- one tensor


def pack(dtype: str, data: Bytes, compressor: zstandard.ZstdCompressor | None = None) -> tuple[int, bytes]:
    """Return the number of compressed bytes and the packed bytes; 0 and nothing if packing is not shorter."""
    width = _WIDTHS.get(dtype, 1)
    if width == 1 or not len(data):
        return 0, b""
    import numpy as np  # slow to import, and an agent packs nothing

    octets = np.frombuffer(data, np.uint8).reshape(-1, width)
    high = (compressor or _compressor()).compress(np.ascontiguousarray(octets[:, -1]).data)
    if len(high) >= len(octets):
        return 0, b""
    return len(high), b"".join((high, *(np.ascontiguousarray(part).data for part in _low_parts(octets))))


def unpack(dtype: str, packed_bytes: int, payload: Bytes) -> bytes:
    """Return the tensor's bytes.

    Raises:
        ProtocolError: these are no packed numbers, or would exceed their announced size.
    """
    width = _WIDTHS.get(dtype, 1)
    low = memoryview(payload)[packed_bytes:]
    if width == 1 or packed_bytes > len(payload) or len(low) % (width - 1):
        raise ProtocolError(
            f"A frame of {len(payload)} bytes, {packed_bytes} of them packed, has no {dtype} numbers."
        )
    import numpy as np  # as above

    count = len(low) // (width - 1)
    octets = np.empty((count, width), np.uint8)
    octets[:, -1] = np.frombuffer(_decompressed(payload[:packed_bytes], count), np.uint8)
    for part in _low_parts(octets):
        part[:] = np.frombuffer(low[: part.nbytes], part.dtype)
        low = low[part.nbytes :]
    return octets.tobytes()


def _low_parts(octets: np.ndarray[tuple[int, ...], np.dtype[np.uint8]]) -> Iterator[Part]:
    """Yield all but the high bytes, as views of numbers half as wide, a quarter as wide and so on, which copy quickly."""
    begin, wide = 0, octets.shape[1] // 2
    while wide:
        yield octets[:, begin : begin + wide].view(f"<u{wide}")[:, 0]
        begin, wide = begin + wide, wide // 2


def _decompressed(data: Bytes, count: int) -> bytes:
    """Decompress exactly the expected bytes; refuse a frame that announces another size."""
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
    """Return a compressor with a short search: entropy coding shortens high bytes, and repetitions hardly do."""
    parameters = zstandard.ZstdCompressionParameters.from_level(
        1, strategy=zstandard.STRATEGY_FAST, min_match=7, hash_log=6, write_content_size=True
    )
    return zstandard.ZstdCompressor(compression_params=parameters)


# ---- whether it pays


@dataclass(frozen=True, slots=True)
class Trial:
    """Result of packing one frame on trial."""

    nbytes: int
    packed_bytes: int
    """Bytes of the whole frame, packed."""
    seconds: float
    """Seconds for packing and unpacking it."""


def pays(trial: Trial, bytes_per_s: float) -> bool:
    """Report whether such a frame arrives sooner packed, over a link of that throughput."""
    plain_s = trial.nbytes / bytes_per_s
    return trial.packed_bytes / bytes_per_s + trial.seconds < _MARGIN * plain_s


def describe_benefit(trial: Trial, bytes_per_s: float) -> str:
    """Return the reason of `pays`, as part of a sentence."""
    saved_s = (trial.nbytes - trial.packed_bytes) / bytes_per_s
    return (
        f"{trial.nbytes} bytes become {trial.packed_bytes}, which saves {1e3 * saved_s:.2f} ms at "
        f"{bytes_per_s / 1e6:.1f} MB/s and takes {1e3 * trial.seconds:.2f}"
    )


@dataclass(slots=True)
class _Size:
    """Statistics of frames of about one size."""

    trial: Trial
    packs: bool
    frames: int = 0
    nbytes: int = 0


@dataclass(slots=True)
class Packer:
    """Packer of one link's frames, if packing pays. Only the sending thread calls `packed`."""

    bytes_per_s: float
    """Measured throughput of the link."""
    clock: Callable[[], float] = time.perf_counter
    _compressor: zstandard.ZstdCompressor = field(default_factory=_compressor)
    _sizes: dict[int, _Size] = field(default_factory=dict[int, _Size])
    _frames: int = 0
    _tensor_bytes: int = 0
    _sent_bytes: int = 0

    def __post_init__(self) -> None:
        # The import takes longer than a step, so no step waits for it.
        import_module("numpy")

    def packed(self, frame: Frame) -> Frame:
        """Return the frame to send: packed, or the same."""
        if not frame.header.HasField("activation"):
            return frame
        sent = self._packed(frame) if len(frame.payload) >= _SMALLEST_BYTES else frame
        self._frames += 1
        self._tensor_bytes += len(frame.payload)
        self._sent_bytes += len(sent.payload)
        return sent

    def use(self) -> worker_pb2.LinkUse:
        """Return statistics of the frames so far; any thread may call it."""
        sizes = list(self._sizes.values())
        use = worker_pb2.LinkUse(
            frames=self._frames,
            tensor_bytes=self._tensor_bytes,
            sent_bytes=self._sent_bytes,
            why="no message was large enough yet",
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
        """Return the statistics of frames of about this size; sometimes one is tried again."""
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
