"""Plan requests made from settings."""

from __future__ import annotations

import pytest

from mlx_ring.core.errors import PlanError
from mlx_ring.core.types import LayerRange
from mlx_ring.head.plan_requests import plan_request_for, proportional_stages
from mlx_ring.planner.profiles import NodeProfile
from mlx_ring.planner.request import Demand, PlanRequest
from mlx_ring.settings.config import Settings
from mlx_ring.settings.settings_sources import load_settings

DEMAND = Demand(1024, 1, 16)
CUSTOM = PlanRequest(DEMAND, strategy="custom")


def nodes(*names: str) -> list[NodeProfile]:
    return [NodeProfile(name, 1 << 30, 1e9, 1e9) for name in names]


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
    assert "proportions were given for 2 machines, but 1 are present" in caplog.text


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
