"""Addresses at which ranks listen for each other, and machines that must not be joined."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from mlx_ring.cluster.deployment import GroupRoute, group_routes
from mlx_ring.core.errors import PlanError
from mlx_ring.host.trusted_interfaces import TrustedInterface


@dataclass(frozen=True)
class Node:
    node: str
    trusted: tuple[TrustedInterface, ...] = ()
    trusted_problem: str = ""


def cable(number: int, end: int) -> TrustedInterface:
    return TrustedInterface(f"thunder{number}", f"10.0.{number}.{end}", f"10.0.{number}.0/24")


def test_ranks_on_one_machine_use_loopback() -> None:
    assert set(group_routes([Node("a"), Node("a")], "it")) == {GroupRoute("127.0.0.1", "127.0.0.1")}


def test_only_hops_between_machines_use_a_trusted_interface() -> None:
    here, there = Node("a", (cable(1, 1),)), Node("b", (cable(1, 2),))
    assert group_routes([here, here, there], "it") == (
        GroupRoute("10.0.1.1", "10.0.1.2"),
        GroupRoute(),
        GroupRoute("10.0.1.2", "10.0.1.1"),
    )


def test_each_cable_of_a_ring_may_be_a_separate_network() -> None:
    nodes = [
        Node("a", (cable(1, 1), cable(3, 1))),
        Node("b", (cable(1, 2), cable(2, 2))),
        Node("c", (cable(2, 3), cable(3, 3))),
    ]
    assert [way.listens for way in group_routes(nodes, "it")] == ["10.0.3.1", "10.0.1.2", "10.0.2.3"]


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (Node("b"), r"A stage joins b and a: .* and b names none\. Start it with --trusted-interface NAME"),
        (Node("b", (), "thunder7 is not there."), r"and b has none: thunder7 is not there\."),
        (
            Node("b", (cable(2, 2),)),
            r"no network in common: b has .*, a has thunder1 \(10.0.1.1\) in 10.0.1.0/24\.",
        ),
    ],
)
def test_machines_without_a_common_trusted_network_are_refused(other: Node, said: str) -> None:
    with pytest.raises(PlanError, match=said):
        group_routes([other, Node("a", (cable(1, 1),))][::-1], "A stage")
