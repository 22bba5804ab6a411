"""Attacks of strangers on the LAN on each open port of a cluster."""

from __future__ import annotations

import secrets
import ssl
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import psutil
from tests.end_to_end.lan_cluster import Machine
from tests.port_attacks import (
    Address,
    abandon_call,
    announced,
    call,
    flood,
    message,
    send_in_tls,
    send_plain,
    shake_hands,
)

from mlx_ring.rpc.frames import Frame, encode_frame
from mlx_ring.rpc.hello import make_hello
from mlx_ring.rpc.protos import worker_pb2

GREETING = encode_frame(Frame(worker_pb2.FrameHeader(hello=make_hello())))
"""First frame of a link, without a sender."""

_LOOPBACK = ("127.0.0.1:", "[::ffff:127.0.0.1]:")
"""Beginnings of addresses that only the machine itself reaches, the second one as gRPC listens on it."""


@dataclass(frozen=True, slots=True)
class Port:
    """An open port of a machine of the cluster."""

    machine: Machine
    address: Address
    process: str
    """Process whose log names refused connections: head, agent or worker."""
    path: str
    """Path of a method that a member may call there."""
    forbidden: str = ""
    """Path of a method that only the head may call."""
    for_strangers: bool = False


def open_ports(machines: Sequence[Machine]) -> list[Port]:
    """Return the open ports of these machines, as the kernel lists them."""
    return [
        _port_of(machine, int(line.split()[3].rpartition(":")[2]), line)
        for machine in machines
        for line in machine.host.run("ss", "-H", "-l", "-t", "-n", "-p").stdout.splitlines()
        if not line.split()[3].startswith(_LOOPBACK)
    ]


def _port_of(machine: Machine, port: int, line: str) -> Port:
    pid = int(line.partition("pid=")[2].partition(",")[0])
    arguments = psutil.Process(pid).cmdline()
    address = (machine.host.address, port)
    if "mlx_ring.worker" in arguments:
        return Port(machine, address, "agent", "/mlx_ring.Worker/Link", "/mlx_ring.Worker/Steps")
    if "serve" in arguments:
        is_enrolment = port == 50052
        path = "/mlx_ring.Enrolment/Enrol" if is_enrolment else "/mlx_ring.Cluster/Attend"
        return Port(machine, address, "head", path, for_strangers=is_enrolment)
    return Port(machine, address, "agent", "/mlx_ring.Weights/Have", "/mlx_ring.Agent/Stop")


def attacks(port: Port, contexts: dict[str, ssl.SSLContext]) -> list[Callable[[], object]]:
    """Return the attacks on a port. Each opens one connection."""
    address = port.address
    rubbish = secrets.token_bytes(4096)
    outside: list[Callable[[], object]] = [
        partial(send_plain, address, b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"),
        partial(send_plain, address, rubbish),
        # A handshake that stops in the middle of its first record.
        partial(send_plain, address, b"\x16\x03\x01\x02\x00\x01"),
    ]
    inside = contexts["nothing" if port.for_strangers else "a member's"]
    if not port.for_strangers:
        outside += [
            partial(shake_hands, address, contexts[shown]) for shown in ("nothing", "another cluster's")
        ]
    return [
        *outside,
        partial(send_in_tls, address, inside, rubbish),
        partial(abandon_call, address, inside, port.path),
        partial(call, address, inside, port.path, announced(len(rubbish), rubbish)),
        partial(call, address, inside, port.path, announced(0, b"")),
        partial(call, address, inside, port.path, message(GREETING)),
        *([partial(call, address, inside, port.forbidden, announced(0, b""))] if port.forbidden else []),
        partial(flood, address, inside, port.path),
    ]
