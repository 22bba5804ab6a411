"""Pydantic AI."""

from __future__ import annotations

from typing import Any, Literal

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
    raises,
    run,
)
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.embeddings import Embedder
from pydantic_ai.embeddings.openai import OpenAIEmbeddingModel
from pydantic_ai.exceptions import ModelHTTPError
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider


class Lamp(BaseModel):
    """A lamp."""

    room: Literal["kitchen", "garden", "hall"]
    on: bool


provider = OpenAIProvider(base_url=f"{URL}/v1", api_key=KEY)
by_chat = OpenAIChatModel(MODEL, provider=provider)
by_responses = OpenAIResponsesModel(MODEL, provider=provider)
by_anthropic = AnthropicModel(MODEL, provider=AnthropicProvider(base_url=URL, api_key=KEY))


def agent_of(model: Any, **fields: Any) -> Any:
    return Agent(model, model_settings={"temperature": 0, "max_tokens": 200}, **fields)


def get_weather(city: str) -> str:
    """Get the weather of a city."""
    return WEATHER_RESULT if city == "Paris" else "{}"


async def streamed(model: Any) -> str:
    async with agent_of(model).run_stream(QUESTION) as answer:
        return "".join([piece async for piece in answer.stream_text(delta=True)])


@check("chat")
def answers() -> None:
    answer = agent_of(by_chat).run_sync(QUESTION)
    equal(answer.output, ANSWER)


@check("chat, streamed")
async def streams() -> None:
    equal(await streamed(by_chat), ANSWER)


@check("tools")
def calls_tools() -> None:
    equal(agent_of(by_chat, tools=[get_weather]).run_sync(WEATHER_QUESTION).output, WEATHER_ANSWER)


@check("tools, streamed")
async def streams_tools() -> None:
    async with agent_of(by_chat, tools=[get_weather]).run_stream(WEATHER_QUESTION) as answer:
        equal(await answer.get_output(), WEATHER_ANSWER)


@check("schema")
def holds_to_schema() -> None:
    for kind in (ToolOutput(Lamp), NativeOutput(Lamp)):
        lamp = agent_of(by_chat, output_type=kind).run_sync(LAMP_REQUEST).output
        expect(isinstance(lamp, Lamp), lamp)


@check("responses")
async def responds() -> None:
    equal(await streamed(by_responses), ANSWER)
    answer = await agent_of(by_responses, tools=[get_weather]).run(WEATHER_QUESTION)
    equal(answer.output, WEATHER_ANSWER)


@check("as Anthropic")
async def speaks_anthropic() -> None:
    equal(await streamed(by_anthropic), ANSWER)
    answer = await agent_of(by_anthropic, tools=[get_weather]).run(WEATHER_QUESTION)
    equal(answer.output, WEATHER_ANSWER)


@check("embeddings")
async def embeds() -> None:
    found = await Embedder(OpenAIEmbeddingModel(MODEL, provider=provider)).embed_documents(["One.", "Two."])
    equal(len(found.embeddings), 2)


@check("errors")
def errs() -> None:
    stranger = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=f"{URL}/v1", api_key=WRONG_KEY))
    equal(raises(ModelHTTPError, lambda: agent_of(stranger).run_sync(QUESTION)).status_code, 401)
    unknown = OpenAIChatModel("no/such-model", provider=provider)
    equal(raises(ModelHTTPError, lambda: agent_of(unknown).run_sync(QUESTION)).status_code, 404)


run()
