"""Announcement of a head on the LAN, and its interpretation by a finder: mDNS (RFC 6762) with DNS-SD (RFC 6763).

Anyone on the LAN can announce anything. The result is a list to choose from and no reason for trust: a
machine that joins checks the cluster's fingerprint in its token.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import math
import re
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from mlx_ring.core.errors import shown_text
from mlx_ring.host.addresses import CLUSTER_PORT, HeadAddress
from mlx_ring.host.interfaces import LanAddress

log = logging.getLogger(__name__)

SERVICE_TYPE = "_mlx-ring._tcp.local."
FINGERPRINT_DIGITS = 16
LISTEN_S = 3.0
"""Time to listen: heads answer within a second; the rest is for a lost packet."""
_LOOK_AFTER_S, _LOOK_EVERY_S = 20.0, 60.0
"""Time without a known head after which it is looked for, and the time between two looks."""
_LABEL_BYTES = 63
"""Most bytes in one part of a DNS name."""
_CLUSTER, _NODE, _VERSION, _AUTHORITY = "cluster", "node", "version", "ca"


@dataclass(frozen=True, slots=True)
class HeadAnnouncement:
    """Fields of the TXT record."""

    cluster: str
    """Name of the cluster."""
    node: str
    """Node id of the head, which no other machine has."""
    version: str
    """Version of mlx-ring."""
    authority: str
    """First sixteen hexadecimal digits of the CA's fingerprint; empty if a finder read none."""

    def instance(self, port: int) -> str:
        """Return the name of the service: one label of a DNS name, and so without dots.

        It has the port if that is not the default. Two heads on one machine cannot notice that they
        have the same name, because answers to one may reach the other's socket.
        """
        where = "" if port == CLUSTER_PORT else f" port {port}"
        text = shown_text(f"{self.cluster} on {self.node}").replace(".", "-")
        return text.encode()[: _LABEL_BYTES - len(where)].decode(errors="ignore").strip() + where

    @property
    def host(self) -> str:
        """Host name that no other program has: the machine's own belongs to the operating system."""
        readable = re.sub(r"[^a-z0-9]+", "-", self.node.lower())[:40].strip("-")
        return f"mlx-ring-{readable or 'head'}.local."

    def properties(self) -> dict[str, str]:
        """Return the fields of the TXT record."""
        return {
            _CLUSTER: shown_text(self.cluster),
            _NODE: shown_text(self.node),
            _VERSION: self.version,
            _AUTHORITY: self.authority[:FINGERPRINT_DIGITS],
        }


@dataclass(frozen=True, slots=True)
class FoundHead:
    """Head that was announced on the LAN."""

    announcement: HeadAnnouncement
    port: int
    addresses: tuple[str, ...]
    """Addresses, IPv4 first; link-local IPv6 with this machine's interface, as in fe80::1%en0, last."""

    @property
    def joinable(self) -> tuple[HeadAddress, ...]:
        """Addresses that `mlx-ring join` accepts, the likeliest first."""
        return tuple(HeadAddress(address, self.port) for address in self.addresses)

    def as_json(self) -> dict[str, object]:
        announcement = self.announcement
        return {
            "cluster": announcement.cluster,
            "node": announcement.node,
            "version": announcement.version,
            "ca": announcement.authority,
            "port": self.port,
            "addresses": list(self.addresses),
        }


def read_properties(properties: Mapping[bytes, bytes | None]) -> HeadAnnouncement:
    """Read a TXT record of unknown origin. Missing fields are empty, and no field can control a terminal."""
    texts = {
        name: shown_text((properties.get(name.encode()) or b"").decode(errors="replace")) for name in _NAMES
    }
    authority = texts[_AUTHORITY].lower()
    known = re.fullmatch(r"[0-9a-f]{16}", authority) is not None
    return HeadAnnouncement(texts[_CLUSTER], texts[_NODE], texts[_VERSION], authority if known else "")


_NAMES = (_CLUSTER, _NODE, _VERSION, _AUTHORITY)


def read_addresses(texts: Iterable[str], links: Sequence[str] = ()) -> tuple[str, ...]:
    """Read addresses of unknown origin, the likeliest first.

    Args:
        texts: an IPv6 address may carry a scope, by number or by name.
        links: this machine's interfaces with link-local IPv6 addresses. If the interface of a link-local
            address is unknown, the result has it for each: one of them will answer.
    """
    scoped = dict.fromkeys(found for text in texts for found in _with_scope(text, links))
    return tuple(sorted(filter(_is_usable, scoped), key=_rank))


