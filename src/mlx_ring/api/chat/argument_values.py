"""Arguments of calls: JSON as it arrives, and text with the types of the tool's schema."""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Callable, Mapping
from typing import Any, cast

from mlx_ring.api.chat.request import Tool

_OUTSIDE = frozenset('{}[],:" \t\r\n0123456789+-.')
"""All characters that JSON has outside strings, except in words."""
_WORDS = {"true": "true", "false": "false", "null": "null", "True": "true", "False": "false", "None": "null"}
"""Words that are values, in JSON or in Python, each as JSON spells it."""
_MOST_DEPTH = 16
"""Limit of references and choices within each other that are followed in a schema."""
_FENCE = re.compile(r"^```(?:json)?\s*(.*?)\s*(?:```)?$", re.DOTALL)
_NUMBER = re.compile(r"[-+]?[0-9]+(\.[0-9]+)?([eE][-+]?[0-9]+)?")


class JsonObjectReader:
    """Reader that streams a JSON object from its first brace to its last.

    It mends what models write although JSON does not allow it: line breaks in strings, words of Python, and last commas.
    """

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self._last = ""
        """Last character."""
        self._held = ""
        """Start of a word, or a comma and the white space after it, which the next character makes right or wrong."""
        self.is_broken = False
        """True if the text can no longer become JSON."""

    def push(self, text: str) -> tuple[str, str | None]:
        """Return the part of `text` that belongs to the object, and the text after the object, or None if it has not ended."""
        taken: list[str] = []
        for place, character in enumerate(text):
            if not self._in_string and not self._accepts(character):
                self.is_broken = True
                return "".join((*taken, self._held)), text[place:]
            taken.append(self._take(character))
            self._last = character
            if self._depth == 0:
                return "".join(taken), text[place + 1 :]
        return "".join(taken), None

    def _accepts(self, character: str) -> bool:
        word = self._held if self._held.isalpha() else ""
        if not self._is_of_word(character):
            return (character in _OUTSIDE or character in "eE") and (not word or word in _WORDS)
        return any(known.startswith(word + character) for known in _WORDS)

    def _is_of_word(self, character: str) -> bool:
        return character.isalpha() and not (character in "eE" and self._last.isdigit())

    def _take(self, character: str) -> str:
        if self._in_string:
            return self._take_inside(character)
        if self._is_of_word(character) and self._held.isalpha():
            self._held += character
            return ""
        if self._held.startswith(",") and character.isspace():
            self._held += character
            return ""
        before = self._release(character)
        if self._is_of_word(character) or character == ",":
            self._held = character
            return before
        self._in_string = character == '"'
        self._depth += (character in "{[") - (character in "}]")
        return before + character

    def _release(self, following: str) -> str:
        """Return the held text as JSON: without a comma before a closing bracket."""
        held, self._held = self._held, ""
        if held.isalpha():
            return _WORDS[held]
        return held[1:] if following in "}]" else held

    def _take_inside(self, character: str) -> str:
        self._in_string = self._escaped or character != '"'
        self._escaped = not self._escaped and character == "\\"
        return json.dumps(character)[1:-1] if character < " " else character


def is_object(text: str) -> bool:
    """Return True if the text is one JSON object."""
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


# ---- text


def properties_of(tool: Tool | None) -> Mapping[str, object]:
    properties = ((tool and tool.parameters) or {}).get("properties")
    return cast("dict[str, object]", properties) if isinstance(properties, dict) else {}


