"""What an answer consists of, in the order in which it comes.

A JSON object in text that comes in pieces: where it ends, and whether it still is one.

Marks in text that comes in pieces, where one may be cut anywhere.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

EndReason = Literal["stop", "length", "tool_calls"]
"""Why an answer ended: by itself or at a stop string, at its limit, or to have tools called."""


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text that the model thinks before it answers."""

    text: str


@dataclass(frozen=True, slots=True)
class Content:
    """Text of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class CallOpening:
    """A tool call begins. Its name comes whole; its arguments follow before anything else opens."""

    index: int
    """Among the answer's calls, from 0."""
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of the arguments of a call: all pieces joined are one JSON object."""

    index: int
    text: str


AnswerPart = Reasoning | Content | CallOpening | CallArguments


_OUTSIDE = frozenset('{}[],:" \t\r\n0123456789+-.eEtrufalsn')
"""All that stands in JSON outside of strings."""


class JsonObject:
    """Passes an object on as it is written, from its first brace to its last.

    Line breaks and their like, which models write into strings and JSON does not allow there, are spelt out.
    """

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self.is_broken = False
        """Whether it can't become JSON any more."""

    def push(self, text: str) -> tuple[str, str | None]:
        """What of `text` belongs to the object, and what follows it; None while it has not ended."""
        taken: list[str] = []
        for place, character in enumerate(text):
            if not self._in_string and character not in _OUTSIDE:
                self.is_broken = True
                return "".join(taken), text[place:]
            taken.append(self._take(character))
            if self._depth == 0:
                return "".join(taken), text[place + 1 :]
        return "".join(taken), None

    def _take(self, character: str) -> str:
        if self._in_string:
            return self._take_inside(character)
        self._in_string = character == '"'
        self._depth += (character in "{[") - (character in "}]")
        return character

    def _take_inside(self, character: str) -> str:
        self._in_string = self._escaped or character != '"'
        self._escaped = not self._escaped and character == "\\"
        return json.dumps(character)[1:-1] if character < " " else character


def is_object(text: str) -> bool:
    """Whether text is one JSON object."""
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


def first_mark(text: str, marks: Iterable[str]) -> tuple[int, str] | None:
    """Where the first mark begins, and which; of several that begin there the longest."""
    found = [(place, mark) for mark in marks if (place := text.find(mark)) >= 0]
    return min(found, key=lambda one: (one[0], -len(one[1])), default=None)


def open_end(text: str, marks: Iterable[str]) -> int:
    """Characters at the end of `text` that may be the beginning of a mark. Asked for every token: mostly there are none."""
    return max((_open_end(text, mark) for mark in marks), default=0)


def _open_end(text: str, mark: str) -> int:
    place = text.find(mark[0], max(0, len(text) - len(mark) + 1))
    while place >= 0 and not mark.startswith(text[place:]):
        place = text.find(mark[0], place + 1)
    return len(text) - place if place >= 0 else 0
