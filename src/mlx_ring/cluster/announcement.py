"""Announcement of this head on the LAN by mDNS, so that a machine can join without an address, and the search for heads.

It changes no setting of the operating system. If the announcement is not possible, the head logs that once and continues.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import AsyncGenerator, Callable, Generator, Sequence

from zeroconf import Error, IPVersion, ServiceBrowser, ServiceInfo, ServiceListener, Zeroconf
from zeroconf.asyncio import AsyncZeroconf

from mlx_ring.core.errors import ConfigError
from mlx_ring.host.head_announcement import (
    LISTEN_S,
    SERVICE_TYPE,
    FoundHead,
    HeadAnnouncement,
    multicast_interfaces,
    read_addresses,
    read_properties,
)
from mlx_ring.host.interfaces import LanAddress, lan_addresses

log = logging.getLogger(__name__)

LOOK_EVERY_S = 5.0
"""Interval of the check for changed interfaces, such as a new cable or network."""

OwnAddresses = Callable[[], Sequence[LanAddress]]


@contextlib.asynccontextmanager
async def announcing(
    head: HeadAnnouncement,
    port: int,
    own_addresses: OwnAddresses = lan_addresses,
    look_every_s: float = LOOK_EVERY_S,
) -> AsyncGenerator[None]:
    """Announce on every LAN that this head listens on `port`, and withdraw it when the context ends."""
    announcer = _Announcer(head, port, own_addresses, look_every_s)
    task = asyncio.create_task(announcer.follow(), name="announcing")
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


class _Announcer:
    def __init__(
        self, head: HeadAnnouncement, port: int, own_addresses: OwnAddresses, look_every_s: float
    ) -> None:
        self._head, self._port = head, port
        self._own_addresses, self._look_every_s = own_addresses, look_every_s
        self._complained = False

    async def follow(self) -> None:
        """Announce on all interfaces, and again after each change of them."""
        # zeroconf logs every packet that an interface refuses.
        logging.getLogger("zeroconf").setLevel(logging.ERROR)
        addresses = await self._look()
        while True:
            async with contextlib.AsyncExitStack() as stack:
                await self._announce(addresses, stack)
                addresses = await self._change(addresses)

    async def _announce(self, addresses: Sequence[LanAddress], stack: contextlib.AsyncExitStack) -> None:
        interfaces = multicast_interfaces(addresses)
        if not interfaces:
            self._complain("it is on no LAN")
            return
        try:
            zeroconf = AsyncZeroconf(interfaces=interfaces)
            stack.push_async_callback(_close, zeroconf)
            # A head whose name is taken gets a number appended; the second await waits for the packets.
            await (await zeroconf.async_register_service(self._service(addresses), allow_name_change=True))
        except (OSError, RuntimeError, Error) as error:
            self._complain(str(error) or type(error).__name__)

    def _service(self, addresses: Sequence[LanAddress]) -> ServiceInfo:
        return ServiceInfo(
            SERVICE_TYPE,
            f"{self._head.instance(self._port)}.{SERVICE_TYPE}",
            port=self._port,
            properties=self._head.properties(),
            server=self._head.host,
            parsed_addresses=[found.address for found in addresses],
        )

    async def _change(self, known: Sequence[LanAddress]) -> Sequence[LanAddress]:
        """Wait for a change and return the new addresses."""
        while True:
            await asyncio.sleep(self._look_every_s)
            found = await self._look()
            if set(found) != set(known):
                return found

    async def _look(self) -> Sequence[LanAddress]:
        """Return the addresses, read in a thread because macOS needs a subprocess for them."""
        return await asyncio.to_thread(self._own_addresses)

    def _complain(self, reason: str) -> None:
        if not self._complained:
            log.info("This head is not announced on the LAN (%s): machines join it by its address", reason)
        self._complained = True


async def _close(zeroconf: AsyncZeroconf) -> None:
    """Send a goodbye if an interface still accepts it, and close."""
    with contextlib.suppress(OSError, RuntimeError, Error):
        await zeroconf.async_unregister_all_services()
    with contextlib.suppress(OSError, RuntimeError, Error):
        await zeroconf.async_close()


# ---- the search

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
