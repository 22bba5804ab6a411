"""Announcement of this head on the LAN by mDNS, so that a machine can join without an address.

It changes no setting of the operating system. If the announcement is not possible, the head logs that once and continues.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Callable, Sequence

from zeroconf import Error, ServiceInfo
from zeroconf.asyncio import AsyncZeroconf

from mlx_ring.host.head_announcement import SERVICE_TYPE, HeadAnnouncement, multicast_interfaces
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
