"""Rings of machines: their order, and the time of collectives over them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.planner.clusters import cluster_of, node_of, trusting

from mlx_ring.planner.profiles import ClusterProfile
from mlx_ring.planner.rank_costs import Rings
from mlx_ring.rpc.link_profile import LOCAL, UNREACHABLE, LinkProfile

FAST, SLOW = LinkProfile(50e-6, 5e9), LinkProfile(2e-3, 1e8)
NAMES = "abcd"


def linked(*fast_pairs: str, usual: LinkProfile = SLOW) -> ClusterProfile:
    """Return four machines, of which these pairs have a fast link."""
    cluster = trusting(*(node_of(name) for name in NAMES), link=usual)
    return replace(cluster, links={frozenset(pair): FAST for pair in fast_pairs})


def test_an_all_reduce_over_two_is_two_hops_of_half_the_bytes() -> None:
    ring = Rings(linked(), 1.0).among((0, 1))
    assert ring is not None
    assert ring.sum_s(1000) == pytest.approx(2 * SLOW.collective_seconds(500))
    assert ring.gather_s(1000) == pytest.approx(SLOW.collective_seconds(1000))


def test_an_all_reduce_over_four_is_six_hops_of_a_quarter() -> None:
    ring = Rings(linked(), 1.0).among((0, 1, 2, 3))
    assert ring is not None
    assert ring.sum_s(1000) == pytest.approx(6 * SLOW.collective_seconds(250))


def test_the_order_of_a_ring_avoids_slow_links() -> None:
    ring = Rings(linked("ac", "cb", "bd", "da"), 8192).among((0, 1, 2, 3))
    assert ring is not None
    assert ring.links == (FAST,)
    assert ring.nodes in ((0, 2, 1, 3), (0, 3, 1, 2))


def test_only_neighbours_in_a_ring_need_a_trusted_link() -> None:
    nodes = [node_of(name) for name in NAMES]
    pairs = {frozenset(pair): replace(FAST, trusted=True) for pair in ("ac", "cb", "bd", "da")}
    rings = Rings(replace(cluster_of(*nodes), links=pairs), 8192)
    assert rings.among((0, 1, 2, 3)) is not None
    assert rings.among((0, 1)) is None
    assert Rings(cluster_of(*nodes), 8192).among((0, 1)) is None


def test_trusted_machines_that_cannot_reach_each_other_form_no_ring() -> None:
    cluster = replace(linked(), links={frozenset("ab"): UNREACHABLE})
    assert Rings(cluster, 8192).among((0, 1)) is None


def test_a_hop_on_one_machine_takes_the_measured_time() -> None:
    assert 52e-6 <= 2 * LOCAL.collective_seconds(4096 / 2) <= 93e-6
