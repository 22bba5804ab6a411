"""Where each rank of each stage is, and which part of the stage's layers it has. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mlx_ring.cluster.deployment import Site
from mlx_ring.cluster.planner.plan import Plan


@dataclass(frozen=True, slots=True)
class Seat:
    """One rank's."""

    site: Site
    share: float = 1.0
    """Of every layer of its stage, beside those of the other ranks."""


Stage = tuple[Seat, ...]
"""The seats of its ranks, in order."""


def seats_on(sites: Sequence[Site], shares: Sequence[Sequence[float]]) -> tuple[Stage, ...]:
    """A site for each rank, stage after stage."""
    places = iter(sites)
    return tuple(tuple(Seat(next(places), share) for share in stage) for stage in shares)


def seats_of_plan(plan: Plan, sites: Mapping[str, Site]) -> tuple[Stage, ...]:
    """As planned, with the sites by their nodes."""
    return tuple(tuple(Seat(sites[rank.node], rank.share) for rank in stage.ranks) for stage in plan.stages)
