"""Gemma's format of calls: `call:f{city:<|"|>Rome<|"|>,days:2,hours:[8,20]}`, with `<escape>` for quotes in FunctionGemma's.

Names that are words have no quotes, strings are between marks and not escaped, and there is no white space.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from mlx_ring.api.chat.argument_values import parsed_json
from mlx_ring.api.chat.json_schemas import Schema
from mlx_ring.api.chat.lark import DEFINITIONS, NOTHING, LarkGrammar, either, options_of
from mlx_ring.api.chat.request import Tool
from mlx_ring.core.errors import RequestError

QUOTE = '<|"|>'
FUNCTION_GEMMA_QUOTE = "<escape>"

_ParseCalls = Callable[[str, list[dict[str, object]]], object]
_NAME = re.compile(r"\w+", re.ASCII)
_SAID = frozenset({"title", "description", "default", "examples", "$schema", "$id", "$comment", "deprecated"})
"""Keywords of a schema that do not restrict values."""
_SCALARS: Mapping[str, frozenset[str]] = {
    "integer": frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}),
    "number": frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}),
    "boolean": frozenset(),
    "null": frozenset(),
}
"""Types that are written as in JSON, each with its enforced keywords."""
_NUMBERS: Mapping[str, str] = {
    "integer": "/-?(0|[1-9][0-9]{0,17})/",
    "number": r"/-?(0|[1-9][0-9]{0,17})(\.[0-9]{1,17})?([eE][-+]?[0-9]{1,2})?/",
}
"""Patterns of numbers. They limit the length, because Python refuses much longer numbers or reads them as infinite."""
_KINDS: tuple[tuple[type, set[str]], ...] = (
    (bool, {"boolean"}),
    (int, {"integer", "number"}),
    (float, {"number"}),
    (str, {"string"}),
    (list, {"array"}),
    (dict, {"object"}),
    (object, {"null"}),
)
"""JSON's types by type in Python. The first match counts."""
_SPELT = re.compile(r"\\.|/|\n", re.DOTALL)
_SPELLINGS = {"/": r"\/", "\n": r"\n", r"\d": "[0-9]", r"\w": "[A-Za-z0-9_]"}
"""Escapes that Lark spells differently, and classes that JSON Schema limits to ASCII."""
_LONGEST_PATTERN = 4096


def parse_function_gemma(own: _ParseCalls, gemma: _ParseCalls) -> _ParseCalls:
    """Return a parser of FunctionGemma's calls. They differ from Gemma's only in the quotes.

    mlx-lm's parser ends at the first brace or comma. It still reads calls that this one cannot, such as words without quotes.
    """

    def parse(text: str, tools: list[dict[str, object]]) -> object:
        if QUOTE in text:
            return own(text, tools)
        try:
            return gemma(text.replace(FUNCTION_GEMMA_QUOTE, QUOTE), tools)
        except ValueError:
            return own(text, tools)

    return parse


_LITERAL = re.compile(r'<\|"\|>(?P<own>.*?)<\|"\|>|"(?P<json>(?:\\.|[^"\\])*)"', re.DOTALL)
_CALL = re.compile(r"call:(?P<name>[\w.-]+)\s*(?=\{)")
_KEY = re.compile(r"(?<=[{,])\s*(?P<key>[\w-]+)\s*:")
_HELD = re.compile("\x00([0-9]+)\x00")


def parse_gemma(own: _ParseCalls) -> _ParseCalls:
    """Return a parser of Gemma's calls that also reads white space, other names, Python's words, and strings of JSON."""

    def parse(text: str, tools: list[dict[str, object]]) -> object:
        try:
            return own(text, tools)
        except ValueError:
            return _parse_loosely(text)

    return parse


