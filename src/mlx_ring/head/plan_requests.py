"""Requests for a plan, made from the settings for the present machines. Pure."""

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
    """Return the machines in the order of their layers, and the request with their proportions.

    If a machine is lost or added, shares with node names still apply to the nodes that they name.
    Shares without names cannot apply, and the plan uses the strategy `auto`.

    Raises:
        PlanError: The proportions do not match these machines.
    """
    if settings.strategy != "custom":
        return tuple(nodes), request
    shares = named_shares(settings.proportions)
    if shares is not None:
        return _by_name(shares, request, nodes)
    if len(nodes) != settings.nodes:
        log.warning("proportions were given for %d machines, but %d are present", settings.nodes, len(nodes))
        return tuple(nodes), replace(request, strategy="auto")
    return tuple(nodes), replace(request, proportions=tuple(map(float, settings.proportions)))


def named_shares(proportions: Sequence[str]) -> dict[str, float] | None:
    """Return the shares by node; None if they have no names and apply in order.

    Raises:
        PlanError: Only some shares name a node, or two name the same node.
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
    present = [name for name in shares if name in by_name]
    if unknown := sorted(by_name.keys() - shares.keys()):
        problem = f"--proportions has no share for the node {unknown[0]}; it has for {', '.join(shares)}."
        if len(present) < len(shares):
            raise PlanError(problem)
        log.warning("%s It gets no layers.", problem)
    proportions = tuple(shares[name] for name in present)
    return tuple(by_name[name] for name in present), replace(request, proportions=proportions)


def proportional_stages(layers: int, stages: int, proportions: Sequence[str]) -> tuple[LayerRange, ...]:
    """Cut the layers into the stages of one machine by its proportions.

    Raises:
        PlanError: The proportions are more or fewer than the stages, or name nodes.
    """
    if len(proportions) != stages or named_shares(proportions) is not None:
        raise PlanError(
            f"--proportions is {','.join(proportions)}; on one machine it must be a share for each of the {stages} "
            "stages, without names."
        )
    counts = proportional_counts(layers, [float(share) for share in proportions])
    return tuple(LayerRange(start, end) for start, end in pairwise(accumulate(counts, initial=0)))
