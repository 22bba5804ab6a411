"""Bytes that a decode step reads, computed from each family's tensor names and sizes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from mlx_ring.models.model_folder import ModelFolder, TensorEntry
from mlx_ring.planner.model_sizes import DecodeBytes, decode_bytes


def folder(sizes: Mapping[str, int], *, dtype: str = "F32", layers: int = 2, **config: Any) -> ModelFolder:
    """Return a model of tensors of these sizes; embedding and head have a row for each of 10 tokens."""
    tensors = tuple(
        TensorEntry(name, dtype, (10, 1) if "embed" in name or "head" in name else (2, 2), "model", 0, size)
        for name, size in sizes.items()
    )
    entries = {"model_type": "any", "num_hidden_layers": layers, "vocab_size": 10}
    return ModelFolder(Path("any"), entries | config, {}, tensors)


def read(model: ModelFolder, *, widened: bool = False) -> DecodeBytes:
    found = decode_bytes(model, widened=widened)
    assert found is not None
    return found


@pytest.mark.parametrize(
    "path", ["model.layers", "language_model.model.layers", "transformer.h", "h", "transformer.blocks"]
)
def test_layers_are_found_under_every_family_s_names(path: str) -> None:
    model = folder(
        {f"{path}.0.a.weight": 3, f"{path}.1.a.weight": 4, f"{path}.1.b.weight": 5, "norm.weight": 7}
    )
    assert read(model) == DecodeBytes((3, 9), 0)


def test_a_separate_head_counts_and_the_embedding_does_not() -> None:
    model = folder({"layers.0.a": 1, "layers.1.a": 1, "embed_tokens.weight": 50, "lm_head.weight": 40})
    assert read(model).head == 40


def test_a_quantized_head_counts_with_scales_and_biases() -> None:
    parts = {"lm_head.weight": 40, "lm_head.scales": 4, "lm_head.biases": 4}
    assert read(folder({"layers.0.a": 1, "layers.1.a": 1} | parts)).head == 48


def test_a_tied_embedding_counts_as_the_head() -> None:
    sizes = {"layers.0.a": 1, "layers.1.a": 1, "embed_tokens.weight": 50, "embed_tokens.scales": 5}
    assert read(folder(sizes | {"embed_tokens_per_layer.weight": 90, "position.weight": 70})).head == 55


def test_only_the_experts_of_a_token_count() -> None:
    sizes = {
        "layers.0.mlp.up": 8,
        "layers.0.mlp.experts.3.up": 80,
        "layers.1.mlp.switch_mlp.up": 80,
        "layers.1.mlp.shared_experts.up": 8,
        "layers.1.mlp.gate": 2,
    }
    assert read(folder(sizes, num_experts=8, num_experts_per_tok=2)).layers == (28, 30)
    assert read(folder(sizes, num_experts=8)).layers == (88, 90)
    nested = {"n_routed_experts": 8, "moe_topk": 2}
    assert read(folder(sizes, text_config=nested)).layers == (28, 30)


def test_widened_half_precision_counts_double() -> None:
    sizes = {"layers.0.a": 4, "layers.1.a": 4, "lm_head.weight": 6}
    assert read(folder(sizes, dtype="BF16"), widened=True) == DecodeBytes((8, 8), 12)
    assert read(folder(sizes, dtype="BF16")) == DecodeBytes((4, 4), 6)
    assert read(folder(sizes, dtype="U32"), widened=True) == DecodeBytes((4, 4), 6)


def test_layers_of_an_image_encoder_or_beyond_the_last_do_not_count() -> None:
    sizes = {f"vision_tower.encoder.layers.{number}.a": 5 for number in range(4)}
    sizes |= {f"model.layers.{number}.a": 10 for number in range(3)}
    assert read(folder(sizes)).layers == (10, 10)


@pytest.mark.parametrize(
    "names", [["model.layers.0.a"], ["model.block_0.a", "model.block_1.a"], ["layers.weight"]]
)
def test_names_that_lack_a_layer_give_no_result(names: list[str]) -> None:
    assert decode_bytes(folder(dict.fromkeys(names, 1)), widened=False) is None
