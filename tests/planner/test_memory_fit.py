"""Room in a cluster's memory: whether a model fits, how often, and what is missing."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.planner.clusters import cluster_of, known_cluster, known_sizes, node_of, shared_model, trusting

from mlx_ring.core.errors import PlanError
from mlx_ring.planner.memory_fit import MOST_USERS, explain_shortage, fits, room_for
from mlx_ring.planner.place import place
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
