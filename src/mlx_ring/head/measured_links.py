"""Measured links between a cluster's machines: links for activations, and links for collectives."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Container, Iterable, Mapping, Sequence
from dataclasses import replace

from mlx_ring.api.service import LinkInfo
from mlx_ring.cluster.deployment import Site, Trusting, address_of, route_between
from mlx_ring.cluster.link_survey import FoundLink, LinkEnd, LinkSurvey, as_they_are, link_profiles
from mlx_ring.cluster.membership import Membership
from mlx_ring.cluster.quarantine import Pair, Quarantine, pair
from mlx_ring.head.rank_placements import with_trust
from mlx_ring.rpc.link_profile import UNREACHABLE, LinkProfile


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
