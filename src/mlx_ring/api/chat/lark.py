"""Grammars in llguidance's dialect of Lark. Pure.

Also the schemas of tools, for formats whose arguments are not JSON.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import cast

from mlx_ring.api.chat.request import Tool
from mlx_ring.core.errors import RequestError
from mlx_ring.models.grammars import JSON_OPTIONS

ANY_TEXT = "/(?s:.*)/"
"""Pattern of any text. Special tokens are not text."""
SPACE = r"/[ \t\r\n]{1,8}/"
PYTHON_STRINGS = {"json_allowed_escapes": 'nrbtf\\"'}
"""Options for JSON strings that are read as Python's, which has fewer escapes."""


@dataclass(slots=True)
class LarkGrammar:
    """Grammar in construction."""

    tokens: Mapping[str, int]
    """Special tokens by their text."""
    rules: dict[str, str] = field(default_factory=dict[str, str])

    def add(self, name: str, body: str) -> str:
        """Add a rule and return its name."""
        self.rules[name] = body
        return name

    def fresh(self, body: str, *, lazy: bool = False) -> str:
        """Add a rule under a new name. A lazy rule matches as little as possible."""
        name = f"r{len(self.rules)}"
        self.rules[f"{name}[lazy]" if lazy else name] = body
        return name

    def exactly(self, text: str) -> str:
        """Return an expression of a text, with special tokens by their ids."""
        return " ".join(
            f"<[{self.tokens[piece]}]>" if piece in self.tokens else json.dumps(piece)
            for piece in self.pieces(text)
        )

    def json(self, schema: Mapping[str, object], **options: object) -> str:
        """Return an expression of JSON under a schema."""
        try:
            return f"%json {json.dumps(dict(schema) | {'x-guidance': JSON_OPTIONS | options})}"
        except (RecursionError, TypeError, ValueError) as error:
            raise RequestError(f"The schema cannot be read: {error}.") from error

    def until(self, text: str, *, besides: str = "") -> str:
        """Return an expression of any text up to and including the first `text`; `besides` restricts the whole.

        Parsers recognize a mark without the white space at its ends too.
        """
        first, *others = self.pieces(text)
        free = ANY_TEXT
        if besides or first != first.strip():
            others_than = f" & ~/{besides}/" if besides else ""
            free = self._terminal(f"{ANY_TEXT} & {_without(first.strip() or first)}{others_than}")
        if first in self.tokens:
            return f"{free} {self.exactly(text)}"
        head = self.fresh(f"{free} {json.dumps(first)}", lazy=True)
        return f"{head} {self.exactly(''.join(others))}" if others else head

    def until_mark(self, mark: str, within: Iterable[str] = ()) -> str:
        """Return an expression of any text up to a mark in any spelling. The text must match each of `within`."""
        free = self._terminal(" & ".join([ANY_TEXT, _without(mark), *within]))
        if mark in self.tokens:
            return f"{free} {self.exactly(mark)}"
        return self._terminal(f"{free} {json.dumps(mark)}")

    def in_order(self, values: Mapping[str, str], required: Collection[object], *, between: str) -> str:
        """Return an expression of the values in order, each at most once, and those in `required` exactly once."""
        first = after = '""'
        for name, value in reversed(list(values.items())):
            optional = name not in required
            written = f"{self.fresh(value)} {after}"
            first = self.fresh(f"{written} | {first}" if optional else written)
            after = self.fresh(f"{between} {written} | {after}" if optional else f"{between} {written}")
        return first

    def pieces(self, text: str) -> list[str]:
        """Split a text into special tokens and the texts between them."""
        known = "|".join(map(re.escape, sorted(self.tokens, key=len, reverse=True)))
        return [piece for piece in (re.split(f"({known})", text) if known else [text]) if piece]

    def write(self) -> str:
        return "\n".join(["%llguidance {}", *(f"{name}: {body}" for name, body in self.rules.items())])

    def _terminal(self, body: str) -> str:
        name = f"T{len(self.rules)}"
        self.rules[name] = body
        return name


def either(options: Iterable[str]) -> str:
    """Return an expression of one of several options."""
    return f"({' | '.join(options)})"


def _without(text: str) -> str:
    """Return an expression of every text that does not contain this one."""
    literally = re.escape(text).replace("/", r"\/").replace("\\\n", r"\n")
    return f"~/(?s:.*){literally}(?s:.*)/"


Schema = Mapping[str, object]

NOTHING: Schema = {"type": "object", "properties": {}, "additionalProperties": False}
"""Schema of a tool that takes no arguments."""
STRING_KEYS = frozenset({"type", "enum", "const", "title", "description", "default", "examples", "$comment"})
"""Keywords of a string's schema that lists its texts or allows any."""
_LENIENT = {"lenient": True, "coerce_one_of": True}
"""Options for tools that are not strict. Keywords that cannot be enforced are ignored."""
_DEFINITIONS = ("$defs", "definitions")
_PLAIN_KEYS = frozenset(
    {
        *("type", "properties", "required", "additionalProperties", *_DEFINITIONS),
        *("title", "description", "$schema", "$id", "$comment", "default", "examples"),
    }
)
"""Keywords of a schema whose arguments can be written one by one."""


def options_of(tool: Tool) -> Mapping[str, object]:
    """Return llguidance's options for JSON under a tool's schema."""
    return {} if tool.strict else _LENIENT


def properties_of(tool: Tool) -> Mapping[str, Schema]:
    """Return the properties of a tool whose arguments are written one by one.

    Raises:
        RequestError: the tool is strict, and its schema restricts more than each single argument.
    """
    schema = tool.parameters or NOTHING
    others = sorted(schema.keys() - _PLAIN_KEYS)
    if others and tool.strict:
        raise RequestError(
            f"'{others[0]}' in the parameters of tool '{tool.name}' cannot be enforced in this model's format.",
            param="tools",
        )
    properties = schema.get("properties", {})
    if not isinstance(properties, Mapping):
        raise RequestError(f"'properties' of tool '{tool.name}' is no object.", param="tools")
    given = cast("Mapping[str, object]", properties)
    missing = [name for name in required_of(tool) if name not in given]
    if missing and tool.strict:
        raise RequestError(f"Tool '{tool.name}' requires '{missing[0]}', which has no schema.", param="tools")
    return {
        name: cast("Schema", value) if isinstance(value, Mapping) else {} for name, value in given.items()
    }


def required_of(tool: Tool) -> list[str]:
    """Return the names of the required arguments."""
    required = (tool.parameters or NOTHING).get("required", [])
    return [str(name) for name in cast("list[object]", required)] if isinstance(required, list) else []


def alone_of(tool: Tool, schema: Schema) -> Schema:
    """Return a property's schema with the definitions that it may refer to."""
    given = tool.parameters or {}
    return {**{key: given[key] for key in _DEFINITIONS if key in given}, **schema}


def texts_of(schema: Schema) -> list[str] | None:
    """Return the possible texts of a property if the schema lists them."""
    if not schema.keys() <= STRING_KEYS:
        return None
    given = [schema["const"]] if "const" in schema else schema.get("enum")
    if not isinstance(given, list) or not given:
        return None
    values = cast("list[object]", given)
    return [str(value) for value in values] if all(isinstance(value, str) for value in values) else None
