"""Rounds of link measurements, and their results for the planner."""

from __future__ import annotations

from collections import Counter
from itertools import combinations

import pytest

from mlx_ring.cluster.link_survey import FoundLink, as_they_are, link_profiles, link_remarks, rounds
from mlx_ring.rpc.link_profile import FRAMES_S, UNREACHABLE, LinkProfile


@pytest.mark.parametrize("count", range(9))
def test_each_pair_is_measured_once_and_no_node_twice_in_a_round(count: int) -> None:
    nodes = [f"mini-{number}" for number in range(count)]
    made = list(rounds(nodes))
    assert sorted(sorted(pair) for pairs in made for pair in pairs) == sorted(
        map(list, combinations(nodes, 2))
    )
    for pairs in made:
        assert all(times == 1 for times in Counter(node for pair in pairs for node in pair).values())
    assert len(made) == max(0, count - 1 + count % 2)


def test_a_link_is_the_worse_of_its_two_directions() -> None:
    found = [FoundLink("a", "b", 1e-3, 2e8), FoundLink("b", "a", 2e-3, 1e8)]
    assert link_profiles(found) == {frozenset("ab"): LinkProfile(2e-3, 1e8, FRAMES_S)}
    assert link_profiles(reversed(found)) == link_profiles(found)


def test_a_link_that_is_broken_in_one_direction_is_unreachable() -> None:
    found = [FoundLink("a", "b", 1e-3, 2e8), FoundLink("b", "a", problem="b did not answer")]
    assert link_profiles(found) == link_profiles(reversed(found)) == {frozenset("ab"): UNREACHABLE}


def test_links_of_a_node_that_has_left_are_broken() -> None:
    found = [FoundLink("a", "b", 1e-3, 2e8), FoundLink("b", "c", 1e-3, 2e8), FoundLink("c", "b", 1e-3, 2e8)]
    away = [
        FoundLink("b", "c", problem="c is disconnected"),
        FoundLink("c", "b", problem="c is disconnected"),
    ]
    assert as_they_are(found, {"a", "b"}) == [found[0], *away]


def test_the_links_of_a_plan_are_listed() -> None:
    links: dict[frozenset[str], LinkProfile] = {
        frozenset(("head", "mini")): LinkProfile(0.31e-3, 1.2e9),
        frozenset(("mini", "box")): LinkProfile(4e-3, 5e6),
        frozenset(("head", "other")): LinkProfile(1e-3, 1e8),
    }
    (told,) = link_remarks(["head", "mini", "box"], links)
    assert told == (
        "Measured links: head - mini round trip 0.31 ms, 9.6 Gbit/s; "
        "box - mini round trip 4.00 ms, 40 Mbit/s."
    )
    assert link_remarks(["head"], links) == ()
    assert link_remarks(["here", "there"], {}) == ()
