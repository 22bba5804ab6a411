"""Stages whose ranks are on several machines, as `--tp` beside `--nodes` asks for them. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from mlx_ring.cluster.deployment import Site
from mlx_ring.cluster.placement import Cut
from mlx_ring.cluster.planner.profiles import ModelProfile, NodeProfile
from mlx_ring.cluster.planner.stage_tables import Demand, StageTables
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


def check_memory(
    seats: Sequence[Stage], cut: Cut, model: ModelProfile, demand: Demand, nodes: Mapping[str, NodeProfile]
) -> Mapping[str, int]:
    """What ranks take by node, counted by their shares. Bytes.

    Raises:
        PlanError: it is more than a node may use.
    """
    tables, taken = StageTables(model, demand), Counter[str]()
    for layers, stage in zip(cut.ranges, seats, strict=True):
        whole = sum(seat.share for seat in stage)
        for seat in stage:
            node = nodes[seat.site.node]
            held = float(tables.memory(node)[layers.start, layers.end]) - node.process_bytes
            taken[node.name] += int(held * seat.share / whole) + node.process_bytes
    for name, nbytes in taken.items():
        if nbytes > nodes[name].usable_bytes:
            raise PlanError(
                f"The workers on {name} need {nbytes / 1e9:.1f} GB for {model.name} with {demand.context_tokens} tokens of context, and "
                f"it has {nodes[name].usable_bytes / 1e9:.1f} GB for them: use more machines, a smaller --max-model-len, or --kv-bits 8."
            )
    return taken
