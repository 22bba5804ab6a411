"""Two ends of a link over a collective, each with a thread of its own, and what carries their bytes.

Both learn of every step with rows, in the order of the stream, before the step can fail. Then the sender
owes one message and the receiver waits for one. So no failure of a step can put the ends out of step with each other.
Only these threads block in a collective. The compute thread still handles deadlines, tombstones and the end of the
process. After an error in a collective its group is unusable: the process ends, and its parent starts a new one.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from typing import Protocol, cast

import mlx.core as mx

from mlx_ring.core.errors import LinkLost, WorkerLost
from mlx_ring.rpc.backends import BACKENDS, Backend
from mlx_ring.rpc.links import Inbox, LinkKey, LinkSender, WireTensor
from mlx_ring.rpc.protos import step_pb2
from mlx_ring.worker.collective.step_messages import Form, MessageSlot, slot_of
from mlx_ring.worker.compute_thread import end_process, group_failure

log = logging.getLogger(__name__)

OnError = Callable[[Exception], None]


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
