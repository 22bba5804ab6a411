"""Frames and their packing, which is lossless, bounded, and applied only if it pays."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from mlx_ring.core.errors import ProtocolError
from mlx_ring.rpc.frames import (
    Frame,
    Packer,
    Trial,
    decode_frame,
    describe_benefit,
    encode_frame,
    pack,
    pays,
    unpack,
)
from mlx_ring.rpc.protos import worker_pb2


@given(step=st.integers(0, 2**64 - 1), payload=st.binary(max_size=300))
def test_a_decoded_frame_equals_the_encoded_one(step: int, payload: bytes) -> None:
    header = worker_pb2.FrameHeader(
        activation=worker_pb2.Activation(step=step, dtype="bfloat16", shape=[2, 3])
    )
    frame = decode_frame(encode_frame(Frame(header, payload)))
    assert frame.header == header
    assert bytes(frame.payload) == payload


@given(data=st.binary(max_size=64))
def test_any_bytes_are_a_frame_or_a_protocol_error(data: bytes) -> None:
    try:
        frame = decode_frame(data)
    except ProtocolError:
        return
    assert isinstance(frame.header, worker_pb2.FrameHeader)


def test_a_header_longer_than_the_message_is_refused_with_both_lengths() -> None:
    with pytest.raises(ProtocolError, match="should have 1000 bytes, but the frame has 6"):
        decode_frame((1000).to_bytes(4, "little") + b"ab")


WIDTHS = {
    "bool": 1, "uint8": 1, "int8": 1, "uint16": 2, "int16": 2, "float16": 2, "bfloat16": 2,
    "uint32": 4, "int32": 4, "float32": 4, "uint64": 8, "int64": 8,
}  # fmt: skip


def activations(numbers: int, dtype: str = "float32") -> bytes:
    """Make activations like a layer's: normal, with some outliers."""
    random = np.random.default_rng(7)
    values = random.standard_normal(numbers).astype(np.float32) * random.choice([0.1, 1, 1, 1, 30], numbers)
    floats = values.astype(np.float32)
    if dtype == "float16":
        return floats.astype(np.float16).tobytes()
    return (
        (floats.view(np.uint32) >> 16).astype(np.uint16).tobytes()
        if dtype == "bfloat16"
        else floats.tobytes()
    )