def _parse_loosely(text: str) -> list[dict[str, object]]:
    strings: list[str] = []

    def hold(found: re.Match[str]) -> str:
        strings.append(found[0] if found["own"] is None else json.dumps(found["own"]))
        return f"\x00{len(strings) - 1}\x00"

    plain = _LITERAL.sub(hold, text)
    calls: list[dict[str, object]] = []
    for call in _CALL.finditer(plain):
        arguments = _KEY.sub(r'"\g<key>":', _balanced(plain[call.end() :]))
        written = _HELD.sub(lambda held: strings[int(held[1])], arguments)
        calls.append({"name": call["name"], "arguments": parsed_json(written)})
    if not calls:
        raise ValueError(text)
    return calls


def _balanced(text: str) -> str:
    """Return the text up to the brace that closes its first one."""
    depth = 0
    for brace in re.finditer("[{}]", text):
        depth += 1 if brace[0] == "{" else -1
        if not depth:
            return text[: brace.end()]
    raise ValueError(text)


def write_call(grammar: LarkGrammar, tool: Tool, quote: str) -> str:
    """Write one call without its outer marks.

    Raises:
        RequestError: the tool is strict, and its schema cannot be enforced in this format.
    """
    try:
        arguments = _Values(grammar, tool, quote).of({"type": "object", **(tool.parameters or NOTHING)})
    except RecursionError as error:
        raise RequestError(f"The schema cannot be read: {error}.", param="tools") from error
    return f"{json.dumps(f'call:{tool.name}')} {arguments}"


