"""Clients of a twin service: in this process, and over a socket."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import httpx
import uvicorn
from starlette.routing import BaseRoute, Match
from tests.api.twins import TwinCatalog, TwinService
from tests.default_settings import make_api_settings

from mlx_ring.api.app import build_app
from mlx_ring.api.middleware.guard import Admission
from mlx_ring.api.openapi import ApiRoute
from mlx_ring.api.settings import ApiSettings
from mlx_ring.head.http_connections import HttpConfig
from mlx_ring.head.uvicorn_connection import ConnectionLimits


class Api:
    """Client of the application in this process. Each call runs in its own event loop."""

    def __init__(
        self,
        service: TwinService | None = None,
        settings: ApiSettings | None = None,
        *others: TwinService,
        client: str = "127.0.0.1",
    ) -> None:
        self._client = client
        self.service = TwinService() if service is None else service
        self.catalog = TwinCatalog(self.service, *others)
        self.admission = Admission()
        self._app = build_app(self.catalog, settings or make_api_settings(), admission=self.admission)

    @property
    def routes(self) -> Sequence[BaseRoute]:
        return self._app.routes

    def get(self, path: str, **headers: str) -> httpx.Response:
        return self.request("GET", path, headers=headers)

    def post(self, path: str, body: object, **headers: str) -> httpx.Response:
        return self.request("POST", path, content=json.dumps(body), headers=headers)

    def request(self, method: str, path: str, **options: Any) -> httpx.Response:
        response = self.send(method, path, **options)
        self._check_status(response)
        return response

    def send(self, method: str, path: str, **options: Any) -> httpx.Response:
        """Send a request whose status may be any."""

        async def call() -> httpx.Response:
            transport = httpx.ASGITransport(self._app, client=(self._client, 12345))
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost:8100") as client:
                return await client.request(method, path, **options)

        return asyncio.run(call())

    def _check_status(self, response: httpx.Response) -> None:
        """Check that the OpenAPI document lists an error's status. That without API keys lists no 401."""
        if response.status_code < 400 or response.status_code == 401:
            return
        scope = {"type": "http", "method": response.request.method, "path": response.request.url.path}
        for route in self._app.routes:
            if (
                isinstance(route, ApiRoute)
                and route.doc is not None
                and route.matches(scope)[0] is Match.FULL
            ):
                listed = openapi_document()["paths"][route.path_format][route.method.lower()]["responses"]
                assert str(response.status_code) in listed, route.path_format
                return

    def chat(self, *, content: object = "Hello.", **fields: object) -> httpx.Response:
        messages = [{"role": "user", "content": content}]
        return self.post("/v1/chat/completions", {"messages": messages} | fields)

    def complete(self, **fields: object) -> httpx.Response:
        return self.post("/v1/completions", {"prompt": "Hello."} | fields)


@cache
def openapi_document() -> dict[str, Any]:
    """Return the document at `/openapi.json`, built once in a process because that takes a second."""
    return Api().send("GET", "/openapi.json").json()


def documented_operations() -> list[tuple[str, str]]:
    """Return the path and method of each route that is not hidden, in the document's order."""
    routes = [route for route in Api().routes if isinstance(route, ApiRoute)]
    operations = [(route.path_format, route.method.lower()) for route in routes if route.doc is not None]
    paths = list(dict.fromkeys(path for path, _ in operations))
    return sorted(operations, key=lambda operation: paths.index(operation[0]))


def error_of(response: httpx.Response) -> dict[str, Any]:
    """Check a response's error body in OpenAI's format, and return its error."""
    body = response.json()
    assert set(body) == {"error"}
    assert {"message", "type", "param", "code"} <= set(body["error"])
    assert isinstance(body["error"]["message"], str)
    assert body["error"]["message"]
    assert response.headers["x-request-id"]
    return body["error"]


def refusal(response: httpx.Response, status: int = 400) -> tuple[str | None, str]:
    """Return the field that a refusal names, and its message."""
    assert response.status_code == status, response.text
    error = error_of(response)
    return error["param"], error["message"]


def events(response: httpx.Response) -> list[dict[str, Any]]:
    """Return a stream's events, and check that they end with [DONE]."""
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = [line for line in response.text.split("\n\n") if line]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1] if not line.startswith(":")]


@contextmanager
def serving(
    service: TwinService,
    settings: ApiSettings | None = None,
    *,
    limits: ConnectionLimits | None = None,
    admission: Admission | None = None,
    port: int = 0,
    catalog: TwinCatalog | None = None,
    tls: ssl.SSLContext | None = None,
) -> Generator[str]:
    """Run a real server on loopback, on a free port unless one is given, and yield its URL."""
    listener = socket.create_server(("127.0.0.1", port))
    app = build_app(catalog or TwinCatalog(service), settings or make_api_settings(), admission=admission)
    server = uvicorn.Server(HttpConfig(app, limits or ConnectionLimits(), tls, end_s=1))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        yield f"http{'s' if tls else ''}://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
        listener.close()
