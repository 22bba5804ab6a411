"""Grammars of answers: they accept only answers that mlx-lm's parsers read and that match the schema."""

from __future__ import annotations

import json
import random
import re
from dataclasses import replace
from typing import Any, Literal, cast

import jsonschema
import numpy as np
import pytest
from llguidance import LLMatcher
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask
from tests.api.chat.call_examples import (
    ARGUMENTS,
    CLOCK,
    DSML,
    END,
    FORMATS,
    IDS,
    MARKS,
    MINIMAL_ARGUMENTS,
    SCHEMA,
    TEMPLATES,
    WEATHER,
    CallExample,
    example_of,
    own_format,
    tokenizer,
)
from tests.api.chat.formats import read, rules

from mlx_ring.api.chat.answer import ChatAnswer
from mlx_ring.api.chat.answer_grammars import answer_grammar
from mlx_ring.api.chat.lark import NOTHING
from mlx_ring.api.chat.model_format import CallMarks, ChatFormat, Marks, parse_tool_call
from mlx_ring.api.chat.request import AnswerFormat, Conversation, Tool, ToolUse
from mlx_ring.core.errors import RequestError
from mlx_ring.core.types import Grammar
from mlx_ring.models.grammars import check_grammar, to_llguidance

THINKING = Marks("<think>", "</think>")
JSON_TOOLS = FORMATS[0]
WRONG = (("days", "nights"), ("3", "15"), ("3", '"3"'), ("20]", "24]"), ("get_weather", "get_time"))
"""Pairs of a correct text and a wrong replacement."""
every_format = pytest.mark.parametrize("example", FORMATS, ids=IDS)


def tools_conversation(
    *tools: Tool, choice: Literal["none", "auto", "required"] = "required", **more: Any
) -> Conversation:
    answer = more.pop("format", AnswerFormat())
    return Conversation((), ToolUse(tools, choice, **more), answer)


def schema_conversation(schema: Any, *tools: Tool, param: str = "response_format") -> Conversation:
    return tools_conversation(*tools, choice="auto", format=AnswerFormat("json_schema", schema, param))


def grammar_of(example: CallExample, conversation: Conversation) -> Grammar | None:
    return answer_grammar(example.format(), conversation, thinking_open=False, open_schemas=False)


def accepts(grammar: Grammar | None, text: str, example: CallExample = JSON_TOOLS) -> bool:
    """Return True if the grammar accepts this text as an answer."""
    assert grammar is not None
    known = tokenizer(example.added)[0]
    matcher = LLMatcher(known, to_llguidance(grammar.kind, grammar.text), log_level=0)
    assert matcher.get_error() == ""
    tokens = known.tokenize_str(text, parse_special=True)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def read_calls(example: CallExample, text: str, *tools: Tool, **options: Any) -> list[tuple[str, Any]]:
    """Return the names and arguments of the calls of an answer without other text, whole and streamed."""
    answers = [
        ChatAnswer(parts=read(pieces, rules(example.format(), tools=tools, early=early, **options)))
        for pieces, early in (([text], False), (list(text), False), (list(text), True))
    ]
    made = [[(call.name, json.loads(call.arguments)) for call in answer.calls] for answer in answers]
    assert [answer.content for answer in answers] == [""] * 3, text
    assert made[0] == made[1] == made[2]
    return made[0]


@every_format
def test_required_tool_call_is_accepted_and_parsed(example: CallExample) -> None:
    grammar = grammar_of(example, tools_conversation(WEATHER, CLOCK))
    tools = [WEATHER.for_template(), CLOCK.for_template()]
    for call, arguments in ((example.call, ARGUMENTS), (example.minimal_call, MINIMAL_ARGUMENTS)):
        assert accepts(grammar, example.whole(call), example)
        made = read_calls(example, example.whole(call), WEATHER, CLOCK)
        assert made == [("get_weather", json.loads(arguments))]
        jsonschema.validate(made[0][1], SCHEMA)
        if example.parser not in TEMPLATES:  # mlx-lm reads it too
            parsed: Any = example.marks().parse(call, tools)
            found: Any = cast("list[Any]", parsed)[0] if isinstance(parsed, list) else parsed
            assert (found["name"], found["arguments"]) == made[0]
    assert not example.empty_call or accepts(grammar, example.whole(example.empty_call), example)
    assert not accepts(grammar, "Rome is warm.", example)
    assert not accepts(grammar, example.whole(example.call) + "It is warm.", example)


@every_format
@pytest.mark.parametrize("wrong", WRONG, ids=str)
def test_tool_call_that_breaks_its_schema_is_rejected(example: CallExample, wrong: tuple[str, str]) -> None:
    broken = example.call.replace(*wrong)
    assert not accepts(
        grammar_of(example, tools_conversation(WEATHER, CLOCK)), example.whole(broken), example
    )


