"""Plans from measured profiles."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.planner.clusters import model_of, node_of
from tests.planner.test_model_sizes import QWEN3_14B, QWEN3_30B_A3B, profile_of
from tests.profiles import COSTS, RATES, made_up_profile

from mlx_ring.planner.catalogue import known_profile
from mlx_ring.planner.place import place
from mlx_ring.planner.profiles import ClusterProfile, ModelProfile, NodeProfile, measured_node
from mlx_ring.planner.request import Demand, PlanRequest
from mlx_ring.planner.stage_costs import StageTables, working_bytes
from mlx_ring.rpc.link_profile import LinkProfile

NODE = measured_node(made_up_profile(), "box")
ONE_SEQUENCE = Demand(context_tokens=1024, sequences=1)


def quantized(model: ModelProfile, weights: str) -> ModelProfile:
    return replace(model, weights=weights)


def seconds(model: ModelProfile, *, rows: int = 1, context: int = 0) -> float:
    return float(StageTables(model, ONE_SEQUENCE).seconds(NODE, rows, context).steady[0, -1])


def test_a_profile_gives_memory_rates_and_costs() -> None:
    assert (NODE.memory_bytes, NODE.bandwidth, NODE.flops) == (16 * 10**9, 20e9, 90e9)
    assert NODE.widens
    assert NODE.costs == COSTS
    assert measured_node(made_up_profile(), "box", memory_cap=10**9).memory_bytes == 10**9
    assert measured_node(made_up_profile(), "box", memory_cap=10**12).memory_bytes == 16 * 10**9


def test_memory_of_own_processes_counts_on_a_cpu_and_not_on_a_gpu() -> None:
    model, profile = model_of(4), made_up_profile(worker_bytes=200 * 10**6, agent_bytes=100 * 10**6)
    bare, with_processes, with_head = (
        float(StageTables(model, ONE_SEQUENCE).memory(node)[0, -1])
        for node in (
            measured_node(made_up_profile(), "box"),
            measured_node(profile, "box"),
            measured_node(profile, "box", beside_bytes=2 * 10**8),
        )
    )
    assert (with_processes - bare, with_head - bare) == (300e6, 400e6)
    assert measured_node(made_up_profile(device="gpu", worker_bytes=10**9), "box").process_bytes == 0


def test_a_gpu_uses_its_half_precision_rate_and_widens_nothing() -> None:
    node = measured_node(made_up_profile(device="gpu", computes_in=""), "box")
    assert (node.bandwidth, node.widens) == (2e9, False)


@pytest.mark.parametrize(
    ("weights", "bandwidth"),
    [
        ("float32", 20e9),
        ("8-bit", 1.2e9),
        ("4-bit", 0.7e9),
        ("3-bit", 0.7e9),
        ("6-bit", 0.7e9),
        ("5-bit", 0.7e9),
        ("float16", 20e9),
    ],
)
def test_weights_use_the_rate_of_their_format_or_the_nearest(weights: str, bandwidth: float) -> None:
    assert NODE.rate(weights).bandwidth == bandwidth


def test_a_machine_from_a_data_sheet_has_one_rate() -> None:
    node = node_of("a", gb_s=100, tflops=4)
    assert {node.rate(weights).bandwidth for weights in ("float32", "4-bit")} == {100e9}


def test_the_time_of_a_step_is_the_sum_of_its_parts() -> None:
    model = quantized(model_of(10, layer_bytes=70_000_000, kv_bytes=0), "4-bit")
    drawing = COSTS.draw_s + model.vocabulary * COSTS.logit_s
    # With these sizes a layer has as many operations as bytes, so at a single row the bytes take longer.
    expected = 10 * (70e6 / 0.7e9 + COSTS.quantized_layer_s) + COSTS.step_s + drawing
    head = 2 * model.vocabulary * model.hidden_size / RATES[-1].flops
    assert seconds(model) == pytest.approx(expected + head)


def test_layers_of_float_weights_have_a_cost_of_their_own() -> None:
    model = quantized(model_of(10, kv_bytes=0), "float32")
    slower = made_up_profile(costs=COSTS.model_copy(update={"layer_s": COSTS.layer_s + 1e-3}))
    found = StageTables(model, ONE_SEQUENCE).seconds(measured_node(slower, "slower"), 1, 0).steady[0, -1]
    assert float(found) - seconds(model) == pytest.approx(10 * 1e-3)


def test_layers_whose_scales_are_bytes_take_as_many_operations_as_those_of_float_weights() -> None:
    model = quantized(model_of(10, kv_bytes=0), "4-bit")
    longer = seconds(replace(model, has_byte_scales=True)) - seconds(model)
    assert longer == pytest.approx(10 * (COSTS.layer_s - COSTS.quantized_layer_s))


def test_a_cost_per_row_of_weights_counts_if_it_was_measured() -> None:
    model = quantized(model_of(1, layer_bytes=40_960_000, kv_bytes=0, head_bytes=131_072_000), "float32")
    node = measured_node(made_up_profile(rates=(RATES[0].model_copy(update={"row_s": 0.0}),)), "no-row-cost")
    without_row_cost = float(StageTables(model, ONE_SEQUENCE).seconds(node, 1, 0).steady[0, -1])
    rows = 40_960_000 / 2 / model.hidden_size + model.vocabulary
    assert seconds(model) - without_row_cost == pytest.approx(rows * 1e-7)


def test_attention_costs_grow_with_the_context_up_to_the_window() -> None:
    model = model_of(4, kv_bytes=4)
    wide = replace(model, layers=tuple(replace(layer, query_width=2000) for layer in model.layers))
    sliding = replace(wide, layers=tuple(replace(layer, window=100) for layer in wide.layers))
    assert seconds(wide, context=1000) - seconds(wide) == pytest.approx(4 * 1000 * 2000 * COSTS.attention_s)
    assert seconds(sliding, context=1000) - seconds(sliding) == pytest.approx(
        4 * 100 * 2000 * COSTS.attention_s
    )


@pytest.mark.parametrize("start_s", [1e-3, 1.0])
def test_operations_that_start_ahead_count_where_they_take_longer_than_the_computation(
    start_s: float,
) -> None:
    model = quantized(model_of(10, kv_bytes=0), "float32")

    def on(**costs: Any) -> NodeProfile:
        return measured_node(made_up_profile(costs=COSTS.model_copy(update=costs)), "box")

    def decode(node: NodeProfile) -> float:
        return float(StageTables(model, ONE_SEQUENCE).seconds(node, 1, 0).steady[0, -1])

    def prefill(node: NodeProfile) -> float:
        return StageTables(model, ONE_SEQUENCE).prefill_seconds(node, 0, 10, 512)

    ahead, free = on(layer_s=start_s, starts_ahead=True), on(layer_s=0.0)
    for seconds_on in (decode, prefill):
        layer_s = (seconds_on(free) - (seconds_on is decode) * _outside(model)) / 10
        assert seconds_on(ahead) - seconds_on(free) == pytest.approx(10 * max(0.0, start_s - layer_s))


def _outside(model: ModelProfile) -> float:
    """Return the seconds of a step beside its layers."""
    head = max(
        model.head_bytes / RATES[0].bandwidth + model.vocabulary * RATES[0].row_s,
        2 * model.vocabulary * model.hidden_size / RATES[0].flops,
    )
    return COSTS.step_s + COSTS.draw_s + model.vocabulary * COSTS.logit_s + head


@pytest.mark.parametrize(
    ("config", "bits", "held_bytes"),
    [
        pytest.param(
            {"hidden_size": 2048, "num_hidden_layers": 16, "intermediate_size": 8192, "head_dim": 64}
            | {"num_attention_heads": 32, "vocab_size": 128_256, "tie_word_embeddings": True},
            None,
            2.999e9,
            id="1.24 B in bfloat16",
        ),
        pytest.param(
            {"hidden_size": 4096, "num_hidden_layers": 36, "intermediate_size": 12288}
            | {"num_attention_heads": 32, "tie_word_embeddings": True},
            4,
            6.692e9,
            id="8 B in 4 bits",
        ),
    ],
)
def test_a_promise_of_memory_on_an_nvidia_gpu_covers_what_was_held_there(
    config: dict[str, Any], bits: int | None, held_bytes: float, tmp_path: Path
) -> None:
    """Compare with MLX's peak on an H200, for one request of 2,048 tokens and 128 more."""
    model = profile_of(QWEN3_14B | config, tmp_path, bits)
    gpu = made_up_profile(device="gpu", device_name="NVIDIA H200", computes_in="", memory_bytes=150 * 10**9)
    demand = Demand(context_tokens=2 * (2048 + 128), sequences=1)
    for promised in (
        float(StageTables(model, demand).memory(measured_node(gpu, "box"))[0, -1]),
        float(StageTables(model, demand).memory(known_profile("nvidia-h200"))[0, -1]),
    ):
        assert held_bytes <= promised <= 1.1 * held_bytes


