"""Announces this head on the LAN by mDNS, so that a machine can join without knowing an address.

Nothing of the operating system's is touched: packets go out over the interfaces as they are. Where
that is not possible, the head does without, and says so once.
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
"""Cables are plugged and networks joined while a head runs."""

OwnAddresses = Callable[[], Sequence[LanAddress]]


@contextlib.asynccontextmanager
async def announcing(
    head: HeadAnnouncement,
    port: int,
    own_addresses: OwnAddresses = lan_addresses,
    look_every_s: float = LOOK_EVERY_S,
) -> AsyncGenerator[None]:
    """Say on every LAN, for as long as this is open, that this head listens on `port`; take it back afterwards."""
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
        """Announce on the interfaces that there are, anew after each change."""
        # It tells of every packet that an interface refuses.
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
            # Another head of the same name gets a number behind it; the await is for what it sends meanwhile.
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
        """The addresses, once they are others."""
        while True:
            await asyncio.sleep(self._look_every_s)
            found = await self._look()
            if set(found) != set(known):
                return found

    async def _look(self) -> Sequence[LanAddress]:
        """Apart from the loop: on a Mac a program is asked."""
        return await asyncio.to_thread(self._own_addresses)

    def _complain(self, reason: str) -> None:
        if not self._complained:
            log.info("this head is not announced on the LAN (%s): machines join it by its address", reason)
        self._complained = True


async def _close(zeroconf: AsyncZeroconf) -> None:
    """With a word of goodbye, where an interface still takes it."""
    with contextlib.suppress(OSError, RuntimeError, Error):
        await zeroconf.async_unregister_all_services()
    with contextlib.suppress(OSError, RuntimeError, Error):
        await zeroconf.async_close()
