"""Message of a step in a collective. Both ends know its size from the step alone, even if the step fails.

It names its step and carries the activations of all its rows, and tokens that the next stage cannot know. Anything
else (rows or the whole step failed) uses gRPC, where it may be of any size. The message then says so and is
otherwise empty, so that the next one is matched correctly.
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
class MessageSlot:
    """Place of a message among all: its step, and its number of tokens."""

    key: LinkKey
    tokens: int


def slot_of(step: step_pb2.Step) -> MessageSlot:
    """Return the step's slot. Rows without a valid input count as empty: each stage fails them by itself."""
    return MessageSlot(step_key(step), sum(map(_length, step.rows)))


def _length(row: step_pb2.Row) -> int:
    try:
        return row_length(row)
    except (ProtocolError, IndexError):
        return 0


@dataclass(frozen=True, slots=True)
class Form:
    """Format that all messages between two stages share."""

    hidden: int
    """Numbers for each token."""
    dtype: str
    number_bytes: int

    def nbytes(self, slot: MessageSlot) -> int:
        return _HEAD.size + slot.tokens * (_ID_BYTES + self.hidden * self.number_bytes)

    def holds(self, slot: MessageSlot, tensor: WireTensor) -> bool:
        """Report whether the slot's message can carry the tensor, with everything that belongs to it."""
        whole = tensor.dtype == self.dtype and tensor.shape == (slot.tokens, self.hidden)
        return whole and tensor.failure is None and len(tensor.tokens) in {0, slot.tokens}

    def write(self, slot: MessageSlot, tensor: WireTensor | None) -> bytearray:
        """Return the slot's message. None means that the step's output comes over gRPC."""
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

    def read(self, slot: MessageSlot, message: memoryview) -> WireTensor | None:
        """Return the content of the slot's message; None if it comes over gRPC.

        Raises:
            ProtocolError: the message belongs to another step.
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
    def _begin(slot: MessageSlot) -> int:
        """Return the offset of the activations."""
        return _HEAD.size + slot.tokens * _ID_BYTES
