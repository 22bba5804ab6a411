"""The official SDK as a client."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest
from pydantic import BaseModel
from tests.api.clients import serving
from tests.api.twins import ANSWER_TEXT, MarkingTokenizer, TwinService

from mlx_ring.core.errors import WorkerLost


@pytest.fixture
def service() -> TwinService:
    return TwinService()


@pytest.fixture
def client(service: TwinService) -> Iterator[openai.OpenAI]:
    """The SDK, pointed at a server on the loopback."""
    with (
        serving(service) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client


def test_a_chat_answer(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="twin", messages=[{"role": "user", "content": "Hello."}], seed=1, n=2
    )
    assert [choice.message.content for choice in answer.choices] == [ANSWER_TEXT] * 2
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_a_chat_stream_with_logprobs_and_usage(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="org/twin",
        messages=[{"role": "user", "content": "Hello."}],
        stream=True,
        stream_options={"include_usage": True},
        logprobs=True,
        top_logprobs=1,
        extra_body={"top_k": 5, "chat_template_kwargs": {"enable_thinking": False}},
    )
    chunks = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == ANSWER_TEXT
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].usage is not None
    assert chunks[1].choices[0].logprobs is not None


def test_the_sdks_own_answer_goes_back_as_history(client: openai.OpenAI) -> None:
    first = client.chat.completions.create(model="twin", messages=[{"role": "user", "content": "Hello."}])
    history = first.choices[0].message.model_dump()
    again = client.chat.completions.create(
        model="twin",
        messages=[{"role": "user", "content": "Hello."}, history, {"role": "user", "content": "And?"}],  # pyright: ignore[reportArgumentType] - a dumped message is a plain dict
    )
    assert again.choices[0].message.content == ANSWER_TEXT


def test_the_stream_helper_puts_the_answer_together(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(
        model="twin", messages=[{"role": "user", "content": "Hello."}]
    ) as stream:
        assert stream.get_final_completion().choices[0].message.content == ANSWER_TEXT


class GetWeather(BaseModel):
    """The weather of a city."""

    city: str


CALL = (
    '<think>Hm.</think>\n<tool_call>\n{"name": "GetWeather", "arguments": {"city": "Zürich"}}\n</tool_call>'
)
WEATHER = openai.pydantic_function_tool(GetWeather)


@pytest.fixture
def caller() -> Iterator[openai.OpenAI]:
    """The SDK, pointed at a model that thinks and calls a tool."""
    with (
        serving(TwinService(tokenizer=MarkingTokenizer(), says=CALL)) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client


def test_a_streamed_call_is_put_together_and_parsed(caller: openai.OpenAI) -> None:
    with caller.chat.completions.stream(
        model="twin", messages=[{"role": "user", "content": "Weather?"}], tools=[WEATHER]
    ) as stream:
        kinds = [event.type for event in stream]
        message = stream.get_final_completion().choices[0].message
    assert kinds.count("tool_calls.function.arguments.delta") > 3
    assert kinds.count("tool_calls.function.arguments.done") == 1
    assert message.tool_calls is not None
    assert message.tool_calls[0].function.parsed_arguments == GetWeather(city="Zürich")
    assert message.content in (None, "")


def test_a_call_and_its_result_go_back_as_history(caller: openai.OpenAI) -> None:
    asked: Any = {"role": "user", "content": "Weather?"}
    answer = caller.chat.completions.create(model="twin", messages=[asked], tools=[WEATHER])
    message = answer.choices[0].message
    assert answer.choices[0].finish_reason == "tool_calls"
    assert message.tool_calls is not None
    result: Any = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "sunny"}
    history: Any = message.model_dump()
    again = caller.chat.completions.create(
        model="twin",
        messages=[asked, history, result],
        tools=[WEATHER],
    )
    assert again.choices[0].message.tool_calls


def test_a_completion_whole_and_streamed(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="twin", prompt="Hello.", max_tokens=3, echo=True, logprobs=2)
    assert answer.choices[0].text == "Hello.hij"
    assert answer.choices[0].logprobs is not None
    stream = client.completions.create(model="twin", prompt="Hello.", max_tokens=3, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == "hij"


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["org/twin"]
    assert client.models.retrieve("org/twin").owned_by == "mlx-ring"


def test_errors_are_the_sdks_own(client: openai.OpenAI, service: TwinService) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        client.completions.create(model="other", prompt="x")
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as wrong:
        client.completions.create(model="twin", prompt="x", temperature=9)
    assert wrong.value.param == "temperature"
    assert wrong.value.request_id
    service.error = WorkerLost("Worker 1 died.")
    with pytest.raises(openai.InternalServerError) as lost:
        client.completions.create(model="twin", prompt="x")
    assert lost.value.status_code == 503


def test_an_error_in_mid_stream_is_raised() -> None:
    service = TwinService(automatic=False)
    with serving(service) as url, openai.OpenAI(base_url=f"{url}/v1", api_key="none") as client:
        stream = client.chat.completions.create(
            model="twin", messages=[{"role": "user", "content": "Hello."}], stream=True
        )
        next(stream)
        service.executor.lose(WorkerLost("Worker 1 died."))
        with pytest.raises(openai.APIError, match="Worker 1 died"):
            list(stream)
