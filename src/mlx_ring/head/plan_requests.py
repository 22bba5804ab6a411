"""What the settings ask of a plan, for the machines that are there. Pure."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

from mlx_ring.core.errors import PlanError
from mlx_ring.core.types import LayerRange
from mlx_ring.planner.profiles import NodeProfile
from mlx_ring.planner.request import PlanRequest
from mlx_ring.planner.strategies import proportional_counts
from mlx_ring.settings.config import Settings

log = logging.getLogger(__name__)


def plan_request_for(
    settings: Settings, request: PlanRequest, nodes: Sequence[NodeProfile]
) -> tuple[tuple[NodeProfile, ...], PlanRequest]:
    """The machines, in the order in which layers go to them, and the request with the proportions that hold for them.

    Proportions hold for the machines that were asked for. Where one is lost or comes besides, shares that name their
    nodes hold among those; shares without names cannot, and the plan is as `auto` makes it.

    Raises:
        PlanError: the proportions are not for these machines.
    """
    if settings.strategy != "custom":
        return tuple(nodes), request
    shares = named_shares(settings.proportions)
    if shares is not None:
        return _by_name(shares, request, nodes)
    if len(nodes) != settings.nodes:
        log.warning("proportions were given for %d machines, and %d are there", settings.nodes, len(nodes))
        return tuple(nodes), replace(request, strategy="auto")
    return tuple(nodes), replace(request, proportions=tuple(map(float, settings.proportions)))


def named_shares(proportions: Sequence[str]) -> dict[str, float] | None:
    """By node; None where they go by order.

    Raises:
        PlanError: some name a node and others none, or two the same.
    """
    pairs = [text.rpartition("=") for text in proportions]
    names = [name for name, _, _ in pairs]
    if not any(names):
        return None
    if not all(names) or len(set(names)) != len(names):
        raise PlanError(f"--proportions is {','.join(proportions)}; each share must name a node of its own.")
    return {name: float(share) for name, _, share in pairs}


def _by_name(
    shares: dict[str, float], request: PlanRequest, nodes: Sequence[NodeProfile]
) -> tuple[tuple[NodeProfile, ...], PlanRequest]:
    by_name = {node.name: node for node in nodes}
    there = [name for name in shares if name in by_name]
    if unknown := sorted(by_name.keys() - shares.keys()):
        told = f"--proportions has no share for the node {unknown[0]}; it has for {', '.join(shares)}."
        if len(there) < len(shares):
            raise PlanError(told)
        log.warning("%s It gets no layers.", told)
    proportions = tuple(shares[name] for name in there)
    return tuple(by_name[name] for name in there), replace(request, proportions=proportions)


def proportional_stages(layers: int, stages: int, proportions: Sequence[str]) -> tuple[LayerRange, ...]:
    """The stages of one machine, as its proportions say.

    Raises:
        PlanError: they are not as many as stages, or name nodes.
    """
    if len(proportions) != stages or named_shares(proportions) is not None:
        raise PlanError(
            f"--proportions is {','.join(proportions)}; on one machine it must be a share for each of the {stages} "
            "stages, without names."
        )
    counts = proportional_counts(layers, [float(share) for share in proportions])
    return tuple(LayerRange(start, end) for start, end in pairwise(accumulate(counts, initial=0)))
