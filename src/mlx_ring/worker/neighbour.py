"""Whether who connected to a rank's port is the rank before it: MLX's ring takes whoever comes first for its neighbour."""

from __future__ import annotations

import psutil

from mlx_ring.core.errors import PeerRefused


def check_neighbour(port: int, expected: str) -> None:
    """To be called when the ring has been joined, and before anything is sent.

    Args:
        port: on which this process has listened.
        expected: the address from which the rank before it comes; empty: this machine.

    Raises:
        PeerRefused: somebody else has come.
    """
    expected = expected or "127.0.0.1"
    came = {
        str(connection.raddr.ip)
        for connection in psutil.Process().net_connections("tcp4")
        if connection.laddr.port == port and connection.raddr
    }
    if strangers := sorted(came - {expected}):
        raise PeerRefused(
            f"{strangers[0]} came to the port of this rank's group, where the rank before it comes from {expected}: "
            "see who else is on that network."
        )
