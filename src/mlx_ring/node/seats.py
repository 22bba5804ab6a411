"""Where each rank of each stage is, which part of the stage's layers it has, and how it hears the others of its group. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from mlx_ring.cluster.deployment import Site
from mlx_ring.cluster.group_ways import GroupWay, group_ways
from mlx_ring.cluster.planner.plan import Plan
from mlx_ring.rpc.joined_ranks import GRPC
from mlx_ring.rpc.protos import worker_pb2


@dataclass(frozen=True, slots=True)
class Seat:
    """One rank's."""

    site: Site
    share: float = 1.0
    """Of every layer of its stage, beside those of the other ranks."""
    way: GroupWay = field(default_factory=GroupWay)
    """To it, where MLX joins it with others."""


Stage = tuple[Seat, ...]
"""The seats of its ranks, in order."""


def seats_on(sites: Sequence[Site], shares: Sequence[Sequence[float]]) -> tuple[Stage, ...]:
    """A site for each rank, stage after stage."""
    places = iter(sites)
    return tuple(tuple(Seat(next(places), share) for share in stage) for stage in shares)


def seats_of_plan(plan: Plan, sites: Mapping[str, Site]) -> tuple[Stage, ...]:
    """As planned, with the sites by their nodes."""
    return tuple(tuple(Seat(sites[rank.node], rank.share) for rank in stage.ranks) for stage in plan.stages)


def spread_evenly(sites: Sequence[Site], ranks: int) -> tuple[Site, ...]:
    """A site for each rank of all stages: neighbouring ranks on one, and as many on each."""
    return tuple(sites[rank * len(sites) // ranks] for rank in range(ranks))


def even_numbers(ranks: int, most: int) -> Iterator[int]:
    """Of sites that can have as many ranks each, the largest number first."""
    return (number for number in range(min(ranks, most), 0, -1) if ranks % number == 0)


def with_ways(seats: tuple[Stage, ...], link: str) -> tuple[Stage, ...]:
    """With how ranks of a group hear each other: those that share layers, or all stages that a collective links.

    Raises:
        PlanError: some are on machines between which nothing is trusted with it.
    """
    if link != GRPC and len(seats) > 1:
        ways = group_ways([stage[0].site for stage in seats], f"--link {link}")
        return tuple((replace(stage[0], way=way),) for stage, way in zip(seats, ways, strict=True))
    return tuple(map(_joined, seats))


def _joined(stage: Stage) -> Stage:
    if len(stage) == 1:
        return stage
    ways = group_ways([seat.site for seat in stage], f"A stage of {len(stage)} workers")
    return tuple(replace(seat, way=way) for seat, way in zip(stage, ways, strict=True))


def tell_ways(assignments: Iterable[worker_pb2.StageAssignment], seats: Sequence[Stage]) -> None:
    """Write to each rank's assignment how the others of its group reach it."""
    for assignment in assignments:
        way = seats[assignment.stage][assignment.rank].way
        assignment.group_host, assignment.group_from = way.listens, way.comes_from
