from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.worker.random_models import QWEN3, write_random_model

from mlx_ring.core.errors import ModelUnsupported
from mlx_ring.models.architectures import find_architecture, known_architectures, require_cuttable
from mlx_ring.models.model_folder import ModelFolder, read_model_folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_random_model(tmp_path / "model", QWEN3)


def of_type(folder: Path, model_type: str) -> ModelFolder:
    (folder / "config.json").write_text(json.dumps({**QWEN3, "model_type": model_type}))
    return read_model_folder(folder)


def test_an_examined_architecture_is_accepted_on_any_number_of_stages(folder: Path) -> None:
    for stages in (1, 2, 5):
        assert require_cuttable(of_type(folder, "qwen3"), stages).exact


def test_a_type_that_mlx_lm_runs_as_another_is_that_other() -> None:
    assert find_architecture("mistral") == known_architectures()["llama"]


def test_the_class_decides_where_one_type_has_two_architectures() -> None:
    known = known_architectures()
    assert find_architecture("bailing_hybrid", ["BailingMoeV3ForCausalLM"]) is known["bailing_moe_v3"]
    assert find_architecture("bailing_hybrid", ["Other"]) is known["bailing_hybrid"]


@pytest.mark.parametrize("nested", [False, True])
def test_entries_that_an_architecture_needs_are_looked_for(folder: Path, nested: bool) -> None:  # noqa: FBT001
    def with_sharing(layers: int | None) -> ModelFolder:
        entries = {"num_kv_shared_layers": layers, "hidden_size_per_layer_input": 0}
        config = {**QWEN3, "model_type": "gemma4", **({"text_config": entries} if nested else entries)}
        (folder / "config.json").write_text(json.dumps(config))
        return read_model_folder(folder)

    assert require_cuttable(with_sharing(0), 3).exact
    for sharing in (with_sharing(2), with_sharing(None)):
        assert not require_cuttable(sharing, 1).exact
        with pytest.raises(ModelUnsupported, match="share KV"):
            require_cuttable(sharing, 2)


def test_an_unknown_architecture_is_refused_with_the_way_to_examine_it(folder: Path) -> None:
    with pytest.raises(ModelUnsupported, match=r"'brand_new' model.*make conformance"):
        require_cuttable(of_type(folder, "brand_new"), 1)


def test_one_that_cannot_be_cut_is_refused_by_name_with_the_reason(folder: Path) -> None:
    name, outcome = next((name, found) for name, found in known_architectures().items() if not found.exact)
    with pytest.raises(ModelUnsupported, match=f"'{name}' model, which cannot be split over 2 stages"):
        require_cuttable(of_type(folder, name), 2)
    assert outcome.reason


def test_one_that_runs_whole_may_be_served_on_one_stage(folder: Path) -> None:
    whole = [name for name, found in known_architectures().items() if found.whole and not found.exact]
    assert whole
    for name in whole:
        assert require_cuttable(of_type(folder, name), 1).whole
        with pytest.raises(ModelUnsupported, match="can be served on one stage"):
            require_cuttable(of_type(folder, name), 2)


def test_most_families_can_be_cut() -> None:
    assert sum(found.exact for found in known_architectures().values()) >= 47
