"""Transports of bytes from one stage to the next in a group: sent and received, or summed.

Only one thread uses each end, in the order of the messages. A call returns when its collective is done. After an
error the group is unusable.
"""

from __future__ import annotations

from typing import Protocol, cast

import mlx.core as mx

from mlx_ring.rpc.backends import BACKENDS, Backend


class Transport(Protocol):
    """Transport from one stage to the next."""

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
