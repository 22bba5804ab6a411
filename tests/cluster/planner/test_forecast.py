"""What is expected of stages that are there."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.cluster.planner.clusters import cluster_of, model_of, node_of

from mlx_ring.cluster.planner.forecast import Forecast
from mlx_ring.cluster.planner.place import Wish, place
from mlx_ring.cluster.planner.stage_tables import Demand
from mlx_ring.core.types import LayerRange

DEMAND = Demand(context_tokens=4096, sequences=2)


def forecast_of(*counts: int) -> Forecast:
    nodes = [node_of(name, gb_s=100.0 * (place + 1)) for place, name in enumerate("abc"[: len(counts)])]
    ends = [sum(counts[: place + 1]) for place in range(len(counts))]
    ranges = [LayerRange(end - count, end) for end, count in zip(ends, counts, strict=True)]
    return Forecast(model_of(sum(counts)), DEMAND, cluster_of(*nodes), list(zip(nodes, ranges, strict=True)))


def test_it_expects_what_the_plan_did() -> None:
    nodes = [node_of("a", gb_s=100), node_of("b", gb_s=200)]
    plan = place(model_of(28), cluster_of(*nodes), Wish(DEMAND, strategy="uniform"))
    forecast = forecast_of(14, 14)
    for number, stage in enumerate(plan.stages):
        assert forecast.decode_s(number, 1, DEMAND.context_tokens // 2) == pytest.approx(stage.token_s)
        memory = forecast.memory(number)
        assert memory.weight_bytes == stage.weight_bytes
        assert memory.total_bytes == stage.memory_bytes
        assert memory.kv_bytes > 0
        assert memory.working_bytes > 0
    assert forecast.token_s(DEMAND.context_tokens // 2) == pytest.approx(plan.prediction.token_s)


@given(st.integers(1, 16), st.integers(0, 8192), st.integers(1, 2048))
@settings(deadline=None)
def test_more_rows_longer_contexts_and_larger_chunks_never_take_less(
    rows: int, context: int, tokens: int
) -> None:
    forecast = forecast_of(10, 18)
    for stage in range(len(forecast)):
        once = forecast.decode_s(stage, rows, context)
        assert 0 < once <= forecast.decode_s(stage, rows + 1, context)
        assert once <= forecast.decode_s(stage, rows, context + 512)
        chunk = forecast.chunk_s(stage, tokens, context)
        assert forecast.decode_s(stage, 1, context) <= chunk <= forecast.chunk_s(stage, tokens + 1, context)


def test_one_stage_has_no_hops() -> None:
    forecast = forecast_of(28)
    assert forecast.token_s(100) == forecast.decode_s(0, 1, 100)
    assert forecast_of(14, 14).token_s(100) > sum(
        forecast_of(14, 14).decode_s(stage, 1, 100) for stage in (0, 1)
    )
