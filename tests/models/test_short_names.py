"""Short names of published models, and what they mean on the hub."""

from __future__ import annotations

import pytest

from mlx_ring.core.errors import ModelNotFound
from mlx_ring.models.model_source import find_model
from mlx_ring.models.short_names import find_hub_id, published_models, short_names_of
from mlx_ring.planner.known_models import find_known_model


@pytest.mark.parametrize(
    ("typed", "hub_id"),
    [
        ("qwen3:8b", "mlx-community/Qwen3-8B-4bit"),
        ("Qwen3-8B", "mlx-community/Qwen3-8B-4bit"),
        ("llama3.3:70b-4bit", "mlx-community/Llama-3.3-70B-Instruct-4bit"),
        ("llama3.3:latest", "mlx-community/Llama-3.3-70B-Instruct-4bit"),
        ("gpt-oss:20b", "mlx-community/gpt-oss-20b-MXFP4-Q8"),
        ("qwen3:30b", "mlx-community/Qwen3-30B-A3B-4bit"),
        ("gemma4:31b-q8", "mlx-community/gemma-4-31b-it-8bit"),
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
        ("qwen3", "qwen3 may be any of qwen3:0.6b, qwen3:1.7b, qwen3:4b, qwen3:8b: name one of them."),
        ("qwen3:8b-3bit", "it has qwen3:8b, qwen3:8b-4bit."),
        ("qwen33:8b", "Did you mean 'qwen3:8b'"),
    ],
)
def test_a_name_that_means_no_single_model_gets_the_names_that_do(typed: str, said: str) -> None:
    with pytest.raises(ModelNotFound) as refusal:
        find_model(typed)
    assert said in str(refusal.value)
