"""Two ends of a link over a collective, each with a thread of its own, what carries their bytes, and the messages.

Both ends know the size of a step's message from the step alone, even if the step fails. It names its step and carries
the activations of all its rows, and tokens that the next stage cannot know. Anything else (rows or the whole step
failed) uses gRPC, where it may be of any size. The message then says so and is otherwise empty, so that the next one
is matched correctly.

Both learn of every step with rows, in the order of the stream, before the step can fail. Then the sender
owes one message and the receiver waits for one. So no failure of a step can put the ends out of step with each other.
Only these threads block in a collective. The compute thread still handles deadlines, tombstones and the end of the
process. After an error in a collective its group is unusable: the process ends, and its parent starts a new one.
"""

from __future__ import annotations

import logging
import queue
import struct
import threading
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, cast

import mlx.core as mx

from mlx_ring.core.errors import LinkLost, ProtocolError, WorkerLost
from mlx_ring.rpc.backends import BACKENDS, Backend
from mlx_ring.rpc.links import Inbox, LinkKey, LinkSender, WireTensor
from mlx_ring.rpc.protos import step_pb2
from mlx_ring.worker.compute_thread import end_process, group_failure
from mlx_ring.worker.inputs import row_length, step_key

log = logging.getLogger(__name__)

OnError = Callable[[Exception], None]

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


class Transport(Protocol):
    """Transport from one stage to the next, used by one thread at each end. A call returns when its collective is done."""

    def send(self, message: bytearray) -> None: ...

    def receive(self, nbytes: int) -> memoryview: ...


def transport_between(group: mx.distributed.Group, backend: Backend, sender: int, *, sums: bool) -> Transport:
    """Return the transport from the rank `sender` to the one after it.

    With `sums`, both ends join a sum. A backend that cannot send always uses one.
    """
    info = BACKENDS[backend]
    device = mx.Device(mx.gpu if info.runs_on_gpu else mx.cpu)
    if sums or not info.can_send:
        return _Summed(group, device)
    return _PointToPoint(group, device, sender)


class _PointToPoint:
    def __init__(self, group: mx.distributed.Group, device: mx.Device, sender: int) -> None:
        self._group = group
        self._device = device
        self._sender = sender

    def send(self, message: bytearray) -> None:
        mx.eval(
            mx.distributed.send(_octets(message), self._sender + 1, group=self._group, stream=self._device)
        )

    def receive(self, nbytes: int) -> memoryview:
        return _bytes_of(
            mx.distributed.recv((nbytes,), mx.uint8, self._sender, group=self._group, stream=self._device)
        )


class _Summed:
    """Transport by sums. The receiver adds zeros to bytes, so everything arrives bit by bit."""

    def __init__(self, group: mx.distributed.Group, device: mx.Device) -> None:
        self._group = group
        self._device = device

    def send(self, message: bytearray) -> None:
        mx.eval(self._sum(_octets(message)))

    def receive(self, nbytes: int) -> memoryview:
        return _bytes_of(self._sum(mx.zeros((nbytes,), mx.uint8, stream=self._device)))

    def _sum(self, octets: mx.array) -> mx.array:
        return mx.distributed.all_sum(octets, group=self._group, stream=self._device)


def _octets(message: bytearray) -> mx.array:
    return mx.array(cast("list[int]", memoryview(message)))


def _bytes_of(octets: mx.array) -> memoryview:
    mx.eval(octets)
    return memoryview(cast("bytes", octets))


class CollectiveSender:
    """Sending end. Content that does not fit a collective's message uses another link, which also reports failures."""

    def __init__(
        self, transport: Transport, form: Form, other: LinkSender, on_error: OnError = end_process
    ) -> None:
        self._transport = transport
        self._form = form
        self._other = other
        self._on_error = on_error
        self._owed: dict[LinkKey, MessageSlot] = {}
        self._outgoing: queue.SimpleQueue[tuple[MessageSlot, WireTensor | None] | None] = queue.SimpleQueue()
        threading.Thread(target=self._send_all, name="collective sender", daemon=True).start()

    def expect(self, step: step_pb2.Step) -> None:
        """Expect a message for the step, which the sender owes from now on."""
        slot = slot_of(step)
        self._owed[slot.key] = slot

    def send(self, key: LinkKey, tensor: WireTensor) -> None:
        slot = self._owed.pop(key, None)
        if slot is not None and self._form.holds(slot, tensor):
            self._outgoing.put((slot, tensor))
            return
        self._other.send(key, tensor)
        self._leave_empty(slot)

    def send_failure(self, key: LinkKey, failure: step_pb2.Failure) -> None:
        self._other.send_failure(key, failure)
        self._leave_empty(self._owed.pop(key, None))

    def close(self) -> None:
        self._outgoing.put(None)
        self._other.close()

    def _leave_empty(self, slot: MessageSlot | None) -> None:
        if slot is not None:
            self._outgoing.put((slot, None))

    def _send_all(self) -> None:
        try:
            for slot, tensor in iter(self._outgoing.get, None):
                self._transport.send(self._form.write(slot, tensor))
        except Exception as error:  # noqa: BLE001 - MLX raises any kind of error
            self._on_error(error)


class CollectiveReceiver:
    """Receiving end, which puts messages into an inbox."""

    def __init__(
        self, transport: Transport, form: Form, inbox: Inbox, peer: str, on_error: OnError = end_process
    ) -> None:
        """Start receiving; `peer` names the sender in errors."""
        self._transport = transport
        self._form = form
        self._inbox = inbox
        self._peer = peer
        self._on_error = on_error
        self._expected: queue.SimpleQueue[MessageSlot | None] = queue.SimpleQueue()
        threading.Thread(target=self._receive_all, name="collective receiver", daemon=True).start()

    def expect(self, step: step_pb2.Step) -> None:
        """Wait for the step's message, after those before it."""
        self._expected.put(slot_of(step))

    def close(self) -> None:
        self._expected.put(None)

    def _receive_all(self) -> None:
        try:
            for slot in iter(self._expected.get, None):
                tensor = self._form.read(slot, self._transport.receive(self._form.nbytes(slot)))
                if tensor is not None:
                    self._inbox.put(slot.key, tensor)
        except Exception as error:  # noqa: BLE001 - MLX raises any kind of error
            lost, failed = group_failure(error), f"The collective with {self._peer} failed: {error}"
            self._inbox.break_off(lost if isinstance(lost, LinkLost) else WorkerLost(failed))
            self._on_error(error)
