"""Room in a cluster's memory: whether a model fits, how often, and what is missing."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.planner.clusters import (
    cluster_of,
    known_cluster,
    known_sizes,
    model_of,
    node_of,
    shared_model,
    trusting,
)

from mlx_ring.core.errors import PlanError
from mlx_ring.core.types import LayerRange, RankId
from mlx_ring.engine.kv_budget import KvBudget, RankKv
from mlx_ring.planner.forecast import forecast_plan
from mlx_ring.planner.memory_fit import MOST_USERS, explain_shortage, fits, room_for, within_kv_memory
from mlx_ring.planner.place import place, plan_loaded, stages_of
from mlx_ring.planner.plan import Plan
from mlx_ring.planner.profiles import ClusterProfile, ModelProfile
from mlx_ring.planner.request import Demand, PlanRequest
from mlx_ring.rpc.link_profile import LinkProfile
from mlx_ring.settings.strategies import Strategy

CABLE = LinkProfile(2e-5, 5e9)


LARGE_LAYER = shared_model(1, layer_bytes=14 * 10**9)
"""Model whose only layer needs more memory than one machine has."""


TWO = trusting(node_of("a", 10), node_of("b", 10), link=CABLE)


def test_what_only_several_machines_together_hold_fits() -> None:
    request = PlanRequest(Demand(1024, 1))
    assert place(LARGE_LAYER, TWO, request).kind == "tensor"
    assert fits(LARGE_LAYER, TWO, request)
    assert not fits(LARGE_LAYER, TWO, replace(request, allows_tensor=False))
    assert not fits(LARGE_LAYER, cluster_of(*(replace(node, trusted=False) for node in TWO.nodes)), request)


def test_a_shortage_names_what_machines_hold_together() -> None:
    """Ask for more sequences than fit, where a single one fits by sharing the layer only."""
    request = PlanRequest(Demand(1024, 10_000))
    said = explain_shortage(LARGE_LAYER, TWO, request)
    assert "Even one short sequence does not fit" not in said
    assert " sequence" in said.partition("This fits: ")[2]


@pytest.mark.parametrize("trusted", [True, False])
def test_room_for_sequences_is_what_plans_hold(trusted: bool) -> None:  # noqa: FBT001 - a case
    nodes = (node_of("a", 6), node_of("b", 4), node_of("c", 5))
    cluster = trusting(*nodes, link=CABLE) if trusted else cluster_of(*nodes, link=CABLE)
    model = shared_model(5, layer_bytes=2 * 10**9)
    request = PlanRequest(Demand(4096, 1), objective="throughput")
    room = room_for(model, cluster, request)

    def demand(sequences: int) -> PlanRequest:
        return replace(request, demand=replace(request.demand, sequences=sequences))

    place(model, cluster, demand(room))
    with pytest.raises(PlanError):
        place(model, cluster, demand(room + 1))
    assert 1 <= room_for(model, cluster, request, is_quick=True) <= room


def test_one_machine_is_named_in_the_singular() -> None:
    said = explain_shortage(LARGE_LAYER, cluster_of(node_of("a", 10)), PlanRequest(Demand(1024, 1)))
    assert "and a has 10.0 GB for it" in said


@pytest.mark.parametrize(
    "names",
    [
        ["m4-pro-48"],
        ["m4-pro-48", "m4-16"],
        ["m4-24", "m4-16", "m4-pro-48"],
        ["m4-16", "m4-24", "m4-pro-48", "m4-pro-24", "m4-32"],
    ],
)
@pytest.mark.parametrize("strategy", ["auto", "uniform"])
def test_as_many_users_are_counted_as_the_strategy_can_place(names: list[str], strategy: Strategy) -> None:
    machines = known_cluster(*names)
    model = known_sizes("14b-4bit", machines)
    request = PlanRequest(Demand(8192, 1), strategy=strategy, objective="throughput")
    users = room_for(model, machines, request)
    place(model, machines, replace(request, demand=Demand(8192, users)))
    with pytest.raises(PlanError):
        place(model, machines, replace(request, demand=Demand(8192, users + 1)))


def test_users_are_counted_up_to_a_limit() -> None:
    machines = known_cluster("m3-ultra-512")
    request = PlanRequest(Demand(256, 1), objective="throughput")
    assert room_for(known_sizes("qwen3-0.6b", machines), machines, request) == MOST_USERS


def test_a_model_with_states_fits_as_often_as_a_plan_holds_them() -> None:
    machines = known_cluster("m4-pro-48")
    model = known_sizes("qwen3.5-9b", machines)
    request = PlanRequest(Demand(1024, 1, kv_bits=4), objective="throughput")
    users = room_for(model, machines, request)
    place(model, machines, replace(request, demand=Demand(1024, users, 4)))
    if users < MOST_USERS:
        with pytest.raises(PlanError):
            place(model, machines, replace(request, demand=Demand(1024, users + 1, 4)))


def test_users_are_counted_quickly_where_no_order_of_machines_holds_more() -> None:
    machines = known_cluster("m4-24", "m4-16", "m4-pro-48")
    request = PlanRequest(Demand(8192, 1), objective="throughput")
    model = known_sizes("14b-4bit", machines)
    assert room_for(model, machines, request, is_quick=True) == room_for(model, machines, request)


def test_a_model_that_cannot_quantize_its_kv_is_planned_and_advised_without() -> None:
    machines = known_cluster("m4-16")
    model = replace(known_sizes("8b-4bit", machines), quantizes_kv=False)
    with pytest.raises(PlanError, match=r"8 bits was requested; .* cannot use a quantized one\."):
        place(model, machines, PlanRequest(Demand(1024, 1, kv_bits=8)))
    too_much = PlanRequest(Demand(12288, 4))
    assert "KV of" not in explain_shortage(model, machines, too_much)
    assert "KV of" in explain_shortage(replace(model, quantizes_kv=True), machines, too_much)


# ---- a given KV memory

MB = 10**6
SMALL = model_of(8)
"""Model with 33 MB of KV for 1,000 tokens, in whole blocks."""


def admitted(model: ModelProfile, cluster: ClusterProfile, demand: Demand, plan: Plan) -> int:
    """Return how many of the plan's sequences the engine's account of KV memory admits."""
    _, rooms = forecast_plan(model, cluster, demand, plan)
    budget = KvBudget(
        {
            RankId(stage, rank): RankKv(*room)
            for stage, ranks in enumerate(rooms)
            for rank, room in enumerate(ranks)
        }
    )
    count = 0
    while budget.fits(demand.context_tokens, count):
        budget.charge(count, demand.context_tokens)
        count += 1
    return count


@pytest.mark.parametrize("given", [50 * MB, 333 * MB, 2000 * MB])
@pytest.mark.parametrize("machines", [1, 2, 3])
def test_as_many_users_fit_into_a_given_kv_memory_as_the_engine_admits(given: int, machines: int) -> None:
    cluster = cluster_of(*(node_of(f"node-{place}", 4) for place in range(machines)), link=CABLE)
    request = PlanRequest(Demand(1000, 1, kv_memory_bytes=given), objective="throughput")
    users = room_for(SMALL, cluster, request)
    full = replace(request, demand=replace(request.demand, sequences=users))
    plan = place(SMALL, cluster, full)
    assert admitted(SMALL, cluster, full.demand, plan) == users
    whole = 8 * 4096 * 1024
    assert users == given * 8 // (whole * -(-8 // machines))
    for stage in plan.stages:
        assert stage.memory_bytes >= stage.weight_bytes + given
    with pytest.raises(PlanError, match="does not fit with a KV cache of"):
        place(SMALL, cluster, replace(full, demand=replace(full.demand, sequences=users + 1)))


def test_ranks_that_share_layers_each_have_the_given_kv_memory() -> None:
    """Give each of two ranks half of the KV of 100 sequences, and a little more for heads that no rank has a half of."""
    given = 55 * 4 * 1024 * 1024
    request = PlanRequest(Demand(1024, 100, kv_memory_bytes=given))
    plan = place(LARGE_LAYER, TWO, request)
    assert plan.kind == "tensor"
    assert admitted(LARGE_LAYER, TWO, request.demand, plan) >= 100
    assert not fits(LARGE_LAYER, TWO, replace(request, demand=replace(request.demand, sequences=111)))


def test_a_given_kv_memory_that_no_machine_has_beside_the_weights_is_refused() -> None:
    cluster = cluster_of(node_of("a", 4))
    request = PlanRequest(Demand(1000, 1, kv_memory_bytes=3500 * MB))
    with pytest.raises(PlanError, match=r"KV cache of 3\.5 GB .* leaves every worker that much .* a smaller"):
        place(SMALL, cluster, request)
    place(SMALL, cluster, replace(request, demand=replace(request.demand, kv_memory_bytes=2000 * MB)))


def test_a_context_for_which_the_given_kv_memory_is_too_small_is_refused_with_what_fits() -> None:
    cluster = cluster_of(node_of("a", 4))
    request = PlanRequest(Demand(4000, 1, kv_memory_bytes=100 * MB))
    said = (
        "does not fit with a KV cache of 100 MB for each worker: give a larger --kv-cache-memory. This fits: "
    )
    with pytest.raises(PlanError, match=said) as refused:
        place(SMALL, cluster, request)
    assert "a context of 2816 tokens" in str(refused.value)
    loaded = stages_of(place(SMALL, cluster, replace(request, demand=Demand(4000, 1))))
    assert loaded[0][0] == LayerRange(0, 8)
    with pytest.raises(PlanError, match=r"needs 134 MB of KV cache in the worker on a, which has 100 MB"):
        plan_loaded(SMALL, cluster, request, [loaded])


def test_without_a_longest_context_the_promise_is_what_the_given_kv_memory_holds() -> None:
    each = 8 * 4096 * 256
    for given, asked, held in [
        (40 * each, (8192, 4), (8192, 1)),
        (40 * each, (2048, 9), (2048, 5)),
        (40 * each, (2048, 3), (2048, 3)),
        (5 * each, (8192, 4), (1280, 1)),
    ]:
        found = within_kv_memory(SMALL, Demand(*asked, kv_memory_bytes=given), keeps_context=False)
        assert (found.context_tokens, found.sequences) == held
    kept = within_kv_memory(SMALL, Demand(8192, 4, kv_memory_bytes=5 * each), keeps_context=True)
    assert (kept.context_tokens, kept.sequences) == (8192, 1)
    assert within_kv_memory(SMALL, Demand(8192, 4), keeps_context=False) == Demand(8192, 4)
