"""Profiles of links: what a message between two machines takes. Values only."""

from __future__ import annotations

from dataclasses import dataclass

from mlx_ring.rpc.link_probe import LinkMeasure


@dataclass(frozen=True, slots=True)
class LinkProfile:
    """Between two machines, one way and back."""

    round_trip_s: float
    bandwidth: float
    """Bytes a second."""
    frames_s: float = 0.0
    """Of the round trip, what our own frames and their encryption take, where it was measured with them."""
    trusted: bool = False
    """Whether collectives may run here, which are neither encrypted nor authenticated."""
    collective: LinkProfile | None = None
    """What they take between the interfaces that are trusted, where that is another link and was measured; None: this one."""

    def seconds(self, nbytes: float) -> float:
        """One way."""
        return self.round_trip_s / 2 + nbytes / self.bandwidth

    def collective_seconds(self, nbytes: float) -> float:
        """One way, for a part of a collective: over a plain connection, by threads that hand over to each other."""
        if self.collective is not None:
            return self.collective.collective_seconds(nbytes)
        wire_s = max(0.0, self.round_trip_s - self.frames_s) / 2
        return wire_s + _COLLECTIVE_HOP_S + nbytes / self.bandwidth


_COLLECTIVE_HOP_S = 25e-6
"""What MLX's ring takes for a hop beside the wire: its sum over two ranks on loopback is 52 us at best, which is two hops."""
FRAMES_S = 100e-6
"""There and back: gRPC with mutual TLS beside plain TCP, measured on loopback."""
LOCAL = LinkProfile(round_trip_s=200e-6, bandwidth=2e9, frames_s=190e-6, trusted=True)
"""Between two processes of one machine."""
ETHERNET = LinkProfile(round_trip_s=500e-6, bandwidth=1.1e8)
"""1 Gbit/s, where nothing better is said."""
UNREACHABLE = LinkProfile(round_trip_s=float("inf"), bandwidth=1.0)
"""Between machines that do not get through to each other."""


def measured_link(measure: LinkMeasure) -> LinkProfile:
    """A link, by its probe."""
    return LinkProfile(round_trip_s=measure.round_trip_s, bandwidth=measure.bandwidth, frames_s=FRAMES_S)
