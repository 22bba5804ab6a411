"""Messages of a step: their size follows from the step, and none is taken for another step's."""

from __future__ import annotations

import pytest
from tests.worker.collective.in_process import FORM
from tests.worker.stages import Steps, chunk, decode, previous

from mlx_ring.core.errors import ProtocolError
from mlx_ring.rpc.links import WireTensor
from mlx_ring.rpc.protos import step_pb2, tensor_pb2
from mlx_ring.worker.collective.link_ends import MessageSlot, slot_of
from mlx_ring.worker.inputs import step_key

STEP = Steps().make(chunk(1, 0, [4, 5]), previous(2, 9))
SLOT = slot_of(STEP)
TENSOR = WireTensor("float32", (3, 3), bytes(range(36)), (4, 5, 1 << 31))


def test_slot_counts_tokens_of_chunks_decode_rows_drafts_and_embeddings() -> None:
    embeddings = step_pb2.Row(sequence=3, embeddings=tensor_pb2.Tensor(shape=[4, 3]))
    step = Steps().make(chunk(1, 0, [1, 2, 3]), decode(2, 5, 7, draft=[8, 9]), previous(4, 5), embeddings)
    assert slot_of(step) == MessageSlot(step_key(step), 3 + 3 + 1 + 4)


def test_rows_without_a_valid_input_count_as_empty() -> None:
    shapeless = step_pb2.Row(sequence=2, embeddings=tensor_pb2.Tensor())
    assert slot_of(Steps().make(step_pb2.Row(sequence=1), shapeless)).tokens == 0


def test_written_message_is_read_with_its_tokens() -> None:
    message = FORM.write(SLOT, TENSOR)
    assert len(message) == FORM.nbytes(SLOT)
    read = FORM.read(SLOT, memoryview(message))
    assert read is not None
    assert (read.dtype, read.shape, bytes(read.data)) == ("float32", (3, 3), TENSOR.data)
    assert read.tokens == TENSOR.tokens


def test_message_without_tokens_is_read_without_tokens() -> None:
    read = FORM.read(SLOT, memoryview(FORM.write(SLOT, WireTensor("float32", (3, 3), bytes(36)))))
    assert read is not None
    assert read.tokens == ()


def test_message_of_content_sent_over_grpc_is_as_long_and_says_so() -> None:
    message = FORM.write(SLOT, None)
    assert len(message) == FORM.nbytes(SLOT)
    assert FORM.read(SLOT, memoryview(message)) is None


@pytest.mark.parametrize(
    "tensor",
    [
        WireTensor("float32", (2, 3), bytes(24)),
        WireTensor("bfloat16", (3, 3), bytes(18)),
        WireTensor("float32", (3, 3), bytes(36), (7,)),
        WireTensor("float32", (3, 3), bytes(36), failure=step_pb2.Failure(sequences=[2])),
    ],
    ids=["fewer rows", "another type", "tokens of some rows", "rows failed"],
)
def test_incomplete_content_does_not_fit_its_steps_message(tensor: WireTensor) -> None:
    assert FORM.holds(SLOT, TENSOR)
    assert not FORM.holds(SLOT, tensor)


def test_another_steps_message_is_refused() -> None:
    other = MessageSlot(step_key(Steps().make(epoch=2)), 3)
    with pytest.raises(ProtocolError, match="for test epoch 1 step 1, the collective gave one of epoch 2"):
        FORM.read(SLOT, memoryview(FORM.write(other, TENSOR)))


def test_bytes_that_are_no_message_are_refused() -> None:
    with pytest.raises(ProtocolError, match="Instead of the message"):
        FORM.read(SLOT, memoryview(bytes(FORM.nbytes(SLOT))))
