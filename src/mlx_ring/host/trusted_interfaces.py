"""Interfaces that the owner trusts with MLX's collectives between machines, which are neither encrypted nor authenticated.

A user names them, by an interface's name, by a network such as 10.0.8.0/24, or by one of this machine's addresses.
No other interface is ever trusted. MLX only supports IPv4.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import psutil

from mlx_ring.core.errors import ConfigError

LOOPBACK = "127.0.0.1"
FLAG = "--trusted-interface"


@dataclass(frozen=True, slots=True)
class TrustedInterface:
    """Address of this machine on which collectives may listen."""

    name: str
    """Name that the operating system gives the interface."""
    address: str
    """IPv4 address."""
    network: str
    """Network such as 10.0.8.0/24, in which other addresses can be reached."""

    def __str__(self) -> str:
        return f"{self.name} ({self.address})"


@dataclass(frozen=True, slots=True)
class OwnAddress:
    """One address of an interface, from the operating system."""

    address: str
    """IPv4 or IPv6 address."""
    netmask: str = ""


def find_trusted(
    named: Iterable[str], interfaces: Mapping[str, Sequence[OwnAddress]]
) -> tuple[TrustedInterface, ...]:
    """Find the named interfaces, in that order.

    Args:
        named: interfaces, networks or addresses.
        interfaces: of this machine, by name.

    Raises:
        ConfigError: one does not exist, or has no IPv4 address.
    """
    return tuple(dict.fromkeys(found for name in named for found in _found(name, interfaces)))


def trusted_interfaces(named: Iterable[str]) -> tuple[TrustedInterface, ...]:
    """Find the named interfaces of this machine in its present state."""
    up = {name for name, found in psutil.net_if_stats().items() if found.isup}
    interfaces = {
        name: [
            OwnAddress(found.address.partition("%")[0], found.netmask or "")
            for found in addresses
            if found.family in (socket.AF_INET, socket.AF_INET6)
        ]
        for name, addresses in psutil.net_if_addrs().items()
        if name in up
    }
    return find_trusted(named, interfaces)


def source_address(host: str) -> str:
    """Return the address from which this machine would reach another: by its routes, without sending a packet.

    Raises:
        OSError: there is no route.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        # Any port, because nothing is sent.
        probe.connect((host, 9))
        return str(probe.getsockname()[0])


def _found(name: str, interfaces: Mapping[str, Sequence[OwnAddress]]) -> list[TrustedInterface]:
    network = _network(name)
    on = [
        (interface, own)
        for interface, addresses in interfaces.items()
        for own in addresses
        if (interface == name if network is None else ipaddress.ip_address(own.address) in network)
    ]
    found = [
        TrustedInterface(interface, own.address, _reach(own, network))
        for interface, own in on
        if ":" not in own.address
    ]
    if found:
        return found
    if on or (network is not None and network.version != 4):  # noqa: PLR2004 - IP version 4
        raise ConfigError(
            f"{FLAG} names {name}, which has no IPv4 address: MLX's collectives need one, so give the interface one."
        )
    there = ", ".join(sorted(interfaces)) or "none"
    raise ConfigError(
        f"{FLAG} names {name}, but this machine has no such interface that is up: it has {there}."
    )


def _reach(own: OwnAddress, network: ipaddress.IPv4Network | ipaddress.IPv6Network | None) -> str:
    """Return the named network, or else the interface's."""
    if network is not None and network.prefixlen < network.max_prefixlen:
        return str(network)
    return str(ipaddress.ip_network(f"{own.address}/{own.netmask or '32'}", strict=False))


def _network(name: str) -> ipaddress.IPv4Network | ipaddress.IPv6Network | None:
    try:
        return ipaddress.ip_network(name, strict=False)
    except ValueError:
        return None


@dataclass(frozen=True, slots=True)
class Trust:
    """Interfaces that the owner named. They may change, so each use looks them up."""

    named: tuple[str, ...] = ()

    def now(self) -> tuple[tuple[TrustedInterface, ...], str]:
        """Return the present ones, and why a named one is missing, or nothing."""
        found, problem = list[TrustedInterface](), ""
        for name in self.named:
            try:
                found += trusted_interfaces([name])
            except ConfigError as error:
                problem = problem or str(error)
        return tuple(dict.fromkeys(found)), problem
