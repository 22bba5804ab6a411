"""A capture of the frames on a host's interfaces while a test does something."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Generator
from dataclasses import dataclass, field

from tests.end_to_end.lan_cluster import Machine

_EVERY_PROTOCOL = 0x0003
_IPV4, _IPV6, _TCP = 0x0800, 0x86DD, 6
_ETHERNET, _IPV6_HEADER = 14, 40
_POLL_S = 0.05
_BUFFER_BYTES = 64 << 20

Ports = frozenset[int]
"""Ports of both ends of a connection."""


@dataclass(slots=True)
class Capture:
    """Frames of TCP on every interface."""

    frames: list[tuple[str, Ports, int]] = field(default_factory=list[tuple[str, Ports, int]])
    """Interface, ports and length."""

    def bytes_on(self, interface: str, connections: set[Ports]) -> int:
        """Return the bytes of these connections on an interface."""
        return sum(
            nbytes for name, ports, nbytes in self.frames if name == interface and ports in connections
        )

    def bytes_elsewhere(self, interface: str, connections: set[Ports]) -> int:
        """Return the bytes of these connections on all other interfaces."""
        return sum(
            nbytes for name, ports, nbytes in self.frames if name != interface and ports in connections
        )


@contextlib.contextmanager
def capturing(machine: Machine) -> Generator[Capture]:
    """Record the frames that the machine sends and receives meanwhile."""
    capture, ready, end = Capture(), threading.Event(), threading.Event()

    def read() -> None:
        with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_EVERY_PROTOCOL)) as wire:
            wire.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER_BYTES)
            wire.settimeout(_POLL_S)
            ready.set()
            while True:
                try:
                    frame, where = wire.recvfrom(1 << 17)
                except TimeoutError:
                    if end.is_set():
                        return
                    continue
                if ports := _tcp_ports(frame):
                    capture.frames.append((str(where[0]), ports, len(frame)))

    with machine.host.threads() as pool:
        reading = pool.submit(read)
        assert ready.wait(30)
        try:
            yield capture
        finally:
            end.set()
            reading.result()


def _tcp_ports(frame: bytes) -> Ports | None:
    kind = struct.unpack_from("!H", frame, 12)[0]
    if kind == _IPV4 and frame[_ETHERNET + 9] == _TCP:
        begin = _ETHERNET + 4 * (frame[_ETHERNET] & 15)
    elif kind == _IPV6 and frame[_ETHERNET + 6] == _TCP:
        begin = _ETHERNET + _IPV6_HEADER
    else:
        return None
    return frozenset(struct.unpack_from("!HH", frame, begin))
