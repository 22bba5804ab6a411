"""Grammars in llguidance's dialect of Lark, and the JSON schemas within them. Pure.

`closed` keeps models from inventing properties. Formats whose arguments are not JSON read schemas property by property.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import cast
from urllib.parse import unquote

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


# ---- schemas of tools


Schema = Mapping[str, object]

NOTHING: Schema = {"type": "object", "properties": {}, "additionalProperties": False}
"""Schema of a tool that takes no arguments."""
STRING_KEYS = frozenset({"type", "enum", "const", "title", "description", "default", "examples", "$comment"})
"""Keywords of a string's schema that lists its texts or allows any."""
_LENIENT = {"lenient": True, "coerce_one_of": True}
"""Options for tools that are not strict. Keywords that cannot be enforced are ignored."""
DEFINITIONS = ("$defs", "definitions")
_PLAIN_KEYS = frozenset(
    {
        *("type", "properties", "required", "additionalProperties", *DEFINITIONS),
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
    return {**{key: given[key] for key in DEFINITIONS if key in given}, **schema}


def texts_of(schema: Schema) -> list[str] | None:
    """Return the possible texts of a property if the schema lists them."""
    if not schema.keys() <= STRING_KEYS:
        return None
    given = [schema["const"]] if "const" in schema else schema.get("enum")
    if not isinstance(given, list) or not given:
        return None
    values = cast("list[object]", given)
    return [str(value) for value in values] if all(isinstance(value, str) for value in values) else None


# ---- objects without further properties


def closed(schema: Schema, param: str) -> Schema:
    """Return a schema whose objects have no properties but those that it names.

    An object that names properties and says nothing of further ones is closed, as by llama.cpp and by OpenAI's strict
    schemas. It may have the properties that all parts of its schema name: `allOf`, `anyOf`, `oneOf` and `$ref`. It stays
    open where it says so, or where nothing could match it if it were closed.

    Raises:
        RequestError: the schema, which the request gives as `param`, is nested too deeply.
    """
    try:
        return _Closing(schema).result()
    except RecursionError as error:
        raise RequestError("The schema cannot be read: it is nested too deeply.", param=param) from error


_PARTS = ("allOf", "anyOf", "oneOf")
_BY_NAME = ("properties", "patternProperties", *DEFINITIONS)
_OF_VALUES = ("items", "prefixItems", "additionalProperties", "unevaluatedItems", "contains")
_OF_OBJECTS = frozenset({"properties", "required", "minProperties"})
_STAYS_OPEN = frozenset(
    {
        *("additionalProperties", "unevaluatedProperties", "propertyNames", "const", "enum", "not"),
        *("if", "then", "else", "dependentSchemas", "dependencies", "$dynamicRef", "$recursiveRef"),
    }
)
"""Keywords of an object that describes its further properties itself, or that might not match once it is closed."""


@dataclass(slots=True)
class _Names:
    """Properties of an object, as its schema and the parts of it name them."""

    named: dict[str, None] = field(default_factory=dict[str, None])
    """Properties that have a schema, in order."""
    required: set[str] = field(default_factory=set[str])
    least: int = 0
    """Number of properties that the object needs."""
    may_conflict: bool = False
    """True if a named property may have no value, because several schemas describe it."""

    def add(self, schema: Schema) -> None:
        """Add what one schema says."""
        properties, least = schema.get("properties"), schema.get("minProperties")
        if isinstance(properties, Mapping):
            self.named |= dict.fromkeys(cast("Schema", properties))
            self.may_conflict |= False in cast("Schema", properties).values()
        self.required |= {name for name in _listed(schema, "required") if isinstance(name, str)}
        self.least = max(self.least, least if isinstance(least, int) else 0)
        self.may_conflict |= bool(schema.keys() & {"patternProperties", "$ref", *_PARTS})

    @property
    def are_enough(self) -> bool:
        """True if an object without further properties can match."""
        return (
            bool(self.named)
            and self.required <= self.named.keys()
            and self.least <= (0 if self.may_conflict else len(self.named))
        )


class _Closing:
    """Schema whose objects are being closed.

    An object consists of parts if it has `allOf`, `anyOf`, `oneOf` or `$ref`. They stay open, and only the whole object
    is closed. So a definition that is a part gets a twin that stays open.
    """

    def __init__(self, root: Schema) -> None:
        self._root = root
        self._twins: dict[str, object] = {}
        """Open twins by the references of their originals."""

    def result(self) -> Schema:
        result = cast("dict[str, object]", self._value(self._root))
        if self._twins:
            twins = {_twin_name(ref): twin for ref, twin in self._twins.items()}
            result["$defs"] = {**cast("Schema", result.get("$defs", {})), **twins}
        return result

    def _value(self, given: object) -> object:
        """Return the schema of a value with every object in it closed."""
        if not isinstance(given, Mapping):
            return given
        schema = cast("Schema", given)
        if not schema.keys() & _OF_OBJECTS and _number_of_parts(schema) <= 1:
            return self._with(schema, self._value)
        result = self._part(schema)
        names = _Names()
        if self._collect(schema, names, set()) and names.are_enough:
            own = cast("Schema", result.get("properties", {}))
            result["properties"] = {**own, **{name: True for name in names.named if name not in own}}
            result["additionalProperties"] = False
        return result

    def _part(self, schema: Schema) -> dict[str, object]:
        """Return an object's schema, or a part of one, with every object in its values closed, but not itself."""
        result = self._with(
            schema, lambda part: self._part(cast("Schema", part)) if isinstance(part, Mapping) else part
        )
        if isinstance(ref := schema.get("$ref"), str) and isinstance(self._target(ref), Mapping):
            result["$ref"] = f"#/$defs/{_twin_name(ref)}"
            if ref not in self._twins:
                self._twins[ref] = None  # it may refer to itself
                self._twins[ref] = self._part(cast("Schema", self._target(ref)))
        return result

    def _with(self, schema: Schema, of_part: Callable[[object], object]) -> dict[str, object]:
        """Return a copy with its values closed, and with what `of_part` makes of its parts."""
        result = dict(schema)
        for key, given in schema.items():
            if key in _PARTS and isinstance(given, list):
                result[key] = [of_part(part) for part in cast("list[object]", given)]
            elif key in _BY_NAME and isinstance(given, Mapping):
                values = cast("Schema", given)
                result[key] = {name: self._value(value) for name, value in values.items()}
            elif key in _OF_VALUES and isinstance(given, list):
                result[key] = [self._value(value) for value in cast("list[object]", given)]
            elif key in _OF_VALUES:
                result[key] = self._value(given)
        return result

    def _collect(self, schema: Schema, names: _Names, seen: set[str]) -> bool:
        """Add what a schema and its parts say of properties. Return False if the object has to stay open.

        `seen` are the references that were followed: each counts once, however many parts have it.
        """
        if schema.keys() & _STAYS_OPEN:
            return False
        names.add(schema)
        parts = [part for key in _PARTS for part in _listed(schema, key)]
        ref = schema.get("$ref")
        if isinstance(ref, str) and ref not in seen:
            seen.add(ref)
            if not isinstance(target := self._target(ref), Mapping):
                return False
            parts.append(cast("Schema", target))
        return all(
            self._collect(cast("Schema", part), names, seen) for part in parts if isinstance(part, Mapping)
        )

    def _target(self, ref: str) -> object:
        """Return what a reference within the schema names; None if nothing is there."""
        start, *steps = unquote(ref).split("/")
        found: object = self._root if start == "#" else None
        for step in (step.replace("~1", "/").replace("~0", "~") for step in steps):
            if isinstance(found, list):
                found = {str(place): value for place, value in enumerate(cast("list[object]", found))}
            found = cast("Schema", found).get(step) if isinstance(found, Mapping) else None
        return found


def _twin_name(ref: str) -> str:
    """Return a name that no pointer has to escape, and that other definitions hardly have."""
    return "open-" + "".join(each if each.isalnum() else f"-{ord(each):x}-" for each in ref)


def _listed(schema: Schema, key: str) -> list[object]:
    given = schema.get(key)
    return cast("list[object]", given) if isinstance(given, list) else []


def _number_of_parts(schema: Schema) -> int:
    """Return how many parts an object consists of besides its own keywords; alternatives count once."""
    return len(_listed(schema, "allOf")) + len({"anyOf", "oneOf", "$ref"} & schema.keys())
