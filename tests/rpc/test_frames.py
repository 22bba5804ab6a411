from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_ring.core.errors import ProtocolError
from mlx_ring.rpc.frames import Frame, decode_frame, encode_frame
from mlx_ring.rpc.protos import worker_pb2


@given(step=st.integers(0, 2**64 - 1), payload=st.binary(max_size=300))
def test_a_frame_comes_back_as_it_was(step: int, payload: bytes) -> None:
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
    with pytest.raises(ProtocolError, match="should have 1000 bytes; 6 came"):
        decode_frame((1000).to_bytes(4, "little") + b"ab")
