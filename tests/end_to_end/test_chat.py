"""Reasoning, tool calls and structured output of a real model, over HTTP and two stages."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pytest
from pydantic import BaseModel
from tests.lazily import lazily
from tests.processes import Server, serving

if TYPE_CHECKING:
    import openai
else:
    openai = lazily("openai")

WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
QUESTION: Any = {"role": "user", "content": "What is the weather in Paris?"}


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Serve the demo model once for every test."""
    folder: Path = tmp_path_factory.mktemp("demo")
    with serving("demo", "--stages", "2", folder=folder) as server:
        yield server


@pytest.fixture
def client(demo: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{demo.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_model_reasons_calls_a_tool_and_answers_from_its_result(client: openai.OpenAI) -> None:
    first = client.chat.completions.create(
        model="demo",
        messages=[QUESTION],
        tools=[WEATHER],
        temperature=0,
        reasoning_effort="high",
    )
    message: Any = first.choices[0].message
    assert first.choices[0].finish_reason == "tool_calls"
    assert "get_weather" in message.reasoning
    (call,) = message.tool_calls
    assert json.loads(call.function.arguments) == {"city": "Paris"}
    assert first.usage is not None
    assert first.usage.completion_tokens_details is not None
    assert first.usage.completion_tokens_details.reasoning_tokens
    result: Any = {"role": "tool", "tool_call_id": call.id, "content": "21 degrees and sunny"}
    history: Any = message.model_dump()
    second = client.chat.completions.create(
        model="demo", messages=[QUESTION, history, result], tools=[WEATHER], temperature=0
    )
    assert second.choices[0].finish_reason == "stop"
    assert "21" in (second.choices[0].message.content or "")


def test_stream_has_the_reasoning_and_tool_call_of_a_whole_answer(client: openai.OpenAI) -> None:
    def chunks(effort: Any) -> list[Any]:
        stream = client.chat.completions.create(
            model="demo",
            messages=[QUESTION],
            tools=[WEATHER],
            temperature=0,
            reasoning_effort=effort,
            stream=True,
            logprobs=True,
            stream_options={"include_usage": True},
        )
        return list(stream)

    *answer, usage = chunks("high")
    deltas = [chunk.choices[0].delta for chunk in answer]
    calls = [delta.tool_calls[0] for delta in deltas if delta.tool_calls]
    assert "".join(getattr(delta, "reasoning", "") for delta in deltas) == "I need the tool get_weather."
    assert [call.function.name for call in calls if call.function.name] == ["get_weather"]
    assert len(calls) > 3
    assert json.loads("".join(call.function.arguments for call in calls)) == {"city": "Paris"}
    scored = [chunk.choices[0].logprobs for chunk in answer if chunk.choices[0].logprobs]
    assert sum(len(one.content) for one in scored) == usage.usage.completion_tokens
    assert "think" not in str([delta.content for delta in deltas])


class Weather(BaseModel):
    city: Literal["Paris", "Rome"]
    sky: Literal["sunny", "cloudy"]


def test_sdk_parses_structured_output_and_a_required_tool_call(client: openai.OpenAI) -> None:
    parsed = client.chat.completions.parse(
        model="demo", messages=[QUESTION], response_format=Weather, seed=1, max_tokens=200
    )
    assert isinstance(parsed.choices[0].message.parsed, Weather)
    greeting: Any = {"role": "user", "content": "Hello."}
    called: Any = client.chat.completions.parse(
        model="demo",
        messages=[greeting],
        tools=[openai.pydantic_function_tool(Weather)],
        tool_choice={"type": "function", "function": {"name": "Weather"}},
        seed=1,
        max_tokens=200,
    )
    assert called.choices[0].finish_reason == "tool_calls"
    assert isinstance(called.choices[0].message.tool_calls[0].function.parsed_arguments, Weather)


def test_stop_string_cuts_content_but_not_reasoning(client: openai.OpenAI) -> None:
    create: Any = client.chat.completions.create

    def content(**more: Any) -> str:
        answer = create(
            model="demo",
            messages=[{"role": "user", "content": "Name three colours."}],
            temperature=0,
            max_tokens=60,
            reasoning_effort="high",
            **more,
        )
        return answer.choices[0].message.content or ""

    whole = content()
    word = whole.split()[-1]
    assert content(stop=word) == whole[: whole.index(word)]
    assert content(stop="I ") == (whole[: whole.index("I ")] if "I " in whole else whole)
