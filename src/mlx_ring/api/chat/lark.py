"""Grammars in llguidance's dialect of Lark, and the JSON schemas within them. Pure.

`closed` keeps models from inventing properties. Formats whose arguments are not JSON read schemas property by property.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import cast

from mlx_ring.api.chat.json_schemas import MOST_NODES, NAMED_PLACES, Schema, names_as_patterns, schema_at
from mlx_ring.api.chat.request import Tool
from mlx_ring.core.errors import RequestError
from mlx_ring.models.grammars import JSON_OPTIONS

ANY_TEXT = "/(?s:.*)/"
"""Pattern of any text. Special tokens are not text."""
SPACE = r"/[ \t\r\n]{1,12}/"
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
        known = schema if options.get("lenient") else names_as_patterns(schema)
        try:
            return f"%json {json.dumps(dict(known) | {'x-guidance': JSON_OPTIONS | options})}"
        except (RecursionError, TypeError, ValueError) as error:
            raise RequestError(f"The schema cannot be read: {error}.") from error

    def until(self, text: str, *, besides: str = "") -> str:
        """Return an expression of any text up to and including the first `text`; `besides` restricts the whole.

        Parsers recognize a mark without the white space at its ends too.
        """
        first, *others = self.pieces(text)
        free = ANY_TEXT
        if others and first not in self.tokens:  # the token behind it makes it a mark
            start = re.escape(first).replace("/", r"\/")
            free = self.terminal(f"/(?s:.*){start}/ & {_without(first + others[0])}{_other_than(besides)}")
            return f"{free} {self.exactly(''.join(others))}"
        if besides or first != first.strip():
            free = self.terminal(f"{ANY_TEXT} & {_without(first.strip() or first)}{_other_than(besides)}")
        if first in self.tokens:
            return f"{free} {self.exactly(text)}"
        return self.fresh(f"{free} {json.dumps(first)}", lazy=True)

    def text_besides(self, pattern: str) -> str:
        """Return an expression of any text that does not match the pattern, if there is one."""
        return self.terminal(f"{ANY_TEXT}{_other_than(pattern)}") if pattern else ANY_TEXT

    def until_mark(self, mark: str, within: Iterable[str] = ()) -> str:
        """Return an expression of any text up to a mark in any spelling. The text must match each of `within`."""
        free = self.terminal(" & ".join([ANY_TEXT, _without(mark), *within]))
        if mark in self.tokens:
            return f"{free} {self.exactly(mark)}"
        return self.terminal(f"{free} {json.dumps(mark)}")

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

    def terminal(self, body: str) -> str:
        """Add a terminal under a new name and return it."""
        name = f"T{len(self.rules)}"
        self.rules[name] = body
        return name


def either(options: Iterable[str]) -> str:
    """Return an expression of one of several options."""
    return f"({' | '.join(options)})"


def _other_than(pattern: str) -> str:
    return f" & ~/{pattern}/" if pattern else ""


def _without(text: str) -> str:
    """Return an expression of every text that does not contain this one."""
    literally = re.escape(text).replace("/", r"\/").replace("\\\n", r"\n")
    return f"~/(?s:.*){literally}(?s:.*)/"


@dataclass(frozen=True, slots=True)
class WrittenCalls:
    """Text of one or several calls, with words for its variable parts.

    `NAME` is the tool's name, `JSON` the arguments, `NUMBER` any number, `START` and `END` are the marks around calls,
    and `~` is optional white space.
    """

    call: str
    between: str = ""
    before: str = ""
    behind: str = ""

    def name_pattern(self, start: str, end: str) -> re.Pattern[str]:
        """Return the pattern of a call's start up to the end of its tool's name."""
        heading, _, rest = self.call.partition("NAME")
        texts = (self.before.strip(), self.between.strip(), heading, rest[0])
        before, between, heading, behind = map(re.escape, texts)
        pattern = rf"\s*(?:{before}|{between})?\s*{heading}(?P<name>[^{behind}]+){behind}"
        for word, text in (("START", start), ("END", end)):
            pattern = pattern.replace(word, re.escape(text))
        return re.compile(pattern.replace(r"\~", r"\s*").replace("NUMBER", r"\d+"))


# ---- schemas of tools


NOTHING: Schema = {"type": "object", "properties": {}, "additionalProperties": False}
"""Schema of a tool that takes no arguments."""
_LENIENT = {"lenient": True, "coerce_one_of": True}
"""Options for tools that are not strict. Keywords that cannot be enforced are ignored."""
DEFINITIONS = ("$defs", "definitions")


def options_of(tool: Tool) -> Mapping[str, object]:
    """Return llguidance's options for JSON under a tool's schema."""
    return {} if tool.strict else _LENIENT


# ---- objects without further properties


def closed(schema: Schema) -> Schema:
    """Return a schema whose objects have no properties but those that it names.

    An object that names properties and says nothing of further ones is closed, as by llama.cpp and by OpenAI's strict
    schemas. It may have the properties that all parts of its schema name: `allOf`, `anyOf`, `oneOf` and `$ref`. It stays
    open where it says so, and where nothing might match it if it were closed: among others, values within parts, which
    several of them may describe. A schema with references beyond itself, or of unusual size or depth, is returned as it is.
    """
    if not _can_be_closed(schema):
        return schema
    try:
        return _Closing(schema).result()
    except (RecursionError, _TooLargeError):
        return schema


_PARTS = ("allOf", "anyOf", "oneOf")
_OF_VALUES = ("items", "prefixItems", "additionalProperties")
_OF_OBJECTS = frozenset({"properties", "required", "minProperties", "patternProperties"})
_OF_ARRAYS = frozenset({"items", "prefixItems", "contains", "unevaluatedItems"})
_STAYS_OPEN = frozenset(
    {
        *("additionalProperties", "unevaluatedProperties", "propertyNames", "const", "enum", "not"),
        *("if", "then", "else", "dependentSchemas", "dependentRequired", "dependencies"),
    }
)
"""Keywords of an object that describes its further properties itself, or that might not match once it is closed."""


class _TooLargeError(Exception):
    """Copies of definitions are too large together."""


def _can_be_closed(schema: Schema) -> bool:
    """Return True if every reference is a path from the root, and the schema is of a usual size."""
    if any(key in schema and not isinstance(schema[key], Mapping) for key in DEFINITIONS):
        return False
    open_: list[object] = [value for key, value in schema.items() if key != "$id"]
    for _ in range(MOST_NODES):
        if not open_:
            return True
        node = open_.pop()
        if isinstance(node, list):
            open_ += cast("list[object]", node)
        elif isinstance(node, Mapping):
            given = cast("Schema", node)
            if given.keys() & NAMED_PLACES:
                return False
            open_ += given.values()
            ref = given.get("$ref")
            if isinstance(ref, str) and ref != "#" and not ref.startswith("#/"):
                return False
    return False


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

    An object consists of parts if it has `allOf`, `anyOf`, `oneOf` or `$ref`. They stay as they are, and only the whole
    object is closed. So a definition that is a part, or within one, gets a twin that stays open.
    """

    def __init__(self, root: Schema) -> None:
        self._root = root
        self._names: dict[int, str] = {}
        """Names of the open twins, by the identity of their originals."""
        self._twins: dict[str, object] = {}
        self._copied = 0

    def result(self) -> Schema:
        result = cast("dict[str, object]", self._value(self._root))
        if self._twins:
            result["$defs"] = {**cast("Schema", result.get("$defs", {})), **self._twins}
        return result

    def _value(self, given: object) -> object:
        """Return the schema of a value with every object in it closed."""
        if not isinstance(given, Mapping):
            return given
        schema = cast("Schema", given)
        number = _number_of_parts(schema)
        if number and (number > 1 or schema.keys() & (_OF_OBJECTS | _OF_ARRAYS | _STAYS_OPEN)):
            return self._of_parts(schema)
        result = dict(schema)
        overlap = "patternProperties" in schema
        for key, value in schema.items():
            if key in DEFINITIONS or (key == "properties" and not overlap):
                values = cast("Schema", value if isinstance(value, Mapping) else {})
                result[key] = {name: self._value(each) for name, each in values.items()}
            elif key in _OF_VALUES or (key in _PARTS and self._are_apart(key, value)):
                several = isinstance(value, list)
                result[key] = (
                    [self._value(each) for each in cast("list[object]", value)]
                    if several
                    else self._value(value)
                )
            elif key in _PARTS or key in _OF_ARRAYS or key in ("properties", "patternProperties"):
                result[key] = self._as_it_is(value)
        return result if number else self._shut(schema, result)

    def _of_parts(self, schema: Schema) -> Schema:
        """Return an object that consists of parts, closed as a whole."""
        result = cast("dict[str, object]", self._as_it_is(schema))
        for key in DEFINITIONS:
            values = cast("Schema", schema.get(key, {}))
            if values:
                result[key] = {name: self._value(each) for name, each in values.items()}
        return self._shut(schema, result)

    def _shut(self, schema: Schema, result: dict[str, object]) -> dict[str, object]:
        """Close an object, if it may be closed."""
        names = _Names()
        if self._collect(schema, names, set(), is_part=False) and names.are_enough:
            own = cast("Schema", result.get("properties", {}))
            result["properties"] = {**own, **{name: True for name in names.named if name not in own}}
            result["additionalProperties"] = False
        return result

    def _are_apart(self, key: str, branches: object) -> bool:
        """Return True if branches can be closed one by one: no value that matches one can match another instead.

        Those of `oneOf` have to differ in the constant value of a required property. Otherwise a value might match several
        of them, which is no longer so once they are closed.
        """
        if key != "oneOf" or not isinstance(branches, list):
            return True
        tags: list[dict[str, str]] = []
        for branch in cast("list[object]", branches):
            schema = self._behind_references(branch)
            given = schema.get("properties")
            properties = cast("Schema", given if isinstance(given, Mapping) else {})
            required = _listed(schema, "required")
            tags.append(
                {
                    str(name): tag
                    for name in required
                    if (tag := _constant(properties.get(str(name)))) is not None
                }
            )
        return any(
            len({tag.get(name) for tag in tags} - {None}) == len(tags) for name in (tags[0] if tags else ())
        )

    def _behind_references(self, branch: object) -> Schema:
        seen: set[str] = set()
        while isinstance(branch, Mapping):
            schema = cast("Schema", branch)
            ref = schema.get("$ref")
            if not isinstance(ref, str) or ref in seen:
                return schema
            seen.add(ref)
            branch = schema_at(self._root, ref)
        return {}

    def _as_it_is(self, given: object) -> object:
        """Return a copy in which references lead to open definitions."""
        self._copied += 1
        if self._copied > MOST_NODES:
            raise _TooLargeError
        if isinstance(given, list):
            return [self._as_it_is(each) for each in cast("list[object]", given)]
        if not isinstance(given, Mapping):
            return given
        result: dict[str, object] = {}
        for key, value in cast("Schema", given).items():
            if key == "$ref" and isinstance(value, str):
                result[key] = self._open_twin(value)
            elif key not in DEFINITIONS:
                result[key] = self._as_it_is(value)
        return result

    def _open_twin(self, ref: str) -> str:
        """Return a reference to the open twin of what a reference names, or itself if nothing is there."""
        target = schema_at(self._root, ref)
        if not isinstance(target, Mapping):
            return ref
        definition, taken = cast("Schema", target), cast("Schema", self._root.get("$defs", {}))
        name = self._names.get(id(definition))
        if name is None:
            name = f"open-{len(self._names) + 1}"
            while name in taken:
                name += "-"
            self._names[id(definition)] = name  # first, because the definition may refer to itself
            self._twins[name] = self._as_it_is(definition)
        return f"#/$defs/{name}"

    def _collect(self, schema: Schema, names: _Names, seen: set[str], *, is_part: bool = True) -> bool:
        """Add what a schema and its parts say of properties. Return False if the object has to stay open.

        `seen` are the references that were followed: each counts once, however many parts have it.
        """
        if schema.keys() & _STAYS_OPEN or (is_part and "patternProperties" in schema):
            return False
        names.add(schema)
        parts = [part for key in _PARTS for part in _listed(schema, key)]
        ref = schema.get("$ref")
        if isinstance(ref, str) and ref not in seen:
            seen.add(ref)
            if not isinstance(target := schema_at(self._root, ref), Mapping):
                return False
            parts.append(cast("Schema", target))
        return all(
            self._collect(cast("Schema", part), names, seen) for part in parts if isinstance(part, Mapping)
        )


def _constant(schema: object) -> str | None:
    """Return the only value that a schema allows, as JSON."""
    if not isinstance(schema, Mapping):
        return None
    given = cast("Schema", schema)
    allowed = [given["const"]] if "const" in given else _listed(given, "enum")
    return json.dumps(allowed[0], sort_keys=True) if len(allowed) == 1 else None


def _listed(schema: Schema, key: str) -> list[object]:
    given = schema.get(key)
    return cast("list[object]", given) if isinstance(given, list) else []


def _number_of_parts(schema: Schema) -> int:
    """Return how many parts an object consists of besides its own keywords; alternatives count once."""
    return len(_listed(schema, "allOf")) + len({"anyOf", "oneOf", "$ref"} & schema.keys())
