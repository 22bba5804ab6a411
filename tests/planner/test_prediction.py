"""Predicted throughput, compared with values counted by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.examples import examples
from tests.planner.closed_loop import Load
from tests.planner.costs import MeasuredCost
from tests.planner.prediction import predict_throughput

TENTH_S = MeasuredCost(100_000.0, prefill_us=300_000.0)
STAGES = st.lists(st.builds(MeasuredCost, st.floats(1e3, 1e5)), min_size=1, max_size=5)
MANY = examples(0.6)


def test_one_stream_on_one_stage_gives_a_token_per_step() -> None:
    assert predict_throughput([TENTH_S], [1]) == pytest.approx(10, rel=0.03)


def test_steps_ahead_hide_the_round_trip_to_the_head() -> None:
    assert predict_throughput([TENTH_S], [1], steps_ahead=1, head_us=50_000) == pytest.approx(5, rel=0.05)
    assert predict_throughput([TENTH_S], [1], steps_ahead=2, head_us=50_000) == pytest.approx(10, rel=0.05)


def test_a_head_slower_than_the_stages_limits_throughput() -> None:
    throughput = predict_throughput([TENTH_S, TENTH_S], [4, 4], head_event_us=100_000)
    assert throughput == pytest.approx(4 / 0.2, rel=0.06), "two answers to each step"


def test_one_group_keeps_one_stage_busy_at_a_time() -> None:
    assert predict_throughput([TENTH_S] * 2, [4]) == pytest.approx(20, rel=0.03)


def test_as_many_groups_as_stages_keep_all_stages_busy() -> None:
    assert predict_throughput([TENTH_S] * 2, [4, 4]) == pytest.approx(40, rel=0.03)


def test_the_slowest_stage_limits_throughput() -> None:
    assert predict_throughput([TENTH_S, MeasuredCost(200_000.0)], [4, 4]) == pytest.approx(20, rel=0.03)


def test_a_hop_is_a_bubble_unless_another_group_fills_it() -> None:
    assert predict_throughput([TENTH_S] * 2, [4, 4], hop_us=50_000) == pytest.approx(8 / 0.3, rel=0.03)
    assert predict_throughput([TENTH_S] * 2, [4, 4, 4], hop_us=50_000) == pytest.approx(40, rel=0.03)


def test_prompts_take_their_share_of_the_time() -> None:
    load = Load(prompt_chunks=2, answer_tokens=11)
    # Two chunks and ten decode steps, one client: 0.6 s + 1.0 s.
    assert predict_throughput([TENTH_S], [1], load=load) == pytest.approx(11 / 1.6, rel=0.03)


@given(STAGES, st.integers(1, 6), st.integers(1, 4), st.integers(1, 3), st.floats(0, 1e4))
@MANY
def test_no_pipeline_is_faster_than_its_slowest_stage(
    stages: list[MeasuredCost], groups: int, rows: int, steps_ahead: int, hop_us: float
) -> None:
    throughput = predict_throughput(stages, [rows] * groups, steps_ahead=steps_ahead, hop_us=hop_us)
    # Answers to steps in flight at the start of the interval can count within it.
    assert throughput <= 1.05 * rows * 1e6 / max(stage.decode_us for stage in stages)


@given(STAGES, st.integers(0, 4))
@MANY
def test_a_full_pipeline_without_hops_reaches_its_slowest_stage(
    stages: list[MeasuredCost], more: int
) -> None:
    throughput = predict_throughput(stages, [1] * (len(stages) + more))
    assert throughput == pytest.approx(1e6 / max(stage.decode_us for stage in stages), rel=0.06)
