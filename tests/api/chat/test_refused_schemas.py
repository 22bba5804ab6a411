"""Schemas and formats that no grammar enforces: a request is refused, and the problem named."""

from __future__ import annotations

import asyncio
import json
import re
from dataclasses import replace
from typing import Any

import pytest
from tests.api.chat.call_examples import CLOCK, WEATHER, example_of
from tests.api.chat.test_answer_grammars import (
    JSON_TOOLS,
    grammar_of,
    schema_conversation,
    tools_conversation,
)

from mlx_ring.api.chat.answer_grammars import GrammarChecks, answer_grammar
from mlx_ring.api.chat.model_format import ChatFormat
from mlx_ring.api.chat.request import Conversation, Tool
from mlx_ring.core.errors import RequestError
from mlx_ring.core.types import Grammar


def test_format_without_a_grammar_is_refused_by_name() -> None:
    marks = replace(JSON_TOOLS.marks(), parser="unknown_parser")
    with pytest.raises(RequestError, match="unknown_parser"):
        answer_grammar(
            ChatFormat(calls=marks), tools_conversation(WEATHER), thinking_open=False, open_schemas=False
        )


def refused(conversation: Conversation, format_: ChatFormat) -> RequestError:
    async def check() -> None:
        grammar = answer_grammar(format_, conversation, thinking_open=False, open_schemas=False)
        await GrammarChecks().check(grammar, conversation)

    with pytest.raises(RequestError) as raised:
        asyncio.run(check())
    return raised.value


@pytest.mark.processes
@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ({"not": {"type": "string"}}, '"not"'),
        ({"type": "array", "uniqueItems": True}, '"uniqueItems"'),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf"),
        ({"type": "string", "pattern": "(?=a)b"}, "look-around"),
        ({"type": "string", "format": "iban"}, "iban"),
        ({"$ref": "https://example.org/schema"}, "example.org"),
        ({"type": "integer", "minimum": 2, "maximum": 1}, "Unsatisfiable"),
        ({"enum": ["x" * 300_000]}, "262144"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_unenforceable_schema_is_refused_and_its_problem_is_named(schema: Any, expected: str) -> None:
    error = refused(schema_conversation(schema, param="text.format.schema"), ChatFormat())
    assert expected in str(error)
    assert error.param == "text.format.schema"
    tool = Tool(
        "f", parameters={"type": "object", "properties": {"a": schema}, "required": ["a"]}, strict=True
    )
    error = refused(tools_conversation(CLOCK, tool), JSON_TOOLS.format())
    assert expected in str(error)
    assert (error.param, "'f'" in str(error)) == ("tools[1].function.parameters", True)
    assert not re.search(r"llguidance|coerce_one_of|start:", str(error))


def test_llguidance_options_in_a_schema_are_refused() -> None:
    schema = {"type": "object", "x-guidance": {"lenient": True}}
    assert "x-guidance" in str(refused(schema_conversation(schema), ChatFormat()))
    assert "x-guidance" in str(refused(tools_conversation(Tool("f", parameters=schema)), JSON_TOOLS.format()))


@pytest.mark.processes
def test_grammar_checks_keep_no_whole_grammar() -> None:
    """Check grammars whose length clients decide."""
    checks, grammar = GrammarChecks(), Grammar("json_schema", json.dumps({"description": "x" * (1 << 20)}))
    with pytest.raises(RequestError, match="the limit is 262144 bytes"):
        asyncio.run(checks.check(grammar, tools_conversation(choice="auto")))
    assert len(repr(vars(checks))) < 10_000


@pytest.mark.processes
@pytest.mark.parametrize("depth", [150, 900])
def test_deeply_nested_schema_is_refused(depth: int) -> None:
    schema: dict[str, Any] = {}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    assert "recursion" in str(refused(schema_conversation(schema), ChatFormat()))


@pytest.mark.parametrize(
    "schema", [{"type": "string", "pattern": "^a"}, {"anyOf": [{"type": "string"}, {"type": "integer"}]}]
)
def test_strict_tool_is_refused_where_an_unquoted_format_is_ambiguous(schema: Any) -> None:
    tool = Tool("f", parameters={"type": "object", "properties": {"a": schema}}, strict=True)
    with pytest.raises(RequestError, match="'a' of tool 'f'"):
        grammar_of(example_of("qwen3_coder"), tools_conversation(tool))