@pytest.mark.parametrize(
    ("hidden", "intermediate", "tokens", "held_bytes"),
    [(1024, 3072, 500, 92.2e6), (2048, 6144, 500, 145.4e6), (1024, 3072, 2000, 360.5e6)],
)
def test_a_promise_of_memory_on_a_cpu_covers_the_activations_that_were_held_there(
    hidden: int, intermediate: int, tokens: int, held_bytes: float, tmp_path: Path
) -> None:
    """Compare with MLX's peak beside weights and KV, for one prompt in float32 numbers."""
    config = {"hidden_size": hidden, "intermediate_size": intermediate, "num_hidden_layers": 3}
    config |= {"num_attention_heads": 16, "vocab_size": 4096, "tie_word_embeddings": True}
    widened = profile_of(QWEN3_14B | config, tmp_path).widened
    assert widened is not None
    assert held_bytes <= working_bytes(widened, tokens) <= 1.3 * held_bytes


@pytest.mark.parametrize(
    ("experts_per_token", "expert_width", "held_bytes"), [(8, 192, 55e6), (10, 128, 56.6e6)]
)
def test_a_promise_of_memory_covers_the_activations_of_a_token_s_experts(
    experts_per_token: int, expert_width: int, held_bytes: float, tmp_path: Path
) -> None:
    """Compare with MLX's peak beside weights and KV, for 512 tokens in float32 numbers, by mlx-lm's own model."""
    config = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 3, "num_attention_heads": 8}
    config |= {
        "num_experts": 32,
        "num_experts_per_tok": experts_per_token,
        "moe_intermediate_size": expert_width,
    }
    config |= {"vocab_size": 512, "num_key_value_heads": 2, "tie_word_embeddings": True}
    widened = profile_of(QWEN3_30B_A3B | config, tmp_path).widened
    assert widened is not None
    assert 0.99 * held_bytes <= working_bytes(widened, 512) <= 1.3 * held_bytes


