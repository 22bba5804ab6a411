"""LangChain with its package for OpenAI."""

from __future__ import annotations

from typing import Any, Literal

import openai
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
from langchain_core.messages import AIMessageChunk, HumanMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings
from pydantic import BaseModel, ConfigDict


class Lamp(BaseModel):
    """A lamp."""

    model_config = ConfigDict(extra="forbid")

    room: Literal["kitchen", "garden", "hall"]
    on: bool


@tool
def get_weather(city: str) -> str:
    """Get the weather of a city."""
    return WEATHER_RESULT if city == "Paris" else "{}"


def model_with(**fields: Any) -> ChatOpenAI:
    fields = {"api_key": KEY, "model": MODEL, "temperature": 0, "max_tokens": 200, "max_retries": 0} | fields
    return ChatOpenAI(base_url=f"{URL}/v1", **fields)


model = model_with()


@check("chat")
def answers() -> None:
    answer = model.invoke(QUESTION)
    equal((answer.content, answer.response_metadata["finish_reason"]), (ANSWER, "stop"))
    expect(answer.usage_metadata["output_tokens"] > 0, answer)
    equal([each.content for each in model.batch([QUESTION, QUESTION])], [ANSWER, ANSWER])


@check("chat, streamed")
def streams() -> None:
    whole: AIMessageChunk = sum(list(model.stream(QUESTION))[1:], AIMessageChunk(content=""))
    equal(whole.content, ANSWER)


@check("chat, asynchronous")
async def answers_asynchronously() -> None:
    equal("".join([piece.content async for piece in model.astream(QUESTION)]), ANSWER)


@check("tools")
def calls_tools() -> None:
    bound = model.bind_tools([get_weather])
    request = HumanMessage(WEATHER_QUESTION)
    answer = bound.invoke([request])
    equal([(call["name"], call["args"]) for call in answer.tool_calls], [("get_weather", {"city": "Paris"})])
    equal(bound.invoke([request, answer, get_weather.invoke(answer.tool_calls[0])]).content, WEATHER_ANSWER)
    forced = model.bind_tools([get_weather], tool_choice="any").invoke(QUESTION)
    equal([call["name"] for call in forced.tool_calls], ["get_weather"])


@check("tools, streamed")
def streams_tools() -> None:
    whole: AIMessageChunk | None = None
    for piece in model.bind_tools([get_weather]).stream(WEATHER_QUESTION):
        whole = piece if whole is None else whole + piece
    equal([(call["name"], call["args"]) for call in whole.tool_calls], [("get_weather", {"city": "Paris"})])


@check("schema")
def holds_to_schema() -> None:
    for method in ("json_schema", "function_calling"):
        lamp = (
            model_with(temperature=1, seed=1).with_structured_output(Lamp, method=method).invoke(LAMP_REQUEST)
        )
        expect(isinstance(lamp, Lamp), method, lamp)


@check("completions")
def completes() -> None:
    text = OpenAI(base_url=f"{URL}/v1", api_key=KEY, model=MODEL, max_tokens=4, temperature=0).invoke(
        "The capital of"
    )
    expect(isinstance(text, str) and text, text)


@check("responses")
def responds() -> None:
    own = model_with(use_responses_api=True)
    equal(own.invoke(QUESTION).text, ANSWER)
    equal("".join(piece.text for piece in own.stream(QUESTION)), ANSWER)
    call = own.bind_tools([get_weather]).invoke(WEATHER_QUESTION).tool_calls[0]
    equal((call["name"], call["args"]), ("get_weather", {"city": "Paris"}))


@check("embeddings")
def embeds() -> None:
    own = OpenAIEmbeddings(base_url=f"{URL}/v1", api_key=KEY, model=MODEL, check_embedding_ctx_length=False)
    found = own.embed_documents(["One.", "Two."])
    equal((len(found), len(found[0])), (2, len(own.embed_query("One."))))


@check("errors")
def errs() -> None:
    raises(openai.AuthenticationError, lambda: model_with(api_key=WRONG_KEY).invoke(QUESTION))
    raises(openai.NotFoundError, lambda: model_with(model="no/such-model").invoke(QUESTION))
    raises(openai.BadRequestError, lambda: model_with(temperature=9).invoke(QUESTION))


run()
