"""Request bodies: limits on what an invalid one may cost, and the error messages."""

from __future__ import annotations

import asyncio
import gzip
import json
import threading
from codecs import BOM_UTF8
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any

import pytest
from pydantic import AfterValidator, ValidationError
from starlette.requests import Request
from starlette.types import Message
from tests.api.clients import Api, refusal
from tests.api.twins import TwinService

from mlx_ring.api.anthropic import request as anthropic_request
from mlx_ring.api.anthropic.request import MessagesRequest
from mlx_ring.api.app import DIALECTS
from mlx_ring.api.chat import request as conversations
from mlx_ring.api.errors import error_info
from mlx_ring.api.ollama import dialect as ollama
from mlx_ring.api.openai import chat
from mlx_ring.api.openai.chat import ChatRequest
from mlx_ring.api.openai.completions import CompletionRequest
from mlx_ring.api.openai.embeddings import EmbeddingRequest
from mlx_ring.api.openai.responses.request import ResponsesRequest
from mlx_ring.api.request_body import MOST_MESSAGES, Body, read_body
from mlx_ring.core.errors import RequestError

MANY = 1000


@pytest.mark.parametrize(
    ("schema", "fields"),
    [
        (ChatRequest, {"messages": [0] * MANY}),
        (ChatRequest, {"messages": [{"role": "user", "content": [0] * MANY}]}),
        (CompletionRequest, {"prompt": [-1] * MANY}),
        (CompletionRequest, {"prompt": [[-1] * MANY] * MANY}),
        (EmbeddingRequest, {"input": [""] + [0] * MANY}),
        (ResponsesRequest, {"input": [0] * MANY}),
        (MessagesRequest, {"max_tokens": 1, "messages": [{"role": "assistant", "content": [0] * MANY}]}),
    ],
)
def test_list_validation_stops_at_the_first_error(schema: type[Body], fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError) as refused:
        schema.model_validate(fields)
    assert refused.value.error_count() == 1


def test_object_with_too_many_names_is_refused(api: Api) -> None:
    names = dict.fromkeys(map(str, range(10_001)))
    for body in (names, {"messages": [names]}):
        _, message = refusal(api.post("/v1/chat/completions", body))
        assert "10001 names" in message


@pytest.mark.parametrize(
    ("body", "name"),
    [
        (b'{"prompt": "a", "max_tokens": 1, "prompt": "a"}', "prompt"),
        (b'{"prompt": "a", "logit_bias": {"1": 1, "2": 1, "1": 2}}', "1"),
        (b'{"prompt": "a", "\\ud800": 1, "\\ud800": 2}', "\\ud800"),
    ],
)
def test_duplicate_name_in_an_object_is_refused_by_name(api: Api, body: bytes, name: str) -> None:
    param, message = refusal(api.request("POST", "/v1/completions", content=body))
    assert param == name
    assert f"'{name}' twice" in message


def test_duplicate_names_in_tool_call_arguments_are_accepted(api: Api) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1, "a": 2}'}}
    messages = [
        {"role": "user", "content": "Hello."},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "3"},
    ]
    assert api.post("/v1/chat/completions", {"messages": messages}).status_code == 200


def test_body_with_too_many_lists_is_refused(api: Api) -> None:
    _, message = refusal(
        api.request("POST", "/v1/chat/completions", content=b'{"x":[' + b"[]," * 500_000 + b"0]}")
    )
    assert "500002 brackets" in message


@pytest.mark.parametrize(
    ("path", "field", "fields"),
    [
        ("/v1/chat/completions", "messages", {}),
        ("/v1/responses", "input", {}),
        ("/v1/messages", "messages", {"max_tokens": 1}),
        ("/v1/messages/count_tokens", "messages", {}),
        ("/api/chat", "messages", {}),
    ],
)
def test_too_many_messages_are_refused_in_every_dialect(
    api: Api, path: str, field: str, fields: dict[str, Any]
) -> None:
    messages = [{"role": "user", "content": "a"}] * (MOST_MESSAGES + 1)
    answer = api.post(path, fields | {field: messages})
    assert answer.status_code == 400
    assert f"'{field}' should have at most {MOST_MESSAGES} items, not" in answer.text


def test_too_many_objects_are_refused_before_they_are_checked(api: Api) -> None:
    body = b'{"messages": [' + b"{}," * 100_000 + b"{}]}"
    _, message = refusal(api.request("POST", "/v1/chat/completions", content=body))
    assert message == "The body has more than 100000 objects, the server's limit."


CHATS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {},
    "/v1/messages": {"max_tokens": 1},
    "/api/chat": {"stream": False},
}
"""Route of each dialect that takes messages, and the fields that it needs besides."""


def test_every_dialect_has_a_chat_here() -> None:
    assert {DIALECTS.of(path).name for path in CHATS} == {dialect.name for dialect in DIALECTS}


