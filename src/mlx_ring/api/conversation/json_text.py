"""A JSON object in text that comes in pieces: where it ends, and whether it still is one."""

from __future__ import annotations

import json

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