@dataclass(slots=True)
class _Values:
    """Rules for the values of one tool's arguments."""

    grammar: LarkGrammar
    tool: Tool
    quote: str
    known: dict[str, str] = field(default_factory=dict[str, str])
    """Rules of definitions by their reference, and of values of any kind. Definitions may contain themselves."""

    def of(self, schema: object) -> str:
        """Write a value under a schema."""
        if not isinstance(schema, dict):
            return self._no_value() if schema is False else self._anything()
        given = cast("Schema", schema)
        if "$ref" in given:
            return self._reference(given)
        if "const" in given or "enum" in given:
            return self._listed(given)
        for key in ("anyOf", "oneOf", "allOf"):
            if key in given:
                return self._one_of(given, key)
        return self._typed(given)

    def _typed(self, schema: Schema) -> str:
        kind = schema.get("type", _kind_of(schema))
        match kind:
            case list():
                kinds = cast("list[object]", kind)
                return either(self.of({**_about(schema, each), "type": each}) for each in kinds)
            case "string":
                return self._string(schema)
            case "object":
                return self._object(schema)
            case "array":
                return self._array(schema)
            case str() if kind in _SCALARS:
                return self._scalar(schema, kind)
            case _:
                self._require(schema, ())
                return self._anything()

    # ---- references and choices

    def _reference(self, schema: Schema) -> str:
        """Write a reference as a rule. The rule gets its name first, because a definition may contain itself."""
        self._require(schema, {"$ref", *DEFINITIONS})
        place = str(schema["$ref"])
        if place not in self.known:
            found = self._find(place)
            name = self.known[place] = self.grammar.fresh("")
            self.grammar.add(name, self.of(found))
        return self.known[place]

    def _find(self, place: str) -> object:
        found: Any = self.tool.parameters
        head, *steps = place.split("/")
        for step in steps:
            name = step.replace("~1", "/").replace("~0", "~")
            found = cast("Schema", found).get(name) if isinstance(found, dict) else None
        if head != "#" or found is None:
            raise self._refusal(f"$ref to '{place}'")
        return found

    def _listed(self, schema: Schema) -> str:
        self._require(schema, {"const" if "const" in schema else "enum", "type"})
        listed = [schema["const"]] if "const" in schema else schema["enum"]
        values = cast("list[object]", listed) if isinstance(listed, list) else []
        kinds = schema.get("type")
        fitting = [value for value in values if kinds is None or _json_kind(value) & _as_set(kinds)]
        if not fitting:
            return self._no_value()
        return either(self._exactly(value) for value in fitting)

    def _one_of(self, schema: Schema, key: str) -> str:
        listed = schema[key]
        self._require(schema, {key, *DEFINITIONS})
        options = cast("list[object]", listed) if isinstance(listed, list) else []
        if not options:
            return self._no_value()
        if len(options) > 1 and (key == "allOf" or (key == "oneOf" and not _exclude_each_other(options))):
            if self.tool.strict:
                raise self._refusal(f"'{key}'")
            if key == "allOf":
                return self._anything()
        return either(self.grammar.fresh(self.of(option)) for option in options)

    # ---- values by their type

    def _scalar(self, schema: Schema, kind: str) -> str:
        self._require(schema, {"type", *_SCALARS[kind]})
        asked = {key: schema[key] for key in _SCALARS[kind] if key in schema}
        if not asked and kind in _NUMBERS:
            return _NUMBERS[kind]
        return self.grammar.json({"type": kind, **asked}, **options_of(self.tool))

    def _string(self, schema: Schema) -> str:
        self._require(schema, {"type", "minLength", "maxLength", "pattern"})
        within: list[str] = []
        least, most = self._counts(schema, "minLength", "maxLength")
        if least or most is not None:
            within.append(f"/(?s:.{{{least},{'' if most is None else most}}})/")
        pattern = schema.get("pattern")
        if isinstance(pattern, str):
            within.append(self._searched(pattern))
        return self._quoted(within)

    def _quoted(self, within: Iterable[str] = ()) -> str:
        mark = self.grammar.exactly(self.quote)
        return f"{mark} {self.grammar.until_mark(self.quote, within)}"

    def _searched(self, pattern: str) -> str:
        """Write a text that contains a match of a pattern. Anchors count at the pattern's ends; llguidance refuses others."""
        if len(pattern) > _LONGEST_PATTERN:
            raise self._refusal("a 'pattern' of this length")
        starts, ends = pattern.startswith("^"), re.search(r"(?<!\\)(\\\\)*\$$", pattern) is not None
        core = pattern[starts : len(pattern) - ends]
        found = f"{'' if starts else '(?s:.*)'}({core}){'' if ends else '(?s:.*)'}"
        return f"/{re.sub(_SPELT, lambda each: _SPELLINGS.get(each[0], each[0]), found)}/"

    def _object(self, schema: Schema) -> str:
        """Write an object with its names in the order in which the model's template shows them."""
        self._require(schema, {"type", "properties", "required", "additionalProperties", *DEFINITIONS})
        given, more = schema.get("properties"), schema.get("additionalProperties", True)
        properties: Schema = cast("Schema", given) if isinstance(given, Mapping) else {}
        if not properties and more is not False:
            return self._any_object(self.of(more))
        names = sorted(properties, key=str.lower)
        listed = schema.get("required")
        required = set(cast("list[object]", listed)) if isinstance(listed, list) else set[object]()
        if self.tool.strict and (missing := sorted(map(str, required - set(names)))):
            raise RequestError(
                f"Tool '{self.tool.name}' requires '{missing[0]}', which has no schema.", param="tools"
            )
        values = {name: f'{self._name(name)} ":" {self.of(properties[name])}' for name in names}
        return f'"{{" {self.grammar.in_order(values, required, between=_COMMA)} "}}"'

    def _array(self, schema: Schema) -> str:
        self._require(schema, {"type", "items", "minItems", "maxItems"})
        least, most = self._counts(schema, "minItems", "maxItems")
        item = self.grammar.fresh(self.of(schema.get("items", True)))
        if most == 0:
            return '"[" "]"'
        upper = "" if most is None else most - 1
        several = item if upper == 0 else f"{item} ({_COMMA} {item}){{{max(least - 1, 0)},{upper}}}"
        return f'"[" {several} "]"' if least else f'"[" ({several})? "]"'

    def _counts(self, schema: Schema, least: str, most: str) -> tuple[int, int | None]:
        found = schema.get(least, 0), schema.get(most)
        if not isinstance(found[0], int) or not isinstance(found[1], int | None):
            raise self._refusal(f"such a '{least}' or '{most}'")
        return max(found[0], 0), found[1]

    def _anything(self) -> str:
        if "" not in self.known:
            name = self.known[""] = self.grammar.fresh("")
            scalar = f'{_NUMBERS["number"]} | "true" | "false" | "null"'
            array = f'"[" ({name} ({_COMMA} {name})*)? "]"'
            self.grammar.add(name, f"{self._quoted()} | {scalar} | {array} | {self._any_object(name)}")
        return self.known[""]

    def _any_object(self, value: str) -> str:
        if value.startswith("("):
            value = self.grammar.fresh(value)
        name = f"(/[A-Za-z0-9_]+/ | {self._quoted()})"
        return f'"{{" ({name} ":" {value} ({_COMMA} {name} ":" {value})*)? "}}"'

    # ---- texts

    def _name(self, name: str) -> str:
        return json.dumps(name) if _NAME.fullmatch(name) else self._text(name)

    def _exactly(self, value: object) -> str:
        match value:
            case str():
                return self._text(value)
            case list():
                items = f" {_COMMA} ".join(self._exactly(item) for item in cast("list[object]", value))
                return f'"[" {items} "]"'
            case dict():
                given = cast("dict[str, object]", value)
                members = (
                    f'{self._name(name)} ":" {self._exactly(given[name])}'
                    for name in sorted(given, key=str.lower)
                )
                return f'"{{" {f" {_COMMA} ".join(members)} "}}"'
            case _:
                return json.dumps(json.dumps(value))

    def _text(self, text: str) -> str:
        if self.quote in text:
            raise self._refusal(f"a text that contains {self.quote}")
        return self.grammar.exactly(f"{self.quote}{text}{self.quote}")

    # ---- refusals

    def _require(self, schema: Schema, known: Iterable[str]) -> None:
        others = sorted(schema.keys() - _SAID - set(known))
        if others and self.tool.strict:
            raise self._refusal(f"'{others[0]}'")

    def _no_value(self) -> str:
        raise self._refusal("a schema that no value satisfies")

    def _refusal(self, what: str) -> RequestError:
        return RequestError(
            f"{what[0].upper()}{what[1:]} in the parameters of tool '{self.tool.name}' cannot be enforced in this model's format.",
            param="tools",
        )


