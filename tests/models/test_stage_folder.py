"""Folders for one stage: they hold its tensors, and exist completely or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.worker.random_models import QWEN3, write_random_model

from mlx_ring.core.errors import PlanError
from mlx_ring.core.types import LayerRange
from mlx_ring.models.layer_tensors import stage_bytes, tensors_of_stage, write_stage_folder
from mlx_ring.models.model_folder import ModelFolder, read_model_folder

LAYERS = LayerRange(1, 3)


@pytest.fixture
def model(tmp_path: Path) -> ModelFolder:
    config = {**QWEN3, "hidden_size": 256, "intermediate_size": 1024}
    return read_model_folder(write_random_model(tmp_path / "model", config))


def test_its_tensors_are_the_models_and_the_rest_is_sparse(model: ModelFolder, tmp_path: Path) -> None:
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


def test_it_has_the_digest_of_the_whole_model(model: ModelFolder, tmp_path: Path) -> None:
    write_stage_folder(model, LAYERS, tmp_path / "stage", lambda _count: None)
    assert read_model_folder(tmp_path / "stage").digest == model.digest


def test_an_existing_folder_is_not_changed(model: ModelFolder, tmp_path: Path) -> None:
    (tmp_path / "stage").mkdir()
    with pytest.raises(PlanError, match="already exists: remove it"):
        write_stage_folder(model, LAYERS, tmp_path / "stage", lambda _count: None)
    assert list((tmp_path / "stage").iterdir()) == []


def test_an_interrupted_folder_is_written_anew(model: ModelFolder, tmp_path: Path) -> None:
    def stop(_count: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_stage_folder(model, LAYERS, tmp_path / "stage", stop)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]
    (tmp_path / ".stage.new").mkdir()
    write_stage_folder(model, LAYERS, tmp_path / "stage", lambda _count: None)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "stage"]


def test_a_path_that_cannot_be_written_is_an_error(model: ModelFolder, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(PlanError, match="cannot be written: Not a directory"):
        write_stage_folder(model, LAYERS, tmp_path / "file" / "stage", lambda _count: None)
