"""Model architectures: which are known, and over how many stages each can be split."""

from __future__ import annotations

import json
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from tests.worker.kv.passes import ModelRun
from tests.worker.kv.small_models import small_model
from tests.worker.random_models import QWEN3, write_random_model

from mlx_ring.core.errors import ModelUnsupported
from mlx_ring.models.architectures import (
    default_entries,
    find_architecture,
    known_architectures,
    language_module,
    quantizes_kv,
    require_cuttable,
    require_quantizable,
)
from mlx_ring.models.model_folder import ModelFolder, read_model_folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_random_model(tmp_path / "model", QWEN3)


def of_type(folder: Path, model_type: str) -> ModelFolder:
    (folder / "config.json").write_text(json.dumps({**QWEN3, "model_type": model_type}))
    return read_model_folder(folder)


def test_an_exact_architecture_is_accepted_on_any_number_of_stages(folder: Path) -> None:
    for stages in (1, 2, 5):
        assert require_cuttable(of_type(folder, "qwen3"), stages).exact


def test_a_type_that_mlx_lm_runs_as_another_has_its_entry() -> None:
    assert find_architecture("mistral") == known_architectures()["llama"]


def test_the_class_decides_between_two_architectures_of_a_type() -> None:
    known = known_architectures()
    assert find_architecture("bailing_hybrid", ["BailingMoeV3ForCausalLM"]) is known["bailing_moe_v3"]
    assert find_architecture("bailing_hybrid", ["Other"]) is known["bailing_hybrid"]


@pytest.mark.parametrize("nested", [False, True])
def test_configuration_entries_that_an_architecture_requires_are_checked(folder: Path, nested: bool) -> None:  # noqa: FBT001 - pytest passes parameters by name
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


def test_an_unknown_architecture_is_refused_with_the_list_of_known_ones(folder: Path) -> None:
    with pytest.raises(
        ModelUnsupported,
        match=r"'brand_new' model, an architecture .* does not know\. docs/architectures\.md lists",
    ):
        require_cuttable(of_type(folder, "brand_new"), 1)


def test_an_architecture_that_cannot_be_split_is_refused_with_its_name(folder: Path) -> None:
    name, outcome = next((name, found) for name, found in known_architectures().items() if not found.exact)
    with pytest.raises(ModelUnsupported, match=f"'{name}' model, which cannot be split over 2 stages"):
        require_cuttable(of_type(folder, name), 2)
    assert outcome.reason


def test_an_architecture_that_is_exact_as_a_whole_is_served_on_one_stage(folder: Path) -> None:
    whole = [name for name, found in known_architectures().items() if found.whole and not found.exact]
    assert whole
    for name in whole:
        assert require_cuttable(of_type(folder, name), 1).whole
        with pytest.raises(ModelUnsupported, match="Serve it on one stage"):
            require_cuttable(of_type(folder, name), 2)


def test_most_families_can_be_split() -> None:
    assert sum(found.exact for found in known_architectures().values()) >= 47


@pytest.mark.parametrize("family", ["qwen3", "gemma3_text", "gpt_oss", "deepseek_v3", "deepseek_v32"])
def test_a_quantized_kv_cache_is_refused_where_mlx_lm_cannot_compute_with_it(
    family: str, folder: Path
) -> None:
    run, model = ModelRun(small_model(family), kv_bits=8), of_type(folder, family)
    run.open(1)
    if quantizes_kv(model):
        run.step({1: [1, 2]})
        require_quantizable(model)
        return
    with pytest.raises((AttributeError, TypeError, ValueError)):
        run.step({1: [1, 2]})
    with pytest.raises(ModelUnsupported, match=f"a '{family}' model, .* leave out --kv-bits"):
        require_quantizable(model)


def test_the_family_of_the_text_model_decides_on_its_kv_cache(folder: Path) -> None:
    for text, quantizes in (("mistral4", False), ("ministral3", True)):
        config = {**QWEN3, "model_type": "mistral3", "text_config": {**QWEN3, "model_type": text}}
        (folder / "config.json").write_text(json.dumps(config))
        assert quantizes_kv(read_model_folder(folder)) == quantizes


_UNREADABLE = {"olmo"}
"""Modules that need a package which is not here."""


def test_defaults_are_those_of_each_module_of_mlx_lm() -> None:
    """Read the defaults from the classes themselves, which the head cannot import without MLX."""
    for family in sorted(known_architectures().keys() - _UNREADABLE):
        module = import_module(f"mlx_lm.models.{family}")
        own: dict[str, Any] = {
            field.name: field.default for field in fields(module.ModelArgs) if isinstance(field.default, int)
        }
        read = default_entries({"model_type": family})
        assert own.items() <= read.items() or (family, own) == ("lfm2-vl", {"tie_word_embeddings": True}), (
            family
        )


@pytest.mark.parametrize(
    ("nested", "sizes"),
    [
        ({"model_type": "gemma3_text"}, (262208, 8, 4, 256)),
        ({"num_attention_heads": 32, "num_key_value_heads": 16, "head_dim": 128}, (262208, 32, 16, 128)),
    ],
)
def test_a_published_gemma_3_has_the_sizes_that_its_configuration_leaves_out(
    tmp_path: Path, nested: dict[str, Any], sizes: tuple[int, ...]
) -> None:
    config = {
        "model_type": "gemma3",
        "text_config": {"hidden_size": 2560, "num_hidden_layers": 34, "sliding_window": 1024, **nested},
    }
    model = ModelFolder(tmp_path, config, {}, ())
    names = ("num_attention_heads", "num_key_value_heads", "head_dim")
    assert (model.vocab_size, *map(model.entry, names)) == sizes
    assert (model.context_length, model.entry("sliding_window_pattern")) == (32768, 6)


def test_the_language_model_of_a_multimodal_configuration_decides_about_defaults() -> None:
    for nested, module in (("ministral3", "ministral3"), ("mistral", "llama"), (None, "llama")):
        config = {"model_type": "mistral3", "text_config": {"model_type": nested}}
        assert language_module(config) == module
        assert default_entries(config)["tie_word_embeddings"] == 0
    assert language_module({"model_type": "qwen2_vl"}) == "qwen2"
    assert default_entries({"model_type": "smollm3"})["tie_word_embeddings"] == 1
    assert default_entries({"model_type": "brand_new"}) == {}
