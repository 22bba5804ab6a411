"""Room in a cluster's memory: whether a model fits, how often, and what is missing."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.planner.clusters import cluster_of, node_of, shared_model, trusting

from mlx_ring.core.errors import PlanError
from mlx_ring.planner.memory_fit import explain_shortage, fits, room_for
from mlx_ring.planner.place import place
from mlx_ring.planner.request import Demand, PlanRequest
from mlx_ring.rpc.link_profile import LinkProfile

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
