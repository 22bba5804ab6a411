"""The access log: one line for each HTTP request when it ends, without contents, credentials or queries."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import starmap
from typing import Protocol

from starlette.types import ASGIApp, Message, Receive, Scope, Send

log = logging.getLogger(__name__)

_POLLED = ("/health", "/metrics", "/page", "/favicon.ico")
"""Paths that machines poll, and the page's files: logged at the debug level."""
_LONGEST_PATH = 200
_LEFT = "client_left"


class Counted(Protocol):
    """Token counts of an answer."""

    @property
    def prompt_tokens(self) -> int: ...
    @property
    def completion_tokens(self) -> int: ...


@dataclass(slots=True)
class RequestNotes:
    """Facts about the current request that routes add."""

    model: str | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    was_resumed: bool = False
    """True if an answer was interrupted by a loss, and continued."""


_notes: ContextVar[RequestNotes | None] = ContextVar("request_notes", default=None)


def request_notes() -> RequestNotes:
    """Return the notes of the current request, made on the first call."""
    notes = _notes.get()
    if notes is None:
        notes = RequestNotes()
        _notes.set(notes)
    return notes


def note_resumed() -> None:
    """Record that an answer of the current request was interrupted and continued."""
    notes = _notes.get()
    if notes is not None:
        notes.was_resumed = True


def note_model(model_id: str) -> None:
    """Record the current request's model."""
    notes = _notes.get()
    if notes is not None:
        notes.model = model_id


def note_answers(answers: Sequence[Counted], answers_per_prompt: int) -> None:
    """Record the current request's answers. As in `usage`, a prompt with several answers counts once."""
    notes = _notes.get()
    if notes is not None:
        notes.prompt_tokens += sum(answer.prompt_tokens for answer in answers[::answers_per_prompt])
        notes.completion_tokens += sum(answer.completion_tokens for answer in answers)


class AccessLog:
    """Outermost ASGI middleware."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        line = _Line(scope)
        marker = _notes.set(line.notes)

        async def send_noted(message: Message) -> None:
            await send(message)
            line.sent(message)

        try:
            await self._app(scope, receive, send_noted)
        finally:
            _notes.reset(marker)
            line.write()


@dataclass(slots=True)
class _Line:
    scope: Scope
    notes: RequestNotes = field(default_factory=RequestNotes)
    began_s: float = field(default_factory=time.perf_counter)
    status: int | None = None
    is_whole: bool = False

    def sent(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
        elif not message.get("more_body", False):
            self.is_whole = True

    def write(self) -> None:
        path = self.scope["path"]
        polled = any(path == each or path.startswith(f"{each}/") for each in _POLLED)
        level = logging.DEBUG if polled else logging.INFO
        if log.isEnabledFor(level):
            fields = {name: value for name, value in self._fields().items() if value is not None}
            log.log(level, "%s", " ".join(starmap(_shown, fields.items())), extra=fields)

    def _fields(self) -> dict[str, str | int | float | None]:
        notes, client = self.notes, self.scope.get("client")
        return {
            "client": None if client is None else f"{client[0]}:{client[1]}",
            "method": self.scope["method"],
            "path": _as_sent(self.scope),
            "status": self.status,
            "duration_s": round(time.perf_counter() - self.began_s, 4),
            "request_id": self.scope.get("request_id"),
            "model": notes.model,
            "prompt_tokens": notes.prompt_tokens or None,
            "completion_tokens": notes.completion_tokens or None,
            "ended": None if self.is_whole else _LEFT,
        }


def _shown(name: str, value: object) -> str:
    if name in ("client", "method", "path", "status"):
        return str(value)
    return f"{name}={str(value).replace(' ', '_')}"


def _as_sent(scope: Scope) -> str:
    """Return the path as it was sent, so that it cannot break the line. A query may be private and is dropped."""
    raw: bytes | None = scope.get("raw_path")
    path = scope["path"].encode("unicode_escape") if raw is None else raw
    return path.partition(b"?")[0].decode("ascii", "backslashreplace")[:_LONGEST_PATH]
