"""Profiles of links: what a message between two machines takes. Values only."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LinkProfile:
    """Link between two machines, in both directions."""

    round_trip_s: float
    bandwidth: float
    """Bytes per second."""
    frames_s: float = 0.0
    """Part of the round trip that frames and encryption take, if it was measured with them."""
    trusted: bool = False
    """True if collectives may run here, which are neither encrypted nor authenticated."""
    collective: LinkProfile | None = None
    """Measured link between the trusted interfaces, if collectives use another link than activations."""
    is_mesh: bool = False
    """True if sums go directly between all pairs of machines (MLX's backend jaccl), not around a ring."""

    def seconds(self, nbytes: float) -> float:
        """Return the seconds of a message, one way."""
        return self.round_trip_s / 2 + nbytes / self.bandwidth

    def collective_seconds(self, nbytes: float) -> float:
        """Return the seconds of one part of a collective, one way, over a plain connection between threads."""
        if self.collective is not None:
            return self.collective.collective_seconds(nbytes)
        if self.is_mesh:
            return self.round_trip_s / 2 + nbytes / self.bandwidth
        wire_s = max(0.0, self.round_trip_s - self.frames_s) / 2
        return wire_s + _COLLECTIVE_HOP_S + nbytes / self.bandwidth


_COLLECTIVE_HOP_S = 25e-6
"""Cost of a hop of MLX's ring beside the wire: a sum over two ranks on loopback takes 52 us at best, which is two hops."""
FRAMES_S = 100e-6
"""Round-trip overhead of gRPC with mutual TLS over plain TCP, measured on loopback."""
LOCAL = LinkProfile(round_trip_s=200e-6, bandwidth=2e9, frames_s=190e-6, trusted=True)
"""Link between two processes of one machine."""
ETHERNET = LinkProfile(round_trip_s=500e-6, bandwidth=1.1e8)
"""Link of 1 Gbit/s, assumed if nothing else is known."""
UNREACHABLE = LinkProfile(round_trip_s=float("inf"), bandwidth=1.0)
"""Link between machines that do not reach each other."""
