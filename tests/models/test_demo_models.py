"""The demo models of the package: their files, sizes, templates, tokenizers and answers."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import mlx.core as mx
import pytest
from corpus import Corpus
from evaluate import ask, report
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.utils import load
from transformers import AutoTokenizer

import mlx_ring

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase  # of which all of transformers would be imported

FOLDER = Path(mlx_ring.__file__).parent / "builtin_models"
NAMES = ("demo", "demo-moe")
FILES = {
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
}
LARGEST_TOGETHER_BYTES = 25_000_000
RANKS = 4
QUANTIZATION_GROUP = 32
LONG_POSITION = 16_384
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {}}},
}

each_model = pytest.mark.parametrize("name", NAMES)


@cache
def config_of(name: str) -> dict[str, Any]:
    return json.loads((FOLDER / name / "config.json").read_text(encoding="utf-8"))


@cache
def loaded(name: str) -> tuple[Any, TokenizerWrapper]:
    model, tokenizer = load(str(FOLDER / name))[:2]
    model.set_dtype(mx.float32)
    return model, tokenizer


@cache
def tokenizer_of(name: str) -> PreTrainedTokenizerBase:
    return cast("PreTrainedTokenizerBase", AutoTokenizer.from_pretrained(FOLDER / name))


def rendered(messages: list[dict[str, Any]], **options: Any) -> str:
    return str(tokenizer_of("demo").apply_chat_template(messages, tokenize=False, **options))


@each_model
def test_a_folder_holds_exactly_the_files_that_hugging_face_expects(name: str) -> None:
    assert {path.name for path in (FOLDER / name).iterdir()} == FILES


def test_both_models_together_stay_under_25_megabytes() -> None:
    paths = [path for name in NAMES for path in (FOLDER / name).iterdir()]
    assert sum(path.stat().st_size for path in paths) < LARGEST_TOGETHER_BYTES


def test_the_dense_model_has_eight_layers_and_four_kv_heads() -> None:
    config = config_of("demo")
    assert config["model_type"] == "qwen3"
    assert config["num_hidden_layers"] >= 8
    assert config["num_key_value_heads"] == 4


def test_the_mixture_has_sixteen_layers_and_four_experts() -> None:
    config = config_of("demo-moe")
    assert config["model_type"] == "qwen3_moe"
    assert config["num_hidden_layers"] == 16
    assert config["num_experts"] >= 4


@each_model
def test_rows_divide_into_whole_quantization_groups_for_four_ranks(name: str) -> None:
    config = config_of(name)
    inner = "moe_intermediate_size" if name == "demo-moe" else "intermediate_size"
    queries = config["num_attention_heads"] * config["head_dim"]
    keys = config["num_key_value_heads"] * config["head_dim"]
    for rows in (config["hidden_size"], config[inner], queries, keys):
        assert rows % (RANKS * QUANTIZATION_GROUP) == 0


@each_model
def test_mlx_lm_detects_tool_calls_reasoning_and_the_end_token(name: str) -> None:
    _, tokenizer = loaded(name)
    assert tokenizer.has_tool_calling
    assert tokenizer.has_thinking
    assert tokenizer.eos_token_ids == {config_of(name)["eos_token_id"]}
    call = '{"name": "get_weather", "arguments": {"city": "Rome"}}'
    assert tokenizer.tool_parser is not None
    assert tokenizer.tool_parser(call, None) == json.loads(call)


@each_model
@given(text=st.text())
def test_any_unicode_text_survives_the_tokenizer(name: str, text: str) -> None:
    tokenizer = tokenizer_of(name)
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


def test_the_template_writes_a_plain_conversation() -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    expected = (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert rendered(messages, add_generation_prompt=True) == expected


def test_reasoning_is_off_by_default() -> None:
    messages = [{"role": "user", "content": "Hi"}]
    assert "<think>" not in rendered(messages, add_generation_prompt=True)
    assert rendered(messages, add_generation_prompt=True, enable_thinking=True).endswith("<think>\n")


def test_the_developer_role_is_rendered_as_system() -> None:
    user = {"role": "user", "content": "Hi"}
    texts = [rendered([{"role": role, "content": "Be brief."}, user]) for role in ("developer", "system")]
    assert texts[0] == texts[1]


def test_the_template_writes_tools_calls_and_results() -> None:
    call = {"type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Rome"}'}}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": [{"type": "text", "text": "Weather in Rome?"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "sunny"},
    ]
    text = rendered(messages, tools=[WEATHER], add_generation_prompt=True)
    assert json.dumps(WEATHER) in text
    assert '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>' in text
    assert "<|im_start|>tool\nsunny<|im_end|>" in text


def test_only_the_reasoning_after_the_last_question_is_kept() -> None:
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b", "reasoning_content": "old"},
        {"role": "user", "content": "c"},
        {"role": "assistant", "content": "d", "reasoning_content": "new"},
    ]
    text = rendered(messages)
    assert "old" not in text
    assert "<think>\nnew\n</think>\n\nd<|im_end|>" in text


@pytest.mark.slow
@each_model
def test_far_positions_give_finite_logits(name: str) -> None:
    model, _ = loaded(name)
    assert config_of(name)["max_position_embeddings"] >= LONG_POSITION
    caches = model.make_cache() if hasattr(model, "make_cache") else None
    tokens = mx.arange(1024).reshape(4, 256) % config_of(name)["vocab_size"]
    far = [layer.self_attn.rope(mx.ones((1, 1, 1, 32)), offset=LONG_POSITION) for layer in model.layers]
    assert bool(mx.all(mx.isfinite(mx.concatenate(far))))
    assert bool(mx.all(mx.isfinite(model(tokens, cache=caches))))


@pytest.mark.slow
@pytest.mark.parametrize("per_topic", [8, pytest.param(20, marks=pytest.mark.thorough)])
def test_demo_answers_nine_of_ten_held_out_questions(per_topic: int) -> None:
    answers = ask(FOLDER / "demo", Corpus().questions(per_topic))
    assert len(answers) >= 10 * per_topic
    assert sum(answer.right for answer in answers) >= 0.9 * len(answers), report(answers)
