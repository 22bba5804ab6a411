"""Invalid requests: the error names the field in OpenAI's format, and other requests continue."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from tests.api.clients import Api, error_of, refusal
from tests.default_settings import make_api_settings
from tests.examples import examples

from mlx_ring.api.openai.chat import ChatRequest
from mlx_ring.api.openai.sampling import SchemaFormat

USER = {"role": "user", "content": "Hello."}


def messages(*items: object) -> dict[str, object]:
    return {"messages": list(items)}


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"temperature": 10**400}, "temperature"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"top_k": 1.5}, "top_k"),
        ({"min_p": -1}, "min_p"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"frequency_penalty": -3}, "frequency_penalty"),
        ({"seed": 2**64}, "seed"),
        ({"seed": "1"}, "seed"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -5}, "max_tokens"),
        ({"max_tokens": 10**12}, "max_tokens"),
        ({"max_completion_tokens": 2**31}, "max_completion_tokens"),
        ({"min_tokens": 2**31}, "min_tokens"),
        ({"max_completion_tokens": 1.5}, "max_completion_tokens"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
        ({"stop": 5}, "stop"),
        ({"stop": [5]}, "stop[0]"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a", ""]}, "stop[1]"),
        ({"stop": list("abcde")}, "stop"),
        ({"logit_bias": {"320": 1}}, "logit_bias.320"),
        ({"logit_bias": {"-1": 1}}, "logit_bias.-1"),
        ({"logit_bias": {"07": 1}}, "logit_bias.07"),
        ({"logit_bias": {"1" * 5000: 1}}, "logit_bias." + "1" * 20),
        ({"logit_bias": {"7": 100.5}}, "logit_bias.7"),
        ({"logit_bias": {"7": "much"}}, "logit_bias.7"),
        ({"logit_bias": [7]}, "logit_bias"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": 3}, "logprobs"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"what": 1}}, "stream_options.what"),
        (
            {"stream": True, "stream_options": {"include_obfuscation": True}},
            "stream_options.include_obfuscation",
        ),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function"}}, "tool_choice.function"),
        ({"tool_choice": {"type": "custom"}}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "add"}}}, "tool_choice.function.name"),
        ({"response_format": {"type": "grammar"}}, "response_format.type"),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": {}},
                    "more": 1,
                }
            },
            "response_format.more",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}},
            "response_format.json_schema.name",
        ),
        (
            {"tool_choice": {"type": "function", "function": {"name": "f"}, "more": 1}},
            "tool_choice.more",
        ),
        ({"reasoning_effort": "low"}, "reasoning_effort"),
        ({"modalities": ["audio"]}, "modalities[0]"),
        ({"functions": []}, "functions"),
        ({"function_call": "auto"}, "function_call"),
        ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs.tools"),
        ({"chat_template_kwargs": "x"}, "chat_template_kwargs"),
        ({"unknown_field": 1}, "unknown_field"),
    ],
)
def test_invalid_field_is_named(api: Api, fields: dict[str, object], named: str) -> None:
    param, message = refusal(api.chat(**fields))
    assert param == named
    assert re.split(r"[.\[]", named, maxsplit=1)[0] in message
    assert message.endswith(".")


@pytest.mark.parametrize(("kind", "shown"), [(None, "null"), ([], "a list"), ({}, "an object"), (3, "3")])
def test_value_that_chooses_no_type_is_shown_as_the_body_has_it(api: Api, kind: object, shown: str) -> None:
    param, message = refusal(api.chat(messages=[USER | {"content": [{"type": kind}]}]))
    assert param == "messages[0].content[0].type"
    assert message.endswith(f", not {shown}.")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (
            "/v1/chat/completions",
            {"audio": None, "messages": [USER | {"tool_calls": None, "tool_call_id": None}]},
        ),
        ("/v1/completions", {"prompt": "a", "prediction": None}),
        ("/v1/responses", {"input": "a", "modalities": None}),
        ("/v1/messages", {"max_tokens": 1, "messages": [USER | {"name": None}], "container": None}),
        ("/api/chat", {"messages": [USER | {"name": None}], "stream": False, "options": {"mood": None}}),
    ],
)
def test_unknown_fields_without_a_value_are_accepted(api: Api, path: str, body: dict[str, object]) -> None:
    assert api.post(path, body).status_code == 200


def test_a_null_within_a_client_s_own_object_stays() -> None:
    schema = {"type": "object", "properties": {"a": {"const": None}}, "required": ["a"]}
    format_ = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    fields = ChatRequest.model_validate({"messages": [USER], "response_format": format_})
    assert isinstance(fields.response_format, SchemaFormat)
    assert fields.response_format.json_schema.schema_ == schema


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({}, "messages"),
        (messages(), "messages"),
        ({"messages": None}, "messages"),
        ({"messages": "Hello."}, "messages"),
        (messages("Hello."), "messages[0]"),
        (messages({"content": "x"}), "messages[0].role"),
        (messages({"role": "alien", "content": "x"}), "messages[0].role"),
        (messages({"role": 3, "content": "x"}), "messages[0].role"),
        (messages({"role": "user"}), "messages[0].content"),
        (messages(USER | {"tool_calls": 1}), "messages[0].tool_calls"),
        (messages({"role": "user", "content": None}), "messages[0].content"),
        (messages({"role": "user", "content": 3}), "messages[0].content"),
        (messages({"role": "user", "content": []}), "messages[0].content"),
        (messages({"role": "user", "content": "x", "mood": 1}), "messages[0].mood"),
        (messages(USER, {"role": "assistant"}), "messages[1].content"),
        (messages(USER, {"role": "tool", "content": "4"}), "messages[1].tool_call_id"),
        (
            messages({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}),
            "messages[0].content[0]",
        ),
        (messages({"role": "user", "content": [{"type": "text"}]}), "messages[0].content[0].text"),
        (
            messages({"role": "user", "content": [{"type": "text", "text": "x", "mood": 1}]}),
            "messages[0].content[0].mood",
        ),
        (messages({"role": "user", "content": [{"type": "text", "text": 3}]}), "messages[0].content[0].text"),
        (messages({"role": "user", "content": "half \ud83d of it"}), "messages[0].content"),
    ],
)
def test_invalid_message_is_named(api: Api, body: dict[str, object], named: str) -> None:
    param, message = refusal(api.post("/v1/chat/completions", body))
    assert param == named
    assert named in message


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "JSON"),
        (b"{", "JSON"),
        (b"[]", "object"),
        (b'"text"', "object"),
        (b"\xff{}", "UTF-8"),
        (b'{"temperature": NaN}', "NaN"),
        (b'{"temperature": -Infinity}', "Infinity"),
        (b'{"temperature": 1e999}', "too large"),
        (b'{"seed": ' + b"9" * 5000 + b"}", "digits"),
        (b'{"messages": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "deep"),
        (b'{"messages": ' + b"[" * 100 + b"]" * 100 + b"}", "deep"),
        (b'{"\\ud800": 1}', "surrogate"),
    ],
)
def test_malformed_body_is_refused(api: Api, content: bytes, expected: str) -> None:
    _, message = refusal(api.request("POST", "/v1/chat/completions", content=content))
    assert expected in message


@pytest.mark.parametrize("content_type", ["text/plain", "application/x-www-form-urlencoded", "nonsense"])
def test_json_is_read_with_any_content_type(api: Api, content_type: str) -> None:
    body = {"messages": [USER]}
    assert api.post("/v1/chat/completions", body, **{"content-type": content_type}).status_code == 200


def test_body_over_the_limit_is_413() -> None:
    api = Api(settings=make_api_settings(max_body_bytes=1000))
    _, message = refusal(api.chat(content="x" * 1000), 413)
    assert "1000 bytes" in message
    assert api.chat().status_code == 200


def test_unknown_model_is_404_and_names_the_served_model(api: Api) -> None:
    response = api.chat(model="gpt-9")
    param, message = refusal(response, 404)
    assert param == "model"
    assert response.json()["error"]["code"] == "model_not_found"
    assert "gpt-9" in message
    assert "org/twin" in message


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/nothing", 404),
        ("POST", "/v1/responses/compact", 404),
        ("POST", "/", 405),
        ("GET", "/v1/chat/completions", 405),
        ("DELETE", "/v1/models", 405),
    ],
)
def test_unknown_path_or_method_has_an_openai_error(api: Api, method: str, path: str, status: int) -> None:
    response = api.request(method, path)
    assert response.status_code == status
    assert path in error_of(response)["message"]


def test_valid_requests_succeed_after_invalid_ones(api: Api) -> None:
    api.chat(top_k="x")
    api.complete(prompt=[400])
    assert api.chat().status_code == 200


FIELDS = [
    "model", "messages", "prompt", "temperature", "top_p", "top_k", "min_p", "stop", "seed", "stream",
    "stream_options", "logit_bias", "logprobs", "top_logprobs", "max_tokens", "min_tokens", "echo", "best_of",
    "tools", "tool_choice", "response_format", "chat_template_kwargs", "ignore_eos", "user", "metadata",
]  # fmt: skip
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([0, 1, -1, 2**31, 2**64, 10**40, 1e308, -0.0, 0.5])
    | st.text(st.characters(), max_size=8)
    | st.sampled_from(["user", "assistant", "text", "auto", "twin"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["role", "content", "type", "text", "name", "7", "include_usage"]),
            inner,
            max_size=3,
        )
    ),
    max_leaves=8,
)
BODIES = st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=6)
VALID: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [USER], "max_tokens": 2},
    "/v1/completions": {"prompt": "x", "max_tokens": 2},
    "/generate": {"prompt": "x", "max_tokens": 2},
}
FUZZED = Api()


@examples(1.5, suppress_health_check=[HealthCheck.too_slow])
@given(path=st.sampled_from(sorted(VALID)), body=BODIES)
def test_no_json_body_causes_a_server_error(path: str, body: dict[str, object]) -> None:
    response = FUZZED.request("POST", path, content=json.dumps(VALID[path] | body))
    assert response.status_code in {200, 400, 404}
    if response.status_code != 200:
        error_of(response)


@given(
    content=st.binary(max_size=40)
    | st.text(st.sampled_from('{}[]",:0159eE.-\\untrfalsN'), max_size=30).map(str.encode)
)
def test_no_bytes_cause_a_server_error(content: bytes) -> None:
    response = FUZZED.request("POST", "/v1/completions", content=content)
    assert response.status_code == 400
    error_of(response)
