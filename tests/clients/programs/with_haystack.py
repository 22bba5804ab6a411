"""Haystack with its generators for OpenAI."""

from __future__ import annotations

import json
from typing import Any

import openai
from checks import (
    ANSWER,
    CITY_SCHEMA,
    KEY,
    LAMP_REQUEST,
    LAMP_SCHEMA,
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
    is_lamp,
    raises,
    run,
)
from haystack import Document
from haystack.components.agents import Agent
from haystack.components.embedders import OpenAIDocumentEmbedder, OpenAITextEmbedder
from haystack.components.generators.chat import OpenAIChatGenerator
from haystack.dataclasses import ChatMessage
from haystack.tools import Tool
from haystack.utils import Secret

conversation = [ChatMessage.from_user(QUESTION)]
weather_conversation = [ChatMessage.from_user(WEATHER_QUESTION)]
weather_tool = Tool(
    name="get_weather",
    description="Get the weather of a city",
    parameters=CITY_SCHEMA,
    function=lambda city: WEATHER_RESULT if city == "Paris" else "{}",
)


def generator_with(key: str = KEY, model: str = MODEL, **options: Any) -> OpenAIChatGenerator:
    return OpenAIChatGenerator(
        api_key=Secret.from_token(key),
        model=model,
        api_base_url=f"{URL}/v1",
        generation_kwargs={"temperature": 0, "max_tokens": 200} | options,
        max_retries=0,
    )


generator = generator_with()


@check("chat")
def answers() -> None:
    (reply,) = generator.run(conversation)["replies"]
    equal((reply.text, reply.meta["finish_reason"]), (ANSWER, "stop"))
    expect(reply.meta["usage"]["completion_tokens"] > 0, reply.meta)


@check("chat, streamed")
def streams() -> None:
    pieces: list[str] = []
    (reply,) = generator.run(
        conversation, streaming_callback=lambda piece: pieces.append(piece.content or "")
    )["replies"]
    equal(("".join(pieces), reply.text), (ANSWER, ANSWER))
    expect(len(pieces) > 1, pieces)


@check("chat, asynchronous")
async def answers_asynchronously() -> None:
    (reply,) = (await generator.run_async(conversation))["replies"]
    equal(reply.text, ANSWER)


@check("tools")
def calls_tools() -> None:
    (first,) = generator.run(weather_conversation, tools=[weather_tool])["replies"]
    equal(
        [(call.tool_name, call.arguments) for call in first.tool_calls], [("get_weather", {"city": "Paris"})]
    )


@check("tools, run by an agent")
def runs_tools() -> None:
    agent = Agent(chat_generator=generator, tools=[weather_tool])
    equal(agent.run(messages=weather_conversation)["last_message"].text, WEATHER_ANSWER)


@check("tools, streamed")
def streams_tools() -> None:
    (reply,) = generator.run(weather_conversation, tools=[weather_tool], streaming_callback=lambda _: None)[
        "replies"
    ]
    equal(
        [(call.tool_name, call.arguments) for call in reply.tool_calls], [("get_weather", {"city": "Paris"})]
    )


@check("schema")
def holds_to_schema() -> None:
    schema = {
        "type": "json_schema",
        "json_schema": {"name": "lamp", "strict": True, "schema": LAMP_SCHEMA},
    }
    own = generator_with(temperature=1, seed=1, response_format=schema)
    (reply,) = own.run([ChatMessage.from_user(LAMP_REQUEST)])["replies"]
    expect(is_lamp(json.loads(reply.text or "")), reply)


@check("embeddings")
def embeds() -> None:
    options = {"api_key": Secret.from_token(KEY), "model": MODEL, "api_base_url": f"{URL}/v1"}
    one = OpenAITextEmbedder(**options).run("One.")["embedding"]
    documents = OpenAIDocumentEmbedder(progress_bar=False, **options).run(
        [Document(content="One."), Document(content="Two.")]
    )["documents"]
    equal([len(document.embedding or ()) for document in documents], [len(one)] * 2)


@check("errors")
def errs() -> None:
    raises(openai.AuthenticationError, lambda: generator_with(WRONG_KEY).run(conversation))
    raises(openai.NotFoundError, lambda: generator_with(model="no/such-model").run(conversation))
    raises(openai.BadRequestError, lambda: generator_with(temperature=9).run(conversation))


run()