@every_format
def test_several_tool_calls_are_accepted_only_if_parallel(example: CallExample) -> None:
    assert accepts(grammar_of(example, tools_conversation(WEATHER)), example.two_calls(), example)
    alone = grammar_of(example, tools_conversation(WEATHER, parallel=False))
    assert not accepts(alone, example.two_calls(), example)


@every_format
def test_text_is_free_until_a_strict_tool_call_starts(example: CallExample) -> None:
    for parallel in (True, False):
        grammar = grammar_of(example, tools_conversation(WEATHER, choice="auto", parallel=parallel))
        assert accepts(grammar, "Rome is <b>warm</b>\n[today].", example)
        assert accepts(grammar, "Let me see.\n" + example.marked(example.call), example)
        wrong = example.call.replace("get_weather", "get_time")
        assert not accepts(grammar, "Let me see.\n" + example.marked(wrong), example)


def test_json_that_begins_an_answer_of_llama_is_a_call_of_a_strict_tool() -> None:
    example = example_of("llama3")
    grammar = grammar_of(example, tools_conversation(WEATHER, choice="auto"))
    for before in ("", "<|python_tag|>"):
        assert accepts(grammar, before + example.call, example)
        assert accepts(grammar, before + example.two_calls(), example)
        assert not accepts(grammar, before + example.call.replace("3", "15"), example)
        assert not accepts(grammar, f"{before}{example.call} It is warm.", example)
    assert accepts(grammar, "{}", example)
    assert accepts(grammar, '{"name": "Rome"}', example)
    for wrong in (
        '\n{ "name":"get_weather"}',
        '{"type": "function", "name": "get_weather"}',
        '{"name": "functions.get_weather"}',
    ):
        assert not accepts(grammar, wrong, example)


def test_model_whose_template_refuses_several_calls_makes_one() -> None:
    example = example_of("llama3")
    format_ = replace(own_format("llama"), added=tokenizer(example.added)[1])
    for choice in ("required", "auto"):
        grammar = answer_grammar(
            format_, tools_conversation(WEATHER, choice=choice), thinking_open=False, open_schemas=False
        )
        assert accepts(grammar, example.call, example)
        assert not accepts(grammar, example.two_calls(), example)


def test_other_marks_that_open_calls_are_no_text_beside_strict_tools() -> None:
    example = example_of("granite")
    grammar = grammar_of(example, tools_conversation(WEATHER, choice="auto"))
    assert not accepts(grammar, f"<tool_call>{example.call}", example)
    assert accepts(grammar, "A <tool_calls> is a call.", example)


@pytest.mark.parametrize("parser", ["mistral", "granite", "llama3"])
def test_text_after_calls_that_have_no_last_mark_is_refused_beside_strict_tools(parser: str) -> None:
    """Refuse it because it might be read as a further call."""
    example = example_of(parser)
    grammar = grammar_of(example, tools_conversation(WEATHER, choice="auto"))
    assert accepts(grammar, example.marked(example.call), example)
    assert not accepts(grammar, f"{example.marked(example.call)}get_weather{{}}", example)


def test_command_may_reason_before_a_demanded_call_and_answer_between_its_marks() -> None:
    marks = ("<|START_THINKING|>", "<|END_THINKING|>", "<|START_RESPONSE|>", "<|END_RESPONSE|>")
    example = replace(example_of("command"), added=(*MARKS, *marks))
    format_ = replace(own_format("command"), added=tokenizer(example.added)[1])
    for choice in ("required", "auto"):
        grammar = answer_grammar(
            format_, tools_conversation(WEATHER, choice=choice), thinking_open=False, open_schemas=False
        )
        reasoning = "<|START_THINKING|>I look.<|END_THINKING|>"
        assert accepts(grammar, reasoning + example.whole(example.call), example)
        assert not accepts(grammar, reasoning + example.whole(example.call).replace("3", "15"), example)
        answered = accepts(grammar, "<|START_RESPONSE|>It is warm.<|END_RESPONSE|>", example)
        assert answered == (choice == "auto")


def test_strings_of_deepseek_may_contain_other_tags() -> None:
    example = example_of("deepseek_v32")
    for each in (example, replace(example, added=())):
        grammar = grammar_of(each, tools_conversation(WEATHER))
        for city in ("<b>Rome</b>", "null", "5", "</", "a </invoke> b"):
            text = each.whole(each.minimal_call.replace("Rome", city))
            assert accepts(grammar, text, each)
            assert read_calls(each, text, WEATHER) == [("get_weather", {"city": city, "days": 3})]


