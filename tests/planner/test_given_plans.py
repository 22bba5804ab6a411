"""Plans for ranks whose machines are given."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.planner.clusters import cluster_of, model_of, node_of

from mlx_ring.core.errors import PlanError
from mlx_ring.core.types import LayerRange
from mlx_ring.planner.place import plan_given
from mlx_ring.planner.plan import Plan
from mlx_ring.planner.request import Demand, PlanRequest
from mlx_ring.rpc.link_profile import UNREACHABLE

REQUEST = PlanRequest(Demand(4096, 1))
NODES = [node_of("a"), node_of("b"), node_of("c")]


def plan_on(places: str, *, gigabytes: float = 16) -> Plan:
    """Plan three quarters of every layer on the first machine, and a quarter on the second."""
    nodes = {"a": NODES[0], "b": node_of("b", gigabytes), "c": NODES[2]}
    ranks = [(nodes[place], share) for place, share in zip(places, (0.75, 0.25), strict=True)]
    return plan_given(
        model_of(28), cluster_of(*nodes.values()), REQUEST, [(LayerRange(0, 28), ranks)], "as asked"
    )


def test_each_rank_has_its_share_of_the_weights_and_other_machines_are_left_out() -> None:
    plan = plan_on("ab")
    (stage,) = plan.stages
    large, small = (rank.weight_bytes for rank in stage.ranks)
    assert [(rank.node, rank.share) for rank in stage.ranks] == [("a", 0.75), ("b", 0.25)]
    assert large == 3 * small
    assert [left.node for left in plan.left_out] == ["c"]
    assert (plan.kind, stage.why) == ("tensor", "28 of 28 layers: as asked")
    assert plan.prediction.token_s > 0


@pytest.mark.parametrize("pair", ["ab", "bc", "ca"])
def test_neighbours_that_do_not_reach_each_other_are_refused(pair: str) -> None:
    stages = [
        (LayerRange(first, first + 8), [(node, 1.0)]) for first, node in zip((0, 8, 16), NODES, strict=True)
    ]
    cluster = replace(cluster_of(*NODES), links={frozenset(pair): UNREACHABLE})
    with pytest.raises(PlanError, match=f"{pair[0]} would send to {pair[1]}, but the two do not reach"):
        plan_given(model_of(24), cluster, REQUEST, stages, "as asked")


def test_two_ranks_of_one_machine_need_the_memory_of_both() -> None:
    single, both = plan_on("ab").stages[0].ranks[1].memory_bytes, plan_on("bb").stages[0].ranks
    needed = sum(rank.memory_bytes for rank in both)
    plan_on("ab", gigabytes=1.01 * single / 1e9)
    with pytest.raises(PlanError, match=r"The workers on b need .* GB for .* and it has"):
        plan_on("bb", gigabytes=0.99 * needed / 1e9)
