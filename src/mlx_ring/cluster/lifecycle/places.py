"""Which of a file's machines is this one, and how the others reach the coordinator."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import subprocess
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import psutil

from mlx_ring.cluster.planner.devices_file import Device

_LOOPBACK_NAMES = ("localhost", "localhost.localdomain", "ip6-localhost")
_SSH_S = 10.0
_ANY_PORT = 9
Resolve = Callable[[str], Collection[str]]
"""A name's addresses; none where it has none."""


@dataclass(frozen=True, slots=True)
class Place:
    """A machine of the file, seen from here."""

    device: Device
    host: str
    """Its name or address, as ssh's configuration has it."""
    is_here: bool

    @property
    def name(self) -> str:
        return self.device.name


@dataclass(frozen=True, slots=True)
class Target:
    """What ssh makes of a destination."""

    host: str
    is_direct: bool = True
    """To the usual port, and by no other machine or program."""


def find_places(devices: Sequence[Device]) -> list[Place]:
    """Each machine, this one found among them by the addresses of its interfaces."""
    own = own_addresses()
    return [place_of(device, ssh_target(device.ssh), own, resolve) for device in devices]


def place_of(device: Device, target: Target, own: Collection[str], resolve: Resolve) -> Place:
    """One machine; it is this one where an address of it is, or it is called by loopback's.

    Behind a port of its own or another machine, loopback is not this one's: a tunnel or a virtual machine.
    """
    names = [device.address, *([target.host] if target.is_direct else [])]
    return Place(device, target.host, any(_is_here(name, own, resolve) for name in names if name))


def _is_here(name: str, own: Collection[str], resolve: Resolve) -> bool:
    if name.lower() in _LOOPBACK_NAMES:
        return True
    return any(address in own or _is_loopback(address) for address in resolve(name))


def _is_loopback(address: str) -> bool:
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(address).is_loopback
    return False


def own_addresses() -> frozenset[str]:
    """Of every interface, without scopes."""
    return frozenset(
        found.address.partition("%")[0]
        for all_found in psutil.net_if_addrs().values()
        for found in all_found
        if found.family in (socket.AF_INET, socket.AF_INET6)
    )


def resolve(name: str) -> frozenset[str]:
    """A name's addresses; none where it has none here, as an alias that only a jump host knows."""
    with contextlib.suppress(OSError, UnicodeError):
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
        return frozenset(str(entry[4][0]).partition("%")[0] for entry in found)
    return frozenset()


def ssh_target(destination: str) -> Target:
    """What is behind a destination, the user's configuration heeded; nothing is connected to."""
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        done = subprocess.run(
            ["ssh", "-G", "--", destination], capture_output=True, text=True, timeout=_SSH_S, check=False
        )
        found = target_of(done.stdout)
        if found.host:
            return found
    return Target(destination.rpartition("@")[2])


def target_of(configuration: str) -> Target:
    """Out of what `ssh -G` prints."""
    told = {
        key.lower(): value for key, _, value in (line.partition(" ") for line in configuration.splitlines())
    }
    ways = [told.get(name, "none") for name in ("proxyjump", "proxycommand")]
    return Target(told.get("hostname", ""), told.get("port", "22") == "22" and set(ways) == {"none"})


def head_host(coordinator: Place, other: Place) -> str:
    """By which address `other` reaches the coordinator's ports."""
    if coordinator.device.address:
        return coordinator.device.address
    return _own_way_to(other) if coordinator.is_here else coordinator.host


def _own_way_to(other: Place) -> str:
    """By which address this machine goes there. Nothing is sent: a datagram's socket only asks the routes."""
    with contextlib.suppress(OSError):
        family, kind, protocol, _, address = socket.getaddrinfo(
            other.host, _ANY_PORT, type=socket.SOCK_DGRAM
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    # Reached by a jump host perhaps: the name of this machine may lead back.
    return socket.gethostname()
