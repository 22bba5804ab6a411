"""smolagents: its model for OpenAI's API, and the messages that its agents send."""

from __future__ import annotations

import json
from typing import Any

import openai
from checks import (
    ANSWER,
    KEY,
    LAMP_REQUEST,
    LAMP_SCHEMA,
    MODEL,
    QUESTION,
    URL,
    WEATHER_QUESTION,
    WEATHER_RESULT,
    WRONG_KEY,
    check,
    equal,
    expect,
    is_lamp,
    raises,
    run,
)
from smolagents import OpenAIModel, ToolCallingAgent, tool
from smolagents.models import ChatMessage, MessageRole


@tool
def get_weather(city: str) -> str:
    """Get the weather of a city.

    Args:
        city: where
    """
    return WEATHER_RESULT if city == "Paris" else "{}"


def model_with(key: str = KEY, model: str = MODEL, **fields: Any) -> OpenAIModel:
    return OpenAIModel(
        model,
        api_base=f"{URL}/v1",
        api_key=key,
        client_kwargs={"max_retries": 0},
        retry=False,
        **{"temperature": 0, "max_tokens": 200} | fields,
    )


def ask(question: str) -> list[ChatMessage]:
    return [ChatMessage(MessageRole.USER, [{"type": "text", "text": question}])]


model = model_with()


@check("chat")
def answers() -> None:
    answer = model.generate(ask(QUESTION))
    equal(answer.content, ANSWER)
    expect(answer.token_usage.output_tokens > 0, answer)


@check("chat, streamed")
def streams() -> None:
    pieces = list(model.generate_stream(ask(QUESTION)))
    equal("".join(piece.content or "" for piece in pieces), ANSWER)
    expect(len(pieces) > 1, pieces)


@check("tools, required")
def calls_tools() -> None:
    answer = model.generate(ask(WEATHER_QUESTION), tools_to_call_from=[get_weather])
    (call,) = answer.tool_calls
    equal((call.function.name, json.loads(call.function.arguments)), ("get_weather", {"city": "Paris"}))


@check("tools, streamed")
def streams_tools() -> None:
    pieces = list(model.generate_stream(ask(WEATHER_QUESTION), tools_to_call_from=[get_weather]))
    deltas = [delta for piece in pieces for delta in piece.tool_calls or []]
    arguments = "".join(delta.function.arguments or "" for delta in deltas)
    equal(json.loads(arguments), {"city": "Paris"})


@check("tools, run by an agent")
def runs_tools() -> None:
    """Expect an agent to run what a small model calls, although it never ends by its tool for that."""
    agent = ToolCallingAgent([get_weather], model, max_steps=1, verbosity_level=0)
    agent.run(WEATHER_QUESTION)
    step = agent.memory.steps[1]
    expect(step.tool_calls, step)
    expect(step.tool_calls[0].name in {"get_weather", "final_answer"}, step.tool_calls)


@check("schema")
def holds_to_schema() -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "lamp", "strict": True, "schema": LAMP_SCHEMA}}
    answer = model_with(temperature=1, seed=1).generate(ask(LAMP_REQUEST), response_format=schema)
    expect(is_lamp(json.loads(answer.content or "")), answer)


@check("errors")
def errs() -> None:
    raises(openai.AuthenticationError, lambda: model_with(WRONG_KEY).generate(ask(QUESTION)))
    raises(openai.NotFoundError, lambda: model_with(model="no/such-model").generate(ask(QUESTION)))
    raises(openai.BadRequestError, lambda: model_with(temperature=9).generate(ask(QUESTION)))


run()
