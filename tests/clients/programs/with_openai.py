"""OpenAI's SDK for Python; the same program for each of its major versions."""

from __future__ import annotations

import json
from typing import Any, Literal

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
from pydantic import BaseModel

client = openai.OpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0, timeout=60)
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


class Lamp(BaseModel):
    room: Literal["kitchen", "garden", "hall"]
    on: bool
    brightness: Literal[10, 20, 30]


def chat(messages: list[Any], **fields: Any) -> Any:
    fields = {"model": MODEL, "temperature": 0, "max_tokens": 200} | fields
    return client.chat.completions.create(messages=messages, **fields)


def joined_call(chunks: list[Any]) -> tuple[str, str, str]:
    """Join the streamed parts of the only call; return its id, name and arguments."""
    deltas = [call for chunk in chunks if chunk.choices for call in chunk.choices[0].delta.tool_calls or []]
    equal({delta.index for delta in deltas}, {0})
    equal([delta.function.name for delta in deltas if delta.function.name], ["get_weather"])
    ids = [delta.id for delta in deltas if delta.id]
    equal(len(set(ids)), 1)
    return ids[0], deltas[0].function.name, "".join(delta.function.arguments or "" for delta in deltas)


@check("models")
def lists_models() -> None:
    expect(MODEL in [model.id for model in client.models.list()])
    equal(client.models.retrieve(MODEL).id, MODEL)


@check("chat")
def answers() -> None:
    answer = chat(conversation)
    choice = answer.choices[0]
    equal((choice.message.role, choice.message.content, choice.finish_reason), ("assistant", ANSWER, "stop"))
    equal(answer.usage.total_tokens, answer.usage.prompt_tokens + answer.usage.completion_tokens)
    equal(answer.model, MODEL)
    expect(answer._request_id.startswith("req_"), answer._request_id)


@check("chat, streamed")
def streams() -> None:
    chunks = list(chat(conversation, stream=True, stream_options={"include_usage": True}))
    equal("".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices), ANSWER)
    equal([chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1], "stop")
    equal(chunks[-1].choices, [])
    expect(chunks[-1].usage.completion_tokens > 0, chunks[-1].usage)


@check("chat, asynchronous")
async def answers_asynchronously() -> None:
    async with openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0) as own:
        stream = await own.chat.completions.create(
            model=MODEL, messages=conversation, temperature=0, stream=True
        )
        pieces = [chunk.choices[0].delta.content or "" async for chunk in stream]
        equal("".join(pieces), ANSWER)


@check("several choices, log-probabilities")
def scores() -> None:
    answer = chat(conversation, n=2, logprobs=True, top_logprobs=2, max_tokens=4, temperature=1, seed=3)
    equal([choice.index for choice in answer.choices], [0, 1])
    for choice in answer.choices:
        equal(len(choice.logprobs.content), 4)
        equal(choice.message.content, "".join(scored.token for scored in choice.logprobs.content))
        expect(all(len(scored.top_logprobs) == 2 for scored in choice.logprobs.content), choice.logprobs)


@check("reasoning")
def reasons() -> None:
    thinking = {"chat_template_kwargs": {"enable_thinking": True}}
    message = chat(conversation, extra_body=thinking).choices[0].message
    equal(message.content, ANSWER)
    expect(message.reasoning_content, message)
    equal(message.reasoning, message.reasoning_content)
    chunks = list(chat(conversation, extra_body=thinking, stream=True))
    deltas = [chunk.choices[0].delta for chunk in chunks]
    equal(
        "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas),
        message.reasoning_content,
    )
    equal("".join(delta.content or "" for delta in deltas), ANSWER)


