"""Answers of gpt-oss in its harmony format: messages with headers."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.api.chat.formats import read, rules, split_at
from tests.api.twins import ByteTokenizer

from mlx_ring.api.chat.model_format import HEADING, ChatFormat, parse_tool_call, read_format
from mlx_ring.api.chat.request import CallArguments, CallOpening, ContentText, ReasoningText
from mlx_ring.api.ollama.request import read_think


def gpt_oss() -> ChatFormat:
    tokenizer = ByteTokenizer()
    names = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|constrain|>", "<|call|>")
    tokenizer.special = dict(enumerate(names, start=256))
    return read_format(tokenizer)


REASONING = "<|channel|>analysis<|message|>Hm.<|end|>"
CALL = 'assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city": "Rome"}'
CALL_PARTS = [CallOpening(0, "c0", "get_weather"), CallArguments(0, '{"city": "Rome"}')]


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (
            REASONING + "assistant<|channel|>final<|message|>Hello.",
            [ReasoningText("Hm."), ContentText("Hello.")],
        ),
        ("<|channel|>final <|constrain|>json<|message|>{}", [ContentText("{}")]),
        (
            REASONING + "assistant<|channel|>commentary<|message|>I look.<|end|>" + CALL,
            [ReasoningText("Hm."), ContentText("I look."), *CALL_PARTS],
        ),
        (
            'assistant to=functions.get_weather<|channel|>commentary json<|message|>{"city": "Rome"}<|call|>',
            CALL_PARTS,
        ),
        (CALL.replace("functions.", ""), CALL_PARTS),
        (
            REASONING
            + CALL.replace("commentary to", "analysis to").replace(" <|constrain|>json", " code")
            + "<|call|>",
            [ReasoningText("Hm."), *CALL_PARTS],
        ),
        (
            CALL.replace(" <|constrain|>", "<|call|>"),
            [ContentText(CALL[CALL.index("to=") :].replace(" <|constrain|>", "<|call|>"))],
        ),
        ("<|channel|>analysis to=python code<|message|>1", [ContentText("1")]),
        ("<|channel|>final<|message|>Say to=functions.x", [ContentText("Say to=functions.x")]),
        (
            CALL.replace("get_weather", "unknown"),
            [ContentText(CALL[CALL.index("to=") :].replace("get_weather", "unknown"))],
        ),
    ],
)
def test_messages_are_parsed_by_their_headers(text: str, parts: list[Any]) -> None:
    for early in (False, True):
        assert read([text], rules(gpt_oss(), early=early)) == parts
        assert read(text, rules(gpt_oss(), early=early)) == parts


def test_continued_message_goes_on_without_a_header() -> None:
    assert read([" 4.", " Yes."], rules(gpt_oss(), continues=True)) == [ContentText(" 4. Yes.")]


@given(places=st.lists(st.integers(0, 200), max_size=6), early=st.booleans())
def test_parts_do_not_depend_on_how_the_text_is_split(places: list[int], *, early: bool) -> None:
    whole = read([REASONING + CALL], rules(gpt_oss(), early=early))
    assert read(split_at(REASONING + CALL, places), rules(gpt_oss(), early=early)) == whole


@pytest.mark.parametrize("early", [False, True], ids=["whole", "early"])
def test_required_call_that_is_cut_off_is_no_text(*, early: bool) -> None:
    """Cut off an answer after each of its characters."""
    text = REASONING + CALL
    for length in range(len(text)):
        parts = read(text[:length], rules(gpt_oss(), early=early, required=True), cut_off=True)
        assert not [part for part in parts if isinstance(part, ContentText)]
        name = [part.name for part in parts if isinstance(part, CallOpening)]
        assert name == (["get_weather"] if length > text.index("get_weather") + len("get_weather") else [])


def test_header_tokens_are_shown() -> None:
    format_ = gpt_oss()
    assert format_.shown_tokens(calls=False) == {257, 258, 259}
    assert format_.shown_tokens(calls=True) == {257, 258, 259, 260, 261}


def test_unterminated_name_is_matched_in_linear_time() -> None:
    """Match a name so long that quadratic time would take hours."""
    assert HEADING.match("a" * 400_000) is None
    with pytest.raises(ValueError, match="no function"):
        parse_tool_call("a" * 400_000, [])


def test_arguments_must_be_an_object_or_empty() -> None:
    format_ = gpt_oss()
    assert format_.calls is not None
    assert format_.calls.parse("get_time<|message|>", []) == {"name": "get_time", "arguments": {}}
    with pytest.raises(json.JSONDecodeError):
        format_.calls.parse("get_time<|message|>now", [])
    with pytest.raises(ValueError, match="no function"):
        format_.calls.parse("get_time", [])


def test_model_with_headers_of_reasoning_reasons() -> None:
    format_ = replace(gpt_oss(), words=frozenset({"reasoning_effort"}))
    assert format_.reasons
    assert read_think(format_, think=True) == {}
    assert not ChatFormat().reasons