def read_value(
    text: str, tool: Tool, key: str, *, untyped_json: bool = False, json_strings: bool = False
) -> object:
    """Return an argument with a type that the tool's schema gives it. Text of no such type stays text.

    `null` is no string unless the schema requires one. Where a string is allowed beside other types, only JSON is of these.
    With `untyped_json`, so is an argument that the schema does not describe. Otherwise it is text, or JSON of several values.
    A string may be JSON too with `json_strings`, and with `untyped_json` if it may have another type.
    """
    properties, word = properties_of(tool), text.strip()
    kinds = _kinds_of(properties.get(key), tool.parameters or {})
    if word.lower() == "null" and not (kinds == {"string"} and key in _required_of(tool)):
        return None
    if not kinds:
        return _json_of(text, (object,) if untyped_json else (dict, list) if key in properties else ())
    for kind in ("null", "integer", "number", "boolean", "object", "array"):
        value = _READERS[kind](word) if kind in kinds else _NO_VALUE
        if value is not _NO_VALUE and ("string" not in kinds or _is_json(value, word)):
            return value
    if word.startswith('"') and (json_strings or (untyped_json and not _is_plain_string(properties[key]))):
        return _json_of(text, (str,))
    return text if "string" in kinds else _json_of(text, (object,))


def _is_plain_string(schema: object) -> bool:
    return isinstance(schema, dict) and cast("dict[str, object]", schema).get("type") == "string"


def _required_of(tool: Tool) -> list[object]:
    required = (tool.parameters or {}).get("required")
    return cast("list[object]", required) if isinstance(required, list) else []


def _is_json(value: object, word: str) -> bool:
    return isinstance(value, dict | list) or json.dumps(value) == word


_NO_VALUE = object()


def parsed_json(text: str) -> object:
    """Return the value that a text is in JSON or Python, also within a block of code or doubled braces.

    Raises:
        ValueError: it is none.
    """
    text = _FENCE.sub(r"\1", text.strip())
    value = _parsed(text)
    if value is _NO_VALUE and text.startswith("{{") and text.endswith("}}"):
        value = _parsed(text[1:-1])
    if value is _NO_VALUE:
        raise ValueError(text)
    return value


def _json_of(text: str, types: tuple[type, ...]) -> object:
    """Return the JSON value of one of these types that a text is, else the text."""
    value = _parsed(text)
    return value if value is not _NO_VALUE and isinstance(value, types) else text


def _parsed(text: str) -> object:
    """Return the value that a text is in JSON or Python."""
    try:
        return json.loads(text, strict=False, parse_constant=_refuse, parse_float=_finite)
    except (ValueError, RecursionError):
        pass
    try:
        return json.loads(json.dumps(ast.literal_eval(text.strip()), allow_nan=False))
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return _NO_VALUE


def _refuse(constant: str) -> object:
    raise ValueError(constant)


def _finite(word: str) -> float:
    value = float(word)
    if not math.isfinite(value):
        raise ValueError(word)
    return value


def _number(word: str) -> object:
    value = float(word) if _NUMBER.fullmatch(word) else math.nan
    if not math.isfinite(value):
        return _NO_VALUE
    return _integer(word) if value.is_integer() else value


def _integer(word: str) -> object:
    if not _NUMBER.fullmatch(word):
        return _NO_VALUE
    try:
        return int(word)
    except ValueError:
        value = float(word)
        return int(value) if value.is_integer() else _NO_VALUE


_TRUTH = {
    **dict.fromkeys(("true", "1", "yes", "on"), True),
    **dict.fromkeys(("false", "0", "no", "off"), False),
}


def _of_type(type_: type) -> Callable[[str], object]:
    def read(word: str) -> object:
        value = _parsed(word)
        return value if isinstance(value, type_) else _NO_VALUE

    return read


_READERS: Mapping[str, Callable[[str], object]] = {
    "null": lambda word: None if word.lower() in ("none", "nil") else _NO_VALUE,
    "integer": _integer,
    "number": _number,
    "boolean": lambda word: _TRUTH.get(word.lower(), _NO_VALUE),
    "object": _of_type(dict),
    "array": _of_type(list),
}

_KINDS: tuple[tuple[tuple[str, ...], str], ...] = (
    (("null", "none"), "null"),
    (("int", "uint", "long", "short", "unsigned"), "integer"),
    (("num", "float", "double"), "number"),
    (("bool", "binary"), "boolean"),
    (("obj", "dict", "map"), "object"),
    (("arr", "list", "tuple"), "array"),
    (("str", "text", "varchar", "char", "enum"), "string"),
)
"""Starts of names of types, in JSON Schema and elsewhere."""
_TYPES: tuple[tuple[type, str], ...] = (
    (bool, "boolean"),
    (int, "integer"),
    (float, "number"),
    (str, "string"),
    (list, "array"),
    (dict, "object"),
    (object, "null"),
)


