"""Anthropic's SDK as a client."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from tests.api.clients import serving
from tests.api.twins import ANSWER_TEXT, MarkingTokenizer, TwinService
from tests.default_settings import make_api_settings
from tests.lazily import lazily

from mlx_ring.core.errors import NotReady, WorkerLost

if TYPE_CHECKING:
    import anthropic
else:
    anthropic = lazily("anthropic")

CALL = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'
SAYS = f"<think>\nHm.\n</think>\n\nI add.{CALL}"


@pytest.fixture(scope="module")
def plain_service() -> TwinService:
    return TwinService()


@pytest.fixture(scope="module")
def reasoning_service() -> TwinService:
    """Return a service that always reasons, answers and calls a tool."""
    return TwinService(tokenizer=MarkingTokenizer(), says=SAYS)


@pytest.fixture(scope="module")
def client(request: pytest.FixtureRequest) -> Iterator[anthropic.Anthropic]:
    """Yield the SDK's client of a server with a key that serves the named service."""
    service: TwinService = request.getfixturevalue(request.param)
    with (
        serving(service, make_api_settings(api_keys=("key",))) as url,
        anthropic.Anthropic(base_url=url, api_key="key", max_retries=0) as client,
    ):
        yield client


with_each = pytest.mark.parametrize("client", ["plain_service", "reasoning_service"], indirect=True)
with_plain = pytest.mark.parametrize("client", ["plain_service"], indirect=True)
with_reasoning = pytest.mark.parametrize("client", ["reasoning_service"], indirect=True)
USER: anthropic.types.MessageParam = {"role": "user", "content": "Hello."}
ADD: anthropic.types.ToolParam = {"name": "add", "input_schema": {"type": "object"}}


@with_plain
def test_response_has_its_text_and_stop_reason(client: anthropic.Anthropic) -> None:
    whole = client.messages.create(model="twin", max_tokens=100, messages=[USER], system="Be kind.")
    assert [getattr(block, "text", "") for block in whole.content] == [ANSWER_TEXT]
    assert (whole.stop_reason, whole.role, whole.model) == ("end_turn", "assistant", "org/twin")
    short = client.messages.create(model="twin", max_tokens=3, messages=[USER])
    assert (short.stop_reason, short.usage.output_tokens) == ("max_tokens", 3)
    stopped = client.messages.create(
        model="twin", max_tokens=100, messages=[USER], stop_sequences=["no", ": "]
    )
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", ": ")
    full = client.messages.create(
        model="twin", max_tokens=9999, messages=[{"role": "user", "content": "x" * 4065}]
    )
    assert full.stop_reason == "model_context_window_exceeded"


@with_each
def test_token_count_equals_the_input_tokens_of_the_usage(client: anthropic.Anthropic) -> None:
    counted = client.messages.count_tokens(model="twin", messages=[USER], system="Be kind.")
    answer = client.messages.create(model="twin", max_tokens=1, messages=[USER], system="Be kind.")
    usage = answer.usage
    assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)


@with_reasoning
def test_streamed_message_equals_the_unstreamed_one(client: anthropic.Anthropic) -> None:
    with client.messages.stream(model="twin", max_tokens=200, messages=[USER], tools=[ADD]) as stream:
        streamed = stream.get_final_message()
    whole = client.messages.create(model="twin", max_tokens=200, messages=[USER], tools=[ADD])
    reasoning, text, call = whole.content
    assert reasoning.type == "thinking"
    assert (reasoning.thinking, bool(reasoning.signature)) == ("Hm.", True)
    assert (text.type, getattr(text, "text", "")) == ("text", "I add.")
    assert call.type == "tool_use"
    assert (call.name, call.input) == ("add", {"a": 1, "b": 2})
    assert whole.stop_reason == streamed.stop_reason == "tool_use"
    assert [block.to_dict() | {"id": ""} for block in streamed.content] == [
        block.to_dict() | {"id": ""} for block in whole.content
    ]
    assert streamed.usage.output_tokens == whole.usage.output_tokens


