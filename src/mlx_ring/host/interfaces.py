"""Network interfaces of this machine, and those that its owner trusts. Nothing here changes the operating system's settings.

Addresses for other machines are not those of loopback, bridges of containers and virtual machines, or macOS's private
interfaces. No other machine would reach this one there.

MLX's collectives between machines are neither encrypted nor authenticated. They use only interfaces that a user names:
by an interface's name, by a network such as 10.0.8.0/24, or by one of this machine's addresses. MLX only supports IPv4.
"""

from __future__ import annotations

import ipaddress
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil

from mlx_ring.core.errors import ConfigError
from mlx_ring.host.addresses import EVERY_IPV4, HeadAddress, is_link_local, is_loopback

InterfaceKind = Literal["thunderbolt", "infiniband", "wired", "wireless", "network", "tunnel"]
_ORDER: tuple[InterfaceKind, ...] = ("wired", "network", "wireless", "thunderbolt", "infiniband", "tunnel")
"""Order of join lines: first the kinds that most machines of a user share."""
_NOT_FOR_US = re.compile(
    # Linux: containers and virtual machines.
    r"lo\d*|docker\d*|br-[0-9a-f]{12}|virbr\d+.*|veth.*|vnet\d+|vmnet\d+|vboxnet\d+|cni.*|podman\d*|nerdctl\d*"
    r"|lxcbr\d+|lxdbr\d+|incusbr\d+|cali.*|flannel.*|cilium.*|kube-.*|dummy\d+"
    # macOS: bridges of virtual machines (bridge0 is Thunderbolt's), AirDrop and the like.
    r"|bridge[1-9]\d\d|vmenet\d+|awdl\d+|llw\d+|anpi\d+|ap\d+|gif\d+|stf\d+"
)
_WITHOUT_HARDWARE_ADDRESS, _INFINIBAND = "65534", "32"
"""ARP's numbers for kinds of hardware, in `/sys/class/net/*/type`."""
_ASK_S = 5.0

KindOf = Callable[[str], InterfaceKind]


@dataclass(frozen=True, slots=True)
class LanAddress:
    """One address of one interface."""

    interface: str
    index: int
    """Number that the operating system gives the interface."""
    address: str
    """IPv4 or IPv6 address, without a scope."""
    kind: InterfaceKind

    @property
    def is_ipv6(self) -> bool:
        return ":" in self.address

    @property
    def is_link_local(self) -> bool:
        return ipaddress.ip_address(self.address).is_link_local


def lan_addresses() -> list[LanAddress]:
    """Return the addresses by which other machines may reach this one, in the order in which to list them."""
    up = {name for name, found in psutil.net_if_stats().items() if found.isup}
    addresses = {
        name: [found.address for found in all_found if found.family in (socket.AF_INET, socket.AF_INET6)]
        for name, all_found in psutil.net_if_addrs().items()
        if name in up
    }
    return choose_addresses(addresses, {name: index for index, name in socket.if_nameindex()}, _kinds())


def own_names() -> tuple[str, ...]:
    """Return the names by which machines of this network may know this one: `mini`, `mini.local`, and its full name."""
    whole = socket.gethostname().rstrip(".").lower()
    first = whole.partition(".")[0]
    return tuple(dict.fromkeys((f"{first}.local", first, whole))) if first and first != "localhost" else ()


def lan_urls(
    host: str, port: int, scheme: str, addresses: Sequence[LanAddress], names: Sequence[str]
) -> list[str]:
    """Return the URLs by which other machines reach a server that listens on `host`, none if it is a loopback address.

    The name that mDNS answers comes first: it stays the same when the router gives another address. A link-local IPv6
    address is left out, because browsers refuse it.
    """
    listened = HeadAddress(host, port)
    if not listened.is_every:
        return [] if is_loopback(host) or is_link_local(host) else [f"{scheme}://{listened}"]
    usable = [
        found.address
        for found in addresses
        if not (found.is_ipv6 and (found.is_link_local or host == EVERY_IPV4))
    ]
    # A machine without an address on a network has no name there either.
    hosts = [*[name for name in names if name.endswith(".local")][:1], *usable] if usable else []
    return [f"{scheme}://{HeadAddress(each, port)}" for each in hosts]


