"""Addresses where a head listens, as `host`, `host:port`, `[IPv6]:port`, and the owners of client addresses."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import re
import socket
from dataclasses import dataclass
from typing import cast
from urllib.parse import urlsplit

from mlx_ring.core.errors import ConfigError

CLUSTER_PORT = 50051
LOCAL_NETWORK_DENIED = (
    "macOS has no route there, or its Local Network privacy stops this process: allow it in System Settings, "
    "or run it as a daemon (`sudo mlx-ring service install --system`)"
)
"""Meaning of macOS's errno 65 at an address of the LAN; see docs/macos.md."""
_MACS_NO_ROUTE = 65
"""EHOSTUNREACH on macOS. Linux has 113, so the number alone tells the system."""
EVERY_IPV4 = "0.0.0.0"  # noqa: S104 - compared, not bound
_USUAL_PORTS = {"http": 80, "https": 443}
_LAST_PORT = 65534
"""Largest port: the one after it must be a port too."""
_HOST_AND_PORT = re.compile(r"(?:\[(?P<six>[^\]]+)\]|(?P<host>[^\[\]:\s/@?#\\]+))(?::(?P<port>\d{1,5}))?")

_ENCODED_SCOPE = re.compile(r"(?<=[0-9a-f:])%25(?=[0-9]*[^0-9\]])", re.IGNORECASE)
_URL_WITH_SCOPE = re.compile(r"^(\w+://(?:[^@/?#]*@)?\[[^\]%]*)%25(?=[^\]])")


def is_denied_by_macos(number: int | None, address: str) -> bool:
    """Report whether an error of a connection may come from macOS's Local Network privacy.

    Args:
        number: the error's `errno`.
        address: a name or an address; names count as being on the LAN.
    """
    if number != _MACS_NO_ROUTE:
        return False
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return True
    return not (found.is_loopback or found.is_global)


@dataclass(frozen=True, slots=True)
class HeadAddress:
    """A head's two ports. A user types the first; the second is always the one after it."""

    host: str
    """Host without brackets."""
    port: int = CLUSTER_PORT

    @property
    def cluster(self) -> str:
        """Address for members, where both sides show a certificate."""
        return self._with(self.port)

    @property
    def enrolment(self) -> str:
        """Address where a machine without a certificate asks for one.

        gRPC's Python servers cannot ask for a certificate without requiring it, so machines without one need
        another port.
        """
        return self._with(self.enrolment_port)

    @property
    def is_every(self) -> bool:
        """True if a head that listens here does so on all addresses of its machine."""
        return self.host in ("::", EVERY_IPV4)

    @property
    def enrolment_port(self) -> int:
        return self.port + 1

    def _with(self, port: int) -> str:
        return f"[{self.host}]:{port}" if ":" in self.host else f"{self.host}:{port}"

    def __str__(self) -> str:
        return self.cluster


def parse_head_address(text: str) -> HeadAddress:
    """Read an address that a user typed; the default port is 50051.

    Raises:
        ConfigError: it is no address.
    """
    typed = plain_scope(text.strip())
    if _is_bare_ipv6(typed):
        return HeadAddress(typed)
    found = _HOST_AND_PORT.fullmatch(typed)
    port = int(found["port"] or CLUSTER_PORT) if found else 0
    if found is None or not 1 <= port <= _LAST_PORT or not _is_name(found["host"] or ""):
        raise ConfigError(
            f"{text!r} is no address of a head: give a name or an address, optionally with a port from 1 to {_LAST_PORT}, "
            f"such as mini.local or 192.168.1.7:{CLUSTER_PORT} or [fe80::1%en0]:{CLUSTER_PORT}."
        )
    return HeadAddress(found["six"] or found["host"], port)


def _is_name(text: str) -> bool:
    """Return False for a name that no system can look up, such as one with an empty or a long part."""
    try:
        text.encode("idna")
    except UnicodeError:
        return False
    return text.isprintable()


def _is_bare_ipv6(text: str) -> bool:
    try:
        ipaddress.IPv6Address(text)
    except ValueError:
        return False
    return True


def bracketed(host: str) -> str:
    """Return the host as it stands before a port: an IPv6 address in brackets."""
    return f"[{host}]" if _is_bare_ipv6(host) else host


def plain_scope(text: str) -> str:
    """Return an address, or text with one, as sockets take it: fe80::1%en0 for fe80::1%25en0, as URLs have it (RFC 6874).

    A number alone is that of an interface: fe80::1%25 and fe80::1%254 stay as they are.
    """
    return _ENCODED_SCOPE.sub("%", text)


