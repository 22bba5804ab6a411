"""The tensors that a stage needs: all of them, and no large one too many."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from mlx_ring.core.errors import PlanError
from mlx_ring.core.types import LayerRange
from mlx_ring.models.layer_tensors import tensors_of_stage
from mlx_ring.models.model_folder import ModelFolder, TensorEntry

LAYERS = {f"model.layers.{number}.mlp.weight": (8, 8) for number in range(3)}
OUTSIDE = {"model.embed_tokens.weight": (10, 8), "model.norm.weight": (8,), "lm_head.weight": (10, 8)}


def folder(shapes: Mapping[str, Sequence[int]], model_type: str = "qwen3", **config: Any) -> ModelFolder:
    tensors = tuple(
        TensorEntry(name, "F32", tuple(shape), "model", 0, 1 << 20) for name, shape in shapes.items()
    )
    entries = {"model_type": model_type, "num_hidden_layers": 3, "vocab_size": 10}
    return ModelFolder(Path("any"), entries | config, {}, tensors)


def names(model: ModelFolder, start: int, end: int) -> set[str]:
    return {entry.name for entry in tensors_of_stage(model, LayerRange(start, end))}


def test_each_stage_gets_its_layers_the_first_the_embedding_and_the_last_the_head() -> None:
    model = folder(LAYERS | OUTSIDE, tie_word_embeddings=False)
    layer = [*LAYERS]
    assert names(model, 0, 1) == {layer[0], "model.embed_tokens.weight", "model.norm.weight"}
    assert names(model, 1, 2) == {layer[1], "model.norm.weight"}
    assert names(model, 2, 3) == {layer[2], "model.norm.weight", "lm_head.weight"}
    assert names(model, 0, 3) == {*LAYERS, *OUTSIDE}


@pytest.mark.parametrize(
    ("config", "head"),
    [
        ({"tie_word_embeddings": True}, True),
        ({}, True),
        ({"tie_word_embeddings": False, "text_config": {"tie_word_embeddings": True}}, True),
        ({"tie_word_embeddings": False}, False),
    ],
)
def test_the_last_stage_gets_an_embedding_that_may_be_tied(
    config: dict[str, Any],
    head: bool,  # noqa: FBT001 - an example's column
) -> None:
    shapes = LAYERS | OUTSIDE
    if not head:
        del shapes["lm_head.weight"]
    model = folder(shapes, **config)
    assert "model.embed_tokens.weight" in names(model, 2, 3)
    assert "model.embed_tokens.weight" not in names(model, 1, 2)


def test_a_family_without_tied_embeddings_needs_no_configuration_entry() -> None:
    assert "model.embed_tokens.weight" not in names(folder(LAYERS | OUTSIDE, "deepseek_v3"), 2, 3)


def test_quantized_embeddings_and_heads_include_their_scales() -> None:
    parts = {
        f"{module}.{part}": (10, 4) for module in ("model.embed", "lm_head") for part in ("weight", "scales")
    }
    model = folder(LAYERS | parts, tie_word_embeddings=False)
    assert names(model, 0, 1) >= {"model.embed.weight", "model.embed.scales"}
    assert names(model, 1, 2) == {"model.layers.1.mlp.weight"}
    assert names(model, 2, 3) >= {"lm_head.weight", "lm_head.scales"}


def test_a_large_ambiguous_tensor_goes_to_every_stage_and_the_embedding_with_it() -> None:
    model = folder(LAYERS | OUTSIDE | {"model.projection.weight": (8, 8)}, tie_word_embeddings=False)
    for start in range(3):
        assert names(model, start, start + 1) >= {"model.projection.weight", "model.embed_tokens.weight"}
    assert "lm_head.weight" not in names(model, 1, 2)


def test_ambiguous_layers_go_to_every_stage() -> None:
    model = folder({f"model.part{number}.weight": (8, 8) for number in range(3)} | OUTSIDE)
    assert names(model, 1, 2) == {entry.name for entry in model.tensors}


def test_tensors_that_mlx_lm_ignores_go_to_no_stage() -> None:
    ignored = [
        *("vision_tower.encoder.layers.0.weight", "model.visual.blocks.1.weight", "mtp.layers.0.weight"),
        *("model.mtp_layers.0.weight", "audio_tower.weight", "multi_modal_projector.linear_1.weight"),
        "model.layers.3.mlp.weight",
    ]
    model = folder(LAYERS | OUTSIDE | dict.fromkeys(ignored, (8, 8)), tie_word_embeddings=False)
    assert names(model, 0, 3) == {*LAYERS, *OUTSIDE}
    assert names(model, 1, 2) == {"model.layers.1.mlp.weight", "model.norm.weight"}


@pytest.mark.parametrize(("start", "end"), [(0, 4), (-1, 2), (2, 2), (3, 1)])
def test_missing_layers_are_refused_with_their_range(start: int, end: int) -> None:
    with pytest.raises(PlanError, match=rf"Layers \[{start}, {end}\) were requested, but any has 3 layers"):
        names(folder(LAYERS | OUTSIDE), start, end)
