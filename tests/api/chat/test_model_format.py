"""Answer formats, as tokenizers describe them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tests.api.twins import ByteTokenizer, MarkingTokenizer
from tests.engine.small_tokenizers import TOOL, byte_fallback, byte_level

from mlx_ring.api.chat.model_format import ChatFormat, Marks, read_format
from mlx_ring.api.chat.prepare import prompts_end
from mlx_ring.api.context import ChatFormats
from mlx_ring.core.lean_imports import import_bare
from mlx_ring.engine.streams import Detokenizer, Vocabulary
from mlx_ring.head.served_model import prepare_model
from mlx_ring.models.model_source import find_model
from mlx_ring.settings.settings_sources import load_settings


@pytest.fixture(scope="module")
def demo() -> Any:
    """Load the demo model's tokenizer as mlx-lm does."""
    import_bare("mlx_lm")
    from mlx_lm.tokenizer_utils import load  # pyright: ignore[reportUnknownVariableType] - bare dicts

    return load(find_model("demo").folder.path)


def test_demo_model_has_qwens_format(demo: Any) -> None:
    format_ = read_format(demo)
    assert format_.thinking == Marks("<think>", "</think>")
    assert format_.calls is not None
    assert (format_.calls.start, format_.calls.end, format_.calls.parser) == (
        "<tool_call>",
        "</tool_call>",
        "json_tools",
    )
    assert format_.knows("tools")
    assert format_.knows("enable_thinking")
    assert not format_.knows("reasoning_effort")


@pytest.mark.parametrize("of_tools", ["default", "tool_use"])
def test_tools_of_a_model_with_several_templates_have_the_format_of_theirs(
    tmp_path: Path, of_tools: str
) -> None:
    """Read what mlx-lm does not: it finds the format of calls by a single template only."""
    folder = tmp_path / "model"
    shutil.copytree(find_model("demo").folder.path, folder)
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    own = json.loads((folder / "tokenizer_config.json").read_text())
    templates = {"default": "{{ messages[0].content }}", "rag": "[TOOL_CALLS]{{ documents }}"}
    templates[of_tools] = _tools_template()
    named = [{"name": name, "template": text} for name, text in templates.items()]
    (folder / "tokenizer_config.json").write_text(json.dumps({**own, "chat_template": named}))
    tokenizer = prepare_model(load_settings({"model": str(folder)})).tokenizer
    format_ = read_format(tokenizer)
    assert format_.calls is not None
    assert (format_.calls.start, format_.calls.parser) == ("<tool_call>", "json_tools")
    assert format_.knows("tools")
    assert format_.special


def _tools_template() -> str:
    """Return the demo model's template, which has tools."""
    tokenizer: Any = prepare_model(load_settings({"model": "demo"})).tokenizer
    return tokenizer._tokenizer.chat_template


def test_call_tokens_are_shown_only_where_calls_are_allowed(
    demo: Any,
) -> None:
    format_ = read_format(demo)
    names = {demo.convert_ids_to_tokens(token) for token in format_.shown_tokens(calls=True)}
    assert names == {"<think>", "</think>", "<tool_call>", "</tool_call>"}
    names = {demo.convert_ids_to_tokens(token) for token in format_.shown_tokens(calls=False)}
    assert names == {"<think>", "</think>"}


def test_shown_tokens_are_text_and_other_special_tokens_are_dropped(demo: Any) -> None:
    tokens = demo.encode("<think>\nI see 日本.\n</think>\n\nHello.<|im_end|>", add_special_tokens=False)
    shown = read_format(demo).shown_tokens(calls=True)
    detokenizer = Detokenizer(Vocabulary.of(demo).showing(shown))
    text = "".join([*map(detokenizer.push, tokens), detokenizer.flush()])
    assert text == "<think>\nI see 日本.\n</think>\n\nHello."


@pytest.mark.parametrize("tokenizer", [byte_level(), byte_fallback()], ids=["byte level", "byte fallback"])
def test_showing_a_token_changes_no_other_text(tokenizer: Any) -> None:
    end = tokenizer.convert_tokens_to_ids("<|end|>")
    tokens = [
        *tokenizer.encode("hello the", add_special_tokens=False),
        end,
        *tokenizer.encode(f" é{TOOL} hello", add_special_tokens=False),
    ]
    vocabulary = Vocabulary.of(tokenizer)

    def text(showing: Vocabulary) -> str:
        detokenizer = Detokenizer(showing)
        return "".join([*map(detokenizer.push, tokens), detokenizer.flush()])

    assert text(vocabulary.showing(frozenset({end}))).replace("<|end|>", "") == text(vocabulary)
    assert "<|end|>" in text(vocabulary.showing(frozenset({end})))


@pytest.mark.parametrize(("kwargs", "opened"), [({}, False), ({"enable_thinking": True}, True)])
def test_prompt_end_shows_whether_reasoning_is_open(
    demo: Any, kwargs: dict[str, object], *, opened: bool
) -> None:
    prompt = demo.apply_chat_template(
        [{"role": "user", "content": "What is <think>?"}],
        add_generation_prompt=True,
        **({"enable_thinking": False} | kwargs),
    )
    assert read_format(demo).opens_thinking(prompts_end(demo, prompt)) is opened


def test_model_without_marks_has_an_empty_format() -> None:
    assert read_format(ByteTokenizer()) == ChatFormat()


def test_each_tokenizer_is_read_once() -> None:
    formats, one, other = ChatFormats(), MarkingTokenizer(), ByteTokenizer()
    assert formats[one] is formats[one]
    assert formats[one] != formats[other]


def test_mlx_lm_states_are_renamed() -> None:
    tokenizer = ByteTokenizer()
    tokenizer.response_initial_state = "header"
    tokenizer.response_transitions = {
        "header": [("to=self", "reasoning"), ("<calls>", "tool")],
        "normal": [("<|eom|>", "header")],
    }
    tokenizer.tool_call_start, tokenizer.tool_call_end = "<calls>", "</calls>"
    tokenizer.tool_parser = MarkingTokenizer.tool_parser
    format_ = read_format(tokenizer)
    assert format_.begins == "header"
    assert format_.turns == {"header": (("to=self", "reasoning"),), "start": (("<|eom|>", "header"),)}
