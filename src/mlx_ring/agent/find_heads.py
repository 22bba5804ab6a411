"""Search by mDNS for the heads that announce themselves on the LAN (`cluster/announcement.py`)."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Generator, Sequence

from zeroconf import IPVersion, ServiceBrowser, ServiceInfo, ServiceListener, Zeroconf

from mlx_ring.core.errors import ConfigError
from mlx_ring.host.head_announcement import (
    LISTEN_S,
    SERVICE_TYPE,
    FoundHead,
    multicast_interfaces,
    read_addresses,
    read_properties,
)
from mlx_ring.host.interfaces import LanAddress, lan_addresses

_RESOLVE_MS = 1000


def find_heads(
    timeout_s: float = LISTEN_S, own_addresses: Callable[[], Sequence[LanAddress]] = lan_addresses
) -> list[FoundHead]:
    """Listen for so long; the heads by cluster and machine. None where this machine is on no LAN.

    Raises:
        ConfigError: multicast cannot be used here.
    """
    own = own_addresses()
    interfaces = multicast_interfaces(own)
    if not interfaces:
        return []
    with _listening(interfaces) as zeroconf:
        names = _Names()
        browser = ServiceBrowser(zeroconf, SERVICE_TYPE, names)
        time.sleep(timeout_s)
        browser.cancel()
        described = [zeroconf.get_service_info(SERVICE_TYPE, name, _RESOLVE_MS) for name in names.present()]
    links = list(dict.fromkeys(found.interface for found in own if found.is_ipv6 and found.is_link_local))
    heads = [_read(info, links) for info in described if info is not None and info.port]
    return sorted(heads, key=lambda head: (head.announcement.cluster, head.announcement.node, head.port))


@contextlib.contextmanager
def _listening(interfaces: list[str | int]) -> Generator[Zeroconf]:
    # It logs every packet that an interface refuses; only received announcements matter here.
    logging.getLogger("zeroconf").setLevel(logging.ERROR)
    try:
        zeroconf = Zeroconf(interfaces=interfaces)
    except (OSError, RuntimeError) as error:
        raise ConfigError(
            f"Cannot search this LAN for heads ({error}): give the head's address to `mlx-ring join`."
        ) from error
    try:
        yield zeroconf
    finally:
        zeroconf.close()


class _Names(ServiceListener):
    """Record of the present services. Called from the browser's thread."""

    def __init__(self) -> None:
        self._names: dict[str, None] = {}
        self._lock = threading.Lock()

    def present(self) -> list[str]:
        with self._lock:
            return list(self._names)

    def add_service(self, zc: Zeroconf, type_: str, name: str) -> None:
        del zc, type_
        with self._lock:
            self._names[name] = None

    def remove_service(self, zc: Zeroconf, type_: str, name: str) -> None:
        del zc, type_
        with self._lock:
            self._names.pop(name, None)

    def update_service(self, zc: Zeroconf, type_: str, name: str) -> None:
        """Ignore updates; the services are read at the end."""


def _read(info: ServiceInfo, links: Sequence[str]) -> FoundHead:
    texts = [str(address) for address in info.ip_addresses_by_version(IPVersion.All)]
    return FoundHead(read_properties(info.properties), info.port or 0, read_addresses(texts, links))
