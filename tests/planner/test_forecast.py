"""Forecasts of times and memory for given stages."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.examples import examples
from tests.planner.clusters import cluster_of, model_of, node_of, on_gpus, shared_model, with_experts

from mlx_ring.core.types import LayerRange
from mlx_ring.planner.forecast import Forecast, StepTable, forecast_plan
from mlx_ring.planner.place import place
from mlx_ring.planner.profiles import StepRatios
from mlx_ring.planner.request import Demand, PlanRequest
from mlx_ring.rpc.link_profile import LOCAL, LinkProfile

DEMAND = Demand(context_tokens=4096, sequences=2)


def forecast_of(*counts: int) -> Forecast:
    nodes = [node_of(name, gb_s=100.0 * (place + 1)) for place, name in enumerate("abc"[: len(counts)])]
    ends = [sum(counts[: place + 1]) for place in range(len(counts))]
    ranges = [LayerRange(end - count, end) for end, count in zip(ends, counts, strict=True)]
    return Forecast(model_of(sum(counts)), DEMAND, cluster_of(*nodes), list(zip(nodes, ranges, strict=True)))


def test_a_forecast_equals_the_plan_s_prediction() -> None:
    nodes = [node_of("a", gb_s=100), node_of("b", gb_s=200)]
    plan = place(model_of(28), cluster_of(*nodes), PlanRequest(DEMAND, strategy="uniform"))
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
def test_time_grows_with_rows_context_and_chunk_size(rows: int, context: int, tokens: int) -> None:
    forecast = forecast_of(10, 18)
    for stage in range(len(forecast)):
        once = forecast.decode_s(stage, rows, context)
        assert 0 < once <= forecast.decode_s(stage, rows + 1, context)
        assert once <= forecast.decode_s(stage, rows, context + 512)
        chunk = forecast.chunk_s(stage, tokens, context)
        assert forecast.decode_s(stage, 1, context) <= chunk <= forecast.chunk_s(stage, tokens + 1, context)


@pytest.mark.parametrize("is_group", [False, True])
@pytest.mark.parametrize("given", [None, 512])
def test_a_measured_chunk_is_compared_with_one_of_as_many_tokens(
    given: int | None, *, is_group: bool
) -> None:
    """Expect experts to be read once, also for more tokens than usual or given chunks have. Sums of ranks take longer."""
    node = on_gpus([replace(node_of("a", tflops=1e6), ratios=StepRatios(prefill=1.5))])[0]
    model, layers = with_experts(shared_model(8, layer_bytes=400_000_000)), LayerRange(0, 8)
    ranks = [[(node, 0.5), (node, 0.5)]] if is_group else []
    demand = replace(DEMAND, chunk_tokens=given)
    forecast = Forecast(model, demand, cluster_of(node), [(node, layers)], ranks)
    usual, long = (forecast.chunk_s(0, tokens, 0) for tokens in (512, 2048))
    assert usual < long < (2.5 if is_group else 1.01) * usual
    if not is_group:
        assert long == pytest.approx(1.5 * forecast.corrected({}).chunk_s(0, 2048, 0), rel=0.1)


def test_one_stage_has_no_hops() -> None:
    forecast = forecast_of(28)
    assert forecast.token_s(100) == forecast.decode_s(0, 1, 100)
    assert forecast_of(14, 14).token_s(100) > sum(
        forecast_of(14, 14).decode_s(stage, 1, 100) for stage in (0, 1)
    )


def shared_forecast(shares: tuple[float, ...], *, workers_at_once: int) -> Forecast:
    """Return a forecast for all layers on ranks of one machine that can run this many workers at once."""
    node = replace(node_of("a", 64), workers_at_once=workers_at_once)
    model = shared_model(24)
    stages = [(node, LayerRange(0, 24))]
    return Forecast(model, DEMAND, cluster_of(node), stages, [[(node, share) for share in shares]])


def test_two_ranks_with_a_core_each_take_half_the_time_and_their_collectives() -> None:
    single, two = shared_forecast((1.0,), workers_at_once=2), shared_forecast((1.0, 1.0), workers_at_once=2)
    collectives_s = 24 * 2 * 2 * LOCAL.collective_seconds(4096 * 2 / 2)
    assert two.decode_s(0, 1, 0) == pytest.approx(single.decode_s(0, 1, 0) / 2 + collectives_s, rel=0.05)
    assert two.token_s(0) == two.decode_s(0, 1, 0)
    assert single.chunk_s(0, 512, 0) / 2 < two.chunk_s(0, 512, 0) < single.chunk_s(0, 512, 0)


def test_ranks_that_share_a_core_are_no_faster_than_one() -> None:
    single = shared_forecast((1.0,), workers_at_once=1)
    assert shared_forecast((1.0, 1.0), workers_at_once=1).decode_s(0, 1, 0) > single.decode_s(0, 1, 0)


def test_the_largest_rank_sets_the_time_and_each_rank_has_its_own_memory() -> None:
    even, uneven = (shared_forecast(shares, workers_at_once=2) for shares in ((1.0, 1.0), (3.0, 1.0)))
    assert uneven.decode_s(0, 1, 0) > 1.2 * even.decode_s(0, 1, 0)
    three, one = uneven.memory_of_ranks(0)
    assert three.kv_bytes == 3 * one.kv_bytes
    assert uneven.memory(0).total_bytes == three.total_bytes + one.total_bytes


@given(st.integers(1, 16), st.integers(0, 4096), st.integers(1, 1024))
@examples(0.4)
def test_time_of_ranks_grows_with_rows_context_and_chunk_size(rows: int, context: int, tokens: int) -> None:
    forecast = shared_forecast((0.5, 0.25, 0.25), workers_at_once=3)
    once = forecast.decode_s(0, rows, context)
    assert 0 < once <= forecast.decode_s(0, rows + 1, context)
    assert once <= forecast.decode_s(0, rows, context + 512)
    chunk = forecast.chunk_s(0, tokens, context)
    assert forecast.decode_s(0, 1, context) <= chunk <= forecast.chunk_s(0, tokens + 1, context)


def test_a_hop_to_several_ranks_sends_the_activations_to_each() -> None:
    nodes = [node_of(name) for name in "ab"]
    model, cluster = shared_model(12), cluster_of(*nodes, link=LinkProfile(1e-3, 1e6))
    stages = [
        (node, layers) for node, layers in zip(nodes, (LayerRange(0, 6), LayerRange(6, 12)), strict=True)
    ]
    single = Forecast(model, DEMAND, cluster, stages)
    both = Forecast(model, DEMAND, cluster, stages, [[(nodes[0], 1.0)], [(nodes[1], 1.0)] * 2])
    hops = [
        forecast.token_s(0) - sum(forecast.decode_s(stage, 1, 0) for stage in (0, 1))
        for forecast in (single, both)
    ]
    assert hops[1] - hops[0] == pytest.approx(4096 * 2 / 1e6)


def test_a_table_of_steps_is_near_the_forecast() -> None:
    model, cluster = model_of(12), cluster_of(node_of("a"), node_of("b"))
    demand = Demand(4096, 8)
    plan = place(model, cluster, PlanRequest(demand, strategy="uniform"))
    forecast, rooms = forecast_plan(model, cluster, demand, plan)
    table = StepTable(forecast, 0.001)
    for stage in range(2):
        for rows, context in ((1, 100), (3, 700), (8, 3000)):
            assert table.decode_s(stage, rows, context) == pytest.approx(
                forecast.decode_s(stage, rows, context), rel=0.01
            )
        for start, tokens in ((0, 2), (0, 500), (900, 61), (2000, 512)):
            assert table.chunk_s(stage, [(start, tokens)]) == pytest.approx(
                forecast.chunk_s(stage, tokens, start), rel=0.03
            )
    assert table.head_s() == 0.001
    assert [[room.bytes_per_token for room in ranks] for ranks in rooms] == [[6 * 4096]] * 2
    for ranks, node in zip(rooms, cluster.nodes, strict=True):
        assert 0 < ranks[0].limit_bytes < node.usable_bytes - 6 * 100_000_000


def test_a_step_of_several_prompts_compares_fewer_tokens_than_one_long_prompt() -> None:
    model, cluster = model_of(4), cluster_of(node_of("a"))
    plan = place(model, cluster, PlanRequest(Demand(4096, 1)))
    table = StepTable(forecast_plan(model, cluster, Demand(4096, 1), plan)[0], 0.0)
    assert table.chunk_s(0, [(0, 256)] * 4) < table.chunk_s(0, [(0, 1024)])
