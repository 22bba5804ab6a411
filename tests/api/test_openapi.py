"""The document at `/openapi.json`, which responses to its examples must match, and the page at `/docs`."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from functools import cache
from typing import Any
from urllib.parse import urljoin

import httpx
import pytest
from jsonschema import Draft202012Validator
from starlette.applications import Starlette
from tests.api.clients import Api, documented_operations, openapi_document
from tests.api.twins import MarkingTokenizer, TwinService
from tests.default_settings import make_api_settings

from mlx_ring.api import openapi
from mlx_ring.api.app import DIALECTS

API = Api()
OPERATIONS = documented_operations()
ENDLESS = "/cluster/events"
UNTRIED = {"/models/load": "loads a model of its own"}
"""Routes whose example cannot be sent, each with the reason."""


def is_kept(path: str) -> bool:
    """Return True for a path of a kept answer, which needs a journal: `test_journal.py` checks its schemas."""
    return "{response_id}" in path


def responses(path: str, method: str) -> dict[str, Any]:
    return openapi_document()["paths"][path][method]["responses"]


def without_other_fields(document: dict[str, Any]) -> dict[str, Any]:
    """Return a document whose objects have their listed fields only, unless it allows others by name."""
    schemas = document["components"]["schemas"]
    closed = {
        name: {"additionalProperties": False} | schema if "properties" in schema else schema
        for name, schema in schemas.items()
    }
    return {"components": {"schemas": closed}}


@cache
def closed_document() -> dict[str, Any]:
    return without_other_fields(openapi_document())


def check(value: object, schema: dict[str, Any]) -> None:
    """Check a value against a schema of the document. It has no field that the schema does not list."""
    Draft202012Validator({**schema, **closed_document()}).validate(value)


def test_the_document_has_every_route_that_is_not_hidden() -> None:
    paths = openapi_document()["paths"]
    assert [(path, method) for path, methods in paths.items() for method in methods] == OPERATIONS


@pytest.mark.parametrize(("path", "method"), OPERATIONS)
def test_response_matches_the_documented_schema(path: str, method: str) -> None:
    if path in (ENDLESS, "/models/load", "/models/unload") or is_kept(path):
        return
    body = (
        openapi_document()["paths"][path][method]
        .get("requestBody", {})
        .get("content", {})
        .get("application/json", {})
    )
    target = path.replace("{model}", "org/twin")
    answer = API.get(target) if method == "get" else API.request(method, target, json=body["example"])
    assert answer.status_code == 200, answer.text
    content = responses(path, method)["200"]["content"]
    if not content:
        assert answer.content == b""
        return
    media_type = answer.headers["content-type"].partition(";")[0]
    if media_type == "application/json":
        check(answer.json(), content[media_type]["schema"])
    else:
        assert media_type in content


@pytest.mark.parametrize(
    ("path", "method"),
    [(path, method) for path, method in OPERATIONS if method == "post" and not is_kept(path)],
)
def test_streams_and_refusals_match_the_documented_schemas(path: str, method: str) -> None:
    documented = responses(path, method)
    example = openapi_document()["paths"][path][method]["requestBody"]["content"]["application/json"].get(
        "example", {}
    )
    refused = API.post(path, {"no_such_field": 1})
    assert str(refused.status_code) in documented
    error = json.loads(
        json.dumps(documented[str(refused.status_code)]["content"]["application/json"]["schema"])
    )
    assert refused.json()
    assert error["$ref"].endswith("Error")
    for media_type, content in documented["200"]["content"].items():
        if "x-each" in content:
            streamed = API.post(path, example | {"stream": True})
            assert streamed.headers["content-type"].partition(";")[0] == media_type
            lines = [line.removeprefix("data: ") for line in streamed.text.splitlines() if line.strip()]
            for line in lines:
                if line.startswith("{"):
                    check(json.loads(line), content["x-each"])


TOOL: dict[str, Any] = {"name": "add", "parameters": {"type": "object"}}
RICH: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "tools": [{"type": "function", "function": TOOL}],
        "n": 2,
        "logprobs": True,
        "top_logprobs": 2,
    },
    "/v1/completions": {"echo": True, "logprobs": 2, "n": 2},
    "/v1/responses": {
        "tools": [{"type": "function", **TOOL}],
        "include": ["message.output_text.logprobs", "reasoning.encrypted_content"],
        "top_logprobs": 2,
    },
    "/v1/messages": {"tools": [{"name": "add", "input_schema": {"type": "object"}}]},
    "/api/chat": {
        "tools": [{"type": "function", "function": TOOL}],
        "logprobs": True,
        "options": {"num_predict": 99},
    },
    "/api/generate": {"logprobs": True, "top_logprobs": 2},
}
"""Fields that make each route answer with everything it can."""


@pytest.mark.parametrize("path", RICH)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "says", ["<think>\nHm.</think>Yes.", '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>']
)
def test_reasoning_calls_and_logprobs_match_the_documented_schemas(
    path: str, says: str, *, stream: bool
) -> None:
    api = Api(TwinService(tokenizer=MarkingTokenizer(), says=says))
    example = openapi_document()["paths"][path]["post"]["requestBody"]["content"]["application/json"][
        "example"
    ]
    answer = api.post(path, example | {"stream": stream} | RICH[path])
    assert answer.status_code == 200, answer.text
    content = responses(path, "post")["200"]["content"]
    if not stream:
        check(answer.json(), content["application/json"]["schema"])
        return
    each = content[answer.headers["content-type"].partition(";")[0]]["x-each"]
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines()]
    values = [json.loads(line) for line in lines if line.startswith("{")]
    assert len(values) > 2
    for value in values:
        check(value, each)


def test_every_operation_lists_its_possible_statuses() -> None:
    keyed = Api(settings=make_api_settings(api_keys=("key",)))
    document = keyed.get("/openapi.json", authorization="Bearer key").json()
    assert document["security"] == [{"bearer": []}, {"key": []}]
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            documented = set(operation["responses"])
            assert {"200", "400", "403", "500", "503"} <= documented
            is_open = operation.get("security") == []
            assert is_open == (path.startswith(("/health", "/docs"))), path
            assert ("401" in documented) != is_open
            if is_kept(path):
                assert "404" in documented
            else:
                assert method != "post" or {"404", "408", "413", "429"} <= documented
    assert "security" not in openapi_document()
    assert not any("401" in responses(*operation) for operation in OPERATIONS)


def test_fields_without_effect_are_in_every_request_schema() -> None:
    for path, method in OPERATIONS:
        if method == "post" and not is_kept(path):
            schema = openapi_document()["paths"][path][method]["requestBody"]["content"]["application/json"][
                "schema"
            ]
            fields = openapi_document()["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
            assert {"user", "metadata", "store"} <= set(fields["properties"])
            assert fields["additionalProperties"] == {"type": "null"}


def test_every_schema_reference_resolves() -> None:
    text = json.dumps(openapi_document())
    names = {part.partition('"')[0] for part in text.split('"#/components/schemas/')[1:]}
    assert names <= set(openapi_document()["components"]["schemas"])
    assert "#/$defs/" not in text


def test_docs_page_ignores_the_query() -> None:
    for path in ("/docs", "/docs/page.js", "/docs/page.css"):
        plain, queried = API.get(path), API.get(f"{path}?content=alert(1)&media_type=text/html")
        assert queried.content == plain.content
        assert queried.headers["content-type"] == plain.headers["content-type"]


@pytest.mark.parametrize("path", ["/docs/", "/docs//"])
def test_docs_page_with_a_slash_leads_to_one_whose_links_are_right(path: str) -> None:
    address = urljoin(path, API.get(path).headers["location"])
    page = API.get(address)
    assert page.status_code == 200
    links = re.findall(r'(?:href|src)="([^":]+)"', page.text)
    assert set(links) == {"docs/page.css", "docs/page.js", "openapi.json"}
    for link in links:
        assert API.get(urljoin(address, link)).status_code == 200


def test_docs_page_needs_no_key_and_loads_nothing_external() -> None:
    keyed = Api(settings=make_api_settings(api_keys=("key",)))
    page = keyed.get("/docs")
    assert page.status_code == 200
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert "//" not in page.text.replace("</", "")
    for path in ("/docs/page.js", "/docs/page.css"):
        assert keyed.get(path).status_code == 200
    assert keyed.get("/openapi.json").status_code == 401


def test_the_document_is_made_once_and_off_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[threading.Thread] = []

    def document(*_: object) -> dict[str, object]:
        threads.append(threading.current_thread())
        return {"openapi": "3.1.0"}

    monkeypatch.setattr(openapi, "_document", document)
    app = Starlette()
    openapi.describe_api(app, make_api_settings(), DIALECTS)

    async def read() -> list[bytes]:
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(app), base_url="http://localhost"
        ) as client:
            answers = await asyncio.gather(*(client.get("/openapi.json") for _ in range(3)))
        return [answer.content for answer in answers]

    assert asyncio.run(read()) == [b'{"openapi":"3.1.0"}'] * 3
    assert len(threads) == 1
    assert threads[0] is not threading.current_thread()
