"""A folder for one stage holds its own tensors, and is there whole or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.worker.random_models import QWEN3, write_random_model

from mlx_ring.core.errors import PlanError
from mlx_ring.core.types import LayerRange
from mlx_ring.models.layer_tensors import tensors_of_stage
from mlx_ring.models.model_folder import ModelFolder, read_model_folder
from mlx_ring.models.stage_folder import stage_bytes, write_stage_folder

LAYERS = LayerRange(1, 3)


@pytest.fixture
def model(tmp_path: Path) -> ModelFolder:
    config = {**QWEN3, "hidden_size": 256, "intermediate_size": 1024}
    return read_model_folder(write_random_model(tmp_path / "model", config))


def test_its_tensors_are_the_models_and_what_lies_between_is_holes(
    model: ModelFolder, tmp_path: Path
) -> None:
    reported: list[int] = []
    write_stage_folder(model, LAYERS, tmp_path / "stage", reported.append)
    whole = (model.path / "model.safetensors").read_bytes()
    part = (tmp_path / "stage" / "model.safetensors").read_bytes()
    for entry in tensors_of_stage(model, LAYERS):
        span = slice(entry.offset, entry.offset + entry.nbytes)
        assert part[span] == whole[span]
    assert sum(reported) == stage_bytes(model, LAYERS)
    assert len(part) == len(whole)
    blocks = (tmp_path / "stage" / "model.safetensors").stat().st_blocks * 512
    assert blocks < stage_bytes(model, LAYERS) + 64 * 4096 < len(whole) * 2 / 3


def test_it_is_the_same_model_to_whoever_asks(model: ModelFolder, tmp_path: Path) -> None:
    write_stage_folder(model, LAYERS, tmp_path / "stage", lambda _count: None)
    assert read_model_folder(tmp_path / "stage").digest == model.digest


def test_a_folder_that_is_there_is_left_alone(model: ModelFolder, tmp_path: Path) -> None:
    (tmp_path / "stage").mkdir()
    with pytest.raises(PlanError, match="already exists: remove it"):
        write_stage_folder(model, LAYERS, tmp_path / "stage", lambda _count: None)
    assert list((tmp_path / "stage").iterdir()) == []


def test_what_was_left_of_an_interrupted_one_is_made_anew(model: ModelFolder, tmp_path: Path) -> None:
    def stop(_count: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_stage_folder(model, LAYERS, tmp_path / "stage", stop)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]
    (tmp_path / ".stage.new").mkdir()
    write_stage_folder(model, LAYERS, tmp_path / "stage", lambda _count: None)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "stage"]


def test_where_nothing_can_be_written_it_is_said(model: ModelFolder, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(PlanError, match="cannot be written: Not a directory"):
        write_stage_folder(model, LAYERS, tmp_path / "file" / "stage", lambda _count: None)