_COMMA = '","'


def _kind_of(schema: Schema) -> Any:
    """Return the type that a schema implies."""
    if "properties" in schema or "additionalProperties" in schema:
        return "object"
    return "array" if "items" in schema else None


def _about(schema: Schema, kind: object) -> Schema:
    """Return the part of a schema of several types that applies to one of them."""
    asked = {
        "string": {"minLength", "maxLength", "pattern", "format"},
        "object": {"properties", "required", "additionalProperties"},
        "array": {"items", "minItems", "maxItems"},
        **{name: set(keys) for name, keys in _SCALARS.items()},
    }
    others = set[str]().union(*asked.values()) - asked.get(str(kind), set())
    return {key: value for key, value in schema.items() if key not in others}


def _as_set(kinds: object) -> set[str]:
    return set(map(str, cast("list[object]", kinds))) if isinstance(kinds, list) else {str(kinds)}


def _json_kind(value: object) -> set[str]:
    if isinstance(value, float) and value.is_integer():
        return {"number", "integer"}
    return next(kinds for known, kinds in _KINDS if isinstance(value, known))


def _exclude_each_other(options: Iterable[object]) -> bool:
    """Return True if no value can match two of the options, judged by their types."""
    seen: set[str] = set()
    for option in options:
        kind = cast("Schema", option).get("type") if isinstance(option, Mapping) else None
        kinds = {"number" if each == "integer" else each for each in _as_set(kind)} if kind else {"", *seen}
        if "" in kinds or kinds & seen:
            return False
        seen |= kinds
    return True
