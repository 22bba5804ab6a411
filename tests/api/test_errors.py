"""Errors in the format of each dialect, from every source."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from tests.api.clients import Api
from tests.api.twins import CONTEXT
from tests.default_settings import make_api_settings
from tests.examples import examples

from mlx_ring.api.app import DIALECTS
from mlx_ring.core.errors import NotReady, Overloaded, PlanError, RingError, WorkerLost

OPENAI, ANTHROPIC, OLLAMA = "/v1/responses", "/v1/messages", "/api/chat"
FIELDS: dict[str, dict[str, Any]] = {
    OPENAI: {"input": "Hello."},
    ANTHROPIC: {"max_tokens": 4, "messages": [{"role": "user", "content": "Hello."}]},
    OLLAMA: {"messages": [{"role": "user", "content": "Hello."}]},
}


def openai_error_type(body: dict[str, Any]) -> str:
    assert set(body) == {"error"}
    assert set(body["error"]) >= {"message", "type", "param", "code"}
    return body["error"]["type"]


def anthropic_error_type(body: dict[str, Any]) -> str:
    assert set(body) == {"type", "error", "request_id"}
    assert body["type"] == "error"
    assert body["error"]["message"]
    return body["error"]["type"]


def ollama_error_type(body: dict[str, Any]) -> str:
    assert set(body) == {"error"}
    assert body["error"].endswith(".")
    return ""


ERROR_TYPES: dict[str, Callable[[dict[str, Any]], str]] = {
    OPENAI: openai_error_type,
    ANTHROPIC: anthropic_error_type,
    "/v1/messages/nothing": anthropic_error_type,
    "/v1/messagesx": openai_error_type,
    OLLAMA: ollama_error_type,
    "/apix": openai_error_type,
}


@pytest.mark.parametrize("examples_by_path", [FIELDS, ERROR_TYPES])
def test_every_dialect_has_an_example_here(examples_by_path: Mapping[str, object]) -> None:
    assert {DIALECTS.of(path).name for path in examples_by_path} == {dialect.name for dialect in DIALECTS}


@pytest.mark.parametrize("path", ERROR_TYPES)
def test_authentication_origin_and_path_errors_use_the_dialect_of_the_path(
    path: str,
) -> None:
    keyed = Api(settings=make_api_settings(api_keys=("key",)))
    refused = keyed.post(path, {})
    foreign = keyed.post(path, {}, origin="https://evil.example")
    unknown = keyed.request("DELETE", path, headers={"x-api-key": "key"})
    assert (refused.status_code, foreign.status_code) == (401, 403)
    assert unknown.status_code in (404, 405)
    types = [ERROR_TYPES[path](answer.json()) for answer in (refused, foreign, unknown)]
    if ERROR_TYPES[path] is anthropic_error_type:
        unknown_type = "not_found_error" if unknown.status_code == 404 else "invalid_request_error"
        assert types == ["authentication_error", "permission_error", unknown_type]


def test_anthropic_errors_have_the_request_id_in_the_body_and_two_headers() -> None:
    answer = Api().post(ANTHROPIC, {})
    assert answer.status_code == 400
    assert answer.json()["request_id"] == answer.headers["request-id"] == answer.headers["x-request-id"]
    assert "request-id" not in Api().post(OPENAI, {}).headers


@pytest.mark.parametrize(
    ("error", "status", "kind", "retry"),
    [
        (NotReady("The model is being loaded."), 503, "overloaded_error", ("5", None)),
        (WorkerLost("Worker 1 died."), 503, "overloaded_error", ("5", None)),
        (PlanError("There is no room."), 503, "api_error", ("5", "false")),
        (Overloaded("Too many.", retry_after_s=1.2), 429, "rate_limit_error", ("2", None)),
        (RingError("It broke."), 500, "api_error", (None, "false")),
    ],
)
def test_errors_have_retry_headers(
    api: Api, error: RingError, status: int, kind: str, retry: tuple[str | None, str | None]
) -> None:
    api.service.error = error
    for path, fields in FIELDS.items():
        answer = api.post(path, fields)
        assert answer.status_code == status
        assert (answer.headers.get("retry-after"), answer.headers.get("x-should-retry")) == retry
        error_type = ERROR_TYPES[path](answer.json())
        assert error_type == kind or path != ANTHROPIC


def test_body_over_the_limit_is_413_in_anthropics_format() -> None:
    large = Api(settings=make_api_settings(max_body_bytes=10)).post(ANTHROPIC, FIELDS[ANTHROPIC])
    assert (large.status_code, anthropic_error_type(large.json())) == (413, "request_too_large")


NAMES = [
    "input", "messages", "system", "instructions", "tools", "tool_choice", "thinking", "reasoning", "text", "include",
    "output_config", "context_management", "stop_sequences", "max_tokens", "stream", "thread", "metadata", "conversation",
]  # fmt: skip
INNER = [
    "type",
    "role",
    "content",
    "text",
    "name",
    "input",
    "arguments",
    "call_id",
    "format",
    "schema",
    "edits",
    "keep",
]
WORDS = ["user", "assistant", "message", "function", "function_call", "tool_use", "tool", "text", "input_text", "enabled", "json_schema"]  # fmt: skip
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 9) | st.sampled_from(WORDS) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(INNER), inner, max_size=4),
    max_leaves=10,
)
FUZZED = Api()


@examples(0.8, suppress_health_check=[HealthCheck.too_slow])
@given(path=st.sampled_from(sorted(FIELDS)), body=st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=4))
def test_no_json_body_causes_a_server_error(path: str, body: dict[str, object]) -> None:
    answer = FUZZED.post(path, FIELDS[path] | body)
    assert answer.status_code in (200, 400)
    if answer.status_code == 400:
        assert ERROR_TYPES[path](answer.json()) == ("" if path == OLLAMA else "invalid_request_error")


LONG = "x" * (CONTEXT + 1)
LONG_CHAT = {"messages": [{"role": "user", "content": LONG}]}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", LONG_CHAT),
        ("/chat/completions", LONG_CHAT | {"stream": True}),
        ("/v1/completions", {"prompt": LONG}),
        ("/v1/completions", {"prompt": LONG, "stream": True}),
        ("/v1/responses", {"input": LONG}),
        ("/v1/responses", {"input": LONG, "stream": True}),
        ("/v1/messages", LONG_CHAT | {"max_tokens": 4}),
        ("/v1/messages", LONG_CHAT | {"max_tokens": 4, "stream": True}),
        ("/v1/embeddings", {"input": LONG}),
        ("/generate", {"prompt": LONG}),
        ("/api/chat", LONG_CHAT),
        ("/api/generate", {"prompt": LONG}),
        ("/api/embed", {"input": LONG, "truncate": False}),
    ],
)
def test_prompt_over_the_context_is_400_with_both_token_counts(
    api: Api, path: str, body: dict[str, object]
) -> None:
    refused = api.post(path, body)
    assert refused.status_code == 400, refused.text
    numbers = [int(number) for number in re.findall(r"\d+", refused.text)]
    assert CONTEXT in numbers
    assert any(CONTEXT < number < CONTEXT + 100 for number in numbers)
