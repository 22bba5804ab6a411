"""Machines with a CPU quota, compared with a simulated clock."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.planner.clusters import cluster_of, model_of, node_of
from tests.profiles import made_up_profile

from mlx_ring.core.types import LayerRange
from mlx_ring.planner.forecast import Forecast
from mlx_ring.planner.place import place
from mlx_ring.planner.profiles import CpuQuota, NodeProfile, lone_stream, measured_node
from mlx_ring.planner.request import Demand, PlanRequest

QUOTAS = st.builds(CpuQuota, st.floats(0.05, 0.95), st.sampled_from([0.01, 0.1]))
MOMENTS = 8


def simulated_seconds(quota: CpuQuota, moment_s: float, computing_s: float) -> float:
    """Return the seconds that a computation takes, simulated period by period.

    It starts at a moment of a period whose quota is unused.
    """
    allowed_s = quota.share * quota.period_s
    now, period_ends = moment_s, quota.period_s
    while (usable := min(allowed_s, period_ends - now)) < computing_s:
        computing_s -= usable
        now, period_ends = period_ends, period_ends + quota.period_s
    return now + computing_s - moment_s


@given(QUOTAS, st.floats(0.001, 0.3))
def test_a_step_takes_the_mean_of_the_simulated_times(quota: CpuQuota, computing_s: float) -> None:
    moments = [(number + 0.5) / MOMENTS * quota.period_s for number in range(MOMENTS)]
    expected = [simulated_seconds(quota, moment, computing_s) for moment in moments]
    # By rounding, a step that ends with its quota can need a little of the next one.
    slack = quota.period_s if any(_is_at_an_end(quota, moment, computing_s) for moment in moments) else 1e-9
    assert quota.clock_s(np.array([computing_s]))[0] == pytest.approx(np.mean(expected), abs=slack)


def _is_at_an_end(quota: CpuQuota, moment_s: float, computing_s: float) -> bool:
    allowed_s = quota.share * quota.period_s
    quotas = (computing_s - min(allowed_s, quota.period_s - moment_s)) / allowed_s
    return abs(quotas - round(quotas)) < 1e-9


@given(QUOTAS)
def test_a_short_step_runs_at_full_speed_and_a_long_one_at_the_quota(quota: CpuQuota) -> None:
    short, long = 1e-3 * quota.share * quota.period_s, 1000 * quota.period_s
    assert quota.clock_s(np.array([short]))[0] == pytest.approx(short, rel=0.05)
    assert quota.clock_s(np.array([long]))[0] == pytest.approx(long / quota.share, rel=0.01)


def test_a_stage_limited_by_its_quota_sets_the_time_of_a_token() -> None:
    assert lone_stream([2.0, 1.0], [2.0, 5.0], 0.5) == ([2.0, 2.5], 5.0)


def test_stages_that_are_idle_long_enough_are_not_slowed_by_their_quota() -> None:
    assert lone_stream([2.0, 1.0], [2.5, 3.0], 0.5) == ([2.0, 1.0], 3.5)


def test_stages_of_one_machine_share_its_quota() -> None:
    times, around = lone_stream([2.0, 1.0, 1.0], [4.0, 4.0, 1.0], 0.0, ["a", "a", "b"])
    assert around == sum(times) == 8.0
    assert times == [4.0, 3.0, 1.0]


def node_with_quota(name: str, share: float, period_s: float = 0.1) -> NodeProfile:
    node = node_of(name, gb_s=100)
    return NodeProfile(
        node.name,
        node.memory_bytes,
        node.bandwidth,
        node.flops,
        reserve_share=0.0,
        cpu_quota=CpuQuota(share, period_s),
    )


def test_forecast_and_plan_agree_for_machines_with_a_quota() -> None:
    nodes = [node_with_quota("a", 0.6), node_with_quota("b", 0.2)]
    demand = Demand(4096, 1)
    plan = place(model_of(28), cluster_of(*nodes), PlanRequest(demand, strategy="uniform"))
    ranges = [LayerRange(0, 14), LayerRange(14, 28)]
    forecast = Forecast(model_of(28), demand, cluster_of(*nodes), list(zip(nodes, ranges, strict=True)))
    assert forecast.token_s(2048) == pytest.approx(plan.prediction.token_s)
    assert [forecast.decode_s(stage, 1, 2048) for stage in (0, 1)] == [
        pytest.approx(stage.token_s) for stage in plan.stages
    ]


def test_half_a_quota_doubles_the_time_of_a_single_machine() -> None:
    whole = place(model_of(28), cluster_of(node_of("a", gb_s=100)), PlanRequest(Demand(4096, 1)))
    part = place(model_of(28), cluster_of(node_with_quota("a", 0.5)), PlanRequest(Demand(4096, 1)))
    assert part.prediction.token_s == pytest.approx(2 * whole.prediction.token_s)


@pytest.mark.parametrize(
    ("changes", "share"),
    [
        ({}, None),
        ({"cpu_share": 0.5, "cpu_period_s": 0.1, "blas_threads": 1}, 0.5),
        ({"cpu_share": 0.5, "cpu_period_s": 0.1, "blas_threads": 2}, None),
        ({"cpu_share": 1.5, "cpu_period_s": 0.1, "blas_threads": 1}, None),
        ({"cpu_share": 0.5, "cpu_period_s": 0.1, "device": "gpu"}, None),
    ],
)
def test_a_quota_applies_only_if_it_limits_the_compute_threads(
    changes: dict[str, object], share: float | None
) -> None:
    quota = measured_node(made_up_profile(**changes), "a").cpu_quota
    assert (None if quota is None else quota.share) == share