def frame_of(data: bytes, dtype: str) -> Frame:
    activation = worker_pb2.Activation(dtype=dtype, shape=[len(data) // WIDTHS[dtype]])
    return Frame(worker_pb2.FrameHeader(activation=activation), data)


def clock(step_s: float) -> Iterator[float]:
    return (step_s * number for number in count())


@given(dtype=st.sampled_from(sorted(WIDTHS)), data=st.binary(max_size=600), repeats=st.integers(0, 40))
def test_numbers_of_every_type_are_restored_bit_for_bit(dtype: str, data: bytes, repeats: int) -> None:
    data *= repeats
    data = data[: len(data) // WIDTHS[dtype] * WIDTHS[dtype]]
    high, packed = pack(dtype, data)
    if high:
        assert len(packed) < len(data)
        assert unpack(dtype, high, packed) == data
    else:
        assert packed == b""


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_infinities_and_nan_payloads_are_restored(dtype: str) -> None:
    special = np.array([np.inf, -np.inf, np.nan, -0.0, 1e-45], np.float32).tobytes()
    quiet_and_signalling = bytes.fromhex("0100c07f 0100a0ff 010080ff")
    data = (special + quiet_and_signalling) * 200
    high, packed = pack(dtype, data)
    assert high
    assert unpack(dtype, high, memoryview(packed)) == data


@pytest.mark.parametrize(("dtype", "share"), [("bfloat16", 0.75), ("float16", 0.92), ("float32", 0.88)])
def test_packed_activations_are_smaller(dtype: str, share: float) -> None:
    data = activations(1 << 15, dtype)
    high, packed = pack(dtype, data)
    assert high > 0
    assert len(packed) < share * len(data)


def test_empty_data_and_uint8_are_not_packed() -> None:
    assert pack("float32", b"") == (0, b"")
    assert pack("uint8", bytes(4096)) == (0, b"")


@given(dtype=st.sampled_from(sorted(WIDTHS)), high=st.integers(0, 1 << 33), payload=st.binary(max_size=300))
def test_any_bytes_are_numbers_or_a_protocol_error(dtype: str, high: int, payload: bytes) -> None:
    try:
        data = unpack(dtype, high, payload)
    except ProtocolError:
        return
    assert len(data) <= 2 * len(payload)


def bomb(announces: int | None = None) -> bytes:
    """Compress 256 MiB of zeros, perhaps with a wrong length in the header."""
    packed = zstandard.ZstdCompressor(write_content_size=True).compress(bytes(256 << 20))
    if announces is None:
        return packed
    honest = zstandard.get_frame_parameters(packed).content_size
    return packed.replace(honest.to_bytes(4, "little"), announces.to_bytes(4, "little"), 1)


def test_a_compression_bomb_is_refused_before_unpacking() -> None:
    packed = bomb()
    with pytest.raises(ProtocolError, match="announces 268435456 bytes; there are 64 numbers"):
        unpack("bfloat16", len(packed), packed + bytes(64))


def test_a_compression_bomb_with_a_false_size_is_refused() -> None:
    packed = bomb(announces=70_000)
    with pytest.raises(ProtocolError, match="cannot be read"):
        unpack("bfloat16", len(packed), packed + bytes(70_000))


def test_a_compression_bomb_without_a_size_is_refused() -> None:
    packed = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(1 << 20))
    with pytest.raises(ProtocolError, match="announces"):
        unpack("bfloat16", len(packed), packed + bytes(64))


def test_packing_pays_if_the_link_is_slower_than_the_packer() -> None:
    trial = Trial(nbytes=1_000_000, packed_bytes=700_000, seconds=0.002)
    assert pays(trial, 12.5e6)
    assert not pays(trial, 125e6)
    assert "which saves 24.00 ms at 12.5 MB/s and takes 2.00" in describe_benefit(trial, 12.5e6)


@given(bytes_per_s=st.floats(1e3, 1e11), seconds=st.floats(0, 1), packed=st.integers(1, 10**6))
def test_packing_that_pays_saves_time(bytes_per_s: float, seconds: float, packed: int) -> None:
    trial = Trial(10**6, packed, seconds)
    if pays(trial, bytes_per_s):
        assert packed / bytes_per_s + seconds < 10**6 / bytes_per_s


def test_frames_of_a_slow_link_are_packed_and_marked() -> None:
    packer = Packer(12.5e6, clock=clock(1e-6).__next__)
    frame = frame_of(activations(4096, "bfloat16"), "bfloat16")
    sent = packer.packed(frame)
    head = sent.header.activation
    assert 0 < head.packed_bytes < len(sent.payload) < len(frame.payload)
    assert unpack(head.dtype, head.packed_bytes, sent.payload) == frame.payload
    use = packer.use()
    assert use.compresses
    assert (use.frames, use.tensor_bytes, use.sent_bytes) == (1, 8192, len(sent.payload))
    assert "at 12.5 MB/s" in use.why


def test_frames_of_a_fast_link_are_sent_unpacked_and_the_reason_is_reported() -> None:
    packer = Packer(2e9, clock=clock(1e-3).__next__)
    frame = frame_of(activations(4096, "bfloat16"), "bfloat16")
    assert packer.packed(frame) is frame
    assert not packer.use().compresses
    assert "at 2000.0 MB/s and takes 1.00" in packer.use().why


def test_incompressible_numbers_are_sent_unpacked() -> None:
    packer = Packer(1e6, clock=clock(1e-9).__next__)
    frame = frame_of(np.random.default_rng(1).bytes(1 << 14), "bfloat16")
    assert packer.packed(frame) is frame


def test_small_frames_and_tombstones_are_never_packed() -> None:
    packer = Packer(1e3)
    for frame in (
        frame_of(activations(100, "bfloat16"), "bfloat16"),
        Frame(worker_pb2.FrameHeader(tombstone=worker_pb2.Tombstone(step=1))),
    ):
        assert packer.packed(frame) is frame
    assert packer.use().why == "no message was large enough yet"


def test_each_frame_size_has_its_own_trial() -> None:
    """Let a trial cost the same for any size, so that packing pays only for large frames."""
    packer = Packer(10e6, clock=clock(2e-3).__next__)
    small, large = (frame_of(activations(numbers, "bfloat16"), "bfloat16") for numbers in (1024, 1 << 18))
    assert packer.packed(small) is small
    assert packer.packed(large) is not large
