"""Heads with a journal, whose ranks answer a step when the test says so, and requests whose answers are kept."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from starlette.types import Message
from tests.api.twins import TwinCatalog, TwinService
from tests.default_settings import make_api_settings
from tests.eventually import run_tasks_until

from mlx_ring.api.app import build_app
from mlx_ring.api.journal import Journal

SIZE = 1 << 20
HELLO = [{"role": "user", "content": "Hello."}]
STREAMS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HELLO, "stream_options": {"include_usage": True}, "logprobs": True},
    "/v1/completions": {"prompt": "Hello.", "max_tokens": 20, "logprobs": 2, "echo": True},
    "/v1/responses": {"input": "Hello."},
    "/v1/messages": {"messages": HELLO, "max_tokens": 100},
}
"""A streamed request of each endpoint whose answers are kept."""
Events = list[tuple[str, str]]
"""Ids and data of events."""


class Head:
    """One run of a head with a journal, whose ranks answer a step when the test says so."""

    def __init__(
        self,
        folder: Path,
        *,
        keys: Sequence[str] = (),
        automatic: bool = True,
        size: int = SIZE,
        digest: str = "",
    ) -> None:
        self.service = TwinService(automatic=automatic)
        self.service.metadata["digest"] = digest
        self.catalog = TwinCatalog(self.service)
        self.journal = Journal(folder, size, keys)
        settings = make_api_settings(api_keys=tuple(keys))
        self.app = build_app(self.catalog, settings, journal=self.journal)

    async def step(self) -> None:
        """Let every rank execute what it was sent and deliver the answers, and clients get what is written of these."""
        executor = self.service.executor
        for rank in executor.runnable():
            executor.run(rank)
        for rank in executor.answering():
            executor.deliver(rank)
        for _ in range(10):
            await asyncio.sleep(0)
        await run_tasks_until(lambda: not self.journal._writer._is_writing)  # pyright: ignore[reportPrivateUsage]
        for _ in range(10):
            await asyncio.sleep(0)

    async def call(
        self,
        method: str,
        path: str,
        body: object = None,
        *,
        leaves: Callable[[bytes], bool] = lambda _: False,
        **headers: str,
    ) -> tuple[int, str]:
        """Send a request, and return the status and what came of the answer.

        Args:
            method: the request's method.
            path: its path and query.
            body: its body, as JSON.
            leaves: returns True of the bytes so far when the client closes its connection.
            headers: its headers, with underscores for hyphens.
        """
        received, status, has_left = bytearray(), 0, asyncio.Event()
        messages = iter(
            [{"type": "http.request", "body": json.dumps(body).encode() if body is not None else b""}]
        )

        async def receive() -> Message:
            message = next(messages, None)
            if message is None:
                await has_left.wait()
            return message or {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            if not has_left.is_set():
                received.extend(message.get("body", b""))
            if leaves(bytes(received)):
                has_left.set()

        path, _, query = path.partition("?")
        given = {name.replace("_", "-"): value for name, value in headers.items()}
        await self.app(
            {
                "type": "http",
                "http_version": "1.1",
                "method": method,
                "path": path,
                "root_path": "",
                "raw_path": path.encode(),
                "query_string": query.encode(),
                "scheme": "http",
                "server": ("localhost", 8100),
                "client": ("127.0.0.1", 5000),
                "state": {},
                "headers": [
                    (name.encode(), value.encode("latin-1"))
                    for name, value in {"host": "localhost", **given}.items()
                ],
            },
            receive,
            send,
        )
        return status, received.decode()

    async def stream(self, path: str, body: object, *, most: int | None = None, **headers: str) -> Events:
        """Return the events of a streamed answer, of which the client may read only the first ones."""
        status, text = await self.call(
            "POST",
            path,
            body,
            leaves=lambda data: most is not None and data.count(b"\ndata: ") >= most,
            **headers,
        )
        assert status == 200, text
        return events_of(text)[:most]


def events_of(text: str) -> Events:
    return re.findall(r"^id: (.*)\n(?:event: .*\n)?data: (.*)$", text, re.MULTILINE)


@asynccontextmanager
async def running(folder: Path, **options: Any) -> AsyncGenerator[Head]:
    """Run a head, and end it in order."""
    head = Head(folder, **options)
    await head.journal.open()
    head.journal.begin()
    try:
        yield head
    finally:
        await head.journal.close()


def request_of(path: str, **more: object) -> dict[str, object]:
    return (
        {**STREAMS[path], "stream": True, "seed": 5, **more}
        if path != "/v1/messages"
        else {**STREAMS[path], "stream": True}
    )


def without_times(data: str) -> str:
    """Return an event without the figures that differ from run to run: times, speeds, ids and the prefix cache's part."""
    data = re.sub(r'"(created|created_at|completed_at)":\d+', "", data)
    data = re.sub(r'"performance":\{.*?\}', "", data)
    data = re.sub(r'"cached_tokens":\d+|"cache_\w+_input_tokens":\d+|"input_tokens":\d+', "", data)
    return re.sub(r"(chatcmpl-|cmpl-|resp_|msg_)[0-9a-f]+", r"\1", data)


def response_events(text: str) -> list[dict[str, Any]]:
    return [json.loads(data) for _, data in events_of(text)]
