"""Published models by short name, and dense models by their number of parameters."""

from __future__ import annotations

import pytest

from mlx_ring.core.errors import ModelNotFound
from mlx_ring.planner.known_models import find_known_model, popular_models
from mlx_ring.planner.model_sizes import profile_folder


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("llama-70b", "Llama-3.3-70B 4-bit"),
        ("Llama 3.3 70B q4", "Llama-3.3-70B 4-bit"),
        ("qwen3-30b-a3b-4bit", "Qwen3-30B-A3B 4-bit"),
        ("qwen3-30b-8bit", "Qwen3-30B-A3B 8-bit"),
        ("gpt-oss-20b", "gpt-oss-20b MXFP4-Q8"),
        ("deepseek-r1", "DeepSeek-R1 4-bit"),
        ("70B-4bit", "70B 4-bit"),
        ("0.5b-bf16", "0.5B bf16"),
    ],
)
def test_a_short_name_means_the_model_with_its_parts(text: str, name: str) -> None:
    assert find_known_model(text).name == name


@pytest.mark.parametrize("billions", [0.5, 1, 3, 8, 14, 32, 70, 123, 405, 1000])
def test_a_dense_model_has_the_number_of_parameters_that_is_asked_for(billions: float) -> None:
    known = find_known_model(f"{billions:g}b-bf16")
    parameters = profile_folder(known.folder, known.name).weight_bytes / 2
    assert parameters / 1e9 == pytest.approx(billions, rel=0.03)


def test_a_name_that_means_nothing_brings_up_the_nearest() -> None:
    with pytest.raises(ModelNotFound, match=r"The nearest are .*Llama-3-70B"):
        find_known_model("lama-70b")
    with pytest.raises(ModelNotFound, match="9000 billion parameters; give a number from"):
        find_known_model("9000b")


@pytest.mark.parametrize("billions", [0.5, 3, 13, 27, 70, 405])
def test_a_dense_model_can_be_shared_by_two_four_and_eight_ranks(billions: float) -> None:
    known = find_known_model(f"{billions:g}b-4bit")
    shared = profile_folder(known.folder, known.name).shared
    assert shared is not None
    config = known.folder.config
    assert config["num_attention_heads"] % config["num_key_value_heads"] == 0
    assert config["num_key_value_heads"] == 8
    assert config["hidden_size"] == config["num_attention_heads"] * config["head_dim"]


def test_a_models_context_is_the_published_one_or_said_to_be_assumed() -> None:
    assert find_known_model("llama-2-7b").folder.context_length == 4096
    assert find_known_model("qwen3-8b").folder.context_length == 40960
    assert "assumed" not in find_known_model("deepseek-v3.2").remark
    assert "is assumed to be 32,768 tokens" in find_known_model("glm-5.2").remark


@pytest.mark.parametrize(
    "text", ["70B-0bit", "70B-1bit", "70B-7bit", "70B-16bit", "llama-70b-4bit-gs7", "8b-q9"]
)
def test_an_unknown_format_is_refused(text: str) -> None:
    with pytest.raises(ModelNotFound, match=r"The format .* is unknown; give 2, 3, 4, 5, 6 or 8 bits"):
        find_known_model(text)


def test_popular_models_have_sizes_and_a_published_conversion() -> None:
    found = list(popular_models())
    assert len({known.name for known in found}) == len(found) > 30
    for known in found:
        assert "/" in known.remark
        assert known.folder.context_length > 8192
