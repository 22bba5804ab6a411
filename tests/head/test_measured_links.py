"""Survey of links for activations, and of separate links for collectives."""

from __future__ import annotations

import asyncio
from collections.abc import Container
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from mlx_ring.cluster.agent_link import AgentLink, Source, WeightsPeer
from mlx_ring.cluster.deployment import Site
from mlx_ring.cluster.link_survey import FoundLink
from mlx_ring.cluster.membership import Membership
from mlx_ring.cluster.quarantine import Quarantine
from mlx_ring.core.errors import NodeLost
from mlx_ring.head.plan_requests import LinkSurveys, link_info, with_throughput
from mlx_ring.host.interfaces import TrustedInterface
from mlx_ring.rpc.link_profile import UNREACHABLE

CABLE, LAN = 4e9, 1e8


async def reports(_nodes: Container[str]) -> None:
    """Report at once."""


@dataclass
class Agent:
    """An agent that measures links, and records the measured addresses."""

    answers_on_the_cable: bool = True
    measured: list[str] = field(default_factory=list[str])

    async def measure_link(self, _hello: object, _node: str, address: str, *_bounds: float) -> Any:
        self.measured.append(address)
        is_cable = address.startswith("10.0.8.")
        if is_cable and not self.answers_on_the_cable:
            raise NodeLost(f"{address} does not answer")
        return SimpleNamespace(round_trip_s=1e-3, bytes_per_s=CABLE if is_cable else LAN, age_s=0.0)


def site(number: int, agent: Agent, usual: str = "192.168.1", *, trusts: bool = True) -> Site:
    trusted = (TrustedInterface("en5", f"10.0.8.{number}", "10.0.8.0/24"),) if trusts else ()
    hosts = {"": f"{usual}.{number}"}
    return Site(
        f"n{number}",
        cast("AgentLink", agent),
        is_local=False,
        hosts=hosts,
        source=Source("model"),
        trusted=trusted,
    )


def members(sites: list[Site]) -> Membership:
    there: Any = {place.node: SimpleNamespace(session=1, links_port=7) for place in sites}
    return Membership(there)


@pytest.mark.parametrize(
    ("usual", "trusts", "expected"),
    [
        ("192.168.1", True, (LAN, CABLE, ["192.168.1.2:7", "10.0.8.2:7"])),
        ("10.0.8", True, (CABLE, None, ["10.0.8.2:7"])),
        ("192.168.1", False, (LAN, None, ["192.168.1.2:7"])),
    ],
)
def test_link_for_collectives_is_measured_if_it_is_a_separate_one(
    usual: str, expected: object, *, trusts: bool
) -> None:
    agent = Agent()
    sites = [site(1, agent, usual), site(2, Agent(), usual, trusts=trusts)]
    surveys = LinkSurveys("n1", reports)
    _, links = asyncio.run(surveys.take_all(members(sites), sites))
    link = links[frozenset(("n1", "n2"))]
    own = None if link.collective is None else link.collective.bandwidth
    assert (link.bandwidth, own, agent.measured) == expected
    assert link.trusted == trusts
    assert [one.bytes_per_s for one in surveys.found] == [link.bandwidth] * 2, "status shows the usual links"


def test_broken_cable_is_measured_once_and_the_plan_uses_the_usual_link() -> None:
    agent = Agent(answers_on_the_cable=False)
    sites = [site(1, agent), site(2, Agent())]

    async def run() -> None:
        surveys = LinkSurveys("n1", reports)
        for _ in range(2):
            _, links = await surveys.take_all(members(sites), sites)
            link = links[frozenset(("n1", "n2"))]
            assert (link.trusted, link.collective, link.bandwidth) == (True, None, LAN)

    asyncio.run(run())
    assert agent.measured == ["192.168.1.2:7", "10.0.8.2:7"]


def test_a_link_that_plans_avoid_is_shown_with_the_reason() -> None:
    avoided = Quarantine("It was lost 2 times.", 0.0)
    assert link_info(FoundLink("n1", "n2", 1e-3, LAN, 1.0), None).problem == ""
    assert "It was lost 2 times." in link_info(FoundLink("n1", "n2", 1e-3, LAN, 1.0), avoided).problem
    assert link_info(FoundLink("n1", "n2", problem="n2 is silent"), avoided).problem == "n2 is silent"


def test_node_fetches_weights_from_no_node_that_it_does_not_reach() -> None:
    peers = tuple(WeightsPeer(f"{node}:1", node) for node in ("", "n2", "n3", "n4"))
    own = replace(site(1, Agent()), source=Source("model", "digest", peers))
    found = [
        FoundLink("n1", "n2", 1e-3, LAN, 1.0),
        FoundLink("n1", "n3", problem="n3 did not answer"),
        FoundLink("n4", "n1", problem="n1 did not answer"),
        FoundLink("n2", "n4", problem="n4 did not answer"),
    ]
    linked = with_throughput(own, found)
    assert [peer.node for peer in linked.source.peers] == ["", "n2"]
    assert linked.bytes_per_s == {"n2": LAN}


def test_links_of_members_are_usable_as_plans_use_them() -> None:
    sites = [site(1, Agent()), site(2, Agent()), site(3, Agent(), trusts=False)]
    surveys = LinkSurveys("n1", reports)
    there = members(sites)
    asyncio.run(surveys.take_all(there, sites))
    connected: Any = {
        one.node: SimpleNamespace(node=one.node, trusted=one.trusted, trusted_problem="") for one in sites[:2]
    }
    found = surveys.usable(Membership(connected), ())
    assert found == {ends: link for ends, link in surveys.profiles(sites).items() if "n3" not in ends}
    assert surveys.usable(Membership(connected), [("n1", "n2")])[frozenset(("n1", "n2"))] == UNREACHABLE
