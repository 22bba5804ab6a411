"""Stages whose ranks are on several machines, as `--tp` beside `--nodes` asks for them. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import combinations

from mlx_ring.cluster.deployment import Site
from mlx_ring.cluster.group_ways import way_between
from mlx_ring.cluster.placement import Cut
from mlx_ring.cluster.planner.profiles import ETHERNET, UNREACHABLE, LinkProfile
from mlx_ring.core.errors import PlanError
from mlx_ring.node.seats import Stage, even_numbers, seats_on, spread_evenly, with_ways


def share_stages(cut: Cut, link: str, sites: Sequence[Site], least: int) -> list[tuple[Stage, ...]]:
    """Every way to give ranks to machines, as many to each; that with most machines first.

    Args:
        cut: stages and their ranks.
        link: between stages.
        sites: whom to take, the first first.
        least: that must be taken.

    Raises:
        PlanError: there is none that machines trust.
    """
    ranks, ways = sum(map(len, cut.shares)), list[tuple[Stage, ...]]()
    problem: PlanError | None = None
    for number in even_numbers(ranks, len(sites)):
        if number < least:
            break
        # Who trusts no interface is of use where no group needs one.
        for chosen in _choices(sites, number):
            try:
                ways.append(with_ways(seats_on(spread_evenly(chosen, ranks), cut.shares), link))
                break
            except PlanError as error:
                problem = problem or error
    if not ways:
        raise problem or PlanError(
            f"{ranks} workers were asked for, as many on each machine: that is not done with {len(sites)} machines."
        )
    return ways


def _choices(sites: Sequence[Site], number: int) -> list[Sequence[Site]]:
    trusting = [site for site in sites if site.trusted]
    choices = [sites[:number]]
    if len(trusting) >= number and trusting[:number] != choices[0]:
        choices.append(trusting[:number])
    return choices


def with_trust(
    links: Mapping[frozenset[str], LinkProfile],
    sites: Sequence[Site],
    measured: Mapping[frozenset[str], LinkProfile] | None = None,
) -> dict[frozenset[str], LinkProfile]:
    """Links, with those trusted over which collectives may go: both ends trust an interface, in one network.

    Args:
        links: that activations take.
        sites: the machines.
        measured: links between interfaces that are trusted, where they are others.
    """
    known = dict(links)
    for one, other in combinations(sites, 2):
        pair = frozenset((one.node, other.node))
        link, own = known.get(pair, ETHERNET), (measured or {}).get(pair, UNREACHABLE)
        if link != UNREACHABLE and way_between(one, other) is not None:
            known[pair] = replace(link, trusted=True, collective=None if own == UNREACHABLE else own)
    return known
