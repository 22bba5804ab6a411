"""What is measured of the links between a cluster's machines: those that activations take, and those that collectives would."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mlx_ring.cluster.deployment import Site, address_of, way_between
from mlx_ring.cluster.link_survey import FoundLink, LinkEnd, LinkSurvey, link_profiles
from mlx_ring.cluster.membership import Membership
from mlx_ring.head.rank_placements import with_trust
from mlx_ring.rpc.link_profile import LinkProfile


class LinkSurveys:
    """Both, for one cluster."""

    def __init__(self, node: str) -> None:
        """`node` is the head's own."""
        self._usual = LinkSurvey(node)
        # Who listens on one address only does not answer on a cable: planning then counts with the usual link.
        self._trusted = LinkSurvey(node, keeps_problems=True)

    @property
    def found(self) -> tuple[FoundLink, ...]:
        """Of what activations take, as it is known."""
        return self._usual.found

    async def take(self, membership: Membership, sites: Sequence[Site]) -> tuple[FoundLink, ...]:
        """Measure what activations take, as far as it is not known."""
        return await self._usual.take(_ends(membership, sites, Site.host_for))

    async def take_all(
        self, membership: Membership, sites: Sequence[Site]
    ) -> tuple[tuple[FoundLink, ...], dict[frozenset[str], LinkProfile]]:
        """The same, and what collectives would take where that is another link; with both as planning has them."""
        found = await self.take(membership, sites)
        by_node = {site.node: site for site in sites}
        await self._trusted.take(
            _ends(membership, sites, lambda site, other: _trusted_host(site, by_node[other]))
        )
        return found, self.profiles([site for site in sites if site.node in membership.members])

    def profiles(self, sites: Sequence[Site]) -> dict[frozenset[str], LinkProfile]:
        """What is known of links between these, as planning has it."""
        nodes = {site.node for site in sites}
        usual, trusted = (
            link_profiles(link for link in survey.found if {link.source, link.target} <= nodes)
            for survey in (self._usual, self._trusted)
        )
        return with_trust(usual, sites, trusted)


def _ends(membership: Membership, sites: Sequence[Site], host: Callable[[Site, str], str]) -> list[LinkEnd]:
    """The members whose links can be measured; `host` tells where one is reached by another."""

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
    """Where collectives of the other reach it; empty where they may not, or activations go there too."""
    way = way_between(other, site)
    return "" if way is None or way.listens == site.host_for(other.node) else way.listens
