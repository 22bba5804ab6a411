"""Which machines get which ranks of `--tp` beside `--nodes`."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import pytest

from mlx_ring.cluster.agent_link import AgentLink, Source
from mlx_ring.cluster.deployment import Site
from mlx_ring.cluster.placement import Cut, even_split
from mlx_ring.core.errors import PlanError
from mlx_ring.head.rank_placements import Stage, share_stages, with_trust
from mlx_ring.host.trusted_interfaces import TrustedInterface
from mlx_ring.rpc.link_profile import UNREACHABLE, LinkProfile

LAYERS = 28


def site(node: str, *, trusts: bool = True) -> Site:
    trusted = (TrustedInterface("thunder0", f"10.0.8.{ord(node)}", "10.0.8.0/24"),) if trusts else ()
    return Site(
        node, cast("AgentLink", None), is_local=False, hosts={}, source=Source("model"), trusted=trusted
    )


def cut(stages: int, *shares: float) -> Cut:
    return Cut.alike(even_split(LAYERS, stages), shares)


def told(stages: tuple[Stage, ...]) -> list[str]:
    return ["".join(placed.site.node for placed in stage) for stage in stages]


@pytest.mark.parametrize(
    ("machines", "stages", "ranks", "expected"),
    [
        ("ab", 1, 2, ["ab"]),
        ("ab", 1, 4, ["aabb"]),
        ("abcd", 2, 2, ["ab", "cd"]),
        ("ab", 2, 2, ["aa", "bb"]),
        ("abc", 2, 2, ["aa", "bb"]),
        ("a", 2, 2, ["aa", "aa"]),
    ],
)
def test_neighbouring_ranks_go_to_neighbouring_machines_as_many_to_each(
    machines: str, stages: int, ranks: int, expected: list[str]
) -> None:
    ways = share_stages(cut(stages, *[1.0] * ranks), "grpc", [site(node) for node in machines], 1)
    assert told(ways[0]) == expected
    assert told(ways[-1]) == ["a" * ranks] * stages, "one machine has room for all, if it comes to that"


def test_who_trusts_nothing_is_passed_over_where_others_do() -> None:
    sites = [site("a"), site("b", trusts=False), site("c")]
    assert told(share_stages(cut(1, 1, 1), "grpc", sites, 1)[0]) == ["ac"]


def test_as_many_machines_as_were_asked_for_are_taken_or_the_one_that_trusts_nothing_is_named() -> None:
    with pytest.raises(PlanError, match="b names none"):
        share_stages(cut(1, 1, 1), "grpc", [site("a"), site("b", trusts=False)], 2)


def test_a_link_is_trusted_where_both_ends_trust_an_interface_in_one_network() -> None:
    apart = replace(site("c"), trusted=(TrustedInterface("en5", "10.0.9.1", "10.0.9.0/24"),))
    broken = {frozenset("ad"): UNREACHABLE}
    links = with_trust(broken, [site("a"), site("b"), apart, site("d"), site("e", trusts=False)])
    assert {"".join(sorted(pair)) for pair, link in links.items() if link.trusted} == {"ab", "bd"}


def test_collectives_take_what_was_measured_between_the_interfaces_that_are_trusted() -> None:
    wireless, cable = LinkProfile(5e-3, 2e7), LinkProfile(50e-6, 4e9)
    pairs = [frozenset("ab"), frozenset("bc"), frozenset("ac")]
    measured = {pairs[0]: cable, pairs[1]: UNREACHABLE}
    links = with_trust(dict.fromkeys(pairs, wireless), [site("a"), site("b"), site("c")], measured)
    each = [(links[pair].seconds(1e6), links[pair].collective_seconds(1e6)) for pair in pairs]
    slow = wireless.collective_seconds(1e6)
    assert each == [(wireless.seconds(1e6), sums) for sums in (cable.collective_seconds(1e6), slow, slow)]