@pytest.mark.parametrize(
    ("schema", "written", "others"),
    [
        ({"type": ["string", "null"]}, {"Rome": "Rome", "null": "null"}, {"null": None, '"Rome"': "Rome"}),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, {"": "", "5": "5"}, {"null": None, '"a"': "a"}),
        ({"anyOf": [{"type": "integer"}, {"type": "string"}]}, {"5": "5"}, {"5": 5, '"5"': "5"}),
        ({}, {"Rome": "Rome", "[1]": "[1]"}, {"[1]": [1], '"Rome"': "Rome", "true": True}),
        ({"enum": ["Rome", 5, None]}, {"Rome": "Rome"}, {"5": 5, "null": None, '"Rome"': "Rome"}),
        ({"type": "string", "minLength": 2}, {}, {'"ab"': "ab"}),
        ({"enum": [" a", "b"]}, {}, {'" a"': " a"}),
    ],
    ids=str,
)
def test_strings_among_other_values_are_written_and_read_as_deepseek_does(
    schema: dict[str, Any], written: dict[str, str], others: dict[str, Any]
) -> None:
    """Check that both ways of its encoder are accepted: strings as they stand, and all else as JSON."""
    example = example_of("deepseek_v32")
    parameters = {"type": "object", "properties": {"city": schema}, "required": ["city"]}
    tool = Tool("get_weather", parameters=parameters, strict=True)
    grammar = grammar_of(example, tools_conversation(tool))
    tag = f'<{DSML}parameter name="city" string="{{}}">{{}}</{DSML}parameter>\n'
    for kind, values in (("true", written), ("false", others)):
        for text, value in values.items():
            call = f'\n<{DSML}invoke name="get_weather">\n{tag.format(kind, text)}</{DSML}invoke>\n'
            assert accepts(grammar, example.whole(call), example), text
            assert read_calls(example, example.whole(call), tool) == [("get_weather", {"city": value})]
    listed = f'\n<{DSML}invoke name="get_weather">\n{tag.format("true", "x")}</{DSML}invoke>\n'
    assert accepts(grammar, example.whole(listed), example) == (bool(written) and "enum" not in schema)


def test_call_of_deepseek_without_arguments_may_have_an_empty_line() -> None:
    example = example_of("deepseek_v32")
    text = example.whole(f'\n<{DSML}invoke name="clock">\n\n</{DSML}invoke>\n')
    assert accepts(grammar_of(example, tools_conversation(CLOCK)), text, example)
    assert read_calls(example, text, CLOCK) == [("clock", {})]


def test_calls_of_granite_may_be_indented() -> None:
    example = example_of("granite")
    calls = [
        {"name": "get_weather", "arguments": json.loads(each)} for each in (ARGUMENTS, MINIMAL_ARGUMENTS)
    ]
    text = example.whole(json.dumps(calls, indent=4))
    assert accepts(grammar_of(example, tools_conversation(WEATHER)), text, example)
    assert read_calls(example, text, WEATHER) == [(call["name"], call["arguments"]) for call in calls]


def test_white_space_that_only_python_knows_is_white_space() -> None:
    bare = example_of("llama3")
    grammar = grammar_of(bare, tools_conversation(WEATHER, choice="auto"))
    assert not accepts(grammar, '{"name":\x1c"get_weather", "parameters": {"city": 5}}', bare)
    optional = Tool(
        "get_weather", parameters={"type": "object", "properties": {"city": {"type": "string"}}}, strict=True
    )
    for parser in ("qwen3_coder", "seed_oss", "minimax_m2", "minicpm5", "glm47", "laguna"):
        example = example_of(parser)
        city = re.sub(
            r"<(param|arg_key)[^R]*days.*?(</parameter>\n|</param>|</arg_value>)",
            "",
            example.minimal_call,
            flags=re.DOTALL,
        )
        grammar = grammar_of(example, tools_conversation(optional))
        for text, passes in (("\x1cRome", True), ("\x1cnull", False), ("NULL\x1f", False), ("null", False)):
            assert accepts(grammar, example.whole(city.replace("Rome", text)), example) == passes, (
                parser,
                text,
            )


def test_reasoning_may_precede_a_constrained_answer() -> None:
    format_ = JSON_TOOLS.format(THINKING)
    for conversation, text in (
        (tools_conversation(WEATHER), JSON_TOOLS.whole(JSON_TOOLS.call)),
        (schema_conversation(SCHEMA), MINIMAL_ARGUMENTS),
    ):
        is_open = answer_grammar(format_, conversation, thinking_open=True, open_schemas=False)
        assert accepts(is_open, f"Rome, {{ I think.\n</think>\n\n{text}")
        assert not accepts(is_open, text)
        free = answer_grammar(format_, conversation, thinking_open=False, open_schemas=False)
        assert accepts(free, f"<think>\nRome\n</think>\n\n{text}")
        assert accepts(free, text)


