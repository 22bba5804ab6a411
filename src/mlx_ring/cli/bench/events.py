"""Server-sent events out of a byte stream, and what a completion's event says. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

DONE = "[DONE]"


class EventReader:
    """Cuts bytes as they come into the `data` of events; comments and other fields are passed over."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> Iterator[str]:
        lines = (self._rest + data).replace(b"\r\n", b"\n").split(b"\n")
        self._rest = lines.pop()
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip().decode()


@dataclass(frozen=True, slots=True)
class Event:
    """One event of an answer."""

    says_something: bool
    """Whether it brings text, reasoning or a tool call."""
    finish_reason: str | None
    usage: dict[str, Any] | None
    error: str | None


def read_event(data: str) -> Event:
    """Chat and text completions alike. Raises `ValueError` for what is no JSON object."""
    body: object = json.loads(data)
    if not isinstance(body, dict):
        raise ValueError(data)  # noqa: TRY004 - it is text from outside that is wrong
    fields = cast("dict[str, Any]", body)
    error: object = fields.get("error")
    if error is not None:
        message = cast("dict[str, object]", error).get("message") if isinstance(error, dict) else error
        return Event(says_something=False, finish_reason=None, usage=None, error=str(message))
    choices: list[dict[str, Any]] = fields.get("choices") or []
    return Event(
        says_something=any(_says(choice) for choice in choices),
        finish_reason=next((one["finish_reason"] for one in choices if one.get("finish_reason")), None),
        usage=fields.get("usage"),
        error=None,
    )


def _says(choice: dict[str, Any]) -> bool:
    delta: dict[str, Any] = choice.get("delta") or {}
    parts = ("content", "reasoning", "reasoning_content", "tool_calls")
    return bool(choice.get("text")) or any(delta.get(part) for part in parts)
