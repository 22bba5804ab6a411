"""A third-party server of the OpenAI API, with the behaviour and the faults that a test sets."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send


@dataclass
class ThirdPartyServer:
    """Behaviour of the server, and the requests that it got."""

    rejected_fields: frozenset[str] = frozenset()
    """Fields that it rejects with a 400."""
    names_rejected_field: bool = True
    reports_usage: bool = True
    tokens_per_word: int = 3
    template_tokens: int = 7
    token_limit: int = 1000
    """Length at which answers end."""
    tokens_per_event: int = 1
    fault: str | None = None
    """Fault of its answers: a status, or a fault that `Answer` lists."""
    healthy_requests: int = 0
    """Number of requests that are answered before the fault occurs."""
    starts_together: int = 0
    """Number of requests that must be in flight before any answer starts."""
    bodies: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    paths: list[str] = field(default_factory=list[str])
    headers: list[dict[str, str]] = field(default_factory=list[dict[str, str]])
    in_flight: int = 0
    max_in_flight: int = 0
    gate: asyncio.Event = field(default_factory=asyncio.Event)

    def app(self) -> Starlette:
        paths = ("/v1/completions", "/v1/chat/completions")
        return Starlette(
            routes=[
                Route("/v1/models", self._models),
                *(Route(path, self._answer, methods=["POST"]) for path in paths),
            ]
        )

    async def _models(self, request: Request) -> Response:
        self.headers.append(dict(request.headers))
        return JSONResponse({"data": [{"id": "small", "max_model_len": 5000}, {"id": "large"}]})

    async def _answer(self, request: Request) -> Response:
        body = await request.json()
        self.bodies.append(body)
        self.paths.append(request.url.path)
        self.headers.append(dict(request.headers))
        rejected = sorted(self.rejected_fields & set(body))
        if rejected:
            message = f"Unknown field {rejected[0]}." if self.names_rejected_field else "Bad request."
            if rejected[0] == "max_tokens":
                message = "Use max_completion_tokens instead of max_tokens."
            return _error(400, message)
        if self.fault is not None and self.fault.isdigit():
            return _error(int(self.fault), f"Status {self.fault}.")
        if self.fault == "no stream":
            return JSONResponse({"choices": [{"text": "all at once"}]})
        return Answer(self, body)


def _error(status: int, message: str) -> Response:
    return JSONResponse({"error": {"message": message}}, status)


class Answer(Response):
    """A stream of words. Faults: `silence`, `cut`, `error`, `nonsense`, `no newline`, `hang`."""

    def __init__(self, server: ThirdPartyServer, body: dict[str, Any]) -> None:
        super().__init__(media_type="text/event-stream")
        del self.headers["content-length"]
        self._server, self._body = server, body
        self._fault = server.fault if len(server.bodies) > server.healthy_requests else None

    async def __call__(self, _scope: Scope, _receive: Receive, send: Send) -> None:
        server = self._server
        server.in_flight += 1
        server.max_in_flight = max(server.max_in_flight, server.in_flight)
        try:
            await self._wait_for_others()
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await self._events(send)
            await send({"type": "http.response.body", "body": b""})
        finally:
            server.in_flight -= 1

    async def _wait_for_others(self) -> None:
        server = self._server
        if server.in_flight >= server.starts_together:
            server.gate.set()
        if server.starts_together:
            await server.gate.wait()

    async def _events(self, send: Send) -> None:
        async def say(text: str) -> None:
            await send({"type": "http.response.body", "body": text.encode(), "more_body": True})

        server, requested = self._server, self._body.get("max_tokens") or self._body["max_completion_tokens"]
        tokens = min(requested, server.token_limit)
        for _ in range(0, tokens, server.tokens_per_event):
            await say(_data({"choices": [self._choice("word ")]}))
            match self._fault:
                case "cut":
                    raise ConnectionError("like a process that dies")
                case "error":
                    await say(_data({"error": {"message": "out of memory"}}))
                case "nonsense":
                    await say("data: {half\n\n")
                case "hang":
                    await asyncio.Event().wait()
                case _:
                    pass
        if self._fault != "silence":
            await say(_data({"choices": [self._choice("") | {"finish_reason": "length"}]}))
            if "stream_options" in self._body and server.reports_usage:
                await say(_data({"choices": [], "usage": self._usage(tokens)}))
            await say("data: [DONE]" + ("" if self._fault == "no newline" else "\n\n"))

    def _choice(self, text: str) -> dict[str, Any]:
        return {"delta": {"content": text}} if "messages" in self._body else {"text": text}

    def _usage(self, tokens: int) -> dict[str, Any]:
        messages: Sequence[dict[str, str]] = self._body.get("messages", ())
        prompt = messages[0]["content"] if messages else self._body["prompt"]
        counted = self._server.template_tokens + self._server.tokens_per_word * len(prompt.split())
        return {"prompt_tokens": counted, "completion_tokens": tokens}


def _data(value: object) -> str:
    return f"data: {json.dumps(value)}\n\n"


@contextmanager
def serving_third_party(third_party: ThirdPartyServer) -> Generator[str]:
    """Serve on a free port of the loopback, and give the URL."""
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(third_party.app(), log_config=None, timeout_graceful_shutdown=1, lifespan="off")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
        listener.close()
