"""What collectives over machines take, and in which order machines stand in their ring. Pure.

MLX's ring sums in `2 (K - 1)` rounds, in each of which every rank sends one part of `K` to the next; gathering takes
`K - 1` rounds of a rank's whole part. All send at once, so that the slowest link of the ring makes the pace.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mlx_ring.cluster.planner.profiles import ClusterProfile, LinkProfile


@dataclass(frozen=True, slots=True)
class Ring:
    """Machines in the order in which each sends to the next, and the last to the first."""

    nodes: tuple[int, ...]
    """Their places in the cluster, the lowest first."""
    links: tuple[LinkProfile, ...]
    """From each to the next, those that are alike once."""

    def sum_s(self, nbytes: float) -> float:
        """Adding up so many bytes, on every rank."""
        ranks = len(self.nodes)
        return 2 * (ranks - 1) * self._round_s(nbytes / ranks)

    def gather_s(self, nbytes: float) -> float:
        """Having every rank's part, of which the longest has so many bytes."""
        return (len(self.nodes) - 1) * self._round_s(nbytes)

    def _round_s(self, nbytes: float) -> float:
        return max(link.collective_seconds(nbytes) for link in self.links)


class Rings:
    """The best ring of every set of machines that may have one."""

    def __init__(self, cluster: ClusterProfile, nbytes: float, *, trusting: bool = False) -> None:
        """For sums of so many bytes; with `trusting` as if every interface were trusted."""
        self._cluster = cluster
        nodes = range(len(cluster.nodes))
        self._seconds = np.array(
            [[self._hop_s(one, other, nbytes, trusting=trusting) for other in nodes] for one in nodes]
        )
        self._best: dict[int, NDArray[np.float64]] = {}
        """By set, as bits: by the last machine, the slowest hop of a way through all of them from the lowest."""

    def _hop_s(self, one: int, other: int, nbytes: float, *, trusting: bool) -> float:
        here, there = self._cluster.nodes[one], self._cluster.nodes[other]
        if one == other or not (trusting or self._cluster.trusts(here, there)):
            return np.inf
        return self._cluster.link(here.name, there.name).collective_seconds(nbytes / 2)

    def among(self, members: Sequence[int]) -> Ring | None:
        """The ring whose slowest hop is quickest; None where there is none. `members` are in order."""
        bits = sum(1 << node for node in members)
        closed = np.maximum(self._ways(bits), self._seconds[:, members[0]])
        last = int(closed.argmin())
        if not np.isfinite(closed[last]):
            return None
        order = self._trace(bits, last)
        links = {self._link(one, other) for one, other in zip(order, [*order[1:], order[0]], strict=True)}
        return Ring(tuple(order), tuple(links))

    def _link(self, one: int, other: int) -> LinkProfile:
        nodes = self._cluster.nodes
        return self._cluster.link(nodes[one].name, nodes[other].name)

    def _ways(self, bits: int) -> NDArray[np.float64]:
        if bits not in self._best:
            lowest = (bits & -bits).bit_length() - 1
            found = np.full(len(self._seconds), np.inf)
            if bits.bit_count() == 1:
                found[lowest] = 0.0
            for last in range(lowest + 1, bits.bit_length()):
                if bits >> last & 1:
                    found[last] = np.maximum(self._ways(bits & ~(1 << last)), self._seconds[:, last]).min()
            self._best[bits] = found
        return self._best[bits]

    def _trace(self, bits: int, last: int) -> list[int]:
        order = [last]
        while bits := bits & ~(1 << order[-1]):
            order.append(int(np.maximum(self._ways(bits), self._seconds[:, order[-1]]).argmin()))
        return order[::-1]
