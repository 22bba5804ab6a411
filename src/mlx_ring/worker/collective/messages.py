"""A step's message in a collective: as many bytes as both ends know from the step alone, whatever became of it.

It says which step it is of, and carries the activations of all its rows and, where the next stage cannot know them, their
tokens. What does not fit that (rows or the whole step failed) goes over gRPC, where it may be of any size; the message
then says so and is otherwise empty, so that the one after it is taken for what it is.
"""

from __future__ import annotations

import struct
from array import array
from dataclasses import dataclass

from mlx_ring.core.errors import ProtocolError
from mlx_ring.rpc.links import LinkKey, WireTensor
from mlx_ring.rpc.protos import step_pb2
from mlx_ring.worker.inputs import row_length, step_key

_HEAD = struct.Struct("<4sIQQ")
_MARK = b"ring"
_ELSEWHERE, _WITH_TOKENS = 1, 2
_ID = "I"
_ID_BYTES = array(_ID).itemsize


@dataclass(frozen=True, slots=True)
class Slot:
    """A message's place among all: of which step it is, and of how many tokens."""

    key: LinkKey
    tokens: int


def slot_of(step: step_pb2.Step) -> Slot:
    """Rows without a proper input count for nothing: each stage fails them by itself."""
    return Slot(step_key(step), sum(map(_length, step.rows)))


def _length(row: step_pb2.Row) -> int:
    try:
        return row_length(row)
    except (ProtocolError, IndexError):
        return 0


@dataclass(frozen=True, slots=True)
class Form:
    """What all messages between two stages have in common."""

    hidden: int
    """Numbers for each token."""
    dtype: str
    number_bytes: int

    def nbytes(self, slot: Slot) -> int:
        return _HEAD.size + slot.tokens * (_ID_BYTES + self.hidden * self.number_bytes)

    def holds(self, slot: Slot, tensor: WireTensor) -> bool:
        """Whether the slot's message can carry the tensor, with all that belongs to it."""
        whole = tensor.dtype == self.dtype and tensor.shape == (slot.tokens, self.hidden)
        return whole and tensor.failure is None and len(tensor.tokens) in {0, slot.tokens}

    def write(self, slot: Slot, tensor: WireTensor | None) -> bytearray:
        """The slot's message; with None, that what the step gave comes over gRPC."""
        message = bytearray(self.nbytes(slot))
        if tensor is None:
            flags = _ELSEWHERE
        else:
            flags = _WITH_TOKENS if tensor.tokens else 0
            tokens = array(_ID, tensor.tokens).tobytes()
            message[_HEAD.size : _HEAD.size + len(tokens)] = tokens
            message[self._begin(slot) :] = tensor.data
        _HEAD.pack_into(message, 0, _MARK, flags, slot.key.epoch, slot.key.step)
        return message

    def read(self, slot: Slot, message: memoryview) -> WireTensor | None:
        """What the slot's message carries; None where that comes over gRPC.

        Raises:
            ProtocolError: it is another's message.
        """
        mark, flags, epoch, step = _HEAD.unpack_from(message)
        if (mark, epoch, step) != (_MARK, slot.key.epoch, slot.key.step):
            raise ProtocolError(
                f"Instead of the message for {slot.key}, the collective gave one of epoch {epoch} step {step}."
            )
        if flags & _ELSEWHERE:
            return None
        begin = self._begin(slot)
        tokens = array(_ID, message[_HEAD.size : begin].tobytes()) if flags & _WITH_TOKENS else ()
        return WireTensor(self.dtype, (slot.tokens, self.hidden), message[begin:], tuple(tokens))

    @staticmethod
    def _begin(slot: Slot) -> int:
        """Where the activations begin."""
        return _HEAD.size + slot.tokens * _ID_BYTES
