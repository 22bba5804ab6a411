"""Number of replicas of a model, and their machines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations, pairwise
from random import Random

import pytest
from hypothesis import given, reject
from hypothesis import strategies as st
from tests.examples import examples
from tests.planner.clusters import NODES, cluster_of, known_sizes, model_of, node_of

from mlx_ring.core.errors import PlanError
from mlx_ring.planner.catalogue import known_profile
from mlx_ring.planner.pipeline import PipelineBounds
from mlx_ring.planner.place import place, place_if_it_fits
from mlx_ring.planner.plan import Plan
from mlx_ring.planner.profiles import ClusterProfile, CpuQuota, ModelProfile, NodeProfile, StepRatios
from mlx_ring.planner.replicas import place_replicas, total_tokens_per_s
from mlx_ring.planner.request import Demand, PlanRequest
from mlx_ring.planner.stage_costs import Table
from mlx_ring.rpc.link_profile import LinkProfile

THROUGHPUT = PlanRequest(Demand(context_tokens=1024, sequences=16), objective="throughput")


def nodes_of(plans: tuple[Plan, ...]) -> list[set[str]]:
    return [{stage.node for stage in plan.stages} for plan in plans]


def test_for_throughput_every_machine_that_holds_the_model_gets_a_replica() -> None:
    plans = place_replicas(model_of(28), cluster_of(*map(node_of, "abc")), THROUGHPUT, None)
    assert nodes_of(plans) == [{"a"}, {"b"}, {"c"}]
    assert all(plan.sequences == 6 for plan in plans), "sixteen divided by three"


@pytest.mark.parametrize("sequences", [4, 16, 64])
@pytest.mark.parametrize("machines", [2, 3, 4])
def test_over_slow_links_no_other_number_of_replicas_is_faster(machines: int, sequences: int) -> None:
    cluster = cluster_of(
        *(node_of(f"n{place}", 64, gb_s=400, tflops=20) for place in range(machines)),
        link=LinkProfile(5e-3, 4e7),
    )
    model, request = model_of(28), replace(THROUGHPUT, demand=Demand(1024, sequences))

    def throughput(count: int | None) -> float:
        return total_tokens_per_s(place_replicas(model, cluster, request, count), sequences)

    # One more replica must be worth 2 %.
    assert 1.02 * throughput(None) >= max(throughput(count) for count in range(1, machines + 1))


@pytest.mark.parametrize("names", [("m4-max-128",) * 2, ("rtx-3090-24", "m4-max-64", "linux-desktop-64")])
def test_one_more_sequence_does_not_lower_the_throughput_of_replicas(names: tuple[str, ...]) -> None:
    """Expect that only one of them gets it."""
    cluster = cluster_of(*(known_profile(name, f"n{place}") for place, name in enumerate(names)))
    model = known_sizes("llama-8b", cluster)
    speeds: list[float] = []
    for sequences in range(len(names), 9):
        request = replace(THROUGHPUT, demand=Demand(1024, sequences))
        plans = place_replicas(model, cluster, request, len(names))
        speeds.append(total_tokens_per_s(plans, sequences))
    assert all(more >= fewer for fewer, more in pairwise(speeds))


@pytest.mark.parametrize("sequences", [11, 15])
def test_of_many_machines_each_gets_a_replica_although_few_get_one_more_sequence(sequences: int) -> None:
    cluster = cluster_of(*(known_profile("m4-max-128", f"n{place}") for place in range(10)))
    model, request = known_sizes("llama-8b", cluster), replace(THROUGHPUT, demand=Demand(1024, sequences))
    chosen, each = (
        total_tokens_per_s(place_replicas(model, cluster, request, count), sequences) for count in (None, 10)
    )
    ten = replace(request, demand=Demand(1024, 10))
    assert chosen >= each > total_tokens_per_s(place_replicas(model, cluster, ten, None), 10)


def test_machines_like_others_are_named_in_their_own_replica() -> None:
    cluster = cluster_of(*(node_of(f"n{place}", 2) for place in range(12)), link=LinkProfile(1e-4, 1e9))
    plans = place_replicas(model_of(28), cluster, replace(THROUGHPUT, demand=Demand(1024, 6)), None)
    assert len(plans) > 1
    names = [name for each in nodes_of(plans) for name in each]
    assert len(names) == len(set(names))
    assert set(names) <= {node.name for node in cluster.nodes}
    assert "\N{SYMBOL FOR NULL}" not in repr(plans)


def test_too_many_replicas_of_many_machines_are_refused_with_the_number_that_fits() -> None:
    cluster = cluster_of(*(node_of(f"n{place}", 2) for place in range(12)))
    with pytest.raises(
        PlanError, match=r"12 machines cannot hold 12 replicas of made-up, but they can hold \d"
    ):
        place_replicas(model_of(28), cluster, THROUGHPUT, 12)


def test_for_latency_there_is_one_replica() -> None:
    request = PlanRequest(Demand(context_tokens=1024, sequences=1))
    assert len(place_replicas(model_of(28), cluster_of(*map(node_of, "abc")), request, None)) == 1


def test_machines_that_hold_the_model_only_together_are_one_replica() -> None:
    whole = place(model_of(28), cluster_of(node_of("big", 64)), THROUGHPUT).stages[0].memory_bytes / 1e9
    half = 0.7 * whole
    cluster = cluster_of(node_of("a", half), node_of("big", 64), node_of("b", half))
    plans = place_replicas(model_of(28), cluster, THROUGHPUT, 2)
    assert sorted(map(sorted, nodes_of(plans))) == [["a", "b"], ["big"]]


def test_more_replicas_than_machines_or_memory_are_refused_with_the_reason() -> None:
    with pytest.raises(PlanError, match="3 replicas were requested, but there are 2 machines"):
        place_replicas(model_of(28), cluster_of(*map(node_of, "ab")), THROUGHPUT, 3)
    whole = place(model_of(28), cluster_of(node_of("big", 64)), THROUGHPUT).stages[0].memory_bytes / 1e9
    small = cluster_of(node_of("a", 0.7 * whole), node_of("b", 0.7 * whole))
    with pytest.raises(PlanError, match="cannot hold 2 replicas"):
        place_replicas(model_of(28), small, THROUGHPUT, 2)
    with pytest.raises(PlanError, match="strategy auto"):
        place_replicas(
            model_of(28), small, PlanRequest(THROUGHPUT.demand, strategy="uniform", objective="throughput"), 2
        )


def test_too_many_replicas_are_refused_with_the_number_that_fits() -> None:
    whole = place(model_of(28), cluster_of(node_of("big", 64)), THROUGHPUT).stages[0].memory_bytes / 1e9
    cluster = cluster_of(node_of("a", 2 * whole), node_of("b", 2 * whole), node_of("c", 0.1 * whole))
    with pytest.raises(PlanError, match="cannot hold 3 replicas of made-up, but they can hold 2"):
        place_replicas(model_of(28), cluster, THROUGHPUT, 3)


def test_one_replica_equals_the_plan_of_place() -> None:
    cluster = cluster_of(*map(node_of, "ab"))
    assert place_replicas(model_of(28), cluster, THROUGHPUT, 1) == (place(model_of(28), cluster, THROUGHPUT),)


@examples(0.25)
@given(NODES.filter(lambda nodes: 2 <= len(nodes) <= 4), st.integers(1, 12))
def test_no_pair_of_single_machines_has_a_higher_throughput(nodes: list[NodeProfile], sequences: int) -> None:
    cluster, model = cluster_of(*nodes), model_of(12)
    request = PlanRequest(Demand(context_tokens=512, sequences=sequences), objective="throughput")
    try:
        plans = place_replicas(model, cluster, request, 2)
    except PlanError:
        reject()
    names = nodes_of(plans)
    assert not names[0] & names[1], "each has its own machines"
    assert all(stage.memory_bytes <= stage.usable_bytes for plan in plans for stage in plan.stages)
    share = PlanRequest(Demand(context_tokens=512, sequences=-(-sequences // 2)), objective="throughput")
    total = sum(plan.prediction.tokens_per_s for plan in plans)
    for pair in combinations(nodes, 2):
        try:
            singles = [place(model, cluster_of(node), share) for node in pair]
        except PlanError:
            continue
        # The bound by the slowest stage ignores hops, so a pipeline can be a little below it.
        assert total >= 0.9 * sum(plan.prediction.tokens_per_s for plan in singles)


@examples(0.25)
@given(
    NODES,
    st.integers(1, 12),
    st.sampled_from((0.0, 0.005)),
    st.sampled_from((1.0, 3.0)),
    st.sampled_from((None, CpuQuota(0.5, 0.1))),
)
def test_no_pipeline_exceeds_the_bound_of_its_machines(
    nodes: list[NodeProfile], sequences: int, overhead_s: float, ratio: float, quota: CpuQuota | None
) -> None:
    model, request = model_of(12), replace(THROUGHPUT, demand=Demand(512, sequences))
    learned = StepRatios(decode=ratio, overhead_s=overhead_s)
    nodes = [replace(nodes[0], ratios=learned, cpu_quota=quota), *nodes[1:]]
    nodes = [replace(node, ratios=replace(node.ratios, overhead_s=overhead_s)) for node in nodes]
    try:
        plan = place(model, cluster_of(*nodes), request)
    except PlanError:
        reject()
    kinds = [[number] for number in range(len(nodes))]
    bounds = PipelineBounds(model, cluster_of(*nodes), kinds, request)
    bound = bounds.tokens_per_s(tuple(range(len(nodes))), sequences)
    assert plan.prediction.tokens_per_s <= bound * (1 + 1e-9)


def test_of_many_machines_alike_ones_become_replicas_of_the_same_size() -> None:
    model = model_of(28)
    one = place(model, cluster_of(node_of("big", 64)), THROUGHPUT).stages[0]
    for memory, size in ((64.0, 1), (0.6 * one.memory_bytes / 1e9, 2)):
        cluster = cluster_of(*(node_of(f"n{number}", memory) for number in range(100)))
        request = PlanRequest(Demand(context_tokens=1024, sequences=400), objective="throughput")
        plans = place_replicas(model, cluster, request, None)
        names = [name for each in nodes_of(plans) for name in each]
        assert len(names) == len(set(names)) == 100
        assert [len(each) for each in nodes_of(plans)] == [size] * (100 // size)
        assert sum(plan.sequences for plan in plans) >= 400


def test_a_number_of_replicas_of_many_machines_is_kept_or_refused() -> None:
    model = model_of(28)
    cluster = cluster_of(*(node_of(f"n{number}") for number in range(12)))
    assert len(place_replicas(model, cluster, THROUGHPUT, 3)) == 3
    half = 0.6 * model.weight_bytes / 1e9
    small = cluster_of(*(node_of(f"n{number}", half) for number in range(12)))
    with pytest.raises(PlanError, match="12 machines cannot hold 9 replicas"):
        place_replicas(model, small, THROUGHPUT, 9)


def test_of_many_unequal_machines_small_ones_join_and_useless_ones_are_left_out() -> None:
    model = model_of(28)
    whole = place(model, cluster_of(node_of("big", 64)), THROUGHPUT).stages[0].memory_bytes / 1e9
    sizes = [64.0] * 5 + [0.7 * whole] * 6 + [0.001]
    cluster = cluster_of(*(node_of(f"n{number}", memory) for number, memory in enumerate(sizes)))
    plans = place_replicas(model, cluster, THROUGHPUT, None)
    used = {name for each in nodes_of(plans) for name in each}
    assert "n11" not in used
    assert used >= {f"n{number}" for number in range(5)}
    assert all(stage.memory_bytes <= stage.usable_bytes for plan in plans for stage in plan.stages)


def test_the_error_of_many_machines_without_room_for_a_replica_says_what_is_missing() -> None:
    cluster = cluster_of(*(node_of(f"n{number}", 0.2) for number in range(10)))
    with pytest.raises(PlanError, match="GB are missing"):
        place_replicas(model_of(28), cluster, THROUGHPUT, None)


def test_few_replicas_of_many_unlike_machines_are_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Count the plans of machines of which no two are alike, and most are too small for a replica."""
    planned = list[int]()

    def counted(
        model: ModelProfile, cluster: ClusterProfile, request: PlanRequest, *, explains: bool = True
    ) -> Plan | None:
        planned.append(len(cluster.nodes))
        return place_if_it_fits(model, cluster, request, explains=explains)

    monkeypatch.setattr("mlx_ring.planner.many_machines.place_if_it_fits", counted)
    numbers = Random(4)
    nodes = [
        node_of(f"n{place}", numbers.uniform(1, 4), gb_s=numbers.uniform(50, 800)) for place in range(16)
    ]
    plans = place_replicas(model_of(28), cluster_of(*nodes), THROUGHPUT, None)
    assert len(plans) > 1
    assert len(planned) <= 12 + 2 * len(plans)


def test_moves_of_a_machine_bound_each_replica_once(monkeypatch: pytest.MonkeyPatch) -> None:
    computed, compute = Counter[tuple[object, int]](), PipelineBounds.seconds

    def counted(self: PipelineBounds, sets: Sequence[tuple[int, ...]], share: int) -> Table:
        computed.update((kinds, share) for kinds in sets)
        return compute(self, sets, share)

    monkeypatch.setattr(PipelineBounds, "seconds", counted)
    whole = place(model_of(28), cluster_of(node_of("big", 64)), THROUGHPUT).stages[0].memory_bytes / 1e9
    nodes = [
        node_of(f"n{number}", (0.4 + number / 30) * whole, gb_s=100 + 9 * number) for number in range(10)
    ]
    assert place_replicas(model_of(28), cluster_of(*nodes), THROUGHPUT, None)
    assert computed
    assert set(computed.values()) == {1}
