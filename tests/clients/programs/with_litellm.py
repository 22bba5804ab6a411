"""LiteLLM, with each API through which it can reach this server."""

from __future__ import annotations

import json
from typing import Any

import litellm
from checks import (
    ANSWER,
    CITY_SCHEMA,
    KEY,
    LAMP_REQUEST,
    LAMP_SCHEMA,
    MODEL,
    QUESTION,
    URL,
    WEATHER_QUESTION,
    WRONG_KEY,
    check,
    equal,
    expect,
    is_lamp,
    raises,
    run,
)

conversation = [{"role": "user", "content": QUESTION}]
weather_conversation = [{"role": "user", "content": WEATHER_QUESTION}]
weather_tool = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather of a city",
        "parameters": CITY_SCHEMA,
    },
}
BY_OPENAI = {"model": f"openai/{MODEL}", "api_base": f"{URL}/v1"}
BY_ANTHROPIC = {"model": f"anthropic/{MODEL}", "api_base": URL}
BY_OLLAMA = {"model": f"ollama_chat/{MODEL}", "api_base": URL}
BY_VLLM = {"model": f"hosted_vllm/{MODEL}", "api_base": f"{URL}/v1"}


def chat(messages: list[Any], **fields: Any) -> Any:
    fields = {"api_key": KEY, "temperature": 0, "max_tokens": 200, "num_retries": 0} | BY_OPENAI | fields
    return litellm.completion(messages=messages, **fields)


def text_of(chunks: Any) -> str:
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)


@check("chat")
def answers() -> None:
    answer = chat(conversation)
    equal((answer.choices[0].message.content, answer.choices[0].finish_reason), (ANSWER, "stop"))
    expect(answer.usage.total_tokens > 0, answer.usage)


@check("chat, streamed")
def streams() -> None:
    equal(text_of(chat(conversation, stream=True)), ANSWER)
    built = litellm.stream_chunk_builder(
        list(chat(conversation, stream=True, stream_options={"include_usage": True}))
    )
    equal((built.choices[0].message.content, built.usage.completion_tokens > 0), (ANSWER, True))


@check("chat, asynchronous")
async def answers_asynchronously() -> None:
    answer = await litellm.acompletion(messages=conversation, api_key=KEY, temperature=0, **BY_OPENAI)
    equal(answer.choices[0].message.content, ANSWER)


@check("tools")
def calls_tools() -> None:
    for fields in ({}, {"tool_choice": "required"}):
        answer = chat(weather_conversation, tools=[weather_tool], **fields)
        call = answer.choices[0].message.tool_calls[0].function
        equal((call.name, json.loads(call.arguments)), ("get_weather", {"city": "Paris"}))
        equal(answer.choices[0].finish_reason, "tool_calls")


@check("tools, streamed")
def streams_tools() -> None:
    built = litellm.stream_chunk_builder(list(chat(weather_conversation, tools=[weather_tool], stream=True)))
    call = built.choices[0].message.tool_calls[0].function
    equal((call.name, json.loads(call.arguments)), ("get_weather", {"city": "Paris"}))


@check("schema")
def holds_to_schema() -> None:
    form = {"type": "json_schema", "json_schema": {"name": "lamp", "strict": True, "schema": LAMP_SCHEMA}}
    answer = chat([{"role": "user", "content": LAMP_REQUEST}], response_format=form, temperature=1, seed=1)
    expect(is_lamp(json.loads(answer.choices[0].message.content)), answer)


@check("reasoning")
def reasons() -> None:
    thinking = {"chat_template_kwargs": {"enable_thinking": True}}
    message = chat(conversation, extra_body=thinking).choices[0].message
    equal(message.content, ANSWER)
    expect(message.reasoning_content, message)


@check("completions")
def completes() -> None:
    answer = litellm.text_completion(
        model=f"text-completion-openai/{MODEL}",
        api_base=f"{URL}/v1",
        api_key=KEY,
        prompt="The capital of",
        max_tokens=4,
    )
    expect(answer.choices[0].text, answer)


@check("embeddings")
def embeds() -> None:
    found = litellm.embedding(input=["One.", "Two."], api_key=KEY, **BY_OPENAI)
    equal([row["index"] for row in found.data], [0, 1])


@check("responses")
def responds() -> None:
    answer = litellm.responses(input=QUESTION, api_key=KEY, temperature=0, **BY_OPENAI)
    equal(answer.status, "completed")
    equal(answer.output[-1].content[0].text, ANSWER)


@check("as Anthropic")
def speaks_anthropic() -> None:
    equal(chat(conversation, **BY_ANTHROPIC).choices[0].message.content, ANSWER)
    equal(text_of(chat(conversation, stream=True, **BY_ANTHROPIC)), ANSWER)
    call = (
        chat(weather_conversation, tools=[weather_tool], **BY_ANTHROPIC)
        .choices[0]
        .message.tool_calls[0]
        .function
    )
    equal((call.name, json.loads(call.arguments)), ("get_weather", {"city": "Paris"}))


@check("as Ollama")
def speaks_ollama() -> None:
    equal(chat(conversation, **BY_OLLAMA).choices[0].message.content, ANSWER)
    equal(text_of(chat(conversation, stream=True, **BY_OLLAMA)), ANSWER)


@check("as vLLM")
def speaks_vllm() -> None:
    equal(chat(conversation, **BY_VLLM).choices[0].message.content, ANSWER)


@check("errors")
def errs() -> None:
    raises(litellm.AuthenticationError, lambda: chat(conversation, api_key=WRONG_KEY))
    raises(litellm.NotFoundError, lambda: chat(conversation, model="openai/no/such-model"))
    raises(litellm.BadRequestError, lambda: chat(conversation, temperature=9))
    raises(litellm.ContextWindowExceededError, lambda: chat([{"role": "user", "content": "word " * 40_000}]))


run()
