"""Which machines get which ranks of `--tp` beside `--nodes`."""

from __future__ import annotations

from typing import cast

import pytest
from tests.cluster.planner.clusters import model_of, node_of

from mlx_ring.cluster.agent_link import AgentLink, Source
from mlx_ring.cluster.deployment import Site
from mlx_ring.cluster.placement import Cut, even_split
from mlx_ring.cluster.planner.stage_tables import Demand
from mlx_ring.core.errors import PlanError
from mlx_ring.core.trusted_interfaces import TrustedInterface
from mlx_ring.node.seats import Stage
from mlx_ring.node.shared_stages import check_memory, share_stages

LAYERS = 28


def site(node: str, *, trusts: bool = True) -> Site:
    trusted = (TrustedInterface("thunder0", f"10.0.8.{ord(node)}", "10.0.8.0/24"),) if trusts else ()
    return Site(
        node, cast("AgentLink", None), is_local=False, hosts={}, source=Source("model"), trusted=trusted
    )


def cut(stages: int, *shares: float) -> Cut:
    return Cut.alike(even_split(LAYERS, stages), shares)


def told(stages: tuple[Stage, ...]) -> list[str]:
    return ["".join(seat.site.node for seat in stage) for stage in stages]


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


def test_each_rank_is_counted_by_its_share_of_its_stage() -> None:
    nodes = {"a": node_of("a", gb_s=100), "b": node_of("b", gb_s=100)}
    split, model, demand = cut(1, 3, 1), model_of(LAYERS), Demand(4096, 1)
    (seats, *_) = share_stages(split, "grpc", [site("a"), site("b")], 2)
    counted = check_memory(seats, split, model, demand, nodes)
    own = nodes["a"].process_bytes
    assert counted["a"] - own == pytest.approx(3 * (counted["b"] - own), rel=1e-6)
    small = nodes | {"b": node_of("b", gb_s=100, gigabytes=0.1)}
    with pytest.raises(PlanError, match=r"The workers on b need .* GB for"):
        check_memory(seats, split, model, demand, small)