def plain_url(url: str) -> str:
    """Return a URL as httpx takes it, which does not decode a scope."""
    return _URL_WITH_SCOPE.sub(r"\1%", url)


def bare_host(text: str) -> str:
    """Return a host as sockets take it, from text that may have brackets, and a scope as in a URL."""
    return plain_scope(text.strip().removeprefix("[").removesuffix("]"))


def is_link_local(host: str) -> bool:
    """Return True for a link-local IPv6 address, which machines reach through an interface that each names itself."""
    address = bare_host(host).partition("%")[0]
    return _is_bare_ipv6(address) and ipaddress.ip_address(address).is_link_local


def scoped_host(text: str, what: str) -> str:
    """Return a host as `bare_host` does.

    Args:
        text: what a user typed.
        what: name of the setting or argument, for errors.

    Raises:
        ConfigError: a link-local address without an interface, or with one that this machine does not have.
    """
    host = bare_host(text)
    if not is_link_local(host):
        return host
    _, percent, scope = host.partition("%")
    if not percent:
        raise ConfigError(
            f"{what} is {text}, a link-local address, which needs one of this machine's interfaces: {host}%en0, for example."
        )
    if not _is_interface(scope):
        names = ", ".join(name for _, name in socket.if_nameindex())
        raise ConfigError(f"{what} is {text}, but this machine has no interface {scope}: it has {names}.")
    return host


def _is_interface(scope: str) -> bool:
    try:
        _ = socket.if_indextoname(int(scope)) if scope.isdecimal() else socket.if_nametoindex(scope)
    except (OSError, OverflowError):
        return False
    return True


def local_url(host: str, port: int, scheme: str = "http", scope: str = "") -> str:
    """Return the URL by which a user on this machine reaches the server.

    Args:
        host: address on which it listens.
        port: its port.
        scheme: http or https.
        scope: interface of a link-local address.
    """
    local = {EVERY_IPV4: "127.0.0.1", "::": "[::1]"}.get(host, bracketed(host))
    return f"{scheme}://{local.replace(']', f'%25{scope}]') if scope else local}:{port}"


def listening_url(listener: socket.socket, scheme: str) -> str:
    """Return the URL by which a user on this machine reaches the server of a TCP socket."""
    host, port, *more = listener.getsockname()
    index = more[1] if is_link_local(host) else 0
    return local_url(host, port, scheme, socket.if_indextoname(index) if index else "")


def is_same_server(url: str, other: str) -> bool:
    """Return True if two URLs have the same scheme, host and port. All names of loopback are the same host."""
    origin = _origin(url)
    return origin is not None and origin == _origin(other)


def _origin(url: str) -> tuple[str, str, int] | None:
    """Return the scheme, host and port of a URL; None if it has no such parts."""
    try:
        parts = urlsplit(plain_url(url))
        port = _USUAL_PORTS[parts.scheme] if parts.port is None else parts.port
    except (ValueError, LookupError):
        return None
    host = (parts.hostname or "").rstrip(".")
    return parts.scheme, "127.0.0.1" if is_loopback(host) else host, port


def is_loopback(host: str) -> bool:
    """Return True if a server that listens there is reached from its own machine alone."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def listening_sockets(address: str, backlog: int) -> list[socket.socket]:
    """Return sockets that listen on `host:port`, one for each address of the host, and all on the same port.

    One for every address of IPv4 or IPv6 does so for both families.

    Raises:
        OSError: an address is in use, or none is this machine's.
    """
    host, _, text = address.rpartition(":")
    host, port = host.strip("[]"), int(text)
    if host in ("::", EVERY_IPV4):
        if socket.has_dualstack_ipv6():
            every = ("::", port)
            return [socket.create_server(every, family=socket.AF_INET6, backlog=backlog, dualstack_ipv6=True)]
        host = EVERY_IPV4
    sockets: list[socket.socket] = []
    found = {(each[0], each[4]) for each in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)}
    foreign = OSError(errno.EADDRNOTAVAIL, f"{host} has no address")
    with contextlib.ExitStack() as opened:
        for family, (own, _, *scope) in sorted(found):
            place = (own, sockets[0].getsockname()[1] if sockets else port, *scope)
            try:
                listening = socket.create_server(
                    cast("tuple[str, int]", place), family=family, backlog=backlog
                )
            except OSError as error:
                if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                    raise
                foreign = error
            else:
                sockets.append(opened.enter_context(listening))
        if not sockets:
            raise foreign
        opened.pop_all()
    return sockets