@pytest.mark.parametrize(
    "kwargs", [{"enable_thinking": False}, {"thinking": False}, {"reasoning_effort": "none"}]
)
def test_constrained_answer_has_no_reasoning_if_it_is_switched_off(
    kwargs: dict[str, object],
) -> None:
    format_ = JSON_TOOLS.format(THINKING)
    for conversation, text in (
        (tools_conversation(WEATHER), JSON_TOOLS.whole(JSON_TOOLS.call)),
        (schema_conversation(SCHEMA), ARGUMENTS),
    ):
        without_reasoning = replace(conversation, template_kwargs=kwargs)
        grammar = answer_grammar(format_, without_reasoning, thinking_open=False, open_schemas=False)
        assert accepts(grammar, text)
        assert not accepts(grammar, f"<think>\nRome\n</think>\n\n{text}")
        still_open = answer_grammar(format_, without_reasoning, thinking_open=True, open_schemas=False)
        assert accepts(still_open, f"Rome\n</think>\n\n{text}")


def test_gpt_oss_reasons_calls_tools_and_answers_in_its_channels() -> None:
    added = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|constrain|>")
    marks = CallMarks("to=functions.", "<|call|>", "harmony", parse_tool_call)
    format_ = ChatFormat(calls=marks, begins="header", added=tokenizer(added)[1])
    example = replace(JSON_TOOLS, added=added)
    reasoning = "<|channel|>analysis<|message|>Rome.<|end|><|start|>assistant"
    call = f"<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{ARGUMENTS}"
    required = answer_grammar(format_, tools_conversation(WEATHER), thinking_open=False, open_schemas=False)
    assert accepts(required, reasoning + call, example)
    assert accepts(required, call + "<|call|>", example)
    assert not accepts(required, call.replace("3", "15"), example)
    final = "<|channel|>final<|message|>"
    assert not accepts(required, f"{final}It is warm.", example)
    automatic = answer_grammar(
        format_, tools_conversation(WEATHER, choice="auto"), thinking_open=False, open_schemas=False
    )
    assert accepts(automatic, f"{reasoning}{final}It is warm.", example)
    formatted = answer_grammar(format_, schema_conversation(SCHEMA), thinking_open=False, open_schemas=False)
    assert accepts(formatted, reasoning + final + MINIMAL_ARGUMENTS, example)
    assert not accepts(formatted, f"{final}It is warm.", example)


def test_answer_is_json_of_its_schema_or_a_tool_call() -> None:
    schema = {"type": "array", "items": {"type": "integer"}}
    grammar = grammar_of(JSON_TOOLS, schema_conversation(schema, replace(WEATHER, strict=False)))
    assert accepts(grammar, "[1, 2]")
    assert accepts(grammar, JSON_TOOLS.whole(JSON_TOOLS.call))
    assert not accepts(grammar, "[1.5]")
    assert not accepts(grammar, "One")


@every_format
def test_answer_is_any_object_or_a_tool_call(example: CallExample) -> None:
    any_object = AnswerFormat("json_object", {}, "response_format")
    for tools in ((WEATHER, CLOCK), (replace(WEATHER, strict=False),)):
        grammar = grammar_of(example, tools_conversation(*tools, choice="auto", format=any_object))
        for text in ("{}", '{"a": 1}', '{"name": "x"}', example.whole(example.call)):
            assert accepts(grammar, text, example), text


PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
}
REQUEST = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "parameters": {"type": "object"}},
    "required": ["name", "parameters"],
}


@pytest.mark.parametrize(
    ("kind", "schema", "texts"),
    [
        ("json_object", {}, ('{"a": {"b": []}, "name": "get_weather"}', '{"name": "get_weathers", "a": 1}')),
        ("json_object", {}, ('{\n  "type": "x",\n  "name": 1\n}', '{"name":"get"}', '{"a": "\\"", "a": 1}')),
        ("json_schema", PERSON, ('{"name": "Rome", "age": 3}', '{"name":"","age":-1}')),
        ("json_schema", REQUEST, ('{"name": "clocks", "parameters": {}}',)),
        ("json_schema", {"anyOf": [PERSON, REQUEST]}, ('{"name": "Rome", "age": 3}',)),
        (
            "json_schema",
            {"allOf": [{"$ref": "#/$defs/p"}], "$defs": {"p": PERSON}},
            ('{"name": "Rome", "age": 3}',),
        ),
    ],
)
def test_json_of_llama_is_of_its_schema_or_a_call_that_keeps_the_schema_of_a_strict_tool(
    kind: Literal["json_object", "json_schema"], schema: Any, texts: tuple[str, ...]
) -> None:
    example = example_of("llama3")
    format_ = AnswerFormat(kind, schema, "response_format")
    for parallel in (True, False):
        conversation = tools_conversation(WEATHER, CLOCK, choice="auto", parallel=parallel, format=format_)
        grammar = grammar_of(example, conversation)
        for text in texts:
            assert accepts(grammar, text, example), text
        for before in ("{", '{"type": "function", ', "{\n    "):
            call = example.call.replace("{", before, 1)
            assert accepts(grammar, call, example)
            assert read_calls(example, call, WEATHER) == [("get_weather", json.loads(ARGUMENTS))]
            for wrong in WRONG[:4]:
                assert not accepts(grammar, call.replace(*wrong), example)
        assert not accepts(grammar, '{"name": "functions.get_weather", "parameters": {}}', example)
        assert accepts(grammar, example.two_calls(), example) == parallel


