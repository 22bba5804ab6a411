"""Costs of steps, counted by hand."""

from __future__ import annotations

import pytest
from tests.planner.costs import LinearCost, MeasuredCost, StageCosts

from mlx_ring.rpc.protos import step_pb2

CHUNK = step_pb2.Row(sequence=1, start=10, tokens=step_pb2.Tokens(ids=[1, 2, 3]))
NEXT = step_pb2.Row(sequence=2, start=5, previous=True)
DRAFTED = step_pb2.Row(sequence=3, start=5, token=1, draft=[1, 1])


def test_the_cost_of_a_step_counts_passes_rows_tokens_and_context() -> None:
    cost = LinearCost(per_step_s=1000.0, per_token_s=10.0, per_context_s=0.01, per_row_s=100.0)
    assert cost(step_pb2.Step(rows=[CHUNK])) == pytest.approx(1130.33)
    assert cost(step_pb2.Step(rows=[NEXT])) == pytest.approx(1110.05)
    assert cost(step_pb2.Step(rows=[NEXT, DRAFTED])) == pytest.approx(1240.23)


def test_a_step_of_operations_alone_costs_nothing() -> None:
    assert LinearCost(1.0, 1.0)(step_pb2.Step()) == 0.0
    assert MeasuredCost(1.0, 1.0)(step_pb2.Step()) == 0.0


def test_a_measured_cost_distinguishes_prefill_and_decode() -> None:
    cost = MeasuredCost(decode_us=2000.0, prefill_us=50_000.0)
    assert cost(step_pb2.Step(rows=[NEXT, DRAFTED])) == pytest.approx(0.002)
    assert cost(step_pb2.Step(rows=[CHUNK])) == pytest.approx(0.05)


def test_every_stage_has_its_own_cost() -> None:
    costs = StageCosts([LinearCost(1.0, 0.0), LinearCost(3.0, 0.0)])
    step = step_pb2.Step(rows=[NEXT])
    assert [costs(stage, step) for stage in (0, 1)] == [1.0, 3.0]
