"""Whether who connected to a rank's port is the rank before it: MLX's ring takes whoever comes first for its neighbour."""

from __future__ import annotations

import psutil

from mlx_ring.core.errors import PeerRefused
from mlx_ring.core.hostfile import is_loopback


def check_neighbour(listened: str, expected: str) -> None:
    """To be called when the ring has been joined, and before anything is sent.

    Args:
        listened: where this process did, addresses with ports, with commas between them.
        expected: the address from which the rank before it comes; empty: this machine.

    Raises:
        PeerRefused: somebody else has come.
    """
    expected = expected or "127.0.0.1"
    ports = {int(address.rpartition(":")[2]) for address in listened.split(",")}
    came = {
        str(connection.raddr.ip)
        for connection in psutil.Process().net_connections("tcp4")
        if connection.laddr.port in ports and connection.raddr
    }
    if strangers := sorted(one for one in came if not _are_one(one, expected)):
        raise PeerRefused(
            f"{strangers[0]} came to the port of this rank's group, where the rank before it comes from {expected}: "
            "see who else is on that network."
        )


def _are_one(came: str, expected: str) -> bool:
    return came == expected or (is_loopback(came) and is_loopback(expected))
