"""Requests for a plan and profiles of the present machines, made from the settings."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

from mlx_ring.cluster.membership import Member, Membership
from mlx_ring.core.errors import PlanError
from mlx_ring.core.types import CpuWeights, LayerRange
from mlx_ring.head.status import ClusterView
from mlx_ring.head.step_speeds import StepSpeeds, step_speeds
from mlx_ring.host.process import own_memory
from mlx_ring.host.yielding import Yielding
from mlx_ring.planner.profiles import ClusterProfile, NodeProfile, measured_node
from mlx_ring.planner.request import PlanRequest, proportional_counts
from mlx_ring.rpc.link_profile import LinkProfile
from mlx_ring.settings.config import Settings

if TYPE_CHECKING:
    from mlx_ring.cluster.control import Control

log = logging.getLogger(__name__)


def plan_request_for(
    settings: Settings, request: PlanRequest, nodes: Sequence[NodeProfile]
) -> tuple[tuple[NodeProfile, ...], PlanRequest]:
    """Return the machines in the order of their layers, and the request with their proportions.

    If a machine is lost or added, shares with node names still apply to the nodes that they name.
    Shares without names cannot apply, and the plan uses the strategy `auto`.

    Raises:
        PlanError: the proportions do not match these machines.
    """
    if settings.strategy != "custom":
        return tuple(nodes), request
    shares = named_shares(settings.proportions)
    if shares is not None:
        return _by_name(shares, request, nodes)
    if len(nodes) != settings.nodes:
        log.warning("Proportions were given for %d machines, but %d are present", settings.nodes, len(nodes))
        return tuple(nodes), replace(request, strategy="auto")
    return tuple(nodes), replace(request, proportions=tuple(map(float, settings.proportions)))


def named_shares(proportions: Sequence[str]) -> dict[str, float] | None:
    """Return the shares by node; None if they have no names and apply in order.

    Raises:
        PlanError: only some shares name a node, or two name the same node.
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
        PlanError: the proportions are more or fewer than the stages, or name nodes.
    """
    if len(proportions) != stages or named_shares(proportions) is not None:
        raise PlanError(
            f"--proportions is {','.join(proportions)}; on one machine it must be a share for each of the {stages} "
            "stages, without names."
        )
    counts = proportional_counts(layers, [float(share) for share in proportions])
    return tuple(LayerRange(start, end) for start, end in pairwise(accumulate(counts, initial=0)))


def cpu_weights_of(settings: Settings) -> CpuWeights:
    """Return the form of quantized weights on CPUs.

    A limit of the memory for models leaves no choice of larger ones, and MLX's own BLAS gains little with them.
    """
    is_limited = settings.model_memory is not None or settings.blas == "off"
    return "quantized" if is_limited and settings.cpu_weights == "auto" else settings.cpu_weights


def node_profiles(
    settings: Settings, control: Control, membership: Membership, taken: Mapping[str, int]
) -> list[NodeProfile]:
    """Return the members' profiles, the head's own first, without memory that is promised to others."""
    # The current membership may have newer profiles than the one that is planned for.
    latest = control.membership.members
    members = [latest.get(member.node, member) for member in membership.members.values()]
    return _node_profiles(settings, control.node, members, taken)


def measured_cluster(
    settings: Settings,
    view: ClusterView,
    links: Mapping[frozenset[str], LinkProfile],
    taken: Mapping[str, int],
) -> ClusterProfile:
    """Return the connected machines, the head's first, and the links between them, as plans see them.

    Machines have their readable names.

    Args:
        settings: settings of the head.
        view: its machines.
        links: known links, by the IDs of their ends.
        taken: bytes of memory that other models have promised, by node.
    """
    names = readable_names(view)
    nodes = _node_profiles(settings, view.own, view.membership.members.values(), taken)
    return ClusterProfile(
        tuple(replace(node, name=names[node.name]) for node in nodes),
        {
            frozenset(names[node] for node in ends): link
            for ends, link in links.items()
            if ends <= names.keys()
        },
    )


def readable_names(view: ClusterView) -> Mapping[str, str]:
    """Return the name of each connected node: its machine's if no other has the same, else its ID."""
    members = view.membership.members.values()
    counts = Counter(member.machine for member in members)
    return {member.node: member.machine if counts[member.machine] == 1 else member.node for member in members}


def _node_profiles(
    settings: Settings, own: str, members: Iterable[Member], taken: Mapping[str, int]
) -> list[NodeProfile]:
    """Return the profiles of these members, the head's own first."""
    speeds, weights = step_speeds(settings), cpu_weights_of(settings)
    head_bytes = own_memory()
    return [
        _node_profile(
            member, taken.get(member.node, 0), head_bytes if member.node == own else 0, weights, speeds
        )
        for member in sorted(members, key=lambda member: (member.node != own, member.node))
    ]


def _node_profile(
    member: Member, taken: int, head_bytes: int, cpu_weights: CpuWeights, speeds: StepSpeeds
) -> NodeProfile:
    profile = measured_node(
        member.profile,
        member.node,
        reserve_share=1.0 - member.memory_utilization,
        # The memory of other plans already includes the agent and the head.
        beside_bytes=0 if taken else max(member.agent_bytes, member.profile.agent_bytes) + head_bytes,
        cpu_weights=cpu_weights,
    )
    yields = member.yielding or Yielding("")
    left = int(profile.memory_bytes * yields.memory_share) - int(taken / member.memory_utilization)
    return replace(
        profile,
        memory_bytes=max(0, left),
        ratios=speeds.of(member.node, member.profile, yields.speed_share),
        speed_share=yields.speed_share,
    )