def choose_addresses(
    addresses: Mapping[str, Sequence[str]], indexes: Mapping[str, int], kind_of: KindOf
) -> list[LanAddress]:
    """Choose addresses that other machines may reach, wired before wireless, and IPv4 first.

    Args:
        addresses: by interface; a scope (`%en0`) is dropped.
        indexes: by interface; one without has disappeared already.
        kind_of: returns an interface's kind.
    """
    found = [
        LanAddress(name, indexes[name], address.partition("%")[0], kind_of(name))
        for name, texts in addresses.items()
        if name in indexes and not _NOT_FOR_US.fullmatch(name)
        for address in texts
    ]
    return sorted(filter(_is_reachable, found), key=_rank)


def _is_reachable(found: LanAddress) -> bool:
    address = ipaddress.ip_address(found.address)
    if address.is_loopback or address.is_unspecified or address.is_multicast:
        return False
    # macOS gives each of its tunnels a link-local address.
    return not (found.kind == "tunnel" and address.is_link_local)


def _rank(found: LanAddress) -> tuple[bool, int, bool, str]:
    return found.is_link_local, _ORDER.index(found.kind), found.is_ipv6, found.interface


def join_lines(head: HeadAddress, addresses: Sequence[LanAddress], token: str) -> list[str]:
    """Return the commands that join this head from another machine, for each address on which it listens.

    A link-local IPv6 address needs the other machine's interface, which is not known here. Such a machine
    finds the head by itself, and so does any machine if there is no address at all.
    """
    usable = [found.address for found in addresses if not (found.is_ipv6 and found.is_link_local)]
    if not head.is_every:
        usable = [] if is_link_local(head.host) else [head.host]
    heads = [f"{HeadAddress(address, head.port)} " for address in usable] or [""]
    return [f"mlx-ring join {head}--token {token}" for head in heads]


def _kinds() -> KindOf:
    if sys.platform != "darwin":
        return linux_kind
    ports = mac_kinds(_hardware_ports())
    return lambda name: ports.get(name, "tunnel" if name.startswith("utun") else "network")


def linux_kind(name: str, root: Path = Path("/")) -> InterfaceKind:
    """Return the kind of an interface from `/sys`; `root` is that of the file system."""
    folder = root / "sys" / "class" / "net" / name
    hardware = _read(folder / "type")
    if name.startswith("thunderbolt"):
        return "thunderbolt"
    if hardware == _INFINIBAND:
        return "infiniband"
    if (folder / "tun_flags").exists() or hardware == _WITHOUT_HARDWARE_ADDRESS:
        return "tunnel"
    if (folder / "wireless").exists() or (folder / "phy80211").exists():
        return "wireless"
    return "wired" if (folder / "device").exists() else "network"


def mac_kinds(text: str) -> dict[str, InterfaceKind]:
    """Return the interfaces' kinds from the output of `networksetup -listallhardwareports`."""
    ports = re.findall(r"^Hardware Port: (.+)\nDevice: (\S+)$", text, re.MULTILINE)
    return {device: _mac_kind(port) for port, device in ports}


def _mac_kind(port: str) -> InterfaceKind:
    if port.startswith("Thunderbolt") and "Ethernet" not in port:
        return "thunderbolt"
    if port.startswith("Wi-Fi"):
        return "wireless"
    return "wired" if "Ethernet" in port or "LAN" in port else "network"


def _hardware_ports() -> str:
    """Read the hardware ports: this form of the command sets nothing."""
    command = shutil.which("networksetup", path="/usr/sbin")
    if command is None:
        return ""
    try:
        done = subprocess.run(
            [command, "-listallhardwareports"], capture_output=True, text=True, timeout=_ASK_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout


def _read(file: Path) -> str:
    try:
        return file.read_text("ascii", errors="replace").strip()
    except OSError:
        return ""


# ---- interfaces that the owner trusts

LOOPBACK = "127.0.0.1"
TRUST_FLAG = "--trusted-interface"


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
            f"{TRUST_FLAG} names {name}, which has no IPv4 address: MLX's collectives need one, so give the interface one."
        )
    there = ", ".join(sorted(interfaces)) or "none"
    raise ConfigError(
        f"{TRUST_FLAG} names {name}, but this machine has no such interface that is up: it has {there}."
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
