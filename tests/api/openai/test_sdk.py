"""OpenAI's SDK as a client."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
from pydantic import BaseModel
from tests.api.clients import serving
from tests.api.twins import ANSWER_TEXT, MarkingTokenizer, TwinService
from tests.lazily import lazily

from mlx_ring.core.errors import WorkerLost

if TYPE_CHECKING:
    import openai
    from openai.types.responses import FunctionToolParam
    from openai.types.responses.response_input_item_param import FunctionCallOutput
else:
    openai = lazily("openai")


@pytest.fixture(scope="module")
def service() -> TwinService:
    return TwinService()


@pytest.fixture(scope="module")
def client(service: TwinService) -> Iterator[openai.OpenAI]:
    """Yield the SDK's client of a server on the loopback."""
    with (
        serving(service) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client


def test_chat_completion(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="twin", messages=[{"role": "user", "content": "Hello."}], seed=1, n=2
    )
    assert [choice.message.content for choice in answer.choices] == [ANSWER_TEXT] * 2
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_embeddings_in_base64_equal_those_in_floats(client: openai.OpenAI) -> None:
    answer = client.embeddings.create(model="twin", input=["A", "BC"])
    plain = client.embeddings.create(model="twin", input=["A", "BC"], encoding_format="float")
    assert [len(each.embedding) for each in answer.data] == [3, 3]
    for encoded, each in zip(answer.data, plain.data, strict=True):
        assert encoded.embedding == pytest.approx(each.embedding)


def test_chat_stream_has_logprobs_and_usage(client: openai.OpenAI) -> None:
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


def test_answer_of_the_sdk_is_accepted_as_history(client: openai.OpenAI) -> None:
    first = client.chat.completions.create(model="twin", messages=[{"role": "user", "content": "Hello."}])
    history = first.choices[0].message.model_dump()
    again = client.chat.completions.create(
        model="twin",
        messages=[{"role": "user", "content": "Hello."}, history, {"role": "user", "content": "And?"}],  # pyright: ignore[reportArgumentType] - a dumped message is a plain dict
    )
    assert again.choices[0].message.content == ANSWER_TEXT


def test_stream_helper_assembles_the_answer(client: openai.OpenAI) -> None:
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


def weather() -> Any:
    return openai.pydantic_function_tool(GetWeather)


@pytest.fixture(scope="module")
def tool_client() -> Iterator[openai.OpenAI]:
    """Yield the SDK's client of a model that reasons and calls a tool."""
    with (
        serving(TwinService(tokenizer=MarkingTokenizer(), says=CALL)) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client


@pytest.mark.processes
def test_streamed_tool_call_is_assembled_and_parsed(tool_client: openai.OpenAI) -> None:
    with tool_client.chat.completions.stream(
        model="twin", messages=[{"role": "user", "content": "Weather?"}], tools=[weather()]
    ) as stream:
        kinds = [event.type for event in stream]
        message = stream.get_final_completion().choices[0].message
    assert kinds.count("tool_calls.function.arguments.delta") > 3
    assert kinds.count("tool_calls.function.arguments.done") == 1
    assert message.tool_calls is not None
    assert message.tool_calls[0].function.parsed_arguments == GetWeather(city="Zürich")
    assert message.content in (None, "")


@pytest.mark.processes
def test_tool_call_and_result_are_accepted_as_history(tool_client: openai.OpenAI) -> None:
    question: Any = {"role": "user", "content": "Weather?"}
    answer = tool_client.chat.completions.create(model="twin", messages=[question], tools=[weather()])
    message = answer.choices[0].message
    assert answer.choices[0].finish_reason == "tool_calls"
    assert message.tool_calls is not None
    result: Any = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "sunny"}
    history: Any = message.model_dump()
    again = tool_client.chat.completions.create(
        model="twin",
        messages=[question, history, result],
        tools=[weather()],
    )
    assert again.choices[0].message.tool_calls


def test_completion_and_its_stream(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="twin", prompt="Hello.", max_tokens=3, echo=True, logprobs=2)
    assert answer.choices[0].text == "Hello.hij"
    assert answer.choices[0].logprobs is not None
    stream = client.completions.create(model="twin", prompt="Hello.", max_tokens=3, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == "hij"


def test_response_and_its_stream(client: openai.OpenAI) -> None:
    whole = client.responses.create(
        model="twin",
        input="Hello.",
        instructions="Be kind.",
        include=["message.output_text.logprobs"],
        top_logprobs=1,
    )
    assert (whole.output_text, whole.status) == (ANSWER_TEXT, "completed")
    [message] = whole.output
    assert message.type == "message"
    [text] = message.content
    assert text.type == "output_text"
    assert bytes(byte for token in text.logprobs or () for byte in token.bytes).decode() == ANSWER_TEXT
    with client.responses.stream(model="twin", input="Hello.") as stream:
        kinds = [event.type for event in stream]
        assert stream.get_final_response().output_text == ANSWER_TEXT
    assert (kinds[0], kinds[-1]) == ("response.created", "response.completed")
    short = client.responses.create(model="twin", input="Hello.", max_output_tokens=3)
    assert short.incomplete_details is not None
    assert (short.status, short.incomplete_details.reason) == ("incomplete", "max_output_tokens")


def test_response_items_and_tool_result_are_accepted_as_history() -> None:
    call = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    service = TwinService(tokenizer=MarkingTokenizer(), says=f"<think>Hm.</think>I add.{call}")
    tool: FunctionToolParam = {
        "type": "function",
        "name": "add",
        "parameters": {"type": "object"},
        "strict": False,
    }
    with serving(service) as url, openai.OpenAI(base_url=url, api_key="none") as client:
        with client.responses.stream(model="twin", input="1+?", tools=[tool]) as stream:
            first = stream.get_final_response()
        assert [item.type for item in first.output] == ["reasoning", "message", "function_call"]
        assert first.usage is not None
        assert first.usage.output_tokens_details.reasoning_tokens > 0
        called = first.output[-1]
        assert called.type == "function_call"
        assert (called.name, called.arguments) == ("add", '{"a": 1}')
        result: FunctionCallOutput = {
            "type": "function_call_output",
            "call_id": called.call_id,
            "output": "2",
        }
        history: list[Any] = [{"role": "user", "content": "1+?"}]
        history += [item.model_dump() for item in first.output]
        client.responses.create(model="twin", input=[*history, result], tools=[tool], store=False)
    _, turn, answer = service.tokenizer.conversation
    assert (turn["content"], turn["reasoning_content"]) == ("I add.", "Hm.")
    assert (answer["role"], answer["content"], answer["tool_call_id"]) == ("tool", "2", called.call_id)


def test_models_are_listed_and_retrieved(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["org/twin"]
    assert client.models.retrieve("org/twin").owned_by == "mlx-ring"


def test_errors_raise_the_sdk_exceptions(
    client: openai.OpenAI, service: TwinService, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        client.completions.create(model="other", prompt="x")
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as wrong:
        client.completions.create(model="twin", prompt="x", temperature=9)
    assert wrong.value.param == "temperature"
    assert wrong.value.request_id
    monkeypatch.setattr(service, "error", WorkerLost("Worker 1 died."))
    with pytest.raises(openai.InternalServerError) as lost:
        client.completions.create(model="twin", prompt="x")
    assert lost.value.status_code == 503


def test_error_in_a_responses_stream_is_sent_and_raised() -> None:
    service = TwinService(automatic=False)
    with serving(service) as url, openai.OpenAI(base_url=url, api_key="none") as client:
        stream = client.responses.create(model="twin", input="Hello.", stream=True)
        kinds = [next(stream).type, next(stream).type]
        service.executor.lose(WorkerLost("Worker 1 died."))
        with pytest.raises(openai.APIError, match="Worker 1 died"):
            kinds += [event.type for event in iter(lambda: next(stream), None)]
    assert kinds == ["response.created", "response.in_progress"]


def test_error_in_a_chat_stream_is_raised() -> None:
    service = TwinService(automatic=False)
    with serving(service) as url, openai.OpenAI(base_url=f"{url}/v1", api_key="none") as client:
        stream = client.chat.completions.create(
            model="twin", messages=[{"role": "user", "content": "Hello."}], stream=True
        )
        next(stream)
        service.executor.lose(WorkerLost("Worker 1 died."))
        with pytest.raises(openai.APIError, match="Worker 1 died"):
            list(stream)
