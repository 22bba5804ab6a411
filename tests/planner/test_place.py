"""Plans of each strategy, their invariants, and errors when nothing fits."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given, reject
from hypothesis import strategies as st
from tests.examples import examples
from tests.planner.clusters import NODES, cluster_of, model_of, node_of, on_gpus, with_experts
from tests.planner.test_search import every_partition, orders

from mlx_ring.core.errors import PlanError
from mlx_ring.planner.forecast import with_even_chunks
from mlx_ring.planner.place import place
from mlx_ring.planner.plan import Plan
from mlx_ring.planner.profiles import ClusterProfile, ModelProfile, NodeProfile
from mlx_ring.planner.request import Demand, Objective, PlanRequest
from mlx_ring.planner.strategies import METHODS
from mlx_ring.planner.timetable import Timetable
from mlx_ring.rpc.link_profile import LinkProfile
from mlx_ring.settings.strategies import STRATEGIES, Strategy

SMALL = Demand(context_tokens=1024, sequences=1)


def counts(plan: Plan) -> list[int]:
    return [len(stage.layers) for stage in plan.stages]


def plan_request(**options: Any) -> PlanRequest:
    given_options: dict[str, Any] = {"demand": SMALL, **options}
    return PlanRequest(**given_options)


def costs_of_all(model: ModelProfile, cluster: ClusterProfile, request: PlanRequest) -> Iterator[float]:
    """Yield what the objective counts, of every pipeline that fits. All read a prompt in the chunks that plans count."""
    request = with_even_chunks(model, cluster, request)
    times = Timetable(model, cluster, request.demand)
    fitting, nodes = times.tables(1), len(times.cluster.nodes)
    for pieces in every_partition(fitting, orders(nodes, range(1, nodes + 1))):
        if all(np.isfinite(fitting[piece.node][piece.first, piece.end]) for piece in pieces):
            yield times.request_s(pieces, request)


def with_unlike_links(nodes: list[NodeProfile]) -> ClusterProfile:
    """Return a cluster in which each pair of machines has a link of its own."""
    pairs = combinations([node.name for node in nodes], 2)
    links = {
        frozenset(pair): LinkProfile(1e-4 * (1 + place % 3), 1e8 * (1 + 7 * (place % 2)))
        for place, pair in enumerate(pairs)
    }
    return replace(cluster_of(*nodes), links=links)


def test_every_strategy_has_a_help_line_and_a_method() -> None:
    assert set(STRATEGIES) == set(METHODS) == set(get_args(Strategy))


def test_memory_divides_layers_by_memory() -> None:
    nodes = [node_of("a", 8), node_of("b", 8), node_of("c", 16)]
    assert counts(place(model_of(28), cluster_of(*nodes), plan_request(strategy="memory"))) == [7, 7, 14]


def test_custom_follows_the_proportions() -> None:
    cluster = cluster_of(node_of("a"), node_of("b"))
    assert counts(place(model_of(28), cluster, plan_request(strategy="custom", proportions=(0.7, 0.3)))) == [
        20,
        8,
    ]
    assert counts(place(model_of(28), cluster, plan_request(strategy="custom", counts=(5, 23)))) == [5, 23]


def test_uniform_divides_evenly_and_compute_and_balanced_by_speed() -> None:
    cluster = cluster_of(node_of("a", gb_s=100), node_of("b", gb_s=300))
    assert counts(place(model_of(28), cluster, plan_request(strategy="uniform"))) == [14, 14]
    assert counts(place(model_of(28), cluster, plan_request(strategy="compute"))) == [7, 21]
    assert counts(place(model_of(28), cluster, plan_request(strategy="balanced"))) == [7, 21]


def test_balanced_gives_other_machines_the_layers_that_one_cannot_hold() -> None:
    cluster = cluster_of(node_of("a", 16, gb_s=100), node_of("b", 1.2, gb_s=800))
    plan = place(model_of(28), cluster, plan_request(strategy="balanced"))
    assert counts(plan)[1] < 12
    assert (
        "its memory is full"
        in place(
            model_of(28),
            cluster_of(node_of("b", 1.2, gb_s=800), node_of("a")),
            plan_request(strategy="balanced"),
        )
        .stages[0]
        .why
    )


def test_auto_leaves_out_a_machine_that_would_slow_it_down() -> None:
    plan = place(
        model_of(28), cluster_of(node_of("slow", gb_s=20), node_of("fast", gb_s=400)), plan_request()
    )
    assert [stage.node for stage in plan.stages] == ["fast"]
    (left,) = plan.left_out
    assert left.node == "slow"
    assert left.why == "no plan with it answers a request sooner"


@given(
    NODES,
    st.integers(1, 6),
    st.sampled_from([1, 600, 2048, 16_384]),
    st.sampled_from([1, 16, 256]),
    st.booleans(),
)
@examples(1)
def test_auto_answers_a_request_soonest_of_all_pipelines(
    nodes: list[NodeProfile],
    layers: int,
    prompt: int,
    answer: int,
    has_long: bool,  # noqa: FBT001 - Hypothesis gives it by place
) -> None:
    model = model_of(layers, layer_bytes=400_000_000, head_bytes=100_000_000)
    request = plan_request(prompt_tokens=prompt, answer_tokens=answer)
    cluster = with_unlike_links(on_gpus(nodes) if has_long else nodes)
    model = with_experts(model) if has_long else model
    soonest = min(costs_of_all(model, cluster, request), default=np.inf)
    if np.isinf(soonest):
        with pytest.raises(PlanError):
            place(model, cluster, request)
        return
    assert place(model, cluster, request).prediction.request_s <= 1.001 * soonest


@given(
    NODES.filter(lambda nodes: len(nodes) <= 4),
    st.integers(1, 6),
    st.sampled_from([1, 600, 2048, 16_384]),
    st.sampled_from([1, 16, 1024]),
    st.sampled_from([2, 3, 4, 16, 64]),
    st.sampled_from(["latency", "first-token", "throughput"]),
)
@examples(0.5)
def test_auto_answers_several_users_soonest_of_all_pipelines(
    nodes: list[NodeProfile], layers: int, prompt: int, answer: int, users: int, objective: Objective
) -> None:
    model = with_experts(model_of(layers, layer_bytes=400_000_000, head_bytes=100_000_000))
    nodes = on_gpus(nodes) if layers % 2 else nodes
    request = plan_request(
        demand=Demand(1024, users),
        objective=objective,
        prompt_tokens=prompt,
        answer_tokens=answer,
        users=users,
    )
    cluster = with_unlike_links(nodes)
    best = min(costs_of_all(model, cluster, request), default=np.inf)
    if np.isinf(best):
        reject()
    assert place(model, cluster, request).prediction.minimized_s(objective) <= 1.001 * best


def random_problem(seed: int) -> tuple[ModelProfile, ClusterProfile, PlanRequest]:
    """Return a small model, up to five machines and any request."""
    numbers = random.Random(seed)
    count = numbers.randint(1, 5)
    nodes = [
        node_of(
            f"n{place}",
            numbers.choice([numbers.uniform(0.8, 3), numbers.uniform(2, 16)]),
            gb_s=numbers.uniform(20, 800),
            tflops=numbers.uniform(0.5, 30),
        )
        for place in range(count)
    ]
    model = model_of(
        numbers.randint(1, 7 if count > 4 else 9),
        layer_bytes=numbers.choice([100, 400]) * 10**6,
        head_bytes=numbers.choice([0, 100_000_000]),
    )
    links = {
        frozenset(pair): LinkProfile(
            numbers.choice([15e-6, 1e-4, 3e-4, 2e-3]), numbers.choice([1e8, 1e9, 5e9])
        )
        for pair in combinations([node.name for node in nodes], 2)
    }
    users = numbers.choice([1, 1, 1, 2, 3, 4, 16, 64])
    request = plan_request(
        demand=Demand(1024, users),
        objective=numbers.choice(["latency", "first-token", "throughput"]),
        prompt_tokens=numbers.choice([1, 64, 600, 2048, 16_384]),
        answer_tokens=numbers.choice([1, 16, 256, 1024]),
        users=users,
    )
    return model, replace(cluster_of(*nodes), links=links), request


@pytest.mark.parametrize("seed", [*range(8), 50312, 90460, 90882, 91340])
def test_small_clusters_get_the_best_of_all_pipelines(seed: int) -> None:
    model, cluster, request = random_problem(seed)
    best = min(costs_of_all(model, cluster, request), default=np.inf)
    if np.isinf(best):
        with pytest.raises(PlanError):
            place(model, cluster, request)
    else:
        found = place(model, cluster, request).prediction.minimized_s(request.objective)
        assert found <= 1.001 * best


def test_the_last_of_several_users_waits_for_the_prompts_of_all() -> None:
    model, cluster = model_of(28), cluster_of(node_of("a"))
    one, four = (
        place(model, cluster, plan_request(demand=Demand(1024, users), users=users)).prediction
        for users in (1, 4)
    )
    assert four.first_token_s - four.token_s == pytest.approx(4 * (one.first_token_s - one.token_s))
    assert four.request_s == pytest.approx(four.first_token_s + four.answer_tokens * four.token_s)
    assert one.token_s < four.token_s < 4 * one.token_s


@given(NODES, st.integers(1, 6))
@examples(0.5)
def test_memory_leaves_the_fullest_machine_as_empty_as_any_pipeline(
    nodes: list[NodeProfile], layers: int
) -> None:
    model = model_of(layers, layer_bytes=400_000_000, head_bytes=100_000_000)
    request, cluster = plan_request(objective="memory"), cluster_of(*nodes)
    times = Timetable(model, cluster, request.demand)
    filled = [times.costs.memory(node) / node.usable_bytes for node in nodes]
    emptiest = min(
        (
            max(float(filled[piece.node][piece.first, piece.end]) for piece in pieces)
            for pieces in every_partition(filled, orders(len(nodes), range(1, len(nodes) + 1)))
        ),
        default=np.inf,
    )
    if emptiest > 1:
        reject()
    plan = place(model, cluster, request)
    assert fullest(plan) <= emptiest + 0.011
    assert plan.remarks == (f"The fullest machine is {fullest(plan):.0%} full.",)


def unlike_nodes(numbers: random.Random) -> list[NodeProfile]:
    """Return eleven machines, each of its own kind."""
    return [
        node_of(
            f"n{place}", numbers.uniform(2, 16), gb_s=numbers.uniform(50, 800), tflops=numbers.uniform(1, 30)
        )
        for place in range(11)
    ]


@pytest.mark.parametrize("objective", get_args(Objective))
@pytest.mark.parametrize("seed", range(4))
def test_many_unlike_machines_are_planned_no_worse_than_the_fastest_of_them_or_in_order(
    seed: int, objective: Objective
) -> None:
    nodes = unlike_nodes(random.Random(seed))
    model, cluster = model_of(32, layer_bytes=60_000_000), with_unlike_links(nodes)
    request = plan_request(objective=objective, demand=Demand(1024, 8), prompt_tokens=2048)
    plan = place(model, cluster, request)
    fastest = sorted(nodes, key=lambda node: -node.bandwidth)[:4]
    others = [
        place(model, replace(cluster, nodes=tuple(fastest)), request),
        place(model, cluster, replace(request, strategy="balanced")),
    ]
    if objective == "memory":
        assert fullest(plan) <= min(map(fullest, others)) + 0.01
    else:
        seconds = [each.prediction.minimized_s(objective) for each in others]
        assert plan.prediction.minimized_s(objective) <= 1.001 * min(seconds)


@pytest.mark.parametrize("prompt", [1024, 32_000])
def test_auto_is_no_slower_than_equal_layers_over_equal_machines(prompt: int) -> None:
    model, cluster = model_of(80), cluster_of(*map(node_of, "ab"), link=LinkProfile(50e-6, 5e9))
    auto, uniform = (
        place(model, cluster, plan_request(prompt_tokens=prompt, strategy=strategy)).prediction
        for strategy in ("auto", "uniform")
    )
    assert auto.request_s <= 1.001 * uniform.request_s


def test_a_long_prompt_uses_machines_that_an_answer_would_leave_out() -> None:
    cluster = cluster_of(*map(node_of, "ab"), link=LinkProfile(1e-3, 5e9))
    answer = plan_request(prompt_tokens=512, answer_tokens=1000)
    assert place(model_of(28), cluster, answer).kind == "single"
    prompt = plan_request(prompt_tokens=16_384, objective="first-token")
    assert place(model_of(28), cluster, prompt).kind == "pipeline"


@pytest.mark.slow
def test_sixty_four_machines_are_planned_and_a_slow_one_is_left_out() -> None:
    nodes = [node_of(f"node-{place}", 3) for place in range(63)]
    cluster = cluster_of(*nodes, node_of("slow", 3, gb_s=2), link=LinkProfile(50e-6, 5e9))
    plan = place(model_of(128), cluster, plan_request(prompt_tokens=8192))
    assert sum(counts(plan)) == 128
    assert "slow" in {left.node for left in plan.left_out}
    assert all(stage.memory_bytes <= stage.usable_bytes for stage in plan.stages)


def test_auto_for_throughput_uses_every_machine_that_helps() -> None:
    cluster = cluster_of(node_of("a"), node_of("b"), link=LinkProfile(0.1e-3, 1e9))
    many = Demand(context_tokens=1024, sequences=16)
    plan = place(model_of(28), cluster, plan_request(objective="throughput", demand=many))
    assert len(plan.stages) == 2
    alone = place(model_of(28), cluster_of(node_of("a")), plan_request(objective="throughput", demand=many))
    assert plan.prediction.tokens_per_s > 1.1 * alone.prediction.tokens_per_s


def test_a_single_machine_that_would_be_faster_is_named() -> None:
    cluster = cluster_of(node_of("a", gb_s=400), node_of("b", gb_s=20))
    (remark,) = place(model_of(28), cluster, plan_request(strategy="uniform")).remarks
    assert remark.startswith("a alone would be faster for a single stream")


@given(
    NODES,
    st.sampled_from([one for one in STRATEGIES if one != "custom"]),
    st.integers(1, 8),
    st.integers(256, 32_768),
)
@examples(1.5)
def test_memory_is_never_exceeded_and_every_layer_is_placed_once(
    nodes: list[NodeProfile], strategy: Any, sequences: int, context: int
) -> None:
    model = model_of(12, layer_bytes=150_000_000, kv_bytes=16_384, head_bytes=200_000_000)
    demand = Demand(context_tokens=context, sequences=sequences)
    try:
        plan = place(model, cluster_of(*nodes), plan_request(strategy=strategy, demand=demand))
    except PlanError:
        reject()
    assert [layer for stage in plan.stages for layer in range(stage.layers.start, stage.layers.end)] == list(
        range(12)
    )
    assert all(stage.memory_bytes <= stage.usable_bytes for stage in plan.stages)
    assert sum(stage.weight_bytes for stage in plan.stages) >= model.weight_bytes
    for stage in plan.stages:
        assert stage.ranks[0].node == stage.node
        assert sum(rank.share for rank in stage.ranks) == pytest.approx(1)
        assert sum(rank.weight_bytes for rank in stage.ranks) == stage.weight_bytes
        assert all(rank.memory_bytes <= rank.usable_bytes for rank in stage.ranks)
    assert {stage.node for stage in plan.stages} | {left.node for left in plan.left_out} == {
        node.name for node in nodes
    }


def fullest(plan: Plan) -> float:
    """Return the used share of the fullest machine's memory."""
    return max(rank.memory_bytes / rank.usable_bytes for stage in plan.stages for rank in stage.ranks)


