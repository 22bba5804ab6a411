"""Costs of stages: weights that tokens share, experts, look-back, hops, links and sums."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from tests.planner.clusters import cluster_of, model_of, node_of

from mlx_ring.planner.catalogue import chip_profile, chips
from mlx_ring.planner.profiles import LayerProfile, ModelProfile
from mlx_ring.planner.rank_costs import Ring
from mlx_ring.planner.request import Demand, PlanRequest
from mlx_ring.planner.search import MachineLayers
from mlx_ring.planner.stage_costs import StageTables
from mlx_ring.planner.tensor_groups import SharedModel, alone
from mlx_ring.planner.timetable import Timetable
from mlx_ring.rpc.link_profile import LinkProfile

DEMAND = Demand(1024, 1)
FAST = node_of("fast", 1000, gb_s=100, tflops=10_000)
"""Machine whose products take no time beside reading."""


def of_layer(layer: LayerProfile, layers: int = 1) -> ModelProfile:
    return replace(model_of(layers), layers=(layer,) * layers)


EXPERTS = LayerProfile(
    weight_bytes=1_100_000_000,
    read_bytes=100_000_000 + 1_000_000_000 * 4 // 64,
    flops_per_token=1,
    expert_share=4 / 64,
)
"""Attention and a shared expert of 100 MB, and 64 experts of 1 GB together, four for each token."""


@pytest.mark.parametrize("rows", [1, 2, 8, 32])
def test_rows_read_shared_weights_once_and_distinct_experts(rows: int) -> None:
    one = StageTables(of_layer(EXPERTS), DEMAND).stage_seconds(FAST, 0, 1, rows, 0).steady
    distinct = 1 - (1 - 4 / 64) ** rows**0.65
    assert one - FAST.costs.step_s == pytest.approx((0.1 + distinct) / 100, rel=1e-3)


@pytest.mark.parametrize(("batches", "passes"), [(True, 1), (False, 8)])
def test_rows_of_some_families_take_a_pass_each(batches: bool, passes: int) -> None:  # noqa: FBT001 - a case
    layer = LayerProfile(1_000_000_000, 1_000_000_000, 1)
    model = replace(of_layer(layer), batches=batches)
    steady = StageTables(model, DEMAND).stage_seconds(FAST, 0, 1, 8, 0).steady
    assert steady - FAST.costs.step_s == pytest.approx(passes * 1.0 / 100, rel=1e-3)


@pytest.mark.parametrize(
    ("each", "experts", "tokens", "measured"),
    [(8, 256, 2, 12.44 / 7.96 * 8), (8, 256, 4, 19.61 / 7.96 * 8), (6, 256, 149, 4655 / 11008 * 256)],
)
def test_tokens_use_about_as_many_experts_as_was_measured(
    each: int, experts: int, tokens: int, measured: float
) -> None:
    """Expect it within a tenth: decoded sequences (nibor1896/Crow#38), and one prompt (JustVugg/colibri#905)."""
    layer = LayerProfile(experts, each, 1, expert_share=each / experts)
    assert layer.read_by(tokens) == pytest.approx(measured, rel=0.1)


def test_each_chunk_of_a_prompt_reads_the_experts_that_it_uses() -> None:
    tables = StageTables(of_layer(EXPERTS), DEMAND)
    of_chunk = 1 - (1 - 4 / 64) ** 512**0.65
    assert tables.prefill_seconds(FAST, 0, 1, 4 * 512) == pytest.approx(4 * (0.1 + of_chunk) / 100, rel=1e-3)
    assert tables.prefill_seconds(FAST, 0, 1, 1) == pytest.approx(0.1625 / 100, rel=1e-3)


@pytest.mark.parametrize(
    ("changes", "demand", "size"),
    [
        pytest.param({}, DEMAND, 2048, id="GPU"),
        pytest.param({"bandwidth": 1.5e9}, DEMAND, 512, id="slower than a second"),
        pytest.param({"long_chunk_tokens": 0}, DEMAND, 512, id="CPU"),
        pytest.param({"reserve_share": 0.0}, DEMAND, 512, id="no free memory"),
        pytest.param({}, Demand(1024, 1, chunk_tokens=512), 512, id="--prefill-chunk"),
        pytest.param({}, Demand(1024, 1, chunk_tokens=4096), 4096, id="long --prefill-chunk"),
    ],
)
def test_a_prompt_alone_on_a_gpu_reads_experts_for_long_chunks(
    changes: dict[str, float], demand: Demand, size: int
) -> None:
    node = replace(FAST, long_chunk_tokens=2048, reserve_share=0.1, bandwidth=100e9)
    node = replace(node, **changes)  # pyright: ignore[reportArgumentType] - any field
    model, cluster = of_layer(EXPERTS, 2), cluster_of(node)

    def read_s(size: int) -> float:
        return 2 * 8192 / size * EXPERTS.read_by(size) / node.bandwidth

    alone_s, usual_s = read_s(size), read_s(4096 if size == 4096 else 512)
    tables, shared = StageTables(model, demand), SharedModel(model, demand, None)
    assert tables.alone_seconds(node, 8192) == pytest.approx(alone_s, rel=1e-3)
    assert alone(shared, node).alone_seconds(8192) == pytest.approx(tables.alone_seconds(node, 8192))
    assert tables.prefill_seconds(node, 0, 2, 8192) == pytest.approx(usual_s, rel=1e-3)
    # The first of several users' prompts is read alone; answers are in progress beside the others.
    table = tables.prefill_table(node, 8192, 3)
    assert table[0, 2] == pytest.approx((alone_s + 2 * usual_s) / 3, rel=1e-3)
    assert table[0, 1] == pytest.approx(usual_s / 2, rel=1e-3)
    times, whole = Timetable(model, cluster, demand), (MachineLayers(0, 0, 2),)
    for users in (1, 3):
        request = PlanRequest(demand, objective="first-token", prompt_tokens=8192, users=users)
        (seconds,) = times.requests_s([whole], request)
        assert seconds == pytest.approx(times.request_s(whole, request))
        all_s = times.request_s(whole, request) - times.pipeline(whole).token_s(users)
        assert all_s == pytest.approx(alone_s + (users - 1) * usual_s, rel=1e-3)


def test_scores_of_a_prompt_take_heads_by_width_and_end_at_the_window() -> None:
    """Expect two operations for each number of keys and of values, and each token before."""
    slow = node_of("slow", 1000, gb_s=1e9, tflops=1)
    full = LayerProfile(1, 1, 0, kv_bytes_per_token=1, query_width=64 * 128, score_width=2 * 64 * 128)
    seconds = [
        StageTables(of_layer(layer), DEMAND).prefill_seconds(slow, 0, 1, 8192)
        for layer in (full, replace(full, window=128))
    ]
    assert seconds[0] == pytest.approx(2 * 2 * 64 * 128 * 8192**2 / 2 / 1e12, rel=1e-3)
    assert seconds[1] == pytest.approx(2 * 2 * 64 * 128 * 8192 * 128 / 1e12, rel=0.01)


def test_an_indexer_compares_every_token_while_attention_reads_those_that_it_chose() -> None:
    slow = node_of("slow", 1000, gb_s=1e9, tflops=1)
    full = LayerProfile(1, 1, 0, kv_bytes_per_token=1, query_width=8192, score_width=16384)
    chosen = replace(full, window=2048, index_width=2048)
    tables = StageTables(of_layer(chosen), DEMAND)
    behind = tables.prefill_seconds(slow, 0, 1, 512, 65_536)
    assert behind == pytest.approx((2 * 16384 * 2048 + 2 * 2048 * 65_792) * 512 / 1e12, rel=0.01)
    assert behind < StageTables(of_layer(full), DEMAND).prefill_seconds(slow, 0, 1, 512, 65_536) / 5


def test_experts_with_few_rows_of_a_prompt_leave_units_idle() -> None:
    """Expect half of the pace at as many rows of an expert as `experts_rows` says: 512 rows, 4 of 64 experts each."""
    experts = replace(EXPERTS, flops_per_token=10**9)
    ideal = replace(node_of("ideal", 1000, gb_s=1e9, tflops=1), experts_pace=0.5)
    real = replace(ideal, experts_rows=32.0)
    tables = StageTables(of_layer(experts), DEMAND)
    assert tables.prefill_seconds(ideal, 0, 1, 512) == pytest.approx(512e9 / 0.5e12, rel=0.01)
    assert tables.prefill_seconds(real, 0, 1, 512) == pytest.approx(512e9 / 0.25e12, rel=0.01)


def test_products_of_narrow_models_leave_units_idle() -> None:
    """Expect half of the pace at the hidden size that `narrow` says."""
    layer = LayerProfile(1, 1, 10**9)
    model = of_layer(layer)
    wide = node_of("wide", 1000, gb_s=1e9, tflops=1)
    narrow = replace(wide, narrow=float(model.hidden_size))
    seconds = [StageTables(model, DEMAND).prefill_seconds(each, 0, 1, 512) for each in (wide, narrow)]
    assert seconds[1] == pytest.approx(2 * seconds[0])


@pytest.mark.parametrize(("rows", "operations"), [(1, 0), (4, 0.009), (400, 0.416)])
def test_further_rows_of_a_step_count_one_by_one_until_whole_tiles_are_faster(
    rows: int, operations: float
) -> None:
    """Expect 3 ms for a further row in kernels for single rows, and 1 ms for each row of tiles, empty ones too."""
    layer = LayerProfile(1_000_000_000, 1_000_000_000, 10**10)
    node = replace(node_of("vectors", 1000, gb_s=100, tflops=10), vector_s=3e-13)
    step, empty = (
        StageTables(of_layer(each), DEMAND).stage_seconds(node, 0, 1, rows, 0).steady
        for each in (layer, LayerProfile(1, 1, 0))
    )
    read_s = 0.01 if rows < 100 else 0.0
    assert step - empty == pytest.approx(read_s + operations, rel=1e-3)


@pytest.mark.parametrize("name", chips())
def test_a_further_row_takes_no_longer_than_a_step_of_its_own(name: str) -> None:
    node = chip_profile(chips()[name], 512, name)
    layers = LayerProfile(10**8, 10**8, 4 * 10**8), replace(EXPERTS, flops_per_token=6 * 10**8)
    for tables in (StageTables(of_layer(layer), DEMAND) for layer in layers):
        each = [tables.stage_seconds(node, 0, 1, rows, 0).steady / rows for rows in range(1, 70)]
        assert all(more <= fewer * (1 + 1e-9) for fewer, more in pairwise(each))


def test_a_recurrent_state_takes_time_for_each_token_of_a_prompt() -> None:
    node = replace(FAST, scan_s=1e-12)
    for layer, scanned in (
        (LayerProfile(1, 1, 0, kv_bytes_per_sequence=10**6), 1),
        (LayerProfile(1, 1, 0), 0),
    ):
        tables = StageTables(of_layer(layer), DEMAND)
        slower = tables.prefill_seconds(node, 0, 1, 100) - tables.prefill_seconds(FAST, 0, 1, 100)
        assert slower == pytest.approx(scanned * 100 * 10**6 * 1e-12)


def test_activations_of_a_prompt_take_time_in_each_layer() -> None:
    node = replace(FAST, activation_s=1e-9)
    layer = LayerProfile(1, 1, 0)
    model = of_layer(layer, 3)
    seconds = [StageTables(model, DEMAND).prefill_seconds(each, 0, 3, 100) for each in (node, FAST)]
    assert seconds[0] - seconds[1] == pytest.approx(3 * 100 * model.hidden_size * 1e-9)


def test_a_window_is_read_as_far_as_it_is_full() -> None:
    layer = LayerProfile(1, 1, 1, kv_bytes_per_sequence=1_000_000_000, window=1000)
    tables = StageTables(of_layer(layer), DEMAND)
    short, full, long = (
        tables.stage_seconds(FAST, 0, 1, 1, context).steady - FAST.costs.step_s
        for context in (100, 1000, 5000)
    )
    assert (short, long) == (pytest.approx(full / 10, rel=1e-3), pytest.approx(full))


def test_the_hop_back_carries_a_token() -> None:
    link = LinkProfile(round_trip_s=1e-3, bandwidth=1e6)
    cluster = cluster_of(node_of("a"), node_of("b"), link=link)
    times = Timetable(model_of(4), cluster, DEMAND)
    pieces = [MachineLayers(0, 0, 2), MachineLayers(1, 2, 4)]
    stages, token_s = times.pipeline(pieces).lone_stream()
    assert token_s - sum(stages) == pytest.approx(1e-3 + (2 * 1024 + 4) / 1e6, rel=1e-3)
    assert times.back(1)[1, 0] == pytest.approx(0.5e-3 + 4e-6)


def test_a_slow_link_limits_the_throughput() -> None:
    """Expect a row's activations of 2 KB over 1 MB/s: 488 rows a second."""
    cluster = cluster_of(
        node_of("a", gb_s=1e6), node_of("b", gb_s=1e6), link=LinkProfile(round_trip_s=1e-6, bandwidth=1e6)
    )
    pieces = [MachineLayers(0, 0, 2), MachineLayers(1, 2, 4)]
    assert Timetable(model_of(4), cluster, Demand(128, 64)).pipeline(pieces).tokens_per_s() == pytest.approx(
        1e6 / 2048, rel=0.05
    )


def test_sums_over_a_mesh_take_one_round() -> None:
    mesh = LinkProfile(round_trip_s=60e-6, bandwidth=6e9, is_mesh=True)
    four = Ring((0, 1, 2, 3), (mesh,))
    assert four.sum_s(8192) == pytest.approx(30e-6 + 8192 / 6e9)
    assert Ring((0, 1, 2, 3), (replace(mesh, is_mesh=False),)).sum_s(8192) > 5 * four.sum_s(8192)
