"""Demanded and strict tool calls of models whose format mlx-lm does not read, in every API."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.api.chat.call_examples import FORMATS, SCHEMA, TEMPLATES, CallExample
from tests.api.clients import Api, events
from tests.api.twins import ANSWER, SPECIAL, MarkingTokenizer, TwinService

EXAMPLES = [each for each in FORMATS if each.parser in TEMPLATES]
IDS = [f"{each.parser}{'' if each.added else ', marks as text'}" for each in EXAMPLES]
ARGUMENTS = {"city": "Rome", "days": 3}
FUNCTION = {"name": "get_weather", "parameters": SCHEMA}
CHAT = {"type": "function", "function": FUNCTION}
NAMED = {"type": "function", "function": {"name": "get_weather"}}
ANTHROPIC = {"name": "get_weather", "input_schema": SCHEMA}


class _Tokenizer(MarkingTokenizer):
    """Tokenizer of a model that does not reason, whose marks are special tokens or text."""

    think_start = think_end = tool_call_start = tool_call_end = tool_parser = None

    def __init__(self, example: CallExample) -> None:
        super().__init__()
        marks = example.marks()
        known = dict.fromkeys(
            mark for mark in (marks.start, marks.end, *marks.inner) if mark in example.added
        )
        self.special = SPECIAL | dict(enumerate(known or ("<mark>",), ANSWER + 1))
        self.chat_template = TEMPLATES[example.parser]


def api_of(example: CallExample) -> Api:
    """Return a client of a model that answers with one call."""
    says = example.whole(example.minimal_call)
    return Api(TwinService(tokenizer=_Tokenizer(example), says=says, context=16_384))


DEMANDS: list[dict[str, Any]] = [
    {"tools": [CHAT], "tool_choice": "required"},
    {"tools": [CHAT], "tool_choice": NAMED, "parallel_tool_calls": False},
    {"tools": [{"type": "function", "function": FUNCTION | {"strict": True}}]},
]


@pytest.mark.processes
@pytest.mark.parametrize("example", EXAMPLES, ids=IDS)
def test_every_api_has_the_demanded_call(example: CallExample) -> None:
    api = api_of(example)
    for fields in DEMANDS:
        _check_chat(api, fields)
    if example.added:  # the APIs differ no further
        for choice in ({"type": "any"}, {"type": "tool", "name": "get_weather"}):
            _check_anthropic(api, choice | {"disable_parallel_tool_use": True})
        _check_responses(api)


def _check_chat(api: Api, fields: dict[str, Any]) -> None:
    choice = api.chat(**fields).json()["choices"][0]
    (call,) = choice["message"]["tool_calls"]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", None)
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("get_weather", ARGUMENTS)
    chunks = [chunk["choices"][0] for chunk in events(api.chat(**fields, stream=True))]
    deltas = [each["function"] for chunk in chunks for each in chunk["delta"].get("tool_calls", [])]
    assert "".join(delta.get("name", "") for delta in deltas) == "get_weather"
    assert "".join(delta["arguments"] for delta in deltas) == call["function"]["arguments"]
    assert not any(chunk["delta"].get("content") for chunk in chunks)
    assert chunks[-1]["finish_reason"] == "tool_calls"


def _check_anthropic(api: Api, choice: dict[str, Any]) -> None:
    body = {"messages": [{"role": "user", "content": "Hello."}], "max_tokens": 512, "tools": [ANTHROPIC]}
    message = api.post("/v1/messages", body | {"tool_choice": choice}).json()
    assert message["stop_reason"] == "tool_use"
    assert [(block["name"], block["input"]) for block in message["content"]] == [("get_weather", ARGUMENTS)]
    streamed = api.post("/v1/messages", body | {"tool_choice": choice, "stream": True})
    sent = [json.loads(line[6:]) for line in streamed.text.split("\n") if line.startswith("data: ")]
    deltas = [each["delta"] for each in sent if each["type"] == "content_block_delta"]
    assert json.loads("".join(delta["partial_json"] for delta in deltas)) == ARGUMENTS


def _check_responses(api: Api) -> None:
    body = {"input": "Hello.", "tools": [{"type": "function", **FUNCTION}], "tool_choice": "required"}
    (item,) = api.post("/v1/responses", body).json()["output"]
    made = (item["type"], item["name"], json.loads(item["arguments"]))
    assert made == ("function_call", "get_weather", ARGUMENTS)