@check("tools")
def calls_tools() -> None:
    answer = chat(weather_conversation, tools=[weather_tool])
    equal(answer.choices[0].finish_reason, "tool_calls")
    call = answer.choices[0].message.tool_calls[0]
    equal(
        (call.type, call.function.name, json.loads(call.function.arguments)),
        ("function", "get_weather", {"city": "Paris"}),
    )
    result = {"role": "tool", "tool_call_id": call.id, "content": WEATHER_RESULT}
    last = chat([*weather_conversation, answer.choices[0].message, result], tools=[weather_tool])
    equal((last.choices[0].message.content, last.choices[0].finish_reason), (WEATHER_ANSWER, "stop"))


@check("tools, streamed")
def streams_tools() -> None:
    chunks = list(chat(weather_conversation, tools=[weather_tool], stream=True))
    _, _, arguments = joined_call(chunks)
    equal(json.loads(arguments), {"city": "Paris"})
    equal(chunks[-1].choices[0].finish_reason, "tool_calls")


@check("tools, required and named")
def must_call_tools() -> None:
    named = {"type": "function", "function": {"name": "get_weather"}}
    for choice in ("required", named):
        answer = chat(conversation, tools=[weather_tool], tool_choice=choice).choices[0]
        call = answer.message.tool_calls[0]
        equal(call.function.name, "get_weather")
        equal(json.loads(call.function.arguments).keys(), {"city"})
    answer = chat(weather_conversation, tools=[weather_tool], tool_choice="none").choices[0]
    equal((answer.message.tool_calls, answer.finish_reason in {"stop", "length"}), (None, True))


@check("schema")
def holds_to_schema() -> None:
    form = {"type": "json_schema", "json_schema": {"name": "lamp", "strict": True, "schema": LAMP_SCHEMA}}
    for seed in range(3):
        text = chat(
            [{"role": "user", "content": LAMP_REQUEST}], response_format=form, temperature=1, seed=seed
        )
        expect(is_lamp(json.loads(text.choices[0].message.content)), text)
    text = chat(
        [{"role": "user", "content": LAMP_REQUEST}], response_format={"type": "json_object"}, max_tokens=60
    )
    expect(text.choices[0].message.content.lstrip().startswith("{"), text)
    if text.choices[0].finish_reason == "stop":
        expect(isinstance(json.loads(text.choices[0].message.content), dict), text)


@check("schema, parsed by the SDK")
def parses() -> None:
    lamp = client.chat.completions.parse(
        model=MODEL,
        messages=[{"role": "user", "content": LAMP_REQUEST}],
        response_format=Lamp,
        max_tokens=200,
    )
    expect(isinstance(lamp.choices[0].message.parsed, Lamp), lamp)
    with client.chat.completions.stream(
        model=MODEL,
        messages=[{"role": "user", "content": LAMP_REQUEST}],
        response_format=Lamp,
        max_tokens=200,
    ) as stream:
        kinds = {event.type for event in stream}
        expect(isinstance(stream.get_final_completion().choices[0].message.parsed, Lamp), kinds)
    expect({"content.delta", "content.done"} <= kinds, kinds)


@check("tools, parsed by the SDK")
def parses_tools() -> None:
    tool = openai.pydantic_function_tool(Lamp, name="set_lamp")
    request = {
        "model": MODEL,
        "messages": conversation,
        "tools": [tool],
        "tool_choice": "required",
        "max_tokens": 200,
    }
    answer = client.chat.completions.parse(**request)
    expect(isinstance(answer.choices[0].message.tool_calls[0].function.parsed_arguments, Lamp), answer)
    with client.chat.completions.stream(**request) as stream:
        done = [event for event in stream if event.type == "tool_calls.function.arguments.done"]
    expect(isinstance(done[0].parsed_arguments, Lamp), done)


@check("completions")
def completes() -> None:
    request = {"model": MODEL, "prompt": "The capital of", "max_tokens": 5, "temperature": 0}
    whole = client.completions.create(**request, logprobs=1, echo=True)
    expect(whole.choices[0].text.startswith("The capital of"), whole)
    equal("".join(whole.choices[0].logprobs.tokens), whole.choices[0].text)
    pieces = [chunk.choices[0].text for chunk in client.completions.create(**request, stream=True)]
    equal("The capital of" + "".join(pieces), whole.choices[0].text)


