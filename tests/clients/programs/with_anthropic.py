"""Anthropic's SDK for Python."""

from __future__ import annotations

from typing import Any, Literal

import anthropic
from checks import (
    ANSWER,
    CITY_SCHEMA,
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

client = anthropic.Anthropic(base_url=URL, api_key=KEY, max_retries=0, timeout=60)
conversation = [{"role": "user", "content": QUESTION}]
weather_conversation = [{"role": "user", "content": WEATHER_QUESTION}]
weather_tool = {
    "name": "get_weather",
    "description": "Get the weather of a city",
    "input_schema": CITY_SCHEMA,
}


class Lamp(BaseModel):
    room: Literal["kitchen", "garden", "hall"]
    on: bool


def message(messages: list[Any], **fields: Any) -> Any:
    return client.messages.create(messages=messages, **({"model": MODEL, "max_tokens": 200} | fields))


@check("messages")
def answers() -> None:
    answer = message(conversation, system="Be brief.")
    equal(
        (answer.type, answer.role, answer.model, answer.stop_reason),
        ("message", "assistant", MODEL, "end_turn"),
    )
    equal([(block.type, block.text) for block in answer.content], [("text", ANSWER)])
    expect(answer.usage.input_tokens > 0 and answer.usage.output_tokens > 0, answer.usage)
    expect(answer._request_id, answer)


@check("messages, streamed")
def streams() -> None:
    with client.messages.stream(model=MODEL, max_tokens=200, messages=conversation) as stream:
        equal("".join(stream.text_stream), ANSWER)
        last = stream.get_final_message()
    equal((last.stop_reason, last.content[0].text), ("end_turn", ANSWER))
    expect(last.usage.output_tokens > 0, last.usage)
    kinds = [event.type for event in message(conversation, stream=True) if event.type != "ping"]
    equal(
        (kinds[0], kinds[1], kinds[-3:]),
        ("message_start", "content_block_start", ["content_block_stop", "message_delta", "message_stop"]),
    )


@check("messages, asynchronous")
async def answers_asynchronously() -> None:
    async with anthropic.AsyncAnthropic(base_url=URL, api_key=KEY, max_retries=0) as own:
        request = own.messages.stream(model=MODEL, max_tokens=200, messages=conversation)
        async with request as stream:
            equal("".join([piece async for piece in stream.text_stream]), ANSWER)


@check("stopping")
def stops() -> None:
    limited = message(conversation, max_tokens=2)
    equal((limited.stop_reason, limited.usage.output_tokens), ("max_tokens", 2))
    stopped = message(conversation, stop_sequences=["France"])
    equal((stopped.stop_reason, stopped.stop_sequence), ("stop_sequence", "France"))


@check("sampling")
def samples() -> None:
    drawn = message(conversation, max_tokens=5, extra_body={"temperature": 1.0, "top_p": 0.9, "top_k": 40})
    expect(drawn.usage.output_tokens <= 5, drawn)


@check("tools")
def calls_tools() -> None:
    answer = message(weather_conversation, tools=[weather_tool])
    equal(answer.stop_reason, "tool_use")
    call = next(block for block in answer.content if block.type == "tool_use")
    equal((call.name, call.input), ("get_weather", {"city": "Paris"}))
    result = {"type": "tool_result", "tool_use_id": call.id, "content": WEATHER_RESULT}
    turns = [{"role": "assistant", "content": answer.content}, {"role": "user", "content": [result]}]
    last = message([*weather_conversation, *turns], tools=[weather_tool])
    equal((last.content[0].text, last.stop_reason), (WEATHER_ANSWER, "end_turn"))


@check("tools, streamed")
def streams_tools() -> None:
    with client.messages.stream(
        model=MODEL, max_tokens=200, messages=weather_conversation, tools=[weather_tool]
    ) as stream:
        events = list(stream)
        last = stream.get_final_message()
    call = next(block for block in last.content if block.type == "tool_use")
    equal((call.name, call.input, last.stop_reason), ("get_weather", {"city": "Paris"}, "tool_use"))
    expect(any(event.type == "input_json" for event in events), [event.type for event in events])


@check("tools, required and named")
def must_call_tools() -> None:
    for choice in ({"type": "any"}, {"type": "tool", "name": "get_weather"}):
        answer = message(conversation, tools=[weather_tool], tool_choice=choice)
        call = next(block for block in answer.content if block.type == "tool_use")
        equal((call.name, call.input.keys()), ("get_weather", {"city"}))
    answer = message(weather_conversation, tools=[weather_tool], tool_choice={"type": "none"})
    equal({block.type for block in answer.content}, {"text"})


@check("thinking")
def thinks() -> None:
    thinking = {"type": "enabled", "budget_tokens": 1024}
    answer = message(conversation, max_tokens=2000, thinking=thinking)
    equal([block.type for block in answer.content], ["thinking", "text"])
    expect(answer.content[0].thinking, answer)
    again = message(
        [*conversation, {"role": "assistant", "content": answer.content}, *weather_conversation],
        max_tokens=2000,
        thinking=thinking,
    )
    expect(again.content, again)
    adaptive = {"type": "adaptive"}
    with client.messages.stream(
        model=MODEL, max_tokens=2000, messages=conversation, thinking=adaptive
    ) as stream:
        kinds = {event.type for event in stream}
    expect({"thinking", "text"} <= kinds, kinds)


@check("schema, parsed by the SDK")
def parses() -> None:
    answer = client.messages.parse(
        model=MODEL, max_tokens=200, messages=[{"role": "user", "content": LAMP_REQUEST}], output_format=Lamp
    )
    expect(isinstance(answer.parsed_output, Lamp), answer)


@check("counting tokens")
def counts_tokens() -> None:
    count = client.messages.count_tokens(
        model=MODEL, messages=conversation, tools=[weather_tool], system="Be brief."
    )
    answer = message(conversation, tools=[weather_tool], system="Be brief.", max_tokens=1)
    used = answer.usage
    equal(count.input_tokens, used.input_tokens + (used.cache_read_input_tokens or 0))


@check("models")
def lists_models() -> None:
    expect(MODEL in [model.id for model in client.models.list()])
    model = client.models.retrieve(MODEL)
    equal((model.id, model.type), (MODEL, "model"))
    expect(model.display_name and model.created_at.year >= 1970, model)


@check("errors")
def errs() -> None:
    stranger = client.with_options(api_key=WRONG_KEY)
    wrong_key = raises(
        anthropic.AuthenticationError,
        lambda: stranger.messages.create(model=MODEL, max_tokens=9, messages=conversation),
    )
    equal(wrong_key.body["error"]["type"], "authentication_error")
    unknown = raises(anthropic.NotFoundError, lambda: message(conversation, model="no/such-model"))
    equal((unknown.body["type"], unknown.body["error"]["type"]), ("error", "not_found_error"))
    wrong = raises(anthropic.BadRequestError, lambda: message(conversation, extra_body={"temperature": 9}))
    equal(wrong.body["error"]["type"], "invalid_request_error")
    expect("temperature" in wrong.body["error"]["message"], wrong.body)
    raises(anthropic.BadRequestError, lambda: message([{"role": "user", "content": "word " * 40_000}]))


@check("cancelling a stream")
def cancels() -> None:
    long = [{"role": "user", "content": "Repeat this: " + "one two three four " * 40}]
    stream = message(long, stream=True, max_tokens=20_000)
    next(iter(stream))
    stream.close()
    equal(message(conversation).content[0].text, ANSWER)


run()
