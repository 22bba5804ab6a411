"""What the programs share: checks with names, run in turn, each told as a line of JSON.

Every client's own Python runs this, so it has the standard library and nothing else.
    python with_CLIENT.py URL KEY MODEL FOUND
FOUND is the file that the lines go to: clients print much of their own.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import sys
import traceback
from collections.abc import Awaitable, Callable
from pathlib import Path

URL, KEY, MODEL = sys.argv[1:4]
"""The server without `/v1`, its key, and a model id with a slash in it."""

WRONG_KEY = "not-the-key"
QUESTION = "What is the capital of France?"
ANSWER = "The capital of France is Paris."
WEATHER_QUESTION = "What is the weather in Paris?"
WEATHER_RESULT = '{"city": "Paris", "degrees": 21, "sky": "sunny"}'
WEATHER_ANSWER = "It is 21 degrees and sunny in Paris."
"""The demo model knows these, also the tool and what to make of its result."""

CITY_SCHEMA: dict[str, object] = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
LAMP_SCHEMA: dict[str, object] = {
    "type": "object",
    "properties": {
        "room": {"type": "string", "enum": ["kitchen", "garden", "hall"]},
        "on": {"type": "boolean"},
        "brightness": {"type": "integer", "minimum": 0, "maximum": 100},
    },
    "required": ["room", "on", "brightness"],
    "additionalProperties": False,
}
"""Every answer that matches it is short, so whatever a small model makes of it ends."""
LAMP_REQUEST = "Describe a lamp."

Check = Callable[[], None] | Callable[[], Awaitable[None]]
_checks: list[tuple[str, Check]] = []


def check(name: str) -> Callable[[Check], Check]:
    """Have a function run as the check of this name; it is passed when it raises nothing."""

    def add(function: Check) -> Check:
        _checks.append((name, function))
        return function

    return add


def is_lamp(value: object) -> bool:
    """Whether it matches LAMP_SCHEMA."""
    return (
        isinstance(value, dict)
        and value.keys() == {"room", "on", "brightness"}
        and value["room"] in {"kitchen", "garden", "hall"}
        and isinstance(value["on"], bool)
        and type(value["brightness"]) is int
        and 0 <= value["brightness"] <= 100
    )


def expect(condition: object, *found: object) -> None:
    """Like assert, with what was found; `python -O` keeps it."""
    if not condition:
        raise AssertionError(f"found {', '.join(map(repr, found))}")


def equal(found: object, expected: object) -> None:
    if found != expected:
        raise AssertionError(f"found {found!r} where {expected!r} was expected")


def raises(kind: type[BaseException], call: Callable[[], object]) -> BaseException:
    """What the call raises, which must be of this kind."""
    try:
        found = call()
    except kind as error:
        return error
    raise AssertionError(f"{kind.__name__} was expected, and it returned {found!r}")


def run() -> None:
    with Path(sys.argv[4]).open("w", encoding="utf-8") as found, asyncio.Runner() as loop:
        for name, function in _checks:
            line = json.dumps({"check": name, "error": _error_of(function, loop)})
            print(line, file=found, flush=True)


def _error_of(function: Check, loop: asyncio.Runner) -> str | None:
    """What it raises. All share one event loop, as a client keeps its connections in one."""
    try:
        result = function()
        if inspect.isawaitable(result):
            loop.run(_finish(result))
    except Exception:  # noqa: BLE001 - whatever a client raises is what the check is for
        return traceback.format_exc(limit=-6)
    return None


async def _finish(result: Awaitable[None]) -> None:
    await result
