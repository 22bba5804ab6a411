"""Shared code of the programs: named checks that run in turn; each is reported as one line of JSON.

Every client's own Python runs this module, so it uses only the standard library.
    python with_CLIENT.py URL KEY MODEL FOUND
FOUND is the output file, because clients print to stdout too.
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
"""Server address without `/v1`, API key, and model id with a slash."""

WRONG_KEY = "not-the-key"
QUESTION = "What is the capital of France?"
ANSWER = "The capital of France is Paris."
WEATHER_QUESTION = "What is the weather in Paris?"
WEATHER_RESULT = '{"city": "Paris", "degrees": 21, "sky": "sunny"}'
WEATHER_ANSWER = "It is 21 degrees and sunny in Paris."
"""Answer that the demo model knows, like the tool and its result."""

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
"""Schema whose answers are all short, so that a small model always finishes."""
LAMP_REQUEST = "Describe a lamp."

Check = Callable[[], None] | Callable[[], Awaitable[None]]
_checks: list[tuple[str, Check]] = []


def check(name: str) -> Callable[[Check], Check]:
    """Register a function as the check of this name; it passes if it raises nothing."""

    def add(function: Check) -> Check:
        _checks.append((name, function))
        return function

    return add


def is_lamp(value: object) -> bool:
    """Return true if the value matches LAMP_SCHEMA."""
    return (
        isinstance(value, dict)
        and value.keys() == {"room", "on", "brightness"}
        and value["room"] in {"kitchen", "garden", "hall"}
        and isinstance(value["on"], bool)
        and type(value["brightness"]) is int
        and 0 <= value["brightness"] <= 100
    )


def expect(condition: object, *found: object) -> None:
    """Assert a condition and report the actual value; unlike `assert`, also under `python -O`."""
    if not condition:
        raise AssertionError(f"found {', '.join(map(repr, found))}")


def equal(found: object, expected: object) -> None:
    if found != expected:
        raise AssertionError(f"found {found!r} where {expected!r} was expected")


def raises(kind: type[BaseException], call: Callable[[], object]) -> BaseException:
    """Return the exception that the call raises, which must be of this type."""
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
    """Return the exception of a check. All checks share one event loop, because a client's connections do."""
    try:
        result = function()
        if inspect.isawaitable(result):
            loop.run(_finish(result))
    except Exception:  # noqa: BLE001 - whatever a client raises is what the check is for
        return traceback.format_exc(limit=-6)
    return None


async def _finish(result: Awaitable[None]) -> None:
    await result
