"""Requests for a plan, profiles of the present machines, and measured links between them.

There are links for activations, and links for collectives.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Container, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, NamedTuple

from mlx_ring.api.service import LinkInfo
from mlx_ring.cluster.deployment import Site, Trusting, address_of, route_between
from mlx_ring.cluster.link_survey import FoundLink, LinkEnd, LinkSurvey, as_they_are, link_profiles
from mlx_ring.cluster.membership import Member, Membership
from mlx_ring.cluster.quarantine import Pair, Quarantine, pair
from mlx_ring.core.errors import PlanError, RequestError, shown_text
from mlx_ring.core.types import CpuWeights, LayerRange
from mlx_ring.engine.kv_budget import KEPT_TOKENS
from mlx_ring.head.rank_placements import with_trust
from mlx_ring.head.served_model import ServedModel
from mlx_ring.head.status import ClusterView
from mlx_ring.head.step_speeds import StepSpeeds, step_speeds
from mlx_ring.host.process import own_memory
from mlx_ring.host.yielding import Yielding
from mlx_ring.planner.memory_fit import within_kv_memory
from mlx_ring.planner.plan import Plan, proportional_counts
from mlx_ring.planner.profiles import ClusterProfile, NodeProfile, measured_node
from mlx_ring.planner.request import Demand, PlanRequest, chunk_within
from mlx_ring.rpc.backends import is_collective
from mlx_ring.rpc.link_profile import UNREACHABLE, LinkProfile
from mlx_ring.settings.config import Settings

if TYPE_CHECKING:
    from mlx_ring.cluster.control import Control

log = logging.getLogger(__name__)

_PROMISED_TOKENS_EACH = 2048
"""Context length per sequence that a plan for throughput reserves if the settings give none."""


def plan_request(settings: Settings, served: ServedModel, nodes: Iterable[NodeProfile]) -> PlanRequest:
    """Return the request for a plan for these machines.

    It promises a long context to one stream, or a shorter one to all sequences for throughput. If the sizes of layers
    are known, it is no more than a worker's `--kv-cache-memory` holds on any of the machines.
    """
    sequences = users = settings.expected_users
    promised = max(_PROMISED_TOKENS_EACH, KEPT_TOKENS // users)
    if settings.optimize_for == "throughput":
        promised, sequences = _PROMISED_TOKENS_EACH, max(users, settings.max_num_seqs)
    context = settings.max_model_len or min(promised, served.folder.context_length)
    bits = 16 if settings.kv_bits == "off" else int(settings.kv_bits)
    chunk = chunk_within(settings.prefill_chunk, context)
    demand = Demand(context, sequences, bits, kv_memory_bytes=settings.kv_cache_memory, chunk_tokens=chunk)
    if settings.kv_cache_memory is not None and (stored := served.sizes) is not None:
        loaded = stored.widened if any(node.widens for node in nodes) and stored.widened else stored
        count, keeps_context = settings.replicas or 1, settings.max_model_len is not None
        demand = within_kv_memory(loaded, demand, count, keeps_context=keeps_context)
    return PlanRequest(
        demand,
        strategy=settings.strategy,
        objective=settings.optimize_for,
        prompt_tokens=settings.expected_prompt,
        answer_tokens=settings.expected_answer,
        users=users,
        allows_tensor=not is_collective(settings.link),
    )


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


def steady(view: ClusterView) -> ClusterView:
    """Return the machines that plans may use."""
    return replace(view, membership=view.membership.usable.without(view.held))


def planned_names(view: ClusterView, plans: Iterable[Plan | None]) -> set[str] | None:
    """Return the readable names of the machines that plans used or left out; None if a plan is not known."""
    names, found = readable_names(view), set[str]()
    for plan in plans:
        if plan is None:
            return None
        nodes = [rank.node for stage in plan.stages for rank in stage.ranks]
        found |= {names.get(node, node) for node in (*nodes, *(left.node for left in plan.left_out))}
    return found


class Granted(NamedTuple):
    """Memory and share of the speed that the owner of a machine grants."""

    memory_bytes: int
    speed_share: float


def granted_by(nodes: Iterable[NodeProfile]) -> Mapping[str, Granted]:
    """Return the grants of some machines, by name."""
    return {node.name: Granted(node.memory_bytes, node.speed_share) for node in nodes}


def why_fixed(settings: Settings) -> str:
    """Return the reason why settings leave no choice of a split; empty if they do."""
    return "--strategy custom gives the split" if settings.strategy == "custom" else ""


def ids_of(view: ClusterView, names: Container[str]) -> frozenset[str]:
    """Return the ids of connected nodes with these readable names."""
    return frozenset(node for node, name in readable_names(view).items() if name in names)


def find_node(view: ClusterView, name: str) -> str:
    """Return the id of a connected machine, given by its id or name.

    Raises:
        RequestError: none or several are called so.
    """
    members = view.membership.members
    found = [node for node, member in members.items() if name in (node, member.machine)]
    if not members and name == view.own:
        # A single machine without a stored profile is no member.
        return name
    if len(found) == 1:
        return found[0]
    names = ", ".join(sorted(readable_names(view).values())) or "none"
    called = shown_text(name) or "''"
    problem = (
        f"Several machines are called {called}; give an id" if found else f"No machine is called {called}"
    )
    raise RequestError(f"{problem}: connected are {names}.", param="node")


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


# ---- links


class LinkSurveys:
    """Surveys of both kinds of links in one cluster."""

    def __init__(self, node: str, wait_for_reports: Callable[[Container[str]], Awaitable[None]]) -> None:
        """Prepare both surveys.

        Args:
            node: the head's own node.
            wait_for_reports: waits until these nodes have reported their memory.
        """
        self._usual = LinkSurvey(node, wait_for_reports=wait_for_reports)
        # A node that listens on one address only does not answer on a cable.
        # Planning then uses the usual link.
        self._trusted = LinkSurvey(node, keeps_problems=True, wait_for_reports=wait_for_reports)

    @property
    def found(self) -> tuple[FoundLink, ...]:
        """Known links for activations."""
        return self._usual.found

    def links(self, membership: Membership, avoided: Mapping[Pair, Quarantine]) -> tuple[LinkInfo, ...]:
        """Return the known links for activations as the API shows them; plans leave `avoided` ones out."""
        found = as_they_are(self.found, membership.members)
        return tuple(link_info(link, avoided.get(pair(link.source, link.target))) for link in found)

    def usable(self, membership: Membership, avoided: Iterable[Pair]) -> dict[frozenset[str], LinkProfile]:
        """Return the profiles of known links between members, for planning; nothing passes `avoided` ones."""
        return self.profiles([*membership.members.values()]) | broken_links(avoided)

    def distrust(self, nodes: Sequence[str]) -> None:
        """Measure the links between two nodes again before they are used, because a connection was lost there."""
        for survey in (self._usual, self._trusted):
            survey.distrust(nodes)

    async def take(self, membership: Membership, sites: Sequence[Site]) -> tuple[FoundLink, ...]:
        """Measure the links for activations that are not known yet."""
        return await self._usual.take(_ends(membership, sites, Site.host_for))

    async def take_all(
        self, membership: Membership, sites: Sequence[Site]
    ) -> tuple[tuple[FoundLink, ...], dict[frozenset[str], LinkProfile]]:
        """Measure the links for activations, and other links that collectives would use.

        Returns:
            The links for activations, and the profiles of both kinds for planning.
        """
        found = await self.take(membership, sites)
        by_node = {site.node: site for site in sites}
        await self._trusted.take(
            _ends(membership, sites, lambda site, other: _trusted_host(site, by_node[other]))
        )
        return found, self.profiles([site for site in sites if site.node in membership.members])

    async def take_distrusted(self, membership: Membership, sites: Sequence[Site]) -> None:
        """Measure links again if connections were lost there."""
        if self._usual.has_distrusted:
            await self.take_all(membership, sites)

    def profiles(self, sites: Sequence[Trusting]) -> dict[frozenset[str], LinkProfile]:
        """Return the profiles of known links between these nodes, for planning."""
        nodes = {site.node for site in sites}
        usual, trusted = (
            link_profiles(link for link in survey.found if {link.source, link.target} <= nodes)
            for survey in (self._usual, self._trusted)
        )
        return with_trust(usual, sites, trusted)


def _ends(membership: Membership, sites: Sequence[Site], host: Callable[[Site, str], str]) -> list[LinkEnd]:
    """Return the ends of measurable links; `host` returns the host at which another node reaches a site."""

    def end(site: Site, session: int, port: int) -> LinkEnd:
        def address_from(other: str) -> str:
            found = host(site, other)
            return address_of(found, port) if found else ""

        return LinkEnd(site.node, session, site.link, address_from)

    members = membership.members
    return [
        end(site, member.session, member.links_port)
        for site in sites
        if (member := members.get(site.node)) is not None and member.links_port
    ]


def _trusted_host(site: Site, other: Site) -> str:
    """Return the host at which the other site's collectives reach a site.

    It is empty if no trusted route exists, or if activations use the same host.
    """
    route = route_between(other, site)
    return "" if route is None or route.listens == site.host_for(other.node) else route.listens


def broken_links(pairs: Iterable[Sequence[str]]) -> dict[frozenset[str], LinkProfile]:
    """Return profiles of links that nothing passes, given their ends."""
    return {frozenset(pair): UNREACHABLE for pair in pairs}


def with_throughput(site: Site, found: Iterable[FoundLink]) -> Site:
    """Return the site with its measured bandwidth to each other node, and without peers that it does not reach."""
    ours = [link for link in found if site.node in (link.source, link.target)]
    unreached = {end for link in ours if link.problem for end in (link.source, link.target)} - {site.node}
    peers = tuple(peer for peer in site.source.peers if peer.node not in unreached)
    return replace(
        site,
        bytes_per_s={
            link.target: link.bytes_per_s for link in ours if link.source == site.node and not link.problem
        },
        source=replace(site.source, peers=peers),
    )


def link_info(found: FoundLink, avoided: Quarantine | None) -> LinkInfo:
    """Return a found link as the API shows it; `avoided` says why plans leave it out, if they do."""
    problem = found.problem
    if avoided is not None and not problem:
        until = time.strftime("%H:%M", time.localtime(avoided.until_s))
        problem = f"plans avoid it until {until}. {avoided.reason}"
    return LinkInfo(
        source=found.source,
        target=found.target,
        round_trip_s=found.round_trip_s,
        bytes_per_s=found.bytes_per_s,
        unix_time_s=found.unix_time_s,
        problem=problem,
    )
