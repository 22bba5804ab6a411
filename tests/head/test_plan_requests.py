"""Plan requests made from settings."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tests.profiles import made_up_profile

from mlx_ring.cluster.membership import Member, Membership
from mlx_ring.core.errors import ModelUnsupported, PlanError
from mlx_ring.core.types import LayerRange
from mlx_ring.head import served_model
from mlx_ring.head.plan_requests import (
    measured_cluster,
    plan_request,
    plan_request_for,
    proportional_stages,
)
from mlx_ring.head.served_model import ServedModel
from mlx_ring.head.status import ClusterView
from mlx_ring.host.yielding import Yielding
from mlx_ring.models.model_folder import read_model_folder
from mlx_ring.models.model_source import find_model
from mlx_ring.planner.profiles import NodeProfile
from mlx_ring.planner.request import Demand, PlanRequest
from mlx_ring.rpc.link_profile import LinkProfile
from mlx_ring.settings.config import Settings
from mlx_ring.settings.settings_sources import load_settings

DEMAND = Demand(1024, 1, 16)
CUSTOM = PlanRequest(DEMAND, strategy="custom")


def nodes(*names: str) -> list[NodeProfile]:
    return [NodeProfile(name, 1 << 30, 1e9, 1e9) for name in names]


def served_from(folder: Path) -> ServedModel:
    return ServedModel(
        cast("Any", SimpleNamespace(folder=read_model_folder(folder))), None, cast("Any", None), ("m",)
    )


def custom(proportions: str, count: int) -> Settings:
    return load_settings({"strategy": "custom", "proportions": proportions, "nodes": count})


def test_unnamed_shares_follow_the_order_of_machines() -> None:
    order, request = plan_request_for(custom("0.7,0.3", 2), CUSTOM, nodes("a-1", "b-2"))
    assert [node.name for node in order] == ["a-1", "b-2"]
    assert (request.strategy, request.proportions) == ("custom", (0.7, 0.3))


def test_named_shares_set_the_order_of_machines() -> None:
    order, request = plan_request_for(custom("b-2=0.7,a-1=0.3", 2), CUSTOM, nodes("a-1", "b-2"))
    assert [node.name for node in order] == ["b-2", "a-1"]
    assert request.proportions == (0.7, 0.3)


def test_named_shares_hold_for_the_remaining_machines() -> None:
    order, request = plan_request_for(custom("b-2=0.7,a-1=0.3", 2), CUSTOM, nodes("a-1"))
    assert [node.name for node in order] == ["a-1"]
    assert request.proportions == (0.3,)


def test_unnamed_shares_do_not_hold_for_the_remaining_machines(caplog: pytest.LogCaptureFixture) -> None:
    _, request = plan_request_for(custom("0.7,0.3", 2), CUSTOM, nodes("a-1"))
    assert request.strategy == "auto"
    assert "Proportions were given for 2 machines, but 1 are present" in caplog.text


def test_an_additional_machine_gets_no_part_of_named_shares(caplog: pytest.LogCaptureFixture) -> None:
    order, _ = plan_request_for(custom("a-1=0.7,b-2=0.3", 2), CUSTOM, nodes("a-1", "b-2", "c-3"))
    assert [node.name for node in order] == ["a-1", "b-2"]
    assert "no share for the node c-3" in caplog.text


def test_shares_that_name_other_machines_are_refused() -> None:
    with pytest.raises(PlanError, match="no share for the node b-2; it has for a-1, c-3"):
        plan_request_for(custom("a-1=0.7,c-3=0.3", 2), CUSTOM, nodes("a-1", "b-2"))
    with pytest.raises(PlanError, match="each share must name a node of its own"):
        plan_request_for(custom("a-1=0.7,0.3", 2), CUSTOM, nodes("a-1", "b-2"))


def test_another_strategy_is_kept() -> None:
    assert plan_request_for(
        load_settings({"strategy": "memory"}), PlanRequest(DEMAND, strategy="memory"), nodes("a")
    )[1] == PlanRequest(DEMAND, strategy="memory")


def test_stages_of_one_machine_follow_the_proportions() -> None:
    assert proportional_stages(28, 2, ("0.7", "0.3")) == (LayerRange(0, 20), LayerRange(20, 28))
    with pytest.raises(PlanError, match="a share for each of the 3 stages"):
        proportional_stages(28, 3, ("0.7", "0.3"))


# ---- the machines of a what-if question


def member(node: str, machine: str) -> Member:
    profile = made_up_profile(worker_bytes=10**9)
    return Member(
        node, machine, host="", port=0, head_host="", profile=profile, memory_utilization=0.75, session=1
    )


def view_of(*members: Member) -> ClusterView:
    return ClusterView("n2", Membership({each.node: each for each in members}))


def test_a_measured_cluster_has_readable_names_and_the_head_first(tmp_path: Path) -> None:
    view = view_of(member("n1", "mini"), member("n2", "studio"), member("n3", "mini"))
    fast, slow = LinkProfile(1e-4, 1e9, trusted=True), LinkProfile(1e-3, 1e8)
    links: dict[frozenset[str], LinkProfile] = {
        frozenset(("n1", "n2")): fast,
        frozenset(("n1", "n3")): slow,
        frozenset(("n1", "gone")): slow,
    }
    found = measured_cluster(load_settings({"state_dir": str(tmp_path)}), view, links, {})
    assert [node.name for node in found.nodes] == ["studio", "n1", "n3"]
    assert found.links == {frozenset(("n1", "studio")): fast, frozenset(("n1", "n3")): slow}
    assert found.trusts(found.nodes[0], found.nodes[1])
    assert not found.trusts(found.nodes[1], found.nodes[2])
    assert all(node.is_measured for node in found.nodes)


def test_a_measured_cluster_counts_the_head_and_what_other_models_promise(tmp_path: Path) -> None:
    settings = load_settings({"state_dir": str(tmp_path)})
    view = view_of(member("n1", "mini"), member("n2", "studio"))
    own, other = measured_cluster(settings, view, {}, {}).nodes
    assert own.process_bytes > other.process_bytes == 10**9, "the head's own process"
    _, beside = measured_cluster(settings, view, {}, {"n1": 3 * 10**9}).nodes
    assert other.usable_bytes - beside.usable_bytes == pytest.approx(3 * 10**9, abs=2)


def test_a_machine_that_yields_counts_with_its_share(tmp_path: Path) -> None:
    settings = load_settings({"state_dir": str(tmp_path)})

    def planned(yielding: Yielding | None) -> NodeProfile:
        member = Member("n-1", "n", "", 0, "", made_up_profile(), 0.5, 1, yielding=yielding)
        view = ClusterView("n-1", Membership({"n-1": member}))
        (node,) = measured_cluster(settings, view, {}, {"n-1": 1 << 20}).nodes
        return node

    whole, half = planned(None), planned(Yielding("it is busy", 0.25, 0.5))
    assert (whole.speed_share, half.speed_share) == (1.0, 0.25)
    assert (half.ratios.decode, half.ratios.prefill) == (4.0, 4.0)
    taken = (1 << 20) / 0.5
    assert half.memory_bytes == (whole.memory_bytes + taken) / 2 - taken


def test_a_head_with_a_given_kv_memory_promises_what_that_holds(tiny_model: Path) -> None:
    served = served_from(tiny_model)

    def demand(given: dict[str, object], *, widens: bool = False) -> Demand:
        nodes = [NodeProfile("a", 1 << 30, 1e9, 1e9), NodeProfile("b", 1 << 30, 1e9, 1e9, widens=widens)]
        return plan_request(load_settings(given), served, nodes).demand

    usual = demand({})
    assert usual.chunk_tokens is None
    assert demand({"prefill_chunk": 2048}).chunk_tokens == 2048
    assert demand({"prefill_chunk": 65536, "max_model_len": 4096}).chunk_tokens == 4096
    assert (usual.kv_memory_bytes, usual.sequences) == (None, 1)
    given: dict[str, object] = {"kv_cache_memory": "1MiB"}
    small = demand(given)
    assert small.kv_memory_bytes == 1 << 20
    assert 256 <= small.context_tokens < usual.context_tokens
    assert small.context_tokens % 256 == 0
    asked = demand({**given, "max_model_len": 4096, "expected_users": 2})
    assert (asked.context_tokens, asked.sequences) == (4096, 1)
    assert plan_request(load_settings({"expected_users": 2}), served, ()).users == 2


def test_a_head_promises_what_the_machine_with_the_widest_kv_holds() -> None:
    """Have a machine that loads half precision as float32, wherever the head runs."""
    served = served_from(find_model("demo").folder.path)
    narrow, wide = (
        plan_request(
            load_settings({"kv_cache_memory": "8MiB"}),
            served,
            [NodeProfile("a", 1 << 30, 1e9, 1e9), NodeProfile("b", 1 << 30, 1e9, 1e9, widens=widens)],
        ).demand.context_tokens
        for widens in (False, True)
    )
    assert 256 <= wide < narrow


def test_a_head_with_a_given_kv_memory_serves_a_model_whose_sizes_are_unknown(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unknown(*_: object) -> None:
        raise ModelUnsupported(
            "openelm does not give its number of attention heads, so its sizes are unknown."
        )

    monkeypatch.setattr(served_model, "profile_folder", unknown)
    demand = plan_request(load_settings({"kv_cache_memory": "1MiB"}), served_from(tiny_model), ()).demand
    assert (demand.kv_memory_bytes, demand.sequences) == (1 << 20, 1)
