"""Where ranks that MLX joins listen for each other: on loopback, or on interfaces whose owners trust them with it. Pure.

MLX's ring is spoken from each rank to the one after it, and from the last to the first. Every such hop between machines goes from a trusted
interface of the one to a trusted interface of the other that has the same network, or the group is not made.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from mlx_ring.core.errors import PlanError
from mlx_ring.core.trusted_interfaces import FLAG, LOOPBACK, TrustedInterface


class Trusting(Protocol):
    """A node, and where its owner lets collectives go to others."""

    @property
    def node(self) -> str: ...
    @property
    def trusted(self) -> tuple[TrustedInterface, ...]: ...
    @property
    def trusted_problem(self) -> str: ...


@dataclass(frozen=True, slots=True)
class GroupWay:
    """From the rank before to a rank."""

    listens: str = LOOPBACK
    """The rank's address."""
    comes_from: str = LOOPBACK
    """The other's."""


def group_ways(nodes: Sequence[Trusting], wish: str) -> tuple[GroupWay, ...]:
    """To each rank of a group, whose ranks are on these nodes.

    Args:
        nodes: by rank.
        wish: what was asked for, as a person wrote it.

    Raises:
        PlanError: between two of them there is no way that both trust.
    """
    return tuple(_way(nodes[rank - 1], node, wish) for rank, node in enumerate(nodes))


def _way(before: Trusting, node: Trusting, wish: str) -> GroupWay:
    if before.node == node.node:
        return GroupWay()
    for one in (before, node):
        if not one.trusted:
            raise PlanError(f"{wish} joins {before.node} and {node.node}: {_untrusting(one)}")
    if (way := way_between(before, node)) is not None:
        return way
    raise PlanError(
        f"{wish} joins {before.node} and {node.node}, and the interfaces that they trust have no network in common: "
        f"{before.node} has {_told(before)}, {node.node} has {_told(node)}. Name others with {FLAG}."
    )


def way_between(before: Trusting, node: Trusting) -> GroupWay | None:
    """From one machine to another, by interfaces that both trust; None where they trust none in one network."""
    for theirs in before.trusted:
        for ours in node.trusted:
            if theirs.network == ours.network:
                return GroupWay(ours.address, theirs.address)
    return None


def _untrusting(node: Trusting) -> str:
    told = "MLX's collectives are neither encrypted nor authenticated, so they go to other machines on an interface alone that"
    if node.trusted_problem:
        return f"{told} its owner trusts, and of {node.node} there is none: {node.trusted_problem}"
    return f"{told} its owner trusts, and {node.node} names none. Start it with {FLAG} NAME, a Thunderbolt cable's say."


def _told(node: Trusting) -> str:
    return ", ".join(f"{trusted} in {trusted.network}" for trusted in node.trusted)