@pytest.mark.parametrize("path", CHATS)
def test_many_messages_are_converted_off_the_event_loop(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: dict[int, set[threading.Thread]] = {}
    api = Api(TwinService(context=100_000))

    def recorded(messages: list[Any], plain: Callable[..., Any], **options: Any) -> Any:
        threads.setdefault(len(messages), set()).add(threading.current_thread())
        return plain(messages, **options)

    for module, name in (
        (chat, "template_messages"),
        (anthropic_request, "_template_messages"),
        (ollama, "template_messages"),
        (conversations, "in_order_of_calls"),
        (conversations, "with_reasoning"),
    ):
        monkeypatch.setattr(module, name, partial(recorded, plain=getattr(module, name)))
    for count in (1, 501):
        messages = [{"role": ("user", "assistant")[n % 2], "content": "a"} for n in range(count)]
        assert api.post(path, CHATS[path] | {"messages": messages}).status_code == 200
    assert threading.main_thread() in threads[1]
    assert threading.main_thread() not in threads[501]


@pytest.mark.parametrize("long", ["x" * 4_200_000, "{" * 20_000, "[" * 20_000])
def test_no_body_waits_for_one_that_takes_long(long: str) -> None:
    begun, others_are_read = threading.Event(), threading.Event()

    def wait_if_long(text: str) -> str:
        if text == long:
            begun.set()
            others_are_read.wait()
        return text

    class RecordedBody(Body):
        text: Annotated[str, AfterValidator(wait_if_long)]

    async def read(text: str) -> None:
        async def receive() -> Message:
            return {"type": "http.request", "body": json.dumps({"text": text}).encode()}

        request = Request({"type": "http", "headers": []}, receive)
        assert (await read_body(request, RecordedBody, 2**23, 1)).text == text

    async def run() -> None:
        reading = asyncio.create_task(read(long))
        try:
            await asyncio.to_thread(begun.wait)
            for text in ("x", "x" * 300_000, "{" * 1000):
                await read(text)
        finally:
            others_are_read.set()
        await reading

    asyncio.run(run())


def test_only_a_large_body_is_parsed_off_the_event_loop() -> None:
    threads: list[threading.Thread] = []

    def record_thread(text: str) -> str:
        threads.append(threading.current_thread())
        return text

    class RecordedBody(Body):
        text: Annotated[str, AfterValidator(record_thread)]

    async def read(text: str) -> None:
        async def receive() -> Message:
            return {"type": "http.request", "body": json.dumps({"text": text}).encode()}

        request = Request({"type": "http", "headers": []}, receive)
        assert (await read_body(request, RecordedBody, 2**20, 1)).text == text

    for text in ("x" * 10, "x" * 300_000, "{" * 1000):
        asyncio.run(read(text))
    assert [thread is threading.main_thread() for thread in threads] == [True, False, False]


@pytest.mark.parametrize(
    ("headers", "body", "status"),
    [
        ({"content-encoding": "gzip"}, gzip.compress(b"{}", mtime=0), 400),
        ({"content-encoding": "gzip"}, b"{}", 400),
        ({"content-length": str(2**40)}, b"{", 413),
        ({"expect": "100-continue", "content-length": str(2**20 + 1)}, b"", 413),
    ],
)
def test_body_with_invalid_headers_is_refused_before_it_is_read(
    headers: dict[str, str], body: bytes, status: int
) -> None:
    async def receive() -> Message:
        raise AssertionError(body)

    scope = {"type": "http", "headers": [(name.encode(), value.encode()) for name, value in headers.items()]}
    with pytest.raises(RequestError) as refused:
        asyncio.run(read_body(Request(scope, receive), Body, 2**20, 1))
    assert error_info(refused.value).status == status


def test_byte_order_mark_is_ignored(api: Api) -> None:
    body = json.dumps({"prompt": "Hello.", "max_tokens": 1}).encode()
    assert api.request("POST", "/v1/completions", content=BOM_UTF8 + body).status_code == 200


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"stop": list("abcde")}, "'stop' should have at most 4 items, not 5."),
        ({"response_format": {}}, "'response_format.type' is missing."),
        ({"response_format": "json"}, "'response_format' should be an object, not \"json\"."),
        ({"logit_bias": []}, "'logit_bias' should be an object, not a list."),
        ({"messages": {}}, "'messages' should be a list, not an object."),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}]},
            "'tools[0].function.parameters' should be a JSON schema of type 'object', not \"array\".",
        ),
    ],
)
def test_error_messages_use_json_terms(api: Api, fields: dict[str, Any], expected: str) -> None:
    _, message = refusal(
        api.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hello."}], **fields})
    )
    assert message == expected


def test_error_messages_write_values_as_json(api: Api) -> None:
    tool = {"type": "function", "name": "f", "defer_loading": True}
    _, message = refusal(api.post("/v1/responses", {"input": "Hello.", "tools": [tool]}))
    assert message == "'tools[0].defer_loading' should be false, not true."
    assert api.post("/api/chat", {"messages": "x"}).json() == {
        "error": "'messages' should be a list, not \"x\"."
    }
    _, message = refusal(api.post("/v1/responses", {"input": [{"type": False}]}))
    assert message.startswith("'input[0]' is of the type false, which is not supported")
