"""Checkpoints of a transformer alone give the hidden states of the model that they were taken from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import pytest
from mlx_lm.utils import load_model  # pyright: ignore[reportUnknownVariableType] - untyped
from tests.worker.random_models import QWEN3, write_random_model
from tests.worker.stages import CUTS, PROMPT, Pipeline, Want, chunk, open_sequence, want

from mlx_ring.worker.tensors import from_message


def bare(whole: Path, folder: Path, *, with_head: bool) -> Path:
    """Save the same weights as sentence-transformers does."""
    weights = cast("dict[str, mx.array]", mx.load(str(whole / "model.safetensors")))
    kept = {name: array for name, array in weights.items() if with_head or not name.startswith("lm_head")}
    renamed = {name.removeprefix("model."): array for name, array in kept.items()}
    mx.save_safetensors(str(folder / "model.safetensors"), renamed)
    (folder / "config.json").write_text(json.dumps(QWEN3))
    return folder


@pytest.mark.parametrize("with_head", [True, False], ids=["with a head", "without"])
@pytest.mark.parametrize("stages", [1, 2])
def test_a_bare_checkpoint_gives_the_whole_model_s_hidden_states(
    tmp_path: Path, stages: int, *, with_head: bool
) -> None:
    whole, folder = tmp_path / "whole", tmp_path / "bare"
    write_random_model(whole, QWEN3)
    folder.mkdir()
    pipeline = Pipeline(bare(whole, folder, with_head=with_head), CUTS[stages])
    row = chunk(1, 0, PROMPT, want(Want.HIDDEN_SUM, Want.LAST))
    got = from_message(pipeline.results(row, operations=[open_sequence(1)])[1].hidden)
    model: Any = load_model(whole)[0]
    assert mx.allclose(got, model.model(mx.array([PROMPT]))[0, -1], rtol=0, atol=2e-5)
