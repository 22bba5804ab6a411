"""Ollama's client for Python."""

from __future__ import annotations

import json
from typing import Any

import ollama
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


def client_with(key: str) -> ollama.Client:
    return ollama.Client(host=URL, headers={"Authorization": f"Bearer {key}"}, timeout=60)


client = client_with(KEY)
greedy = {"temperature": 0, "num_predict": 200}
conversation = [{"role": "user", "content": QUESTION}]
weather_conversation = [{"role": "user", "content": WEATHER_QUESTION}]
weather_tool: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather of a city",
        "parameters": CITY_SCHEMA,
    },
}


def get_weather(city: str) -> str:
    """Get the weather of a city.

    Args:
        city: where
    """
    return WEATHER_RESULT if city == "Paris" else "{}"


@check("models")
def lists_models() -> None:
    expect(MODEL in [model.model for model in client.list().models])
    shown = client.show(MODEL)
    expect("completion" in (shown.capabilities or []), shown)
    expect(shown.details.family, shown)


@check("chat")
def answers() -> None:
    answer = client.chat(MODEL, conversation, options=greedy)
    equal((answer.message.role, answer.message.content), ("assistant", ANSWER))
    equal((answer.done, answer.done_reason, answer.model), (True, "stop", MODEL))
    expect(answer.eval_count > 0 and answer.prompt_eval_count > 0 and answer.total_duration > 0, answer)


@check("chat, streamed")
def streams() -> None:
    pieces = list(client.chat(MODEL, conversation, options=greedy, stream=True))
    equal("".join(piece.message.content or "" for piece in pieces), ANSWER)
    equal([piece.done for piece in pieces], [False] * (len(pieces) - 1) + [True])


@check("chat, asynchronous")
async def answers_asynchronously() -> None:
    own = ollama.AsyncClient(host=URL, headers={"Authorization": f"Bearer {KEY}"})
    pieces = [piece async for piece in await own.chat(MODEL, conversation, options=greedy, stream=True)]
    equal("".join(piece.message.content or "" for piece in pieces), ANSWER)


@check("thinking")
def thinks() -> None:
    answer = client.chat(MODEL, conversation, options=greedy, think=True)
    expect(answer.message.thinking, answer)
    equal(answer.message.content, ANSWER)


@check("tools")
def calls_tools() -> None:
    answer = client.chat(MODEL, weather_conversation, options=greedy, tools=[get_weather])
    call = answer.message.tool_calls[0].function
    equal((call.name, dict(call.arguments)), ("get_weather", {"city": "Paris"}))
    result = {"role": "tool", "tool_name": "get_weather", "content": get_weather(**call.arguments)}
    last = client.chat(
        MODEL, [*weather_conversation, answer.message, result], options=greedy, tools=[get_weather]
    )
    equal(last.message.content, WEATHER_ANSWER)


@check("tools, streamed")
def streams_tools() -> None:
    pieces = list(client.chat(MODEL, weather_conversation, options=greedy, tools=[weather_tool], stream=True))
    calls = [call.function for piece in pieces for call in piece.message.tool_calls or []]
    equal([(call.name, dict(call.arguments)) for call in calls], [("get_weather", {"city": "Paris"})])


@check("schema")
def holds_to_schema() -> None:
    for seed in range(3):
        options = {"temperature": 1, "seed": seed, "num_predict": 200}
        answer = client.chat(
            MODEL, [{"role": "user", "content": LAMP_REQUEST}], format=LAMP_SCHEMA, options=options
        )
        expect(is_lamp(json.loads(answer.message.content or "")), answer)


@check("generate")
def generates() -> None:
    whole = client.generate(MODEL, QUESTION, options=greedy)
    equal((whole.response, whole.done), (ANSWER, True))
    pieces = list(client.generate(MODEL, QUESTION, options=greedy, stream=True))
    equal("".join(piece.response for piece in pieces), ANSWER)
    raw = client.generate(MODEL, "The capital of", raw=True, options=greedy | {"num_predict": 4})
    expect(raw.response, raw)


@check("embeddings")
def embeds() -> None:
    found = client.embed(MODEL, ["One.", "Two."])
    equal(len(found.embeddings), 2)
    equal(len(found.embeddings[0]), len(found.embeddings[1]))


@check("errors")
def errs() -> None:
    wrong_key = raises(ollama.ResponseError, lambda: client_with(WRONG_KEY).chat(MODEL, conversation))
    equal(wrong_key.status_code, 401)
    unknown = raises(ollama.ResponseError, lambda: client.chat("no/such-model", conversation))
    equal(unknown.status_code, 404)
    expect("no/such-model" in unknown.error, unknown.error)
    wrong = raises(ollama.ResponseError, lambda: client.chat(MODEL, conversation, options={"temperature": 9}))
    equal(wrong.status_code, 400)
    expect("temperature" in wrong.error, wrong.error)


@check("cancelling a stream")
def cancels() -> None:
    long = [{"role": "user", "content": "Repeat this: " + "one two three four " * 40}]
    stream = client.chat(MODEL, long, stream=True)
    next(stream)
    stream.close()
    equal(client.chat(MODEL, conversation, options=greedy).message.content, ANSWER)


run()
