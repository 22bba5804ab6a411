"""Machines that compute layers together: costs of ranks, the best division, and the choice of sharing."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest
from hypothesis import example, given, reject
from hypothesis import strategies as st
from tests.examples import examples
from tests.planner.clusters import (
    NODES,
    cluster_of,
    model_of,
    node_of,
    on_gpus,
    shared_model,
    trusting,
    with_experts,
)

from mlx_ring.core.errors import PlanError
from mlx_ring.core.types import LayerRange
from mlx_ring.models.tensor_shares import share_out
from mlx_ring.planner.forecast import with_even_chunks
from mlx_ring.planner.pipeline import Pipeline
from mlx_ring.planner.place import place
from mlx_ring.planner.plan import Plan
from mlx_ring.planner.profiles import ClusterProfile, ModelProfile, NodeProfile
from mlx_ring.planner.rank_costs import Rings
from mlx_ring.planner.replicas import place_replicas
from mlx_ring.planner.request import OBJECTIVES, Demand, PlanRequest
from mlx_ring.planner.stage_costs import StageTables
from mlx_ring.planner.tensor_groups import GroupStage, SharedModel, alone, fitting_group, group_of
from mlx_ring.planner.tensor_search import SharedLayers
from mlx_ring.rpc.link_profile import UNREACHABLE, LinkProfile

FAST, SLOW = LinkProfile(20e-6, 5e9), LinkProfile(0.5e-3, 1.1e8)
SMALL = Demand(context_tokens=1024, sequences=1)
PAIR = (node_of("a"), node_of("b"))
SHORT = PlanRequest(SMALL, prompt_tokens=1)
ONE_CHUNK = PlanRequest(SMALL, prompt_tokens=16)
"""A prompt that cannot be computed by several stages at once."""


def plan_request(**options: Any) -> PlanRequest:
    given_options: dict[str, Any] = {"demand": SMALL, **options}
    return PlanRequest(**given_options)


def cost_of(plan: Plan, request: PlanRequest) -> float:
    return plan.prediction.minimized_s(request.objective)


def test_a_large_dense_model_is_shared_over_fast_links_and_not_over_slow_ones() -> None:
    model = shared_model(40)
    together = place(model, trusting(*PAIR, link=FAST), plan_request())
    assert together.kind == "tensor"
    assert [(rank.node, rank.share) for rank in together.stages[0].ranks] == [("a", 0.5), ("b", 0.5)]
    assert together.remarks[0].startswith("a+b compute every layer together: ")
    apart = place(model, trusting(*PAIR, link=SLOW), ONE_CHUNK)
    assert apart.kind == "single"
    assert apart.prediction.token_s > 1.5 * together.prediction.token_s
    assert apart.remarks[-1].startswith("If a+b computed every layer together, it would be ")


def test_without_a_trusted_interface_nothing_is_shared_and_the_plan_says_so() -> None:
    plan = place(shared_model(40), cluster_of(*PAIR, link=FAST), ONE_CHUNK)
    assert plan.kind == "single"
    assert plan.remarks[-1].endswith("no interface between these machines is trusted.")
    slow = place(shared_model(40), cluster_of(*PAIR, link=SLOW), ONE_CHUNK)
    assert not any("trusted" in remark for remark in slow.remarks)


def test_a_model_that_cannot_be_split_is_not_shared_and_the_plan_says_so() -> None:
    model = replace(shared_model(40), shared=None)
    plan = place(model, trusting(*PAIR, link=FAST), ONE_CHUNK)
    assert plan.kind == "single"
    assert plan.remarks[-1].endswith("but the model's layers cannot be split.")


def test_sharing_that_cannot_be_served_is_not_planned_and_the_plan_says_so() -> None:
    plan = place(shared_model(40), trusting(*PAIR, link=FAST), replace(ONE_CHUNK, allows_tensor=False))
    assert plan.kind == "single"
    assert "uses the only MLX group of a process" in plan.remarks[-1]


@pytest.mark.parametrize(
    ("nodes", "changes", "options", "sentence"),
    [
        (PAIR[:1], {}, {"strategy": "tensor"}, "there is one; use `serve --tp N`"),
        (PAIR, {}, {"strategy": "hybrid"}, "choose the strategy tensor"),
        (PAIR, {"shared": None}, {"strategy": "tensor"}, "cannot be split; supported are Llama"),
        (PAIR, {}, {"strategy": "tensor", "allows_tensor": False}, "cannot be served"),
        (PAIR, {}, {"strategy": "tensor", "demand": Demand(32_768, 4000)}, "does not fit into the 32.0 GB"),
    ],
)
def test_an_impossible_tensor_or_hybrid_strategy_is_refused(
    nodes: tuple[NodeProfile, ...], changes: dict[str, Any], options: dict[str, Any], sentence: str
) -> None:
    model = replace(shared_model(), **changes)
    with pytest.raises(PlanError, match=sentence):
        place(model, trusting(*nodes, link=FAST), plan_request(**options))


def test_the_strategy_tensor_names_machines_without_a_trusted_interface_between_them() -> None:
    cluster = trusting(*PAIR, link=FAST)
    cluster = replace(cluster, nodes=(*cluster.nodes, node_of("c")))
    with pytest.raises(PlanError, match="is not possible with a and c: "):
        place(shared_model(), cluster, plan_request(strategy="tensor"))
    hybrid = place(shared_model(), cluster, plan_request(strategy="hybrid"))
    assert sorted([rank.node for rank in stage.ranks] for stage in hybrid.stages) == [["a", "b"], ["c"]]


def test_shares_follow_speed_within_the_memory() -> None:
    model = shared_model(40)
    slow, fast = node_of("slow", gb_s=100), node_of("fast", gb_s=300)
    plan = place(model, trusting(slow, fast, link=FAST), plan_request(strategy="tensor"))
    assert [rank.share for rank in plan.stages[0].ranks] == pytest.approx([0.25, 0.75], abs=0.02)
    small = replace(fast, memory_bytes=3 * 10**9)
    less = place(model, trusting(slow, small, link=FAST), plan_request(strategy="tensor"))
    limited = less.stages[0].ranks[1]
    assert limited.memory_bytes <= limited.usable_bytes
    assert 0.2 < limited.share < 0.4


@given(
    NODES,
    st.sampled_from(["auto", "tensor", "hybrid"]),
    st.sampled_from(["latency", "throughput"]),
    st.sampled_from([FAST, LinkProfile(0.2e-3, 1e9), SLOW]),
    st.integers(1, 8),
    st.integers(256, 32_768),
)
@examples(0.6)
def test_no_rank_exceeds_its_memory_and_every_share_is_possible(
    nodes: list[NodeProfile], strategy: Any, objective: Any, link: LinkProfile, sequences: int, context: int
) -> None:
    model = shared_model(12)
    request = plan_request(strategy=strategy, objective=objective, demand=Demand(context, sequences))
    try:
        plan = place(model, trusting(*nodes, link=link), request)
    except PlanError:
        reject()
    ranks = [rank for stage in plan.stages for rank in stage.ranks]
    assert all(rank.memory_bytes <= rank.usable_bytes for rank in ranks)
    assert [layer for stage in plan.stages for layer in range(stage.layers.start, stage.layers.end)] == list(
        range(12)
    )
    names = [rank.node for rank in ranks]
    assert sorted(names + [left.node for left in plan.left_out]) == sorted(node.name for node in nodes)
    assert model.shared is not None
    for stage in plan.stages:
        assert sum(rank.share for rank in stage.ranks) == pytest.approx(1)
        if stage.is_shared:
            share_out(model.shared, [rank.share for rank in stage.ranks])
        # Each rank holds whole norms, and numbers of bytes are rounded.
        whole = sum(model.layers[layer].weight_bytes for layer in range(stage.layers.start, stage.layers.end))
        assert sum(rank.weight_bytes for rank in stage.ranks) >= whole - 8 * len(model.layers)


SLOW_PROMPTS = [
    node_of(f"node-{place}", gigabytes, gb_s=gb_s, tflops=tflops)
    for place, (gigabytes, gb_s, tflops) in enumerate(
        [(1.5, 509, 2), (1.5, 505, 2), (1, 97, 1), (1, 20, 1), (3, 423, 1)]
    )
]
"""Machines for which the plans with the shortest time per token take the longest for a prompt."""


@given(
    NODES,
    st.sampled_from(["latency", "throughput"]),
    st.sampled_from([FAST, LinkProfile(0.2e-3, 1e9), SLOW]),
)
@example(SLOW_PROMPTS, "latency", LinkProfile(0.2e-3, 1e9))
@examples(0.3)
def test_auto_is_no_worse_than_any_candidate(
    nodes: list[NodeProfile], objective: Any, link: LinkProfile
) -> None:
    model, cluster = shared_model(12), trusting(*nodes, link=link)
    request = plan_request(objective=objective, demand=Demand(2048, 4))
    try:
        best = cost_of(place(model, cluster, request), request)
    except PlanError:
        best = float("inf")
    others: list[dict[str, Any]] = [{"allows_tensor": False}, {"strategy": "tensor"}, {"strategy": "hybrid"}]
    for changes in others:
        try:
            other = cost_of(place(model, cluster, replace(request, **changes)), request)
        except PlanError:
            continue
        assert best <= other * (1 + 1e-9)


def divisions(places: tuple[int, ...]) -> Iterator[list[tuple[int, ...]]]:
    """Yield every division of some of the machines into stages, in every order."""
    yield []
    for size in range(1, len(places) + 1):
        for first in combinations(places, size):
            rest = tuple(place for place in places if place not in first)
            for others in divisions(rest):
                yield [first, *others]


def plan_cost(
    shared: SharedModel,
    cluster: ClusterProfile,
    request: PlanRequest,
    division: list[tuple[int, ...]],
    ends: tuple[int, ...],
) -> float:
    """Return what the objective counts with these stages, or infinity."""
    rings, stages = Rings(cluster, 8192), list[GroupStage]()
    rows = -(-request.streams // min(len(division), request.streams))
    for members, first, end in zip(division, ends, ends[1:], strict=False):
        nodes = [cluster.nodes[place] for place in members]
        ring = rings.among(members)
        if len(members) == 1:
            group = alone(shared, nodes[0])
        elif ring is None:
            return float("inf")
        else:
            group = fitting_group(
                shared, [cluster.nodes[place] for place in ring.nodes], ring, first, end, rows
            )
        if group is None or not group.fits(first, end):
            return float("inf")
        stages.append(GroupStage(group, LayerRange(first, end)))
    return Pipeline(cluster, stages, request.demand).minimized_s(request)


def random_problem(seed: int) -> tuple[ModelProfile, ClusterProfile, PlanRequest]:
    """Return a small model, up to four machines of which some are trusted, and any request."""
    numbers = random.Random(seed)
    smallest, largest = numbers.choice([(1.2, 6), (0.6, 1.5), (3, 9)])
    nodes = [
        replace(
            node_of(
                f"n{place}",
                numbers.uniform(smallest, largest),
                gb_s=numbers.uniform(20, 800),
                tflops=numbers.uniform(0.5, 30),
            ),
            trusted=numbers.random() < 0.85,
        )
        for place in range(numbers.randint(2, 4))
    ]
    if seed % 2 and seed < 24:
        nodes = on_gpus(nodes)
    slowest = numbers.choice([5e9, 1e9, 1e8])
    links = {
        frozenset(pair): LinkProfile(numbers.choice([15e-6, 5e-5, 3e-4]), slowest * numbers.choice([1, 8]))
        for pair in combinations([node.name for node in nodes], 2)
    }
    model = shared_model(
        numbers.randint(2, 5),
        layer_bytes=numbers.choice([200, 400]) * 10**6,
        kv_heads=numbers.choice([2, 4, 8]),
    )
    model = with_experts(model) if seed % 2 and seed < 24 else model
    users = numbers.choice([1, 1, 1, 4, 16])
    request = PlanRequest(
        Demand(1024, users),
        objective=numbers.choice(OBJECTIVES[:3]),
        prompt_tokens=numbers.choice([1, 512, 1024, 8192]),
        answer_tokens=numbers.choice([1, 64, 256]),
        users=users,
    )
    return model, replace(cluster_of(*nodes), links=links), request


@pytest.mark.parametrize("seed", [*range(24), 940, 1829, 2141])
def test_small_clusters_get_the_best_of_all_divisions(seed: int) -> None:
    """Compare with every division into stages, every order and every cut."""
    model, cluster, request = random_problem(seed)
    shared, layers = SharedModel(model, request.demand, model.shared), len(model.layers)
    best = min(
        plan_cost(shared, cluster, request, division, (0, *inner, layers))
        for division in divisions(tuple(range(len(cluster.nodes))))
        if 0 < len(division) <= layers
        for inner in combinations(range(1, layers), len(division) - 1)
    )
    if best == float("inf"):
        with pytest.raises(PlanError):
            place(model, cluster, request)
    else:
        assert cost_of(place(model, cluster, request), request) <= best * 1.01


def test_eight_alike_machines_are_paired() -> None:
    nodes = [node_of(f"n{place}", 64, gb_s=400, tflops=20) for place in range(8)]
    cluster = trusting(*nodes, link=LinkProfile(50e-6, 5e9))
    plan = place(shared_model(80, layer_bytes=400_000_000), cluster, plan_request(prompt_tokens=4096))
    assert plan.kind == "hybrid"
    assert {len(stage.ranks) for stage in plan.stages} == {2}
    assert {len(stage.layers) for stage in plan.stages} == {20}


def test_many_alike_machines_share_layers_and_some_are_left_out() -> None:
    nodes = [node_of(f"n{place}", 64, gb_s=400, tflops=20) for place in range(16)]
    cluster = trusting(*nodes, link=LinkProfile(50e-6, 5e9))
    plan = place(shared_model(80, layer_bytes=400_000_000), cluster, plan_request(prompt_tokens=512))
    assert plan.kind in ("tensor", "hybrid")
    assert len({len(stage.ranks) for stage in plan.stages}) == 1
    assert plan.left_out
    unlike = [node_of(f"n{place}", 64 + place, gb_s=400, tflops=20) for place in range(16)]
    with pytest.raises(
        PlanError, match=r"16 machines were given; .* planned for 8 at most, or for 64 of few"
    ):
        place(shared_model(80), trusting(*unlike, link=FAST), plan_request(strategy="hybrid"))


@pytest.mark.parametrize(
    "others",
    [
        pytest.param([node_of("small", 1, gb_s=30)], id="one of another kind"),
        pytest.param(
            [node_of(f"small{place}", 1 + place / 10, gb_s=30) for place in range(9)], id="nine kinds"
        ),
    ],
)
def test_more_machines_of_other_kinds_make_no_plan_slower(others: list[NodeProfile]) -> None:
    model, alike = shared_model(32), [node_of(f"n{place}", 8, gb_s=400) for place in range(8)]
    few = place(model, trusting(*alike, link=FAST), plan_request())
    many = place(model, trusting(*alike, *others, link=FAST), plan_request())
    assert few.stages[0].is_shared
    assert many.prediction.request_s <= few.prediction.request_s
    assert {left.node for left in many.left_out} >= {other.name for other in others}


def test_a_shared_plan_says_that_a_machine_is_too_small_for_a_layer() -> None:
    nodes = [node_of("a", 64, gb_s=400), node_of("b", 64, gb_s=400), node_of("tiny", 0.01)]
    plan = place(shared_model(32), trusting(*nodes, link=FAST), plan_request())
    assert plan.kind == "tensor"
    assert [(left.node, left.why) for left in plan.left_out] == [
        ("tiny", "too little memory for a single layer")
    ]


def test_hybrid_finds_the_two_pairs_with_a_fast_link() -> None:
    nodes = [node_of(name, 4) for name in "abcd"]
    links = {frozenset("ac"): replace(FAST, trusted=True), frozenset("bd"): replace(FAST, trusted=True)}
    cluster = replace(cluster_of(*nodes, link=SLOW), links=links)
    plan = place(shared_model(40, layer_bytes=250_000_000), cluster, plan_request())
    assert plan.kind == "hybrid"
    assert sorted([rank.node for rank in stage.ranks] for stage in plan.stages) == [["a", "c"], ["b", "d"]]


def test_a_rank_with_whole_layers_costs_as_much_as_a_stage() -> None:
    model, node = shared_model(12), node_of("a")
    tables = StageTables(model, SMALL)
    whole = alone(SharedModel(model, SMALL, model.shared), node)
    for first, end in ((0, 12), (0, 5), (5, 12), (3, 4)):
        assert whole.stage_seconds(first, end, 3, 512).steady == pytest.approx(
            tables.stage_seconds(node, first, end, 3, 512).steady
        )
        costs = whole.members[0].costs
        assert costs.memory_bytes(first, end) == pytest.approx(tables.memory(node)[first, end], abs=2)
        assert costs.weight_bytes(first, end) == tables.weight_bytes(node, first, end)
        assert whole.prefill_seconds(first, end, 700) == pytest.approx(
            tables.prefill_seconds(node, first, end, 700)
        )


def test_a_pipeline_without_sharing_is_predicted_like_a_plan() -> None:
    model, cluster = model_of(28), cluster_of(node_of("a"), node_of("b", gb_s=300), link=FAST)
    request = with_even_chunks(model, cluster, plan_request(strategy="balanced", demand=Demand(2048, 4)))
    plan = place(model, cluster, request)
    shared = SharedModel(model, request.demand, None)
    stages = [
        GroupStage(alone(shared, node), stage.layers)
        for node, stage in zip(cluster.nodes, plan.stages, strict=True)
    ]
    prediction = Pipeline(cluster, stages, request.demand).prediction(request)
    assert prediction.token_s == pytest.approx(plan.prediction.token_s)
    assert prediction.tokens_per_s == pytest.approx(plan.prediction.tokens_per_s)
    assert prediction.first_token_s == pytest.approx(plan.prediction.first_token_s)


def test_ranks_hold_their_share_of_heads_and_rows_and_whole_norms() -> None:
    model = shared_model(12)
    shared = SharedModel(model, Demand(1000, 1), model.shared)
    ring = Rings(trusting(*PAIR, link=FAST), 8192).among((0, 1))
    assert ring is not None
    three, one = group_of(shared, PAIR, (0.75, 0.25), ring).members
    assert three.costs.kv_bytes(0, 12) == 3 * one.costs.kv_bytes(0, 12)
    norms, inner = 12 * model.layers[0].whole_bytes, (2, 10)
    whole = 8 * model.layers[0].weight_bytes
    assert three.costs.weight_bytes(*inner) + one.costs.weight_bytes(*inner) == pytest.approx(
        whole + norms * 8 // 12, abs=16
    )
    embedding_and_head = one.costs.weight_bytes(0, 12) - 12 * one.costs.weight_bytes(2, 3)
    assert embedding_and_head == pytest.approx(model.embedding_bytes + model.head_bytes / 4, rel=0.01)


def test_replicas_and_sharing_are_compared_by_total_throughput() -> None:
    model, cluster = shared_model(12), trusting(*PAIR, link=FAST)
    request = plan_request(objective="throughput", demand=Demand(1024, 2))

    def speed(count: int | None) -> float:
        return sum(plan.prediction.tokens_per_s for plan in place_replicas(model, cluster, request, count))

    assert speed(None) * 1.02 >= max(speed(1), speed(2))


def test_a_model_that_fits_only_with_shared_layers_has_one_replica() -> None:
    model = shared_model(1, layer_bytes=6_000_000_000)
    cluster = trusting(node_of("a", 5), node_of("b", 5), link=FAST)
    request = plan_request(objective="throughput", demand=Demand(1024, 2))
    (plan,) = place_replicas(model, cluster, request, None)
    assert plan.kind == "tensor"


def test_no_group_has_machines_that_cannot_reach_each_other() -> None:
    cluster = replace(trusting(*PAIR, link=FAST), links={frozenset("ab"): UNREACHABLE})
    search = SharedLayers(shared_model(), cluster, PlanRequest(SMALL))
    assert not search.is_possible
    assert search.tensor() is None
