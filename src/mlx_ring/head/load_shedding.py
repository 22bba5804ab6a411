"""Limits of client connections, and the choice of the connection that closes when there are too many.

Idle connections close first. If all are busy, the address with the most connections loses one, but only to an address
that has fewer.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol, TypeVar, cast

from mlx_ring.host.addresses import whose


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Limits of what clients may do. Times are in seconds."""

    connections: int = 1024
    idle_s: float = 75.0
    """Longest time between two requests."""
    stall_s: float = 60.0
    """Longest time to send the head of a request, or to read nothing of what was written."""
    handshake_s: float = 10.0
    """Longest time of a TLS handshake."""


class Connected(Protocol):
    """A connection, or one whose TLS handshake is not complete."""

    peer: str
    """Client that the connection belongs to."""
    since_s: float
    """Time at which it was opened."""
    quiet_since_s: float | None
    """Time since which it has no request; None while it has one."""

    @property
    def has_answered(self) -> bool:
        """True once a part of an answer is sent, which closing would cut."""
        ...


class Closable(Connected, Protocol):
    """A connection that can be closed to make room."""

    transport: asyncio.Transport

    def shed(self) -> None:
        """Close to make room for another connection."""
        ...


_AnyConnected = TypeVar("_AnyConnected", bound=Connected)


def choose_to_shed(newcomer: Connected, others: Iterable[_AnyConnected]) -> _AnyConnected | None:
    """Choose the connection that closes for a newcomer; None if the newcomer itself must be refused."""
    others = tuple(others)
    counts = Counter(each.peer for each in (newcomer, *others))
    quiet = {each: each.quiet_since_s for each in others if each.quiet_since_s is not None}
    if quiet:
        return min(quiet, key=lambda each: (-counts[each.peer], quiet[each]))
    most = max(counts.values())
    greedy = [each for each in others if counts[each.peer] == most > counts[newcomer.peer]]
    return min(greedy, key=lambda each: (each.has_answered, -each.since_s), default=None)


def make_room(newcomer: Closable, connections: Iterable[object], limits: ConnectionLimits) -> bool:
    """Close another connection if there are too many; return False if the newcomer must be refused."""
    opened = (each for each in cast("Iterable[Closable]", connections) if each is not newcomer)
    others = [each for each in opened if not each.transport.is_closing()]
    if len(others) < limits.connections:
        return True
    chosen = choose_to_shed(newcomer, others)
    if chosen is not None:
        chosen.shed()
    return chosen is not None


def peer_of(transport: asyncio.BaseTransport) -> str:
    """Return the client that a connection belongs to; empty if the connection has no address."""
    address = cast("object", transport.get_extra_info("peername"))
    return whose(str(cast("tuple[object, ...]", address)[0])) if isinstance(address, tuple) else ""