def _with_scope(text: str, links: Sequence[str]) -> list[str]:
    address, _, scope = text.partition("%")
    if not _needs_scope(address):
        return [address]
    if scope and not scope.isdigit():
        return [text]
    try:
        return [f"{address}%{socket.if_indextoname(int(scope or 0))}"]
    except (OSError, OverflowError):
        return [f"{address}%{link}" for link in links]


def _needs_scope(address: str) -> bool:
    return ":" in address and ipaddress.ip_address(address).is_link_local


def _is_usable(text: str) -> bool:
    address = ipaddress.ip_address(text)
    return not (address.is_unspecified or address.is_multicast)


def _rank(text: str) -> tuple[bool, bool]:
    address = ipaddress.ip_address(text)
    return address.is_link_local, isinstance(address, ipaddress.IPv6Address)


def multicast_interfaces(addresses: Sequence[LanAddress]) -> list[str | int]:
    """Return where to send and listen: an address for IPv4, an interface's number for IPv6.

    Tunnels carry no multicast.
    """
    spoken = [found for found in addresses if found.kind != "tunnel"]
    four = [found.address for found in spoken if not found.is_ipv6]
    return [*four, *sorted({found.index for found in spoken if found.is_ipv6})]


def _is_name(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return True
    return False


class HeadPlace:
    """Address of a known head, which is looked for on the LAN once it is lost: its router may give it another address.

    A name that a user has given is asked and kept too, because it can follow the head to other networks.
    """

    def __init__(
        self,
        address: HeadAddress,
        look: Callable[[HeadAddress], HeadAddress | None] = lambda _: None,
        keep: Callable[[HeadAddress], None] = lambda _: None,
    ) -> None:
        """Begin at an address.

        Args:
            address: address that a user typed, or where the head was last.
            look: returns the address of a head that claims to be this one and is no longer at the given one, or None. May
                take seconds.
            keep: called with the address for later starts, when the head has answered at an address for the first time.
        """
        self.address: HeadAddress = address
        """Address to ask next."""
        self.refused: set[HeadAddress] = set()
        """Addresses that are not asked again, unless the head was there before."""
        self._known: HeadAddress = address
        self._kept = False
        self._name: HeadAddress | None = address if _is_name(address.host) else None
        self._look, self._keep = look, keep
        self._lost_s: float | None = None
        self._looked_s = -math.inf

    @property
    def is_guessed(self) -> bool:
        """True if the head has not answered at this address: another one may have announced itself there."""
        return self.address != self._known

    @property
    def has_answered(self) -> bool:
        """True if the head has answered at any address."""
        return self._kept

    def answered(self) -> None:
        """Record that the head has answered at this address."""
        if self.is_guessed or not self._kept:
            self._known, self._kept = self.address, True
            self._keep(self._name or self.address)
        self._lost_s = None

    def refuse_guess(self) -> None:
        """Record that this address, at which the head has not answered, is of another head, or of none."""
        self.refused.add(self.address)

    async def choose(self) -> None:
        """Choose the address to ask next, after the head did not answer."""
        now = time.monotonic()
        self._lost_s = now if self._lost_s is None else self._lost_s
        name, was_known = self._name, not self.is_guessed
        self.address = name if was_known and name is not None and name not in self.refused else self._known
        if now < max(self._lost_s + _LOOK_AFTER_S, self._looked_s + _LOOK_EVERY_S):
            return
        known = self._known
        found = await _in_daemon(lambda: self._look(known))
        self._looked_s = time.monotonic()
        if found is not None and found != self._known and found not in self.refused:
            log.info(
                "The head at %s is lost; one that claims to be the same was found at %s", self._known, found
            )
            self.address = found


async def _in_daemon(look: Callable[[], HeadAddress | None]) -> HeadAddress | None:
    """Call a function in a thread for which the end of this process does not wait."""
    loop = asyncio.get_running_loop()
    result: asyncio.Future[HeadAddress | None] = loop.create_future()

    def run() -> None:
        try:
            found = look()
        except Exception:
            log.exception("The head could not be looked for")
            found = None
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(lambda: result.done() or result.set_result(found))

    threading.Thread(target=run, name="search for the head", daemon=True).start()
    return await result
