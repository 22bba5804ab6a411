"""Plans of the quick search, compared with those of the planner."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tests.planner.clusters import (
    UNLIKE,
    cluster_of,
    known_cluster,
    known_sizes,
    node_of,
    on_gpus,
    shared_model,
    with_experts,
)

from mlx_ring.core.errors import PlanError
from mlx_ring.core.types import LayerRange
from mlx_ring.planner.catalogue import named_links
from mlx_ring.planner.pipeline import Pipeline
from mlx_ring.planner.place import place
from mlx_ring.planner.plan import Plan
from mlx_ring.planner.profiles import ModelProfile
from mlx_ring.planner.quick_plans import QuickSearch
from mlx_ring.planner.rank_costs import Ring
from mlx_ring.planner.request import OBJECTIVES, Demand, Objective, PlanRequest
from mlx_ring.planner.tensor_groups import GroupStage, SharedModel, alone, group_of
from mlx_ring.planner.timetable import MeanLayers, Timetable
from mlx_ring.rpc.link_profile import LinkProfile


@pytest.mark.slow
@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("link", ["tb5-rdma", "10gbe"])
def test_the_quick_search_finds_about_as_good_plans(link: str, objective: Objective) -> None:
    factors: list[float] = []
    for number in (2, 3, 4):
        machines = replace(known_cluster(*UNLIKE[:number]), usual_link=named_links()[link])
        search = QuickSearch(machines)
        for name in ("qwen3-0.6b", "llama-8b", "gpt-oss-120b", "llama-70b", "qwen3-235b-a22b-4bit"):
            model = known_sizes(name, machines)
            request = PlanRequest(
                Demand(8192, 8 if objective == "throughput" else 1), objective=objective, prompt_tokens=4000
            )
            try:
                best = place(model, machines, request)
            except PlanError:
                with pytest.raises(PlanError):
                    search.plan(model, request)
                continue
            found = search.plan(model, request)
            check_holds(found, model)
            if objective == "memory":
                factors.append(1 + fullest(found) - fullest(best))
            else:
                seconds = (one.prediction.minimized_s(objective) for one in (found, best))
                factors.append(next(seconds) / next(seconds))
    assert len(factors) > 8
    assert max(factors) < 1.15
    assert sum(factors) / len(factors) < 1.03


@pytest.mark.parametrize("users", [1, 3])
@pytest.mark.parametrize("members", [(0,), (0, 1)], ids=["machine", "group"])
def test_estimates_of_one_stage_count_long_chunks(members: tuple[int, ...], users: int) -> None:
    """Compare with the exact prediction of experts, which longer chunks read less often."""
    nodes = [node_of(name, 64, gb_s=200, tflops=100) for name in "ab"]
    cluster = cluster_of(*on_gpus(nodes), link=LinkProfile(30e-6, 5e9))
    model = with_experts(shared_model(8, layer_bytes=400_000_000))
    demand = Demand(9000, users)
    request = PlanRequest(demand, objective="first-token", prompt_tokens=8192, users=users)
    shared = SharedModel(model, demand, model.shared)
    means = MeanLayers(Timetable(model, cluster, demand), shared, request)
    ring = Ring(members, (cluster.usual_link,))
    if len(members) == 1:
        unit, group = means.alone(0, users), alone(shared, cluster.nodes[0])
    else:
        unit, group = means.together(members, ring, users), group_of(shared, cluster.nodes, [0.5, 0.5], ring)
    assert unit is not None
    pipeline = Pipeline(cluster, [GroupStage(group, LayerRange(0, 8))], demand)
    assert means.estimate([unit])[0] == pytest.approx(pipeline.minimized_s(request), rel=0.02)
    usual = replace(unit, alone_s=unit.chunk_s)
    assert means.estimate([usual])[0] > 1.1 * means.estimate([unit])[0]


def test_a_prompt_of_one_chunk_has_a_plan_for_its_first_token() -> None:
    machines = known_cluster(*UNLIKE[:3])
    model = known_sizes("llama-8b", machines)
    request = PlanRequest(Demand(540, 1), objective="first-token", prompt_tokens=500)
    with np.errstate(all="raise"):
        check_holds(QuickSearch(machines).plan(model, request), model)


def fullest(plan: Plan) -> float:
    return max(rank.memory_bytes / rank.usable_bytes for stage in plan.stages for rank in stage.ranks)


def check_holds(plan: Plan, model: ModelProfile) -> None:
    """Check that a plan has all layers once, and no machine more than its memory."""
    layers = [layer for stage in plan.stages for layer in range(stage.layers.start, stage.layers.end)]
    assert layers == list(range(len(model.layers)))
    assert fullest(plan) <= 1
    nodes = [rank.node for stage in plan.stages for rank in stage.ranks]
    assert len(set(nodes)) == len(nodes)
    assert not set(nodes) & {left.node for left in plan.left_out}


@pytest.mark.parametrize("count", [2, 3])
def test_the_quick_search_makes_so_many_replicas(count: int) -> None:
    machines = known_cluster("m4-pro-48", "m4-max-128", "m3-ultra-96")
    model = known_sizes("llama-8b", machines)
    request = PlanRequest(Demand(8192, 12), objective="throughput")
    plans = QuickSearch(machines).replicas(model, request, count)
    assert [plan.sequences for plan in plans] == [12 // count] * count
    nodes = [rank.node for plan in plans for stage in plan.stages for rank in stage.ranks]
    assert len(set(nodes)) == len(nodes)
    with pytest.raises(PlanError, match="No 3 replicas of"):
        QuickSearch(known_cluster("m4-pro-48")).replicas(model, request, 3)
