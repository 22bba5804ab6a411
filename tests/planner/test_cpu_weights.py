"""Forms of quantized weights on CPUs: float32 where native kernels do not run and memory allows it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.planner.clusters import GB, cluster_of, model_of, node_of, shared_model
from tests.profiles import RATES, made_up_profile

from mlx_cpu_kernels.machine import scratch_bytes
from mlx_ring.core.types import CpuWeights, LayerRange
from mlx_ring.planner.forecast import Forecast, settle_weights
from mlx_ring.planner.place import place
from mlx_ring.planner.profiles import ModelProfile, NodeProfile, measured_node
from mlx_ring.planner.request import Demand, PlanRequest
from mlx_ring.planner.stage_costs import StageTables, working_bytes

RATIO = 7
DEMAND = Demand(context_tokens=1024, sequences=1)
REQUEST = PlanRequest(DEMAND)


def quantized(model: ModelProfile) -> ModelProfile:
    """Return the model with weights of 4 bits, which have seven times the bytes as float32."""
    layers = tuple(
        replace(
            layer,
            **{
                name: RATIO * getattr(layer, name)
                for name in ("weight_bytes", "read_bytes", "attention_bytes", "whole_bytes")
            },
        )
        for layer in model.layers
    )
    plain = replace(model, layers=layers, head_bytes=RATIO * model.head_bytes, weights="float32")
    return replace(model, weights="4-bit", widest=4096, dequantized=plain)


MODEL = quantized(model_of(10, head_bytes=50_000_000))
"""1.05 GB, and 7.35 GB as float32."""


def cpu_of(name: str, gigabytes: float, weights: CpuWeights = "auto") -> NodeProfile:
    return replace(node_of(name, gigabytes, gb_s=20), widens=True, cpu_weights=weights, rates=RATES)


@pytest.mark.parametrize(
    ("kernels", "asked", "device", "expected"),
    [
        ("", "auto", "cpu", "auto"),
        ("AVX2", "auto", "cpu", "quantized"),
        ("AVX2", "float32", "cpu", "float32"),
        ("", "quantized", "cpu", "quantized"),
        ("", "float32", "gpu", "quantized"),
    ],
)
def test_only_a_cpu_without_kernels_has_a_choice(
    kernels: str, asked: CpuWeights, device: str, expected: str
) -> None:
    profile = made_up_profile(kernels=kernels, device=device)
    assert measured_node(profile, "box", cpu_weights=asked).cpu_weights == expected


def test_weights_are_float32_where_they_fit_and_as_stored_elsewhere() -> None:
    tables, plain = StageTables(MODEL, DEMAND), MODEL.dequantized
    assert plain is not None
    large, small = cpu_of("large", 16), cpu_of("small", 4)
    assert tables.weight_bytes(large, 0, 10) == 10 * plain.layers[0].weight_bytes + plain.head_bytes
    assert tables.weight_bytes(small, 0, 10) == 10 * MODEL.layers[0].weight_bytes + MODEL.head_bytes
    # Some layers fit as float32 even there.
    assert tables.weight_bytes(small, 0, 4) == 4 * plain.layers[0].weight_bytes + MODEL.embedding_bytes
    assert (tables.memory(small)[0] <= small.usable_bytes).all()
    assert tables.stage_seconds(large, 0, 10, 1, 0).steady < tables.stage_seconds(small, 0, 10, 1, 0).steady


@pytest.mark.parametrize("gigabytes", [3, 6, 9, 16])
def test_the_plan_of_a_choice_is_as_fast_as_the_better_of_both(gigabytes: float) -> None:
    def token_s(weights: CpuWeights) -> float:
        try:
            return place(MODEL, cluster_of(cpu_of("a", gigabytes, weights)), REQUEST).prediction.token_s
        except Exception:  # noqa: BLE001 - float32 weights do not fit
            return float("inf")

    assert token_s("auto") == pytest.approx(min(token_s("quantized"), token_s("float32")))


def test_a_plan_counts_the_memory_of_the_chosen_form() -> None:
    plan = place(MODEL, cluster_of(cpu_of("a", 16)), REQUEST)
    assert plan.stages[0].weight_bytes > 7 * GB
    assert place(MODEL, cluster_of(cpu_of("a", 4)), REQUEST).stages[0].weight_bytes < 1.2 * GB


def test_ranks_of_one_machine_have_float32_weights_as_far_as_they_fit_together() -> None:
    """Give the first stage float32 weights, and leave the second as it is stored."""
    node = cpu_of("a", 6.5)
    stages = [(LayerRange(0, 5), [(node, 1.0)]), (LayerRange(5, 10), [(node, 1.0)])]
    settled = settle_weights(MODEL, DEMAND, cluster_of(node), stages)
    assert [ranks[0][0].cpu_weights for _, ranks in settled] == ["float32", "quantized"]
    roomy = cpu_of("a", 16)
    stages = [(layers, [(roomy, 1.0)]) for layers, _ in stages]
    settled = settle_weights(MODEL, DEMAND, cluster_of(roomy), stages)
    assert [ranks[0][0].cpu_weights for _, ranks in settled] == ["float32", "float32"]
    given = [(ranks[0][0], layers) for layers, ranks in settled]
    forecast = Forecast(MODEL, DEMAND, cluster_of(roomy), given)
    assert sum(forecast.memory(stage).weight_bytes for stage in (0, 1)) > 7 * GB


def test_each_rank_of_shared_layers_holds_what_fits_on_its_machine() -> None:
    model = quantized(shared_model(4))
    nodes = [cpu_of("a", 16), cpu_of("b", 2)]
    ranks = [(node, 0.5) for node in nodes]
    ((_, settled),) = settle_weights(model, DEMAND, cluster_of(*nodes), [(LayerRange(0, 4), ranks)])
    assert [node.cpu_weights for node, _ in settled] == ["float32", "quantized"]


def test_a_model_without_quantized_weights_has_no_choice() -> None:
    node = cpu_of("a", 16)
    stage = (LayerRange(0, 10), [(node, 1.0)])
    ((_, settled),) = settle_weights(model_of(10), DEMAND, cluster_of(node), [stage])
    assert settled[0][0].cpu_weights == "quantized"


def test_working_memory_counts_what_quantized_products_keep() -> None:
    plain = replace(MODEL, weights="bfloat16")
    assert working_bytes(MODEL, 512) - working_bytes(plain, 512) == scratch_bytes(4096, 512)
