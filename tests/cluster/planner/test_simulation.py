"""The simulated pipeline against what can be counted by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_ring.cluster.planner.simulation import (
    DecodeLoop,
    LinearCost,
    Simulation,
    Times,
    predict_throughput,
)
from mlx_ring.rpc.protos import step_pb2

STAGES = st.lists(st.floats(0.01, 1.0), min_size=1, max_size=5)


def test_one_stream_on_one_stage_gives_a_token_a_step() -> None:
    assert predict_throughput([0.1], [1]) == pytest.approx(10, rel=0.03)


def test_waiting_for_the_head_costs_its_round_trip_and_steps_ahead_hide_it() -> None:
    assert predict_throughput([0.1], [1], steps_ahead=1, head_s=0.05) == pytest.approx(5, rel=0.05)
    assert predict_throughput([0.1], [1], steps_ahead=2, head_s=0.05) == pytest.approx(10, rel=0.05)


def test_one_group_leaves_all_stages_but_one_idle() -> None:
    assert predict_throughput([0.1, 0.1], [4]) == pytest.approx(20, rel=0.03)


def test_as_many_groups_as_stages_fill_them() -> None:
    assert predict_throughput([0.1, 0.1], [4, 4]) == pytest.approx(40, rel=0.03)


def test_the_slowest_stage_sets_the_pace() -> None:
    assert predict_throughput([0.1, 0.2], [4, 4]) == pytest.approx(20, rel=0.03)


def test_a_hop_is_a_bubble_unless_another_group_fills_it() -> None:
    assert predict_throughput([0.1, 0.1], [4, 4], hop_s=0.05) < 30
    assert predict_throughput([0.1, 0.1], [4, 4, 4], hop_s=0.05) == pytest.approx(40, rel=0.03)


@given(STAGES, st.integers(1, 6), st.integers(1, 4), st.integers(1, 3), st.floats(0, 0.1))
def test_no_pipeline_is_faster_than_its_slowest_stage(
    stage_s: list[float], groups: int, rows: int, steps_ahead: int, hop_s: float
) -> None:
    found = predict_throughput(stage_s, [rows] * groups, steps_ahead=steps_ahead, hop_s=hop_s)
    assert found <= 1.05 * rows / max(stage_s)


@given(STAGES, st.integers(1, 6))
def test_a_full_pipeline_without_hops_reaches_its_slowest_stage(stage_s: list[float], more: int) -> None:
    groups = [1] * (len(stage_s) + more)
    assert predict_throughput(stage_s, groups) == pytest.approx(1 / max(stage_s), rel=0.06)


@given(STAGES, st.integers(1, 6))
def test_a_stage_is_never_busier_than_the_clock_allows_and_every_run_is_the_same(
    stage_s: list[float], groups: int
) -> None:
    def run() -> list[float]:
        times = Times(lambda stage, _step: stage_s[stage], 0.01, 0.01)
        result = Simulation(DecodeLoop([1] * groups), times, len(stage_s)).run(
            [(0.0, lambda _now: None)], until_s=20.0
        )
        assert all(busy <= result.elapsed_s + groups * 2 * max(stage_s) for busy in result.busy_s)
        return [at for times in result.tokens_s.values() for at in times]

    assert run() == run()


def test_a_steps_cost_counts_passes_tokens_and_context() -> None:
    cost = LinearCost(1.0, 0.1, 0.01)
    row = step_pb2.Row(start=10, tokens=step_pb2.Tokens(ids=[1, 2]))
    assert cost(step_pb2.Step(rows=[row])) == pytest.approx(1.0 + 0.2 + 0.2)
    assert cost(step_pb2.Step()) == 0.0
