"""Short names of published models, and what they mean on the hub."""

from __future__ import annotations

import pytest

from mlx_ring.core.errors import ModelNotFound
from mlx_ring.models.model_source import find_model, remove_model
from mlx_ring.models.short_names import find_hub_id, published_models, short_names_of, unknown_model
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
        ("llama3.1:70b", "mlx-community/Meta-Llama-3.1-70B-Instruct-4bit"),
        ("llama3.1", "mlx-community/Meta-Llama-3.1-8B-Instruct-4bit"),
        ("Llama-3.1:8b", "mlx-community/Meta-Llama-3.1-8B-Instruct-4bit"),
        ("llama3:latest", "mlx-community/Meta-Llama-3-8B-Instruct-4bit"),
        ("mistral", "mlx-community/Mistral-7B-Instruct-v0.3-4bit"),
        ("mistral-nemo", "mlx-community/Mistral-Nemo-Instruct-2407-4bit"),
        ("mistral-small:24b", "mlx-community/Mistral-Small-3.2-24B-Instruct-2506-4bit"),
        ("devstral:24b", "mlx-community/Devstral-Small-2507-4bit-DWQ"),
        ("qwen2.5-coder:32b", "mlx-community/Qwen2.5-Coder-32B-Instruct-4bit"),
        ("qwen2.5-coder", "mlx-community/Qwen2.5-Coder-7B-Instruct-4bit"),
        ("qwq", "mlx-community/QwQ-32B-4bit"),
        ("deepseek-r1:8b", "mlx-community/DeepSeek-R1-Distill-Llama-8B-4bit"),
        ("deepseek-r1:14b", "mlx-community/DeepSeek-R1-Distill-Qwen-14B-4bit"),
        ("gemma3:1b", "mlx-community/gemma-3-1b-it-4bit"),
        ("gemma2:9b", "mlx-community/gemma-2-9b-it-4bit"),
        ("phi4:14b", "mlx-community/phi-4-4bit"),
        ("phi4-mini", "mlx-community/Phi-4-mini-instruct-4bit"),
        ("phi3.5:3.8b", "mlx-community/Phi-3.5-mini-instruct-4bit"),
        ("qwen3:4b", "mlx-community/Qwen3-4B-4bit"),
        ("qwen3-4b-2507", "mlx-community/Qwen3-4B-Instruct-2507-4bit"),
        ("phi4:7b", None),
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
        ("DEMO", "Did you mean 'demo'?"),
        ("llama3.1:71b", "Did you mean 'llama3.1:70b'"),
        ("mistral-smal:24b", "Did you mean 'mistral-small3.2:24b'"),
        ("deepseek-r1-distill", "may be any of deepseek-r1-distill-qwen:7b, "),
    ],
)
def test_a_name_that_means_no_single_model_gets_the_names_that_do(typed: str, said: str) -> None:
    with pytest.raises(ModelNotFound) as refusal:
        find_model(typed)
    assert said in str(refusal.value)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("Qwen2.5-0.5B", 494_032_768),
        ("Qwen2.5-1.5B", 1_543_714_304),
        ("Qwen2.5-3B", 3_085_938_688),
        ("Qwen2.5-Coder-32B", 32_763_876_352),
        ("DeepSeek-R1-Distill-Qwen-1.5B", 1_777_088_000),
        ("DeepSeek-R1-Distill-Llama-8B", 8_030_261_248),
        ("gemma-2-2b", 2_614_341_888),
        ("gemma-2-9b", 9_241_705_984),
        ("gemma-2-27b", 27_227_128_320),
        ("gemma-3-1b", 999_885_952),
        ("Mistral-Nemo", 12_247_782_400),
        ("Mistral-Small-3.2-24B", 23_572_403_200),
        ("Phi-4-mini", 3_836_021_760),
        ("Phi-3.5-mini", 3_821_079_552),
        ("SmolLM2-1.7B", 1_711_376_384),
        ("granite-3.3-8b", 8_170_864_640),
    ],
)
def test_a_configuration_has_the_published_number_of_parameters(name: str, parameters: int) -> None:
    """Leave out the norms, which the planner does not count: a ten-thousandth."""
    planned = sizes_of(find_known_model(f"{name} bf16").folder, name, ClusterProfile(()))
    assert planned.weight_bytes == pytest.approx(2 * parameters, rel=1e-4)


@pytest.mark.parametrize("typed", ["qwen3-coder", "gemma4", "qwen3.6"])
def test_a_plan_refuses_a_name_of_several_models_too(typed: str) -> None:
    with pytest.raises(ModelNotFound, match=f"{typed} may be any of"):
        find_known_model(typed)


def test_a_part_of_a_name_removes_no_model() -> None:
    with pytest.raises(
        ModelNotFound,
        match="qwq is not the whole name of a model: qwq:32b or mlx-community/QwQ-32B-4bit is one",
    ):
        remove_model("qwq")


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


@pytest.mark.parametrize(
    "name",
    [
        "https://huggingface.co/Qwen/Qwen3-0.6B",
        "https://huggingface.co/Qwen/Qwen3-0.6B/tree/main?x=1",
        "hf.co/Qwen/Qwen3-0.6B",
    ],
)
def test_an_address_on_the_hub_gets_the_id_as_a_suggestion(name: str) -> None:
    assert str(unknown_model(name, ("demo",))).endswith(" Did you mean 'Qwen/Qwen3-0.6B'?")