def test_call_of_llama_may_follow_white_space_and_name_its_type() -> None:
    example = example_of("llama3")
    format_ = replace(example.format(), thinking=THINKING)
    typed = example.call.replace("{", '{"type": "function", ', 1)
    for choice in ("required", "auto"):
        grammar = answer_grammar(
            format_, tools_conversation(WEATHER, choice=choice), thinking_open=False, open_schemas=False
        )
        for before in ("", "\n\n", "<think>I look.</think>\n\n", "<think>I look.</think>"):
            for call in (example.call, typed):
                assert accepts(grammar, before + call, example)
                assert not accepts(grammar, before + call.replace("3", "15"), example)
    assert read_calls(example, f"\n\n{typed}", WEATHER) == [("get_weather", json.loads(ARGUMENTS))]


def test_json_object_format_accepts_only_objects() -> None:
    conversation = tools_conversation(choice="auto", format=AnswerFormat("json_object"))
    grammar = answer_grammar(ChatFormat(), conversation, thinking_open=False, open_schemas=False)
    assert accepts(grammar, '{"a": [1, {"b": null}]}')
    assert not accepts(grammar, "[1]")


def test_text_without_strict_tools_has_no_grammar() -> None:
    assert grammar_of(JSON_TOOLS, tools_conversation(replace(WEATHER, strict=False), choice="auto")) is None
    assert grammar_of(JSON_TOOLS, tools_conversation(WEATHER, choice="none")) is None


def test_only_an_allowed_tool_can_be_called() -> None:
    grammar = grammar_of(JSON_TOOLS, tools_conversation(WEATHER, CLOCK, allowed=frozenset({"clock"})))
    assert accepts(grammar, JSON_TOOLS.whole(JSON_TOOLS.empty_call))
    assert not accepts(grammar, JSON_TOOLS.whole(JSON_TOOLS.call))


MUSE_ADDED = ("<|start|>", "<|message|>", "<|eom|>", "<|eot|>")
MUSE = CallExample(
    "muse_spark",
    '\n<atem:invoke name="get_weather">\n<atem:parameter name="city">Rome</atem:parameter>\n'
    '<atem:parameter name="unit">C</atem:parameter>\n<atem:parameter name="days">3</atem:parameter>\n'
    '<atem:parameter name="hours">[8, 20]</atem:parameter>\n</atem:invoke>\n',
    '\n<atem:invoke name="get_weather">\n<atem:parameter name="city">Rome</atem:parameter>\n'
    '<atem:parameter name="days">3</atem:parameter>\n</atem:invoke>\n',
    '\n<atem:invoke name="clock">\n</atem:invoke>\n',
    added=MUSE_ADDED,
)


def muse_format() -> ChatFormat:
    return ChatFormat(calls=MUSE.marks(), begins="header", added=tokenizer(MUSE_ADDED)[1])


def test_muse_reasons_calls_tools_and_answers_in_its_messages() -> None:
    reasoning = " to=self<|message|>Rome.<|eom|><|start|>assistant"
    call = f" to=get_weather<|message|>{MUSE.whole(MUSE.call)}"
    required = answer_grammar(
        muse_format(), tools_conversation(WEATHER, CLOCK), thinking_open=False, open_schemas=False
    )
    assert accepts(required, reasoning + call, MUSE)
    assert accepts(
        required, f"{call}<|eom|><|start|>assistant to=clock<|message|>{MUSE.whole(MUSE.empty_call)}", MUSE
    )
    assert accepts(
        required, f" to=get_weather<|message|>{MUSE.whole(MUSE.call + MUSE.minimal_call[1:])}<|eot|>", MUSE
    )
    for wrong in WRONG:
        assert not accepts(required, call.replace(*wrong), MUSE)
    answer = " to=user<|message|>It is warm."
    assert not accepts(required, answer, MUSE)
    alone = answer_grammar(
        muse_format(), tools_conversation(WEATHER, parallel=False), thinking_open=False, open_schemas=False
    )
    assert not accepts(alone, f"{call}<|eom|><|start|>assistant{call}", MUSE)
    automatic = answer_grammar(
        muse_format(), tools_conversation(WEATHER, choice="auto"), thinking_open=False, open_schemas=False
    )
    assert accepts(automatic, reasoning + answer, MUSE)
    comment = " to=commentary<|message|>Let me see.<|eom|><|start|>assistant"
    assert accepts(automatic, reasoning + comment + call, MUSE)
    formatted = answer_grammar(
        muse_format(), schema_conversation(SCHEMA), thinking_open=False, open_schemas=False
    )
    assert accepts(formatted, f"{reasoning} to=user<|message|>{MINIMAL_ARGUMENTS}", MUSE)
    assert not accepts(formatted, answer, MUSE)


