"""Answers that are interrupted by a fault, and must continue as if there had been none."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import httpx

BODY: Mapping[str, object] = {
    "prompt": [5, 6, 7],
    "max_tokens": 80,
    "ignore_eos": True,
    "temperature": 0,
    "stream": True,
}
"""A completion that is long enough to be interrupted."""


@dataclass(frozen=True)
class Interrupted:
    """A streamed completion that came to its end."""

    text: str
    names: tuple[str, ...]
    """Text of each token, if the request asked for log-probabilities."""
    comments: tuple[str, ...]
    """Comments of the stream."""


def complete(client: httpx.Client, body: Mapping[str, object] = BODY) -> str:
    """Return the text of an undisturbed completion."""
    answer = client.post("/v1/completions", json={**body, "stream": False})
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"]


def interrupt(
    client: httpx.Client, fault: Callable[[], object], body: Mapping[str, object] = BODY
) -> Interrupted:
    """Stream a completion, cause a fault after its first event, and read the stream to its end."""
    with client.stream("POST", "/v1/completions", json=body) as answer:
        assert answer.status_code == 200, answer.read()
        lines = (line for line in answer.iter_lines() if line)
        first = [next(lines), next(lines)]
        fault()
        return read([*first, *lines])


def read(lines: Iterable[str]) -> Interrupted:
    """Read the lines of a stream. Its events must be those of one complete answer."""
    text, ended = "", False
    names, comments = list[str](), list[str]()
    for line in lines:
        if line.startswith(":"):
            comments.append(line)
            continue
        data = line.removeprefix("data: ")
        if data == "[DONE]":
            ended = True
            continue
        event: dict[str, Any] = json.loads(data)
        assert "error" not in event, event["error"]
        for choice in event["choices"]:
            text += choice["text"]
            logprobs: dict[str, list[str]] = choice.get("logprobs") or {}
            names += logprobs.get("tokens", [])
    assert ended
    return Interrupted(text, tuple(names), tuple(comments))