def test_longer_chunks_of_prompts_take_more_memory_and_fewer_steps(tmp_path: Path) -> None:
    model, node = profile_of(QWEN3_14B, tmp_path), measured_node(made_up_profile(), "box")
    usual, longer = (Demand(8192, 1, chunk_tokens=tokens) for tokens in (None, 2048))
    memory, longer_memory = (StageTables(model, each).memory(node)[0, 10] for each in (usual, longer))
    more = working_bytes(node_model := StageTables(model, usual).model_on(node), 2048)
    assert longer_memory - memory == more - working_bytes(node_model, 512)
    assert [PlanRequest(each, prompt_tokens=8000).chunks for each in (usual, longer)] == [16, 4]
    usual_s, longer_s = (
        StageTables(model, each).prefill_seconds(node, 0, 10, 8000) for each in (usual, longer)
    )
    assert longer_s <= usual_s


def test_prompts_alone_have_long_chunks_on_measured_gpus() -> None:
    cpu = made_up_profile()
    gpu = cpu.model_copy(update={"device": "gpu"})
    assert [measured_node(each, "box").long_chunk_tokens for each in (cpu, gpu)] == [0, 2048]


def test_a_split_costs_one_more_step() -> None:
    table = StageTables(model_of(10), ONE_SEQUENCE).seconds(NODE, 1, 100).steady
    assert table[0, 4] + table[4, 10] == pytest.approx(table[0, 10] + COSTS.step_s)


def test_memory_counts_half_precision_as_widened_if_it_is() -> None:
    narrow = model_of(10, layer_bytes=100_000_000)
    wide = replace(
        narrow,
        weights="float32",
        number_bytes=4,
        layers=tuple(replace(layer, weight_bytes=200_000_000) for layer in narrow.layers),
    )
    model = replace(narrow, widened=wide)
    other = replace(NODE, name="mac", widens=False)
    plan = place(
        model, ClusterProfile((NODE, other)), PlanRequest(ONE_SEQUENCE, strategy="custom", counts=(5, 5))
    )
    box, mac = plan.stages
    assert box.weight_bytes == 2 * mac.weight_bytes
    tables = StageTables(model, ONE_SEQUENCE)
    assert tables.memory(NODE)[0, 5] > tables.memory(other)[0, 5]


@pytest.mark.parametrize(
    ("bits", "number_bytes", "share"), [(8, 2, 8.5 / 16), (4, 2, 4.5 / 16), (8, 4, 9 / 32)]
)
def test_a_quantized_kv_cache_takes_its_bits_and_scales(bits: int, number_bytes: int, share: float) -> None:
    assert Demand(1, 1, bits).kv_factor(number_bytes) == pytest.approx(share)


def test_a_message_takes_half_a_round_trip_and_the_time_of_its_bytes() -> None:
    link = LinkProfile(round_trip_s=4e-4, bandwidth=1e9)
    assert link.seconds(1e6) == pytest.approx(1.2e-3)