def test_muse_strings_that_parse_as_json_must_be_quoted() -> None:
    def call(city: str) -> str:
        return f" to=get_weather<|message|>{MUSE.whole(MUSE.minimal_call.replace('Rome', city))}"

    grammar = answer_grammar(
        muse_format(), tools_conversation(WEATHER), thinking_open=False, open_schemas=False
    )
    for city in ("3", "-1.5e3", "true", "null", "[1]", '{"a": 1}', '"a" b'):
        assert not accepts(grammar, call(city), MUSE)
    closed = "3</atem:parameter>\n"
    assert not accepts(grammar, call(f"{closed}Rome"), MUSE)
    for city in ("3 hills", "nullify", "2026-11-22", '"3"', "a < b"):
        assert accepts(grammar, call(city), MUSE)


def test_muse_refuses_a_tool_named_like_a_recipient() -> None:
    with pytest.raises(RequestError, match="'user'"):
        answer_grammar(
            muse_format(),
            tools_conversation(Tool("user", strict=True)),
            thinking_open=False,
            open_schemas=False,
        )


RICH: dict[str, Any] = {
    "type": "object",
    "properties": {
        "who": {"$ref": "#/$defs/person"},
        "Note": {"type": "string", "minLength": 2, "maxLength": 4},
        "code": {"type": "string", "pattern": "^[a-c]/\\d{2,3}$"},
        "content-type": {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None},
        "kind": {"enum": ["a}", "b,c", 'd"', 7, None, True, [1, "x"], {"k": "v"}]},
        "size": {"type": ["integer", "boolean"], "minimum": 3, "maximum": 40},
        "pairs": {
            "type": "array",
            "items": {"type": "array", "items": {"type": "number"}, "maxItems": 1},
            "minItems": 1,
        },
        "more": {"type": "object", "additionalProperties": {"type": "boolean"}},
        "free": {},
    },
    "required": ["who", "Note", "code", "content-type", "kind"],
    "$defs": {
        "person": {
            "type": "object",
            "properties": {
                "name": {"type": "string"},
                "boss": {"anyOf": [{"$ref": "#/$defs/person"}, {"type": "null"}]},
            },
            "required": ["name"],
            "additionalProperties": False,
        }
    },
}


def random_answer(grammar: Grammar | None, example: CallExample, chance: random.Random) -> str:
    """Draw an answer from the allowed tokens; closing tokens are likelier, so that it ends."""
    assert grammar is not None
    known, ids = tokenizer(example.added)
    matcher = LLMatcher(known, to_llguidance(grammar.kind, grammar.text), log_level=0)
    assert matcher.get_error() == ""
    likely = {END, *ids.values(), *known.tokenize_str("]}<")}
    closing = [*re.findall(r"\n?</[^>]+>\n?|<escape>", example.call), example.marks().end]
    mask, tokens = allocate_token_bitmask(1, known.vocab_size), list[int]()
    while not matcher.is_stopped() and len(tokens) < 3000:
        fill_next_token_bitmask(matcher, mask)
        allowed = [int(token) for token in np.unpackbits(mask.view(np.uint8), bitorder="little").nonzero()[0]]
        if chance.random() < 0.1:
            marks = known.tokenize_str(chance.choice(closing), parse_special=True)
            if (taken := matcher.try_consume_tokens(marks)) == len(marks):
                tokens += marks
                continue
            matcher.rollback(taken)
        ending = [token for token in allowed if token in likely]
        token = chance.choice(ending if ending and chance.random() < 0.3 else allowed)
        token = END if END in allowed and len(tokens) > 500 else token
        assert matcher.consume_token(token)
        tokens.append(token)
    assert matcher.is_accepting()
    return known.decode_str([token for token in tokens if token != END])


