"""Short names of published models, and what they mean on the hub."""

from __future__ import annotations

import pytest

from mlx_ring.core.errors import ModelNotFound
from mlx_ring.models.model_source import find_model, remove_model
from mlx_ring.models.short_names import find_hub_id, published_models, short_names_of
from mlx_ring.planner.known_models import find_known_model
from mlx_ring.planner.model_sizes import sizes_of
from mlx_ring.planner.profiles import ClusterProfile


@pytest.mark.parametrize(
    ("typed", "hub_id"),
    [
        ("qwen3:8b", "mlx-community/Qwen3-8B-4bit"),
        ("Qwen3-8B", "mlx-community/Qwen3-8B-4bit"),
        ("llama3.3:70b-4bit", "mlx-community/Llama-3.3-70B-Instruct-4bit"),
        ("llama3.3:latest", "mlx-community/Llama-3.3-70B-Instruct-4bit"),
        ("qwen3:14b", "mlx-community/Qwen3-14B-4bit"),
        ("qwen3:32b", "mlx-community/Qwen3-32B-4bit"),
        ("gemma3:12b", "mlx-community/gemma-3-12b-it-4bit"),
        ("gpt-oss:20b", "mlx-community/gpt-oss-20b-MXFP4-Q8"),
        ("qwen3:30b", "mlx-community/Qwen3-30B-A3B-4bit"),
        ("gemma4:31b-q8", "mlx-community/gemma-4-31b-it-8bit"),
        ("deepseek-r1-distill", "mlx-community/DeepSeek-R1-Distill-Qwen-7B-4bit"),
        ("8b", None),
        ("coder", None),
        ("someone/qwen3-8b", None),
    ],
)
def test_a_short_name_means_one_id_of_the_hub(typed: str, hub_id: str | None) -> None:
    assert find_hub_id(typed) == hub_id


def test_every_short_name_means_its_own_id_here_and_the_same_model_in_plans() -> None:
    for model in published_models():
        for name, hub_id in model.short_names():
            assert find_hub_id(name) == hub_id, name
            assert name in short_names_of(hub_id)
            assert find_known_model(name).name.startswith(model.name)


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("qwen3", "qwen3 may be any of qwen3:0.6b, qwen3:30b-a3b, "),
        ("qwen3-coder", "qwen3-coder may be any of qwen3-coder:30b-a3b, qwen3-coder-next: name one of them."),
        ("gemma4", "gemma4 may be any of gemma4:26b-a4b, gemma4:31b: name one of them."),
        ("qwen3.6", "qwen3.6 may be any of qwen3.6:27b, qwen3.6:35b-a3b: name one of them."),
        (
            "deepseek-r1",
            "is DeepSeek-R1, of which the list has no conversion: give the hub's id of one, or one of deepseek",
        ),
        ("qwen3:8b-3bit", "it has qwen3:8b, qwen3:8b-4bit."),
        ("qwen33:8b", "Did you mean 'qwen3:8b'"),
    ],
)
def test_a_name_that_means_no_single_model_gets_the_names_that_do(typed: str, said: str) -> None:
    with pytest.raises(ModelNotFound) as refusal:
        find_model(typed)
    assert said in str(refusal.value)


@pytest.mark.parametrize("typed", ["qwen3-coder", "gemma4", "qwen3.6"])
def test_a_plan_refuses_a_name_of_several_models_too(typed: str) -> None:
    with pytest.raises(ModelNotFound, match=f"{typed} may be any of"):
        find_known_model(typed)


def test_a_part_of_a_name_removes_no_model() -> None:
    with pytest.raises(
        ModelNotFound, match="phi is not the whole name of a model: phi4 or mlx-community/phi-4-4bit is one"
    ):
        remove_model("phi")


@pytest.mark.parametrize(
    ("hub_id", "weight_bytes"),
    [
        ("mlx-community/Qwen3-0.6B-4bit", 336_000_000),
        ("mlx-community/Qwen3-1.7B-4bit", 968_000_000),
        ("mlx-community/Qwen3-4B-4bit", 2_263_000_000),
        ("mlx-community/Qwen3-8B-4bit", 4_609_000_000),
        ("mlx-community/Qwen3-14B-4bit", 8_308_000_000),
        ("mlx-community/Qwen3-30B-A3B-4bit", 17_180_000_000),
        ("mlx-community/Qwen3-235B-A22B-Instruct-2507-4bit", 132_260_000_000),
    ],
)
def test_models_have_the_bytes_of_their_safetensors_files(hub_id: str, weight_bytes: int) -> None:
    planned = sizes_of(find_known_model(hub_id).folder, hub_id, ClusterProfile(()))
    assert find_hub_id(short_names_of(hub_id)[0]) == hub_id
    assert planned.weight_bytes == pytest.approx(weight_bytes, rel=0.01)
