"""Values as one line of JSON each, and as server-sent events."""

from __future__ import annotations

import json
from collections.abc import Mapping

_ENCODER = json.JSONEncoder(separators=(",", ":"))

Json = dict[str, object]


def json_bytes(value: Mapping[str, object]) -> bytes:
    """In ASCII: some clients take U+2028 and its like for the end of a line."""
    return _ENCODER.encode(value).encode()


def event(value: Mapping[str, object], name: str | None = None) -> bytes:
    """A server-sent event, with a name where the dialect has names."""
    named = b"" if name is None else b"event: %s\n" % name.encode()
    return named + b"data: %s\n\n" % json_bytes(value)