@every_format
@pytest.mark.parametrize("parallel", [True, False])
def test_random_calls_are_read_back_and_match_the_schema(example: CallExample, *, parallel: bool) -> None:
    grammar = grammar_of(example, tools_conversation(WEATHER, CLOCK, parallel=parallel))
    for seed in range(3):
        text = random_answer(grammar, example, random.Random(seed))
        made = read_calls(example, text, WEATHER, CLOCK, parallel=parallel, required=True)
        assert made
        assert parallel or len(made) == 1
        for name, arguments in made:
            jsonschema.validate(arguments, SCHEMA if name == "get_weather" else NOTHING)


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize(
    "example", [example_of("gemma4"), example_of("function_gemma")], ids=lambda each: each.parser
)
def test_random_gemma_calls_have_arguments_that_match_the_schema(
    example: CallExample, *, strict: bool
) -> None:
    tool = Tool("f-1", parameters=RICH, strict=strict)
    grammar = grammar_of(example, tools_conversation(tool, parallel=False))
    for seed in range(8):
        text = random_answer(grammar, example, random.Random(seed))
        reading_rules = rules(example.format(), tools=[tool])
        answer = ChatAnswer(parts=read([text], reading_rules))
        assert [call.name for call in answer.calls] == ["f-1"], text
        jsonschema.validate(json.loads(answer.calls[0].arguments), RICH)


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ({"type": "string", "format": "date"}, "'format'"),
        ({"type": "array", "uniqueItems": True}, "'uniqueItems'"),
        ({"allOf": [{"type": "string"}, {"minLength": 1}]}, "'allOf'"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "'oneOf'"),
        ({"enum": ['<|"|>']}, "contains"),
        ({"$ref": "#/$defs/none"}, "none"),
        (False, "no value satisfies"),
    ],
    ids=str,
)
def test_unenforceable_gemma_schema_of_a_strict_tool_is_refused(schema: Any, expected: str) -> None:
    tool = Tool("f", parameters={"type": "object", "properties": {"a": schema}}, strict=True)
    with pytest.raises(RequestError, match=expected):
        grammar_of(example_of("gemma4"), tools_conversation(tool))


def test_unenforceable_keyword_of_a_non_strict_tool_is_ignored() -> None:
    tool = Tool("get_weather", parameters={**SCHEMA, "not": {"required": ["hours"]}})
    grammar = grammar_of(JSON_TOOLS, tools_conversation(tool))
    assert accepts(grammar, JSON_TOOLS.whole(JSON_TOOLS.call))
    assert not accepts(grammar, JSON_TOOLS.whole(JSON_TOOLS.call.replace("3", "15")))


def test_look_around_in_a_non_strict_tool_is_ignored() -> None:
    """Enforce the rest of a schema with an email address of zod's, whose pattern looks ahead."""
    email = {"type": "string", "format": "email", "pattern": r"^(?!\.)(?!.*\.\.)([A-Za-z0-9]*)@[a-z]+$"}
    known = {"type": "string", "pattern": "^[a-z]+$"}
    fields = {
        "to": {"anyOf": [email, {"type": "null"}]},
        "pattern": known,
        "mark": {"const": {"pattern": "(?=a)"}},
    }
    tool = Tool("send", parameters={"type": "object", "properties": fields, "required": list(fields)})
    grammar = grammar_of(JSON_TOOLS, tools_conversation(tool))
    sent = '{"name": "send", "arguments": {"to": "ann@example.org", "pattern": "ab", "mark": {"pattern": "(?=a)"}}}'
    assert accepts(grammar, JSON_TOOLS.whole(sent))
    for there, other in (("ann@example.org", "nobody"), ('"ab"', '"AB"'), ("(?=a)", "")):
        assert not accepts(grammar, JSON_TOOLS.whole(sent.replace(there, other)))


def test_map_by_names_of_an_enum_is_enforced_in_a_format_and_in_a_strict_tool() -> None:
    flags = {
        "$defs": {"Colour": {"enum": ["red", "green"]}},
        "type": "object",
        "propertyNames": {"$ref": "#/$defs/Colour"},
        "additionalProperties": {"type": "boolean"},
    }
    answer = grammar_of(JSON_TOOLS, schema_conversation(flags))
    call = grammar_of(JSON_TOOLS, tools_conversation(Tool("send", parameters=flags, strict=True)))
    for value, is_one in (({"red": True}, True), ({"blue": True}, False), ({"red": 1}, False)):
        assert accepts(answer, json.dumps(value)) == is_one
        assert accepts(call, sent(value)) == is_one


@pytest.mark.parametrize(
    ("names", "value", "other"),
    [
        ({"enum": [f"Area/City {at}" for at in range(600)]}, {"Area/City 599": True}, {"Area/City 599": 1}),
        ({"enum": ["a", "z"]}, {"z": True, "a": True}, {"z": 1}),
        ({"pattern": "^(?!x)"}, {"n": True}, {"n": "text"}),
    ],
    ids=["many names", "two names", "look-around"],
)
@pytest.mark.parametrize("strict", [False, True])
def test_map_is_enforced_by_its_values_whatever_its_names(
    names: dict[str, Any], value: dict[str, Any], other: dict[str, Any], *, strict: bool
) -> None:
    flags = {"type": "object", "propertyNames": names, "additionalProperties": {"type": "boolean"}}
    schema = {"type": "object", "properties": {"map": flags}, "required": ["map"]}
    tool = tools_conversation(Tool("send", parameters=schema, strict=strict))
    if strict and "pattern" in names:  # refused before it is used
        assert "look-around" in problem_of(grammar_of(JSON_TOOLS, tool))
        return
    grammar = grammar_of(JSON_TOOLS, tool)
    assert problem_of(grammar) == ""
    assert accepts(grammar, sent({"map": value}))
    assert not accepts(grammar, sent({"map": other}))


