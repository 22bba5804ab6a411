"""Stages from folders with only their own tensors, compared with stages from the whole model's folder."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import pytest
from mlx import nn
from mlx.utils import tree_flatten  # pyright: ignore[reportUnknownVariableType] - its tree is any
from mlx_lm.utils import (
    _get_classes,  # pyright: ignore[reportPrivateUsage, reportUnknownVariableType] - the one way to a class
    load_model,  # pyright: ignore[reportUnknownVariableType] - configurations are bare dicts
)
from tests.conformance.families import LAYERS, configuration, with_entries
from tests.worker.random_models import QWEN3, QWEN3_MOE, write_random_model

from mlx_ring.core.errors import ModelCorrupt
from mlx_ring.core.types import LayerRange
from mlx_ring.models.architectures import known_architectures
from mlx_ring.models.layer_tensors import NEVER_COMPUTED, mark_stage_folder, tensors_of_stage
from mlx_ring.models.model_folder import ModelFolder, read_model_folder
from mlx_ring.models.model_source import BUILTIN_FOLDER, builtin_names
from mlx_ring.worker.shard import StageModel
from mlx_ring.worker.weights import load_stage

SAMPLE = [
    *("qwen2", "llama", "gemma3_text", "gemma3", "gpt_oss", "deepseek_v3", "mamba", "qwen3_next", "talkie"),
    *("gemma4_text", "gpt2", "gpt_neox", "phixtral", "longcat_flash_ngram", "olmo_hybrid", "llama4_text"),
]
"""Families with tied, wrapped, sliding, latent and recurrent parts, embeddings read again, and other names of heads."""


def write_sparse_copy(folder: ModelFolder, layers: LayerRange, target: Path) -> ModelFolder:
    """Write a copy in which every tensor that the stage does not need is overwritten."""
    target.mkdir(parents=True)
    kept = {(entry.file, entry.name) for entry in tensors_of_stage(folder, layers)}
    for path in folder.path.iterdir():
        (target / path.name).write_bytes(path.read_bytes())
    for entry in folder.tensors:
        if (entry.file, entry.name) not in kept:
            with (target / entry.file).open("r+b") as stream:
                stream.seek(entry.offset)
                stream.write(b"\x5a" * entry.nbytes)
    return read_model_folder(target)


def load(folder: ModelFolder, layers: LayerRange) -> StageModel:
    return load_stage(folder, layers, "float32", lambda _done, _total: None)


def assert_same(whole: StageModel, part: StageModel, hidden: mx.array | None) -> mx.array:
    """Assert that every needed parameter and the output are equal; return the output."""
    ours, theirs = parameters(whole), parameters(part)
    needed = [path for path in ours if whole.needs(path)]
    assert needed
    for path in needed:
        assert mx.array_equal(ours[path], theirs[path]), path
    tokens = mx.array([[3, 1, 4, 1, 5]])
    one = whole.forward(tokens, hidden, whole.make_layer_caches(), None)
    other = part.forward(tokens, hidden, part.make_layer_caches(), None)
    assert mx.array_equal(one, other)
    return one


def parameters(stage: StageModel) -> dict[str, mx.array]:
    return cast("dict[str, mx.array]", tree_flatten(stage.model.parameters(), destination={}))


def cuts(layers: int) -> Iterator[list[LayerRange]]:
    """Yield every cut into two stages, and one with a stage for each layer."""
    for at in range(1, layers):
        yield [LayerRange(0, at), LayerRange(at, layers)]
    yield [LayerRange(number, number + 1) for number in range(layers)]


def assert_stages_same(folder: ModelFolder, stages: list[LayerRange], target: Path) -> None:
    hidden: mx.array | None = None
    for layers in stages:
        part = load(write_sparse_copy(folder, layers, target / str(layers)), layers)
        hidden = assert_same(load(folder, layers), part, hidden)


@pytest.mark.parametrize("name", builtin_names())
def test_demo_model_needs_only_its_stages_tensors(tmp_path: Path, name: str) -> None:
    folder = read_model_folder(BUILTIN_FOLDER / name)
    half = folder.num_layers // 2
    assert_stages_same(
        folder, [LayerRange(0, half), LayerRange(half, folder.num_layers)], tmp_path / "halves"
    )
    assert_stages_same(folder, [LayerRange(0, 1), *middle_and_last(folder)], tmp_path / "three")


def middle_and_last(folder: ModelFolder) -> list[LayerRange]:
    return [LayerRange(1, folder.num_layers - 1), LayerRange(folder.num_layers - 1, folder.num_layers)]


@pytest.mark.parametrize(
    ("bits", "config", "tied"),
    [
        (0, QWEN3, False),
        (0, QWEN3_MOE, True),
        pytest.param(4, QWEN3, True, marks=pytest.mark.slow),
        pytest.param(4, QWEN3_MOE, False, marks=pytest.mark.slow),
        pytest.param(0, QWEN3, True, marks=pytest.mark.thorough),
        pytest.param(0, QWEN3_MOE, False, marks=pytest.mark.thorough),
        pytest.param(4, QWEN3, False, marks=pytest.mark.thorough),
        pytest.param(4, QWEN3_MOE, True, marks=pytest.mark.thorough),
    ],
)
def test_every_cut_of_a_random_model_has_all_its_tensors(
    tmp_path: Path,
    bits: int,
    config: dict[str, Any],
    tied: bool,  # noqa: FBT001 - an example's column
) -> None:
    """Write models in which every two of the three properties meet, without `--thorough`."""
    path = write_random_model(tmp_path / "model", {**config, "tie_word_embeddings": tied})
    if bits:
        quantize(path, bits)
    folder = read_model_folder(path)
    for number, stages in enumerate(cuts(folder.num_layers)):
        assert_stages_same(folder, stages, tmp_path / str(number))


def quantize(path: Path, bits: int) -> None:
    model: Any = load_model(path)[0]
    nn.quantize(model, group_size=32, bits=bits)
    weights: Any = tree_flatten(model.parameters(), destination={})
    mx.save_safetensors(str(path / "model.safetensors"), weights)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"quantization": {"group_size": 32, "bits": bits}}))


def check_family(family: str, target: Path) -> None:
    entries = dict(known_architectures()[family].only_if)
    folder = read_model_folder(
        write_random_model(target / "model", with_entries(configuration(family), entries))
    )
    assert_stages_same(folder, [LayerRange(0, 2), LayerRange(2, 3), LayerRange(3, LAYERS)], target / "cut")


def exact_families() -> list[str]:
    return [name for name, outcome in known_architectures().items() if outcome.exact]


@pytest.mark.slow
@pytest.mark.parametrize("family", [name for name in SAMPLE if name in exact_families()])
def test_sampled_family_needs_only_its_stages_tensors(tmp_path: Path, family: str) -> None:
    check_family(family, tmp_path)


@pytest.mark.conformance
@pytest.mark.parametrize("family", exact_families())
def test_every_family_needs_only_its_stages_tensors(tmp_path: Path, family: str) -> None:
    check_family(family, tmp_path)


@pytest.mark.slow
def test_no_family_has_parameters_among_tensors_never_computed() -> None:
    for family in exact_families():
        config = with_entries(configuration(family), dict(known_architectures()[family].only_if))
        model_class, arguments_class = cast("tuple[Any, Any]", cast("object", _get_classes(config)))
        model = model_class(arguments_class.from_dict(config))
        flat = cast("dict[str, Any]", tree_flatten(model.parameters(), destination={}))
        assert [path for path in flat if NEVER_COMPUTED.search(path)] == []


def test_folder_made_for_other_layers_is_refused(tmp_path: Path) -> None:
    path = write_random_model(tmp_path / "model", QWEN3)
    mark_stage_folder(path, LayerRange(1, 3))
    folder = read_model_folder(path)
    assert load(folder, LayerRange(1, 3)).layers == LayerRange(1, 3)
    for start, end in itertools.pairwise((0, 2, 5)):
        with pytest.raises(ModelCorrupt, match=rf"made for layers \[1, 3\), but layers \[{start}, {end}\)"):
            load(folder, LayerRange(start, end))
    (path / "mlx-ring-stage.json").write_text("[]")
    with pytest.raises(ModelCorrupt, match="cannot be parsed"):
        load(folder, LayerRange(1, 3))
