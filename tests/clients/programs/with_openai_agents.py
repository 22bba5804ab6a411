"""OpenAI's Agents SDK, over chat completions and over responses."""

from __future__ import annotations

from typing import Any, Literal

import openai
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from checks import (
    ANSWER,
    KEY,
    LAMP_REQUEST,
    MODEL,
    QUESTION,
    URL,
    WEATHER_ANSWER,
    WEATHER_QUESTION,
    WEATHER_RESULT,
    WRONG_KEY,
    check,
    equal,
    expect,
    run,
)
from pydantic import BaseModel

set_tracing_disabled(disabled=True)


class Lamp(BaseModel):
    """A lamp."""

    room: Literal["kitchen", "garden", "hall"]
    on: bool


@function_tool
def get_weather(city: str) -> str:
    """Get the weather of a city."""
    return WEATHER_RESULT if city == "Paris" else "{}"


def agent_of(kind: Any, key: str = KEY, **fields: Any) -> Agent[Any]:
    model = kind(
        model=MODEL, openai_client=openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key=key, max_retries=0)
    )
    return Agent(
        name="helper", model=model, model_settings=ModelSettings(temperature=0, max_tokens=200), **fields
    )


async def try_whole(kind: Any) -> None:
    equal((await Runner.run(agent_of(kind), QUESTION)).final_output, ANSWER)


async def try_stream(kind: Any) -> None:
    result = Runner.run_streamed(agent_of(kind), QUESTION)
    events = [event async for event in result.stream_events() if event.type == "raw_response_event"]
    deltas = [event.data.delta for event in events if event.data.type == "response.output_text.delta"]
    equal(("".join(deltas), result.final_output), (ANSWER, ANSWER))


async def try_tools(kind: Any) -> None:
    agent = agent_of(kind, tools=[get_weather])
    equal((await Runner.run(agent, WEATHER_QUESTION)).final_output, WEATHER_ANSWER)
    result = Runner.run_streamed(agent, WEATHER_QUESTION)
    async for _ in result.stream_events():
        pass
    equal(result.final_output, WEATHER_ANSWER)


async def try_schema(kind: Any) -> None:
    lamp = (await Runner.run(agent_of(kind, output_type=Lamp), LAMP_REQUEST)).final_output
    expect(isinstance(lamp, Lamp), lamp)


@check("chat")
async def answers() -> None:
    await try_whole(OpenAIChatCompletionsModel)


@check("chat, streamed")
async def streams() -> None:
    await try_stream(OpenAIChatCompletionsModel)


@check("tools")
async def calls_tools() -> None:
    await try_tools(OpenAIChatCompletionsModel)


@check("schema")
async def holds_to_schema() -> None:
    await try_schema(OpenAIChatCompletionsModel)


@check("responses")
async def responds() -> None:
    await try_whole(OpenAIResponsesModel)


@check("responses, streamed")
async def streams_responses() -> None:
    await try_stream(OpenAIResponsesModel)


@check("responses, tools")
async def responds_with_tools() -> None:
    await try_tools(OpenAIResponsesModel)


@check("responses, schema")
async def responds_with_schema() -> None:
    await try_schema(OpenAIResponsesModel)


@check("errors")
async def errs() -> None:
    try:
        await Runner.run(agent_of(OpenAIChatCompletionsModel, WRONG_KEY), QUESTION)
    except openai.AuthenticationError:
        return
    raise AssertionError("a wrong key was no AuthenticationError")


run()
