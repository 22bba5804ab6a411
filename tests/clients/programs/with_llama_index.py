"""LlamaIndex with its package for servers like OpenAI's."""

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
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel, ConfigDict


class Lamp(BaseModel):
    """A lamp."""

    model_config = ConfigDict(extra="forbid")

    room: Literal["kitchen", "garden", "hall"]
    on: bool


def get_weather(city: str) -> str:
    """Get the weather of a city."""
    return WEATHER_RESULT if city == "Paris" else "{}"


def model_with(**fields: Any) -> OpenAILike:
    fields = {"api_key": KEY, "model": MODEL, "temperature": 0, "max_tokens": 200, "max_retries": 0} | fields
    fields = {"is_chat_model": True, "is_function_calling_model": True} | fields
    return OpenAILike(api_base=f"{URL}/v1", context_window=4096, **fields)


model = model_with()
conversation = [ChatMessage(role="user", content=QUESTION)]
weather_tool = FunctionTool.from_defaults(get_weather)


@check("chat")
def answers() -> None:
    answer = model.chat(conversation)
    equal((answer.message.content, answer.raw.choices[0].finish_reason), (ANSWER, "stop"))


@check("chat, streamed")
def streams() -> None:
    pieces = list(model.stream_chat(conversation))
    equal("".join(piece.delta or "" for piece in pieces), ANSWER)
    expect(len(pieces) > 1, pieces)


@check("chat, asynchronous")
async def answers_asynchronously() -> None:
    equal((await model.achat(conversation)).message.content, ANSWER)
    equal("".join([piece.delta or "" async for piece in await model.astream_chat(conversation)]), ANSWER)


@check("tools")
def calls_tools() -> None:
    answer = model.chat_with_tools([weather_tool], user_msg=WEATHER_QUESTION)
    calls = model.get_tool_calls_from_response(answer)
    equal([(call.tool_name, call.tool_kwargs) for call in calls], [("get_weather", {"city": "Paris"})])
    forced = model.chat_with_tools([weather_tool], user_msg=QUESTION, tool_required=True)
    equal([call.tool_name for call in model.get_tool_calls_from_response(forced)], ["get_weather"])


@check("tools, run by an agent, streamed")
async def runs_tools() -> None:
    agent = FunctionAgent(tools=[weather_tool], llm=model, system_prompt=None)
    answer = await agent.run(WEATHER_QUESTION)
    equal(answer.response.content, WEATHER_ANSWER)
    equal([call.tool_kwargs for call in answer.tool_calls], [{"city": "Paris"}])


@check("schema")
def holds_to_schema() -> None:
    for structured in (False, True):
        own = model_with(
            temperature=1, additional_kwargs={"seed": 1}, should_use_structured_outputs=structured
        )
        lamp = own.as_structured_llm(Lamp).chat([ChatMessage(role="user", content=LAMP_REQUEST)]).raw
        expect(isinstance(lamp, Lamp), structured, lamp)


@check("completions")
def completes() -> None:
    own = model_with(is_chat_model=False, max_tokens=4)
    expect(own.complete("The capital of").text, "no text")


@check("errors")
def errs() -> None:
    raises(openai.AuthenticationError, lambda: model_with(api_key=WRONG_KEY).chat(conversation))
    raises(openai.NotFoundError, lambda: model_with(model="no/such-model").chat(conversation))
    raises(openai.BadRequestError, lambda: model.chat(conversation, top_p=9))


run()
