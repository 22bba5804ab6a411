"""Messages of one side that stand next to each other, where a dialect or a template takes them for one turn."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import cast


def join_neighbours(
    messages: Iterable[Mapping[str, object]], roles: Collection[str]
) -> list[dict[str, object]]:
    """The messages, with neighbours of the same one of these roles put together, a paragraph each."""
    joined: list[dict[str, object]] = []
    for message in messages:
        if joined and message["role"] in roles and joined[-1]["role"] == message["role"]:
            joined[-1] = _together(joined[-1], message)
        else:
            joined.append(dict(message))
    return joined


def _together(first: Mapping[str, object], second: Mapping[str, object]) -> dict[str, object]:
    both = {**first, **second, "content": _text(first["content"], second["content"], "\n")}
    calls = [*_calls(first), *_calls(second)]
    if calls:
        both["tool_calls"] = calls
    if "reasoning_content" in first and "reasoning_content" in second:
        both["reasoning_content"] = _text(first["reasoning_content"], second["reasoning_content"], "\n")
    return both


def _text(first: object, second: object, between: str) -> str:
    return between.join(str(text) for text in (first, second) if text)


def _calls(message: Mapping[str, object]) -> list[object]:
    return cast("list[object]", message.get("tool_calls", []))
