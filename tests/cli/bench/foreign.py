"""A server of OpenAI's API that is none of ours, with the manners and the faults a test asks for."""

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
class Foreign:
    """What it does, and what it saw."""

    refuses: frozenset[str] = frozenset()
    """Fields that it answers with a 400."""
    names_fields: bool = True
    reports_usage: bool = True
    tokens_per_word: int = 3
    template_tokens: int = 7
    most_tokens: int = 1000
    """Answers end here."""
    per_event: int = 1
    fault: str | None = None
    """What is wrong with its answers: a status, or one of the words in `Answer`."""
    sound: int = 0
    """So many requests are answered before the fault shows."""
    together: int = 0
    """Answers begin only when so many requests are under way."""
    bodies: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    paths: list[str] = field(default_factory=list[str])
    headers: list[dict[str, str]] = field(default_factory=list[dict[str, str]])
    under_way: int = 0
    most_under_way: int = 0
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
        refused = sorted(self.refuses & set(body))
        if refused:
            about = f"Unknown field {refused[0]}." if self.names_fields else "Bad request."
            if refused[0] == "max_tokens":
                about = "Use max_completion_tokens instead of max_tokens."
            return _error(400, about)
        if self.fault is not None and self.fault.isdigit():
            return _error(int(self.fault), f"Status {self.fault}.")
        if self.fault == "no stream":
            return JSONResponse({"choices": [{"text": "all at once"}]})
        return Answer(self, body)


def _error(status: int, message: str) -> Response:
    return JSONResponse({"error": {"message": message}}, status)


class Answer(Response):
    """A stream of words. Faults: `silence`, `cut`, `error`, `nonsense`, `no newline`, `hang`."""

    def __init__(self, server: Foreign, body: dict[str, Any]) -> None:
        super().__init__(media_type="text/event-stream")
        del self.headers["content-length"]
        self._server, self._body = server, body
        self._fault = server.fault if len(server.bodies) > server.sound else None

    async def __call__(self, _scope: Scope, _receive: Receive, send: Send) -> None:
        server = self._server
        server.under_way += 1
        server.most_under_way = max(server.most_under_way, server.under_way)
        try:
            await self._wait_for_others()
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await self._events(send)
            await send({"type": "http.response.body", "body": b""})
        finally:
            server.under_way -= 1

    async def _wait_for_others(self) -> None:
        server = self._server
        if server.under_way >= server.together:
            server.gate.set()
        if server.together:
            await server.gate.wait()

    async def _events(self, send: Send) -> None:
        async def say(text: str) -> None:
            await send({"type": "http.response.body", "body": text.encode(), "more_body": True})

        server, asked = self._server, self._body.get("max_tokens") or self._body["max_completion_tokens"]
        tokens = min(asked, server.most_tokens)
        for _ in range(0, tokens, server.per_event):
            await say(_data({"choices": [self._choice("word ")]}))
            match self._fault:
                case "cut":
                    raise ConnectionError("as a process that dies")
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
def serving_foreign(foreign: Foreign) -> Generator[str]:
    """The server on a free port of the loopback; gives its URL."""
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(foreign.app(), log_config=None, timeout_graceful_shutdown=1, lifespan="off")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
        listener.close()