def test_keywords_that_a_non_strict_tool_ignores_do_not_restrict_it() -> None:
    branch = {"a": {"properties": {"b": {"type": "integer"}}}}
    schema = {
        "type": "object",
        "properties": {
            "a": {"type": "integer"},
            "list": {"type": "array", "unevaluatedItems": {"pattern": "("}},
        },
        "dependencies": branch,
        "unevaluatedProperties": False,
    }
    grammar = grammar_of(JSON_TOOLS, tools_conversation(Tool("send", parameters=schema)))
    assert problem_of(grammar) == ""
    assert accepts(grammar, sent({"a": 1, "b": 2}))


def problem_of(grammar: Grammar | None) -> str:
    """Return why a grammar is refused before any computation; empty if it is not."""
    assert grammar is not None
    try:
        check_grammar(grammar)
    except RequestError as error:
        return str(error)
    return ""


def test_values_of_a_map_by_names_have_no_properties_but_their_own() -> None:
    score = {"type": "object", "properties": {"points": {"type": "integer"}}}
    schema = {"type": "object", "propertyNames": {"enum": ["art"]}, "additionalProperties": score}
    grammar = grammar_of(JSON_TOOLS, schema_conversation(schema))
    assert accepts(grammar, '{"art": {"points": 1}}')
    assert not accepts(grammar, '{"art": {"points": 1, "more": 1}}')


@pytest.mark.parametrize("name", ["default", "const", "enum", "examples", "pattern", "properties"])
def test_look_around_is_ignored_in_properties_named_like_keywords(name: str) -> None:
    inner = {
        "type": "object",
        "properties": {name: {"type": "string", "pattern": "(?=a)"}},
        "required": [name],
    }
    tool = Tool("send", parameters={"type": "object", "properties": {name: inner}, "required": [name]})
    grammar = grammar_of(JSON_TOOLS, tools_conversation(tool))
    assert accepts(grammar, sent({name: {name: "b"}}))
    assert not accepts(grammar, sent({name: {name: 1}}))


@pytest.mark.parametrize("further", [{}, {"additionalProperties": False}])
def test_names_of_properties_with_look_around_may_be_any(further: dict[str, Any]) -> None:
    patterns = {"^(?!x)": {"type": "integer"}, "^(?=y)": {"type": "integer"}, "^n": {"type": "integer"}}
    tool = Tool("send", parameters={"type": "object", "patternProperties": patterns, **further})
    grammar = grammar_of(JSON_TOOLS, tools_conversation(tool))
    assert accepts(grammar, sent({"a": 1, "n": 2}))
    assert not accepts(grammar, sent({"n": "2"}))


@pytest.mark.parametrize(
    ("pattern", "matched", "other"),
    [
        (r"^f\(?=x$", "f(=x", "g=x"),
        (r"^[(?=]+$", "(?=", "a"),
        (r"^[^(?=]+$", "a", "(?="),
        (r"^[\](?=]$", "]", "a"),
        (r"^a\\(?:b)$", "a\\b", "a"),
    ],
)
def test_a_pattern_that_only_looks_like_look_around_is_enforced(
    pattern: str, matched: str, other: str
) -> None:
    fields = {
        "type": "object",
        "properties": {"a": {"type": "string", "pattern": pattern}},
        "required": ["a"],
    }
    grammar = grammar_of(JSON_TOOLS, tools_conversation(Tool("send", parameters=fields)))
    assert accepts(grammar, sent({"a": matched}))
    assert not accepts(grammar, sent({"a": other}))


def sent(arguments: dict[str, Any]) -> str:
    """Return an answer that calls `send`."""
    return JSON_TOOLS.whole(json.dumps({"name": "send", "arguments": arguments}))


def _text_after_string(example: CallExample) -> str:
    """Return the text that closes a string."""
    return example.minimal_call.partition("Rome")[2].partition(">")[0] + ">"


@pytest.mark.parametrize("parser", ["qwen3_coder", "minimax_m2", "minicpm5"])
def test_string_that_would_be_parsed_as_null_is_rejected(parser: str) -> None:
    example = example_of(parser)
    grammar = grammar_of(example, tools_conversation(WEATHER))
    for city, passes in (("Null", False), ("Nullarbor", True), ("Annull", True)):
        call = example.whole(example.minimal_call.replace("Rome", city))
        assert accepts(grammar, call, example) == passes
    # A string that starts with null and its closing text is rejected too, whatever follows.
    twice = example.minimal_call.replace("Rome", f"null{_text_after_string(example)}Rome")
    assert not accepts(grammar, example.whole(twice), example)
