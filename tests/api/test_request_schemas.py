"""Requests are validated as `/openapi.json` documents them: each place of a body is tried with other values."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from copy import deepcopy
from typing import Any

import jsonschema
import pytest
from pydantic import ValidationError
from tests.api.clients import Api, openapi_document, refusal

from mlx_ring.api.anthropic.request import MessagesRequest
from mlx_ring.api.app import DIALECTS
from mlx_ring.api.ollama.dialect import ChatRequest as OllamaChat
from mlx_ring.api.ollama.dialect import GenerateFields
from mlx_ring.api.openai.chat import ChatRequest
from mlx_ring.api.openai.completions import CompletionRequest
from mlx_ring.api.openai.embeddings import EmbeddingRequest
from mlx_ring.api.openai.responses.request import ResponsesRequest
from mlx_ring.api.request_body import Body

VALUES: list[Any] = [None, True, -1, "a", [], ["a"], {"a": 1}]
PARAMETERS: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "string"}}}
FUNCTION: dict[str, Any] = {"name": "f", "description": "d", "parameters": PARAMETERS, "strict": True}
TEXT: dict[str, Any] = {"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}
FULL_BODIES: dict[str, tuple[type[Body], dict[str, Any]]] = {
    "/v1/chat/completions": (
        ChatRequest,
        {
            "messages": [
                {"role": "developer", "content": "s", "name": "z"},
                {"role": "user", "content": [{"type": "text", "text": "x"}]},
                {
                    "role": "assistant",
                    "tool_calls": [
                        {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
                    ],
                    "annotations": [],
                },
                {"role": "tool", "content": "t", "tool_call_id": "c"},
                {"role": "function", "name": "f", "content": "x"},
            ],
            "tools": [
                {"type": "function", "function": FUNCTION},
                {"type": "function"} | FUNCTION | {"name": "g"},
            ],
            "tool_choice": {
                "type": "allowed_tools",
                "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": {"name": "f"}}]},
            },
            "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {}}},
            "stream": True,
            "stream_options": {"include_usage": True},
            "logprobs": True,
        },
    ),
    "/v1/completions": (CompletionRequest, {"prompt": [[1, 2], [3]], "stream": True}),
    "/v1/embeddings": (EmbeddingRequest, {"input": ["a"], "encoding_format": "float"}),
    "/v1/responses": (
        ResponsesRequest,
        {
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": "x"}]},
                {
                    "type": "reasoning",
                    "id": "rs",
                    "summary": [],
                    "content": [{"type": "reasoning_text", "text": "x"}],
                },
                {"type": "function_call", "name": "f", "call_id": "c", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c", "output": "x"},
            ],
            "tools": [{"type": "function"} | FUNCTION],
            "tool_choice": {"type": "function", "name": "f"},
            "text": {"format": {"type": "json_schema", "name": "n", "schema": {}}},
            "reasoning": {"effort": "low", "summary": "auto"},
            "stream_options": {"include_obfuscation": False},
        },
    ),
    "/v1/messages": (
        MessagesRequest,
        {
            "max_tokens": 5,
            "system": [TEXT],
            "messages": [
                {"role": "user", "content": [TEXT]},
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "x", "signature": "s"},
                        {"type": "tool_use", "id": "t", "name": "f", "input": {}},
                    ],
                },
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": [TEXT]}]},
            ],
            "tools": [{"type": "custom", "name": "f", "input_schema": PARAMETERS}],
            "tool_choice": {"type": "tool", "name": "f", "disable_parallel_tool_use": True},
            "thinking": {"type": "enabled", "budget_tokens": 1024},
            "output_config": {"format": {"type": "json_schema", "schema": {}}},
        },
    ),
    "/api/chat": (
        OllamaChat,
        {
            "messages": [
                {"role": "user", "content": "x", "images": []},
                {
                    "role": "assistant",
                    "content": "",
                    "tool_calls": [{"function": {"name": "f", "arguments": {}}}],
                },
            ],
            "tools": [{"type": "function", "function": {"name": "f", "parameters": PARAMETERS}}],
            "options": {"stop": ["a"], "mirostat": 0},
            "logprobs": True,
        },
    ),
    "/api/generate": (GenerateFields, {"prompt": "a", "logprobs": True}),
}
"""Request type and a body with many fields for each route."""
CROSS_CHECKED = frozenset({"logit_bias", "stream", "logprobs", "stream_options", "top_logprobs"})
"""Fields that routes compare with other fields or with the model, beyond their schemas."""


def schema_of(path: str) -> dict[str, Any]:
    media = openapi_document()["paths"][path]["post"]["requestBody"]["content"]["application/json"]
    return {**media["schema"], "components": openapi_document()["components"]}


def properties_of(path: str) -> list[str]:
    return list(
        openapi_document()["components"]["schemas"][schema_of(path)["$ref"].rpartition("/")[2]]["properties"]
    )


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if path:
        yield path
    steps: list[Any] = list(value) if isinstance(value, dict) else []  # pyright: ignore[reportUnknownArgumentType]
    steps += range(len(value)) if isinstance(value, list) else []  # pyright: ignore[reportUnknownArgumentType]
    for step in steps:
        yield from places(value[step], (*path, step))


def with_value(body: Mapping[str, Any], place: tuple[Any, ...], value: Any) -> dict[str, Any]:
    copy: Any = deepcopy(dict(body))
    inner = copy
    for step in place[:-1]:
        inner = inner[step]
    inner[place[-1]] = value
    return copy


def is_accepted(schema: type[Body], body: Mapping[str, Any]) -> bool:
    try:
        schema.model_validate(body)
    except ValidationError:
        return False
    return True


def test_every_dialect_has_a_full_body() -> None:
    assert {DIALECTS.of(path).name for path in FULL_BODIES} == {dialect.name for dialect in DIALECTS}


@pytest.mark.parametrize(
    "path",
    [pytest.param(path, marks=[pytest.mark.slow] * (path == "/v1/chat/completions")) for path in FULL_BODIES],
)
def test_validation_accepts_exactly_what_the_schema_allows(path: str) -> None:
    schema, full_body = FULL_BODIES[path]
    documented = jsonschema.Draft202012Validator(schema_of(path))
    assert documented.is_valid(full_body)
    assert is_accepted(schema, full_body)
    names = [(name,) for name in properties_of(path) if name in schema.model_fields and name not in full_body]
    for place in [*places(full_body), *names, ("no_such_field",)]:
        for value in VALUES:
            body = with_value(full_body, place, value)
            if CROSS_CHECKED & {place[0]} or (
                path == "/v1/responses" and place[-1] == "type" and value is None
            ):
                continue
            assert documented.is_valid(body) == is_accepted(schema, body), (place, value)


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/chat/completions", {"stream_options": {}}),
        ("/v1/chat/completions", {"logprobs": False, "top_logprobs": 1}),
        ("/v1/chat/completions", {"logit_bias": {"a": 1}}),
        ("/v1/chat/completions", {"logit_bias": {"1": 101}}),
        ("/v1/chat/completions", {"functions": [FUNCTION]}),
        ("/v1/chat/completions", {"function_call": "none"}),
        ("/v1/completions", {"stream_options": {}}),
        ("/v1/completions", {"suffix": "a"}),
        ("/tokenize", {"prompt": None}),
        ("/tokenize", {"messages": [{"role": "user", "content": "x"}]}),
    ],
)
def test_conflicting_fields_are_refused_with_a_reason(path: str, fields: dict[str, Any]) -> None:
    example = openapi_document()["paths"][path]["post"]["requestBody"]["content"]["application/json"][
        "example"
    ]
    documented = jsonschema.Draft202012Validator(schema_of(path))
    assert documented.is_valid(example)
    assert not documented.is_valid(example | fields)
    refusal(Api().post(path, example | fields))


def test_tokenize_accepts_a_prompt_or_messages_beside_a_null() -> None:
    documented = jsonschema.Draft202012Validator(schema_of("/tokenize"))
    messages = [{"role": "user", "content": "x"}]
    for body in ({"prompt": "a", "messages": None}, {"messages": messages, "prompt": None}):
        assert documented.is_valid(body)
        assert Api().post("/tokenize", body).status_code == 200, json.dumps(body)