@with_reasoning
def test_tool_runner_calls_the_tool_and_sends_back_its_result(
    client: anthropic.Anthropic, reasoning_service: TwinService
) -> None:
    calls: list[tuple[int, int]] = []

    @anthropic.beta_tool
    def add(a: int, b: int) -> str:
        """Add two numbers."""
        calls.append((a, b))
        return str(a + b)

    runner = client.beta.messages.tool_runner(
        model="twin",
        max_tokens=200,
        messages=[{"role": "user", "content": "Hello."}],
        tools=[add],
        max_iterations=2,
    )
    assert len(list(runner)) == 2
    assert calls[0] == (1, 2)
    user, turn, result = reasoning_service.tokenizer.conversation
    assert (user["role"], turn["reasoning_content"], turn["content"]) == ("user", "Hm.", "I add.")
    assert (result["role"], result["content"], result["name"]) == ("tool", "3", "add")


@with_plain
def test_final_assistant_message_is_continued(
    client: anthropic.Anthropic, plain_service: TwinService
) -> None:
    client.messages.create(
        model="twin", max_tokens=3, messages=[USER, {"role": "assistant", "content": "Well,"}]
    )
    assert plain_service.tokenizer.template_kwargs["continue_final_message"] is True


@with_plain
def test_errors_raise_the_sdk_exceptions(
    client: anthropic.Anthropic, plain_service: TwinService, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(anthropic.AuthenticationError):
        client.with_options(api_key="wrong").messages.create(model="twin", max_tokens=1, messages=[USER])
    with pytest.raises(anthropic.NotFoundError) as unknown:
        client.messages.create(model="other", max_tokens=1, messages=[USER])
    assert (unknown.value.type, bool(unknown.value.request_id)) == ("not_found_error", True)
    with pytest.raises(anthropic.BadRequestError, match="'temperature'"):
        client.messages.create(model="twin", max_tokens=1, messages=[USER], extra_body={"temperature": 2})
    with pytest.raises(anthropic.BadRequestError, match="4096"):
        client.messages.create(model="twin", max_tokens=1, messages=[{"role": "user", "content": "x" * 5000}])
    monkeypatch.setattr(plain_service, "error", NotReady("The model is being loaded."))
    with pytest.raises(anthropic.InternalServerError) as loading:
        client.messages.create(model="twin", max_tokens=1, messages=[USER])
    assert (loading.value.status_code, loading.value.type) == (503, "overloaded_error")


def test_error_in_mid_stream_is_raised_after_pings() -> None:
    service = TwinService(automatic=False)
    with serving(service, make_api_settings(keep_alive_s=0.005)) as url, anthropic.Anthropic(base_url=url, auth_token="x") as client:  # noqa: S106 - no secret  # fmt: skip
        stream = client.messages.create(model="twin", max_tokens=9, messages=[USER], stream=True)
        assert next(iter(stream)).type == "message_start"
        service.executor.lose(WorkerLost("Worker 1 died."))
        with pytest.raises(anthropic.APIStatusError, match=r"Worker 1 died\.") as lost:
            list(stream)
    assert lost.value.type == "api_error"


@with_plain
def test_models_have_no_field_that_the_sdk_reads_as_another_type(client: anthropic.Anthropic) -> None:
    info = client.models.retrieve("twin")
    assert info.capabilities is None
    assert info.to_dict()["features"] == ["completion", "embedding"]


@with_plain
def test_errors_of_models_are_those_of_the_sdks_api(client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError) as unknown:
        client.models.retrieve("other")
    assert (unknown.value.type, bool(unknown.value.request_id)) == ("not_found_error", True)
    with pytest.raises(anthropic.AuthenticationError) as refused:
        client.with_options(api_key="wrong").models.list()
    assert refused.value.type == "authentication_error"