def _kinds_of(
    schema: object, root: Mapping[str, object], visited: set[str] | None = None, depth: int = 0
) -> set[str]:
    """Return the types of JSON that a schema allows; none if it does not say.

    `visited` are the references that were followed already, whose types need not be found again.
    """
    visited = set() if visited is None else visited
    if not isinstance(schema, dict) or depth > _MOST_DEPTH:
        return set()
    given = cast("dict[str, object]", schema)
    reference = given.get("$ref")
    if isinstance(reference, str):
        if reference in visited:
            return set()
        visited.add(reference)
        return _kinds_of(_referred(reference, root), root, visited, depth + 1)
    named = given.get("type")
    if named is not None:
        names = cast("list[object]", named) if isinstance(named, list) else [named]
        return {kind for name in names for starts, kind in _KINDS if str(name).lower().startswith(starts)}
    if "const" in given or isinstance(given.get("enum"), list):
        values = [given["const"]] if "const" in given else cast("list[object]", given["enum"])
        return {next(kind for type_, kind in _TYPES if isinstance(value, type_)) for value in values}
    for key in ("anyOf", "oneOf", "allOf"):
        if isinstance(options := given.get(key), list):
            each = [_kinds_of(option, root, visited, depth + 1) for option in cast("list[object]", options)]
            return set[str]().union(*each)
    return {"object"} if "properties" in given else {"array"} if "items" in given else set()


def _referred(place: str, root: Mapping[str, object]) -> object:
    found: Any = root
    for step in place.removeprefix("#/").split("/"):
        name = step.replace("~1", "/").replace("~0", "~")
        found = cast("dict[str, object]", found).get(name) if isinstance(found, dict) else None
    return found


# ---- arguments that mlx-lm's parsers refuse or lose

_Parser = Callable[[str, list[dict[str, object]]], object]
_EMPTY_ARGUMENTS = re.compile(r"\[ARGS\]\s*(?=\[TOOL_CALLS\]|$)")


def parse_mistral(own: _Parser, text: str, tools: list[dict[str, object]]) -> object:
    """Parse calls without arguments too, and lists of calls with text after them, which is dropped."""
    if not text.lstrip().startswith(("[", "{")):
        return own(_EMPTY_ARGUMENTS.sub("[ARGS]{}", text), tools)
    calls: object = json.JSONDecoder(strict=False).raw_decode(text.lstrip())[0]
    return calls


def parse_pythonic(own: _Parser, text: str, tools: list[dict[str, object]]) -> object:
    """Parse a list of calls without its brackets too, and arguments without names, which are in the order of the schema."""
    text = text.strip()
    try:
        listed = ast.parse(text if text.startswith("[") else f"[{text}]", mode="eval").body
    except SyntaxError:
        return own(text, tools)
    for call in listed.elts if isinstance(listed, ast.List) else ():
        if isinstance(call, ast.Call) and call.args:
            _name_arguments(call, tools)
    return own(ast.unparse(listed), tools)


def _name_arguments(call: ast.Call, tools: list[dict[str, object]]) -> None:
    pairs: list[tuple[str, ast.expr]] = []
    if len(call.args) == 1 and isinstance(given := call.args[0], ast.Dict):
        named = zip(given.keys, given.values, strict=True)
        pairs = [(str(key.value), each) for key, each in named if isinstance(key, ast.Constant)]
    else:
        name = ast.unparse(call.func)
        functions = (cast("dict[str, Any]", tool["function"]) for tool in tools)
        schemas: list[dict[str, Any]] = [each["parameters"] for each in functions if each["name"] == name]
        names: list[str] = [key for schema in schemas for key in schema.get("properties", ())]
        pairs = list(zip(names, call.args, strict=False)) if len(names) >= len(call.args) else []
    if pairs:
        call.keywords[:0] = [ast.keyword(name, value) for name, value in pairs]
        call.args = []
