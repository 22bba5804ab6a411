"""Sizes of a configuration that no model has: each command ends with one sentence, and nothing takes for ever."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from tests.conformance.families import configuration
from tests.examples import examples
from tests.processes import run_cli, run_in_process
from tests.worker.random_models import QWEN3, write_random_model

from mlx_ring.core.errors import ModelCorrupt, RingError
from mlx_ring.head.served_model import describe_model, memory_for_weights, sampling_defaults
from mlx_ring.models.architectures import known_architectures, require_cuttable
from mlx_ring.models.config_limits import (
    _LIMITS,  # pyright: ignore[reportPrivateUsage] - every name is tried
    check_config,
)
from mlx_ring.models.model_folder import read_model_config, read_model_folder
from mlx_ring.planner.model_sizes import profile_folder
from mlx_ring.settings.config import Settings

HOSTILE: list[object] = [
    0,
    -1,
    10**10,
    10**12,
    10**400,
    1.5,
    1e12,
    float("nan"),
    float("inf"),
    "12",
    "",
    True,
    [],
    {},
    [4],
    [-4],
]


PRESHARD = ("--out", "out", "--stages", "2")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_model(tmp_path_factory.mktemp("models") / "model", QWEN3)


def write_config(folder: Path, **fields: Any) -> Path:
    file = folder / "config.json"
    file.write_text(json.dumps(QWEN3 | fields))
    return file


def use(folder: Path) -> None:
    """Read all that a head derives from a model's folder before it starts a worker."""
    model = read_model_folder(folder)
    require_cuttable(model, 2)
    describe_model(model)
    memory_for_weights(model, Settings())
    profile_folder(model, "model")
    profile_folder(read_model_config(folder / "config.json"), "model")
    assert 0 < model.context_length < 1 << 31


@pytest.mark.parametrize("value", HOSTILE, ids=lambda value: repr(value)[:12])
@pytest.mark.parametrize(
    "name", ["num_hidden_layers", "hidden_size", "vocab_size", "max_position_embeddings"]
)
def test_a_wrong_size_is_named_with_its_file_and_value(folder: Path, name: str, value: object) -> None:
    file = write_config(folder, **{name: value})
    with pytest.raises(ModelCorrupt) as caught:
        use(folder)
    assert str(caught.value).startswith(f"{file} gives {name} as {repr(value)[:40]}")
    assert str(caught.value).endswith("Correct the file, or fetch the model again.")


@pytest.mark.parametrize(
    "name", ["num_attention_heads", "num_key_value_heads", "intermediate_size", "head_dim"]
)
@pytest.mark.parametrize("value", [0, -8, 10**12, "8", 8.5, float("nan"), [-8]])
def test_a_wrong_size_of_a_layer_is_named(folder: Path, name: str, value: object) -> None:
    write_config(folder, **{name: value})
    with pytest.raises(ModelCorrupt, match=rf"gives {name} as .* whole number from 1 to"):
        use(folder)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"quantization": {"bits": "four"}}, "gives quantization.bits as 'four'"),
        ({"quantization": {"bits": 4, "group_size": 10**9}}, "gives quantization.group_size as 1000000000"),
        ({"quantization_config": "int4"}, "gives quantization_config as 'int4'; it must be an object"),
        ({"layer_types": ["full_attention"]}, "has 1 layer_types for 5 layers"),
        ({"text_config": {"num_hidden_layers": -3}}, "gives num_hidden_layers as -3"),
    ],
)
def test_other_contradictions_are_named(folder: Path, fields: dict[str, Any], said: str) -> None:
    write_config(folder, **fields)
    with pytest.raises(ModelCorrupt, match=said):
        use(folder)


_VALUES = st.sampled_from(HOSTILE) | st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
_NAMES = st.sampled_from(
    [
        *_LIMITS,
        *(
            "quantization",
            "quantization_config",
            "text_config",
            "layer_types",
            "rope_scaling",
            "eos_token_id",
        ),
        *("architectures", "tie_word_embeddings", "torch_dtype", "dtype", "mlp_only_layers", "model_type"),
    ]
)


@given(st.dictionaries(_NAMES, _VALUES, min_size=1, max_size=3), _VALUES)
@examples(1.0, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
def test_any_configuration_is_read_or_refused(folder: Path, fields: dict[str, Any], advised: object) -> None:
    write_config(folder, **fields)
    with contextlib.suppress(RingError):
        use(folder)
    sampling_defaults({"temperature": advised, "top_k": advised})


@pytest.mark.parametrize(
    "fields",
    [
        {"num_key_value_heads": [4, 0, None, 2, 2], "intermediate_size": [128] * 5},
        {"sliding_window_pattern": "LLLG", "sliding_window": None},
        {"num_experts": 0, "time_step_limit": [0.0, float("inf")], "max_position_embeddings": None},
        {"quantization_config": {"quant_method": "fp8", "bits": 8, "group_size": -1}},
    ],
)
def test_unusual_sizes_of_real_models_are_accepted(fields: dict[str, Any]) -> None:
    check_config(Path("config.json"), QWEN3 | fields)


def test_the_configurations_of_all_architectures_are_accepted() -> None:
    for family in known_architectures():
        check_config(Path(family), configuration(family))


@pytest.mark.parametrize(
    "file", ["model.safetensors", "config.json", "tokenizer.json", "generation_config.json"]
)
@pytest.mark.parametrize(
    "words", [("plan", "--machine", "m4-mac-mini-16"), ("models", "preshard", *PRESHARD)]
)
def test_a_named_pipe_in_a_folder_is_refused(tmp_path: Path, words: tuple[str, ...], file: str) -> None:
    folder = write_random_model(tmp_path / "model", QWEN3)
    (folder / file).unlink(missing_ok=True)
    os.mkfifo(folder / file)
    result = run_in_process(*words, str(folder), folder=tmp_path)
    assert result.returncode == 2
    assert f"{folder / file} is a named pipe, not a file" in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"num_hidden_layers": 10**9}, "gives num_hidden_layers as 1000000000"),
        ({"num_attention_heads": 0}, "gives num_attention_heads as 0"),
        ({"hidden_size": 1e12}, "gives hidden_size as 1000000000000.0"),
        ({"num_attention_heads": "8"}, "gives num_attention_heads as '8'"),
    ],
)
@pytest.mark.parametrize(
    "words", [("plan", "--machine", "m4-mac-mini-16"), ("models", "preshard", *PRESHARD)]
)
def test_commands_refuse_wrong_sizes_in_one_sentence(
    tmp_path: Path, words: tuple[str, ...], fields: dict[str, Any], said: str
) -> None:
    folder = write_random_model(tmp_path / "model", QWEN3)
    write_config(folder, **fields)
    result = run_in_process(*words, str(folder), folder=tmp_path)
    assert (result.returncode, result.stderr.count("\n")) == (2, 1)
    assert said in result.stderr


def test_a_server_refuses_wrong_sizes_and_named_pipes_in_one_sentence(tmp_path: Path) -> None:
    folder = write_random_model(tmp_path / "model", QWEN3)
    write_config(folder, num_hidden_layers=10**9)
    wrong = run_cli("serve", str(folder), "--port", "0", folder=tmp_path)
    (folder / "model.safetensors").unlink()
    os.mkfifo(folder / "model.safetensors")
    pipe = run_cli("serve", str(folder), "--port", "0", folder=tmp_path)
    assert (wrong.returncode, pipe.returncode) == (2, 2)
    assert "gives num_hidden_layers as 1000000000; it must be a whole number" in wrong.stderr
    assert "model.safetensors is a named pipe, not a file" in pipe.stderr