@given(NODES, st.sampled_from(get_args(Objective)))
@examples(0.6)
def test_no_strategy_is_better_than_auto_at_its_objective(
    nodes: list[NodeProfile], objective: Objective
) -> None:
    model, cluster = model_of(12), cluster_of(*nodes)

    def counted(strategy: Strategy) -> float:
        try:
            plan = place(model, cluster, plan_request(strategy=strategy, objective=objective))
        except PlanError:
            return float("inf")
        return fullest(plan) if objective == "memory" else plan.prediction.minimized_s(objective)

    best = counted("auto")
    others = min(counted(strategy) for strategy in ("uniform", "memory", "compute", "balanced"))
    # The search is within a hundredth of the memory, and within a thousandth of the time.
    assert best <= (others + 0.01 if objective == "memory" else others * 1.001)


def test_the_error_for_a_small_cluster_names_a_context_that_fits() -> None:
    model = model_of(28, kv_bytes=8_000)
    demand = Demand(context_tokens=16_384, sequences=4)
    with pytest.raises(PlanError) as caught:
        place(model, cluster_of(node_of("a", 6), node_of("b", 6)), plan_request(demand=demand))
    error = str(caught.value)
    assert "are missing. This fits: " in error
    context = int(error.partition("a context of ")[2].split()[0])
    cluster = cluster_of(node_of("a", 6), node_of("b", 6))
    place(model, cluster, plan_request(demand=Demand(context, 4)))
    with pytest.raises(PlanError):
        place(model, cluster, plan_request(demand=Demand(context + 256, 4)))


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"strategy": "custom", "counts": (5, 5)}, "which is 10 of 28"),
        ({"strategy": "custom", "proportions": (1.0,)}, "2 machines; 1 were given"),
        ({"strategy": "custom", "proportions": (1.0, -1.0)}, "must be more than 0"),
        ({"demand": Demand(100_000, 1)}, "32768 at most"),
    ],
)
def test_a_request_that_contradicts_itself_is_refused(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(PlanError, match=sentence):
        place(model_of(28), cluster_of(node_of("a"), node_of("b")), plan_request(**options))


def test_a_lone_machine_is_compared_with_a_split_and_the_flag_for_one_is_named() -> None:
    cluster = cluster_of(node_of("a"), node_of("b"), link=LinkProfile(20e-3, 1e7))
    plan = place(model_of(28), cluster, plan_request())
    assert len(plan.stages) == 1
    (remark,) = plan.remarks
    split = place(model_of(28), cluster, plan_request(strategy="balanced"))
    assert f"instead of {split.prediction.request_s:.2f} with 2 machines" in remark
    assert "`--strategy balanced`" in remark


def test_a_lone_machine_is_compared_by_what_the_objective_maximizes() -> None:
    cluster = cluster_of(node_of("a"), node_of("b"), link=LinkProfile(20e-3, 1e7))
    demand = Demand(1024, 2)
    plan = place(model_of(28), cluster, plan_request(objective="throughput", demand=demand))
    split = place(model_of(28), cluster, plan_request(strategy="balanced", demand=demand))
    assert len(plan.stages) == 1
    one, both = plan.prediction.tokens_per_s, split.prediction.tokens_per_s
    assert one > both
    assert f"highest throughput: {one:.1f} tokens/s instead of {both:.1f} with 2 machines" in plan.remarks[0]


def test_a_split_is_compared_with_the_fastest_machine_alone_if_one_has_the_memory() -> None:
    near = LinkProfile(20e-6, 5e9)
    (gain,) = place(
        model_of(28), cluster_of(node_of("a"), node_of("b"), link=near), plan_request(strategy="uniform")
    ).remarks
    assert "alone would" in gain
    small = cluster_of(node_of("a", 2), node_of("b", 2), link=near)
    assert place(model_of(28), small, plan_request()).remarks[0] == "No machine alone has the memory for it."
