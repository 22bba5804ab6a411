"""Reasoning, content and tool calls, parsed from text in arbitrary pieces."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.api.chat.formats import QWEN, THINKING, TIME, TOOLS, read, rules, split_at

from mlx_ring.api.chat.model_format import ChatFormat
from mlx_ring.api.chat.reader import AnswerReader, join_parts
from mlx_ring.api.chat.request import CallArguments, CallOpening, ContentText, ReasoningText

CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
CALL_PARTS = [CallOpening(0, "c0", "get_weather"), CallArguments(0, '{"city": "Paris"}')]
FRAGMENTS = [
    "<think>", "</think>", "<tool_call>", "</tool_call>", "<tool", "<", "\n", " ", "Hello", "STOP", '\\"', "}",
    '{"name": "get_weather", "arguments": {"city": "', '"}}', '{"name": "get_time", "arguments": {"k": [1, 2]}}',
    '{"name": "unknown", "arguments": {}}', '{"arguments": {}, "name": "get_time"}', "[1]",
]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("Hello.", [ContentText("Hello.")]),
        ("\n Hello.\n", [ContentText("\n Hello.\n")]),
        ("<think>\nHm.\n</think>\n\nHello.", [ReasoningText("Hm."), ContentText("Hello.")]),
        ("<think>Hm.", [ReasoningText("Hm.")]),
        ("<think>\n\n</think>\n\nHello.", [ContentText("Hello.")]),
        ("A <think> is a tag.", [ContentText("A <think> is a tag.")]),
        (f"Let me look.\n{CALL}", [ContentText("Let me look."), *CALL_PARTS]),
        (f"<think>Hm.</think>\n{CALL}\n", [ReasoningText("Hm."), *CALL_PARTS]),
        (f"<think>Hm. {CALL}</think>", [ReasoningText("Hm."), *CALL_PARTS]),
        (
            f"<think>Hm. {CALL}\nWell.</think>Done.",
            [ReasoningText("Hm."), *CALL_PARTS, ReasoningText("Well."), ContentText("Done.")],
        ),
        (f"{CALL}\nDone.", [*CALL_PARTS, ContentText("Done.")]),
        (CALL.removesuffix("</tool_call>"), CALL_PARTS),
    ],
)
def test_answer_is_parsed_into_its_parts(text: str, parts: list[Any]) -> None:
    assert read([text], rules()) == parts
    assert read(text, rules()) == parts


def test_answer_starts_in_reasoning_opened_by_the_prompt() -> None:
    assert read(["Hm.\n</think>\n\nHello."], rules(thinking_open=True)) == [
        ReasoningText("Hm."),
        ContentText("Hello."),
    ]
    assert read(["Hm."], rules(thinking_open=True)) == [ReasoningText("Hm.")]


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>\n{"name": "unknown", "arguments": {}}\n</tool_call>',
        "<tool_call>\nget_weather Paris\n</tool_call>",
        "I would use <tool_call> for that.",
        '<tool_call>{"name": "get_weather", "arguments": 3}</tool_call>',
    ],
)
def test_invalid_tool_call_is_content(text: str, *, early: bool) -> None:
    assert read([text], rules(early=early)) == [ContentText(text)]


def test_tool_call_after_an_invalid_one_is_found() -> None:
    assert read([f"<tool_call>\n{{ {CALL}"], rules()) == [ContentText("<tool_call>\n{"), *CALL_PARTS]


def test_reasoning_that_mentions_a_call_mark_still_ends() -> None:
    reasoning = "I need no <tool_call> here."
    assert read([f"<think>{reasoning}</think>Hello."], rules()) == [
        ReasoningText(reasoning),
        ContentText("Hello."),
    ]


def test_call_marks_are_text_without_tools() -> None:
    assert read([CALL], rules(tools=())) == [ContentText(CALL)]


def test_calls_are_numbered_and_only_the_first_is_read_if_not_parallel() -> None:
    second = CALL.replace("get_weather", "get_time")
    both = [*CALL_PARTS, CallOpening(1, "c1", "get_time"), CallArguments(1, '{"city": "Paris"}')]
    assert read([f"{CALL}\n{second}"], rules()) == both
    reader = AnswerReader(rules(parallel=False))
    assert reader.push(f"{CALL}\n{second} and more") == CALL_PARTS
    assert reader.ended
    assert reader.finish() == []


def test_early_arguments_are_emitted_as_they_arrive() -> None:
    reader = AnswerReader(rules(early=True))
    assert reader.push('<tool_call>{"name": "get_weather", "argum') == []
    assert reader.push('ents": {"ci') == [CallOpening(0, "c0", "get_weather"), CallArguments(0, '{"ci')]
    assert reader.push('ty": "</tool_call>') == [CallArguments(0, 'ty": "</tool_call>')]
    assert reader.push('"}}</tool_') == [CallArguments(0, '"}')]
    assert reader.push("call>") == []


def test_line_breaks_in_arguments_are_escaped() -> None:
    text = '<tool_call>{"name": "get_time", "arguments": {"city": "a\n\tb"}}</tool_call>'
    for early in (False, True):
        _, arguments = read(text, rules(early=early))
        assert isinstance(arguments, CallArguments)
        assert json.loads(arguments.text) == {"city": "a\n\tb"}


def test_invalid_arguments_are_content_unless_already_emitted() -> None:
    text = '<tool_call>{"name": "get_time", "arguments": {"city": Paris}}</tool_call> Well.'
    assert read([text], rules()) == [ContentText(text)]
    opening, arguments, content = read([text], rules(early=True))
    assert opening == CallOpening(0, "c0", "get_time")
    assert arguments == CallArguments(0, '{"city": Paris}}')
    assert content == ContentText("Well.")


def test_tool_call_that_the_model_left_unfinished_is_content_of_a_whole_answer() -> None:
    text = '<tool_call>{"name": "get_time", "arguments": {"city": "Pa</tool_call>'
    assert read([text], rules()) == [ContentText(text)]


@pytest.mark.parametrize("early", [False, True], ids=["whole", "early"])
def test_tool_call_that_is_cut_off_in_its_arguments_is_a_call(*, early: bool) -> None:
    text = '<tool_call>{"name": "get_time", "arguments": {"city": "Pa'
    reader = AnswerReader(rules(early=early))
    parts = join_parts([*reader.push(text), *reader.finish(cut_off=True)])
    assert parts == [CallOpening(0, "c0", "get_time"), CallArguments(0, '{"city": "Pa')]
    assert (reader.calls, reader.ended) == (1, False)


def test_stop_strings_apply_only_to_content() -> None:
    text = f"<think>STOP it.</think>\n{CALL.replace('Paris', 'STOP')}\nWait.\nSTOP here"
    reader = AnswerReader(rules(stops=("STOP",)))
    parts = reader.push(text)
    assert (reader.ended, reader.stop_match) == (True, "STOP")
    assert parts[0] == ReasoningText("STOP it.")
    assert parts[-1] == ContentText("Wait.\n")


def test_line_breaks_after_reasoning_do_not_match_a_stop_string() -> None:
    reading_rules = rules(stops=("\n\n",))
    assert read(["<think>a\n\nb</think>\n\nOne.\n\nTwo."], reading_rules) == [
        ReasoningText("a\n\nb"),
        ContentText("One."),
    ]


def test_stop_strings_apply_after_min_tokens() -> None:
    assert read(["a", "b", "a"], rules(stops=("a",), min_tokens=1)) == [ContentText("ab")]


def test_text_before_a_stop_string_is_emitted_once() -> None:
    assert read(["Hello\n<tool"], rules(stops=("<tool",))) == [ContentText("Hello\n")]


def test_unclosed_call_marks_are_parsed_a_limited_number_of_times() -> None:
    parsed: list[str] = []

    def parse(text: str, _tools: object) -> object:
        parsed.append(text)
        raise ValueError(text)

    assert QWEN.calls is not None
    marks = ["<tool_call>"] * 500
    assert read(marks, rules(replace(QWEN, calls=replace(QWEN.calls, parse=parse)))) == [
        ContentText("".join(marks))
    ]
    assert len(parsed) < 100


def test_marks_without_meaning_are_dropped() -> None:
    format_ = ChatFormat(THINKING, dropped=("<|open|>response<|sep|>", "<|close|>response<|sep|>"))
    text = "<think>Hm.</think><|open|>response<|sep|>Hello.<|close|>response<|sep|>"
    assert read(text, rules(format_)) == [ReasoningText("Hm."), ContentText("Hello.")]


def test_message_headers_select_reasoning_or_content() -> None:
    format_ = ChatFormat(
        calls=QWEN.calls,
        begins="header",
        turns={
            "header": (("to=self<|message|>", "reasoning"), ("to=user<|message|>", "start")),
            "reasoning": (("<|eom|>", "header"),),
            "start": (("<|eom|>", "header"),),
        },
    )
    text = "to=self<|message|>Hm.<|eom|><|start|>assistant to=user<|message|>Hello.<|eom|><|start|>x " + CALL
    assert read(text, rules(format_)) == [ReasoningText("Hm."), ContentText("Hello."), *CALL_PARTS]


@given(
    fragments=st.lists(st.sampled_from(FRAGMENTS), max_size=12),
    places=st.lists(st.integers(0, 200), max_size=8),
    settings=st.fixed_dictionaries(
        {
            "early": st.booleans(),
            "parallel": st.booleans(),
            "thinking_open": st.booleans(),
            "stops": st.sampled_from([(), ("STOP",), ("\n ", "lo")]),
            "tools": st.sampled_from([(), (TIME,), TOOLS]),
        }
    ),
)
def test_parts_do_not_depend_on_how_the_text_is_split(
    fragments: list[str], places: list[int], settings: dict[str, Any]
) -> None:
    text = "".join(fragments)
    whole = read([text], rules(**settings))
    assert read(split_at(text, places), rules(**settings)) == whole
    assert read(text, rules(**settings)) == whole
    for call in (part for part in whole if isinstance(part, CallArguments)):
        assert settings["early"] or isinstance(json.loads(call.text), dict)


@given(fragments=st.lists(st.sampled_from(FRAGMENTS), max_size=12), after_reasoning=st.booleans())
def test_text_without_tools_is_kept_whole(fragments: list[str], *, after_reasoning: bool) -> None:
    text = "".join(fragments).replace("<think>", "").replace("</think>", "")
    marked = f"<think>a</think>{text}" if after_reasoning else text
    parts = read(split_at(marked, [3, 8]), rules(tools=()))
    content = "".join(part.text for part in parts if isinstance(part, ContentText))
    assert content == (text.lstrip() if after_reasoning else text)
