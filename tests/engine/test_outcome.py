"""Figures of a simulated run, counted by hand."""

from __future__ import annotations

import pytest

from mlx_ring.engine.simulation import Bubble, Outcome, SequenceTimes, StageUse, Work

STAGE = StageUse((Work(1, 0.0, 1.0), Work(2, 1.0, 2.0), Work(3, 4.0, 5.0), Work(4, 6.0, 8.0)))


def test_a_stage_is_busy_while_it_computes_a_step() -> None:
    assert STAGE.busy_s() == 5.0
    assert STAGE.busy_s(1.5, 6.5) == 2.0
    assert STAGE.utilization(0.0, 8.0) == pytest.approx(5 / 8)


def test_a_bubble_lies_between_two_steps() -> None:
    assert STAGE.bubbles() == (Bubble(2.0, 4.0), Bubble(5.0, 6.0))
    assert STAGE.bubbles(3.0, 5.5) == (Bubble(3.0, 4.0), Bubble(5.0, 5.5))
    assert StageUse(()).bubbles() == ()


def test_throughput_and_token_latency_count_within_the_interval() -> None:
    outcome = Outcome(
        elapsed_s=8.0,
        stages=(STAGE,),
        sequences={1: SequenceTimes((1.0, 2.0, 4.0)), 2: SequenceTimes((3.0, 7.0))},
        steps=4,
        most_in_flight=1,
    )
    assert outcome.tokens_per_s(1.0, 4.0) == 1.0
    assert [outcome.itl_s(percent) for percent in (0, 33, 50, 67, 100)] == [1.0, 1.0, 2.0, 4.0, 4.0]
    assert outcome.itl_s(100, 0.0, 4.0) == 2.0
    assert outcome.itl_s(50, 7.0) == 0.0
    assert (outcome.sequences[2].first_token_s, outcome.sequences[2].end_s) == (3.0, 7.0)
