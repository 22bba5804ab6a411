"""Plans for machines that cannot all reach each other."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.planner.clusters import NODES, cluster_of, model_of, node_of

from mlx_ring.core.errors import PlanError
from mlx_ring.planner.place import place
from mlx_ring.planner.plan import Plan
from mlx_ring.planner.profiles import ClusterProfile, NodeProfile
from mlx_ring.planner.replicas import place_replicas
from mlx_ring.planner.request import OBJECTIVES, Demand, Objective, PlanRequest
from mlx_ring.rpc.link_profile import UNREACHABLE, LinkProfile

SMALL = Demand(context_tokens=1024, sequences=1)
AUTO = PlanRequest(SMALL)
FAST = LinkProfile(0.1e-3, 1.2e9)


def broken(cluster: ClusterProfile, *pairs: tuple[str, str]) -> ClusterProfile:
    return replace(cluster, links=dict(cluster.links) | dict.fromkeys(map(frozenset, pairs), UNREACHABLE))


def neighbours(plan: Plan) -> set[frozenset[str]]:
    names = [stage.node for stage in plan.stages]
    return {frozenset(pair) for pair in zip(names, [*names[1:], names[0]], strict=True)}


def test_a_machine_that_another_cannot_reach_is_left_out_with_the_reason() -> None:
    cluster = broken(cluster_of(node_of("a", 2), node_of("b", 2), node_of("c", 2), link=FAST), ("a", "b"))
    plan = place(model_of(28), cluster, AUTO)
    assert len(plan.stages) == 2
    assert frozenset("ab") not in neighbours(plan)
    (left,) = plan.left_out
    assert left.why == f"it and {'b' if left.node == 'a' else 'a'} do not reach each other"


def test_the_error_names_machines_that_only_a_missing_link_excludes() -> None:
    cluster = broken(cluster_of(node_of("a", 2), node_of("b", 2)), ("b", "a"))
    with pytest.raises(PlanError, match=r"these do not reach each other: a and b\. Fix the network"):
        place(model_of(28), cluster, AUTO)


def test_a_fixed_order_over_a_broken_link_is_refused_by_name() -> None:
    cluster = broken(cluster_of(node_of("a"), node_of("b"), node_of("c")), ("b", "c"))
    with pytest.raises(PlanError, match="strategy uniform b would send to c"):
        place(model_of(28), cluster, PlanRequest(SMALL, strategy="uniform"))


@pytest.mark.parametrize(
    ("pairs", "least", "left"),
    [
        ([], 1, "abcd"),
        (["bc"], 1, "abd"),
        (["ad"], 1, "abc"),
        (["bc"], 4, "abcd"),
        (["bc", "bd"], 1, "acd"),
        (["bc", "bd", "ca"], 1, "ab"),
        (["ab", "ac", "ad"], 1, "bcd"),
    ],
)
def test_machines_are_left_out_until_all_others_reach_each_other(
    pairs: list[str], least: int, left: str
) -> None:
    cluster = broken(cluster_of(*map(node_of, "abcd")), *((pair[0], pair[1]) for pair in pairs))
    smaller = cluster.in_reach(least)
    assert "".join(node.name for node in smaller.nodes) == left
    if len(left) < 4:
        place(model_of(28), smaller, PlanRequest(SMALL, strategy="uniform"))


def test_a_slow_link_is_avoided() -> None:
    cluster = cluster_of(*(node_of(name, 1.6) for name in "abc"), link=FAST)
    slow = replace(cluster, links={frozenset("ab"): LinkProfile(30e-3, 1e6)})
    assert len(place(model_of(28), slow, AUTO).stages) == 2
    assert frozenset("ab") not in neighbours(place(model_of(28), slow, AUTO))


def test_replicas_are_placed_on_machines_that_reach_each_other() -> None:
    request = PlanRequest(Demand(context_tokens=1024, sequences=4), objective="throughput")
    cluster = broken(cluster_of(*(node_of(name, 2) for name in "abcd"), link=FAST), ("a", "b"))
    plans = place_replicas(model_of(28), cluster, request, 2)
    assert [len(plan.stages) for plan in plans] == [2, 2]
    assert not any(frozenset("ab") in neighbours(plan) for plan in plans)


@given(nodes=NODES, data=st.data(), objective=st.sampled_from(OBJECTIVES))
def test_no_plan_by_auto_uses_a_broken_link(
    nodes: list[NodeProfile], data: st.DataObject, objective: Objective
) -> None:
    names = [node.name for node in nodes]
    pairs = data.draw(st.lists(st.tuples(st.sampled_from(names), st.sampled_from(names)), max_size=4))
    cluster = broken(cluster_of(*nodes), *((one, other) for one, other in pairs if one != other))
    try:
        plan = place(model_of(12), cluster, PlanRequest(SMALL, objective=objective))
    except PlanError:
        return
    assert not any(cluster.links.get(pair) == UNREACHABLE for pair in neighbours(plan))
    assert plan.prediction.token_s < float("inf")