@check("embeddings")
def embeds() -> None:
    packed = client.embeddings.create(model=MODEL, input=["One.", "Two."])
    plain = client.embeddings.create(model=MODEL, input=["One.", "Two."], encoding_format="float")
    equal([row.index for row in packed.data], [0, 1])
    for ours, theirs in zip(packed.data, plain.data, strict=True):
        expect(all(abs(a - b) < 1e-5 for a, b in zip(ours.embedding, theirs.embedding, strict=True)), ours)


@check("responses")
def responds() -> None:
    answer = client.responses.create(model=MODEL, input=QUESTION, instructions="Be brief.", temperature=0)
    equal((answer.status, answer.output_text), ("completed", ANSWER))
    expect(answer.usage.output_tokens > 0, answer.usage)


@check("responses, streamed")
def streams_responses() -> None:
    events = list(client.responses.create(model=MODEL, input=QUESTION, temperature=0, stream=True))
    equal([event.sequence_number for event in events], list(range(len(events))))
    equal((events[0].type, events[-1].type), ("response.created", "response.completed"))
    equal("".join(event.delta for event in events if event.type == "response.output_text.delta"), ANSWER)
    with client.responses.stream(model=MODEL, input=QUESTION, temperature=0) as stream:
        for _ in stream:
            pass
        equal(stream.get_final_response().output_text, ANSWER)


@check("responses, tools")
def responds_with_tools() -> None:
    tool = {
        "type": "function",
        "name": "get_weather",
        "description": "Get the weather of a city",
        "parameters": CITY_SCHEMA,
        "strict": True,
    }
    request = {"model": MODEL, "tools": [tool], "temperature": 0}
    answer = client.responses.create(input=WEATHER_QUESTION, **request)
    call = next(item for item in answer.output if item.type == "function_call")
    equal((call.name, json.loads(call.arguments)), ("get_weather", {"city": "Paris"}))
    result = {"type": "function_call_output", "call_id": call.call_id, "output": WEATHER_RESULT}
    last = client.responses.create(
        input=[{"role": "user", "content": WEATHER_QUESTION}, *answer.output, result], **request
    )
    equal(last.output_text, WEATHER_ANSWER)
    events = list(client.responses.create(input=WEATHER_QUESTION, stream=True, **request))
    done = next(event for event in events if event.type == "response.function_call_arguments.done")
    deltas = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    equal("".join(deltas), done.arguments)


@check("responses, schema")
def responds_with_schema() -> None:
    answer = client.responses.parse(model=MODEL, input=LAMP_REQUEST, text_format=Lamp, max_output_tokens=200)
    expect(isinstance(answer.output_parsed, Lamp), answer)


@check("errors")
def errs() -> None:
    stranger = client.with_options(api_key=WRONG_KEY)
    wrong_key = raises(
        openai.AuthenticationError,
        lambda: stranger.chat.completions.create(model=MODEL, messages=conversation),
    )
    equal((wrong_key.status_code, wrong_key.code), (401, "invalid_api_key"))
    unknown = raises(openai.NotFoundError, lambda: chat(conversation, model="no/such-model"))
    equal(unknown.code, "model_not_found")
    wrong_field = raises(openai.BadRequestError, lambda: chat(conversation, temperature=9))
    equal((wrong_field.param, wrong_field.type), ("temperature", "invalid_request_error"))
    too_long = raises(openai.BadRequestError, lambda: chat([{"role": "user", "content": "word " * 40_000}]))
    equal(too_long.code, "context_length_exceeded")
    expect(too_long.request_id, too_long)
    raises(openai.NotFoundError, lambda: client.models.retrieve("no/such-model"))


@check("cancelling a stream")
def cancels() -> None:
    stream = chat(conversation, stream=True, max_tokens=20_000, extra_body={"ignore_eos": True})
    next(iter(stream))
    stream.close()
    equal(chat(conversation).choices[0].message.content, ANSWER)


run()
