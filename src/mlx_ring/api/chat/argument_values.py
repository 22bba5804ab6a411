"""Arguments of calls: JSON as it arrives, and text with the types of the tool's schema."""

from __future__ import annotations

import ast
import json
import keyword
import math
import re
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, cast

from mlx_ring.api.chat.request import Tool, kinds_of, properties_of, required_of

_OUTSIDE = frozenset('{}[],:" \t\r\n0123456789+-.')
"""All characters that JSON has outside strings, except in words."""
_WORDS = {"true": "true", "false": "false", "null": "null", "True": "true", "False": "false", "None": "null"}
"""Words that are values, in JSON or in Python, each as JSON spells it."""
LONGEST_HEADING = 1024
"""Limit of the characters of a call around its arguments."""
_FENCE = re.compile(r"^```(?:json)?\s*(.*?)\s*(?:```)?$", re.DOTALL)
_CUT_LINE = re.compile(r"\\.", re.DOTALL)
"""Escape in a string. JSON has none for a line break, before which a backslash stands for itself."""
_NUMBER = re.compile(r"[-+]?[0-9]+(\.[0-9]+)?([eE][-+]?[0-9]+)?")


class JsonObjectReader:
    """Reader that streams a JSON object from its first brace to its last.

    It mends what models write although JSON does not allow it: line breaks in strings, words of Python, and last commas.
    """

    def __init__(self, *, depth: int = 0) -> None:
        """Create a reader that begins within `depth` objects."""
        self._depth = depth
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
        # A backslash before a line break is no escape.
        backslash = "\\" if self._escaped and character < " " else ""
        self._escaped = not self._escaped and character == "\\"
        return backslash + (json.dumps(character)[1:-1] if character < " " else character)


class MembersReader:
    """Reader of the rest of an object behind one of its values, up to the closing brace."""

    def __init__(self) -> None:
        self._json = JsonObjectReader(depth=1)
        self._length = 0
        self.is_broken = False
        """True if the text is no rest of an object, or a very long one."""

    def push(self, text: str) -> str | None:
        """Return the text after the object, or None if it has not ended."""
        if not self._length and not (text := text.lstrip()):
            return None
        if not self._length and text[0] not in ",}":
            self.is_broken = True
            return text
        self._length += len(text)
        rest = self._json.push(text)[1]
        self.is_broken = self._json.is_broken or (rest is None and self._length > LONGEST_HEADING)
        return "" if self.is_broken else rest


_JSON_OPENING = re.compile(
    r'\{\s*+(?:"type"\s*+:\s*+"function"\s*+,\s*+)?"name"\s*+:\s*+"(?P<name>[^"\\]*+)"'
)


def json_opening(text: str, names: Collection[str]) -> str | None:
    """Return the start of a call in JSON up to its tool's name: empty if the text may become one, None if it cannot."""
    found = _JSON_OPENING.match(text, 0, LONGEST_HEADING)
    if found is not None:
        return found[0] if found["name"] in names else None
    written = "".join(text[:LONGEST_HEADING].split())
    openings = (f'{{{kind}"name":"{name}"' for name in names for kind in ("", '"type":"function",'))
    is_open = len(text) < LONGEST_HEADING and any(opening.startswith(written) for opening in openings)
    return "" if is_open else None


def may_be_arguments(text: str) -> bool:
    """Return True if a call in JSON may continue with arguments here, behind its tool's name."""
    written = "".join(text[:LONGEST_HEADING].split())
    return len(text) < LONGEST_HEADING and any(
        written.startswith(heading) or heading.startswith(written)
        for heading in (',"parameters":{', ',"arguments":{')
    )


def may_be_call(text: str, starts: Iterable[str], names: Iterable[str], *, is_json: bool) -> bool:
    """Return True if one of these marks or the heading of a call of one of these tools begins here, or may begin."""
    if any(start and (start.startswith(text) or text.startswith(start)) for start in starts):
        return True
    written = [f"{before}{name}" for name in names for before in ("", "functions.", "functions_")]
    if is_json:
        return json_opening(text, written) is not None
    is_short = len(text) < LONGEST_HEADING
    return any(name.startswith(text) or (is_short and text.startswith(name)) for name in written)


def is_object(text: str) -> bool:
    """Return True if the text is one JSON object."""
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


def arguments_text(arguments: object) -> str | None:
    """Return arguments as JSON; None if they are no object."""
    if isinstance(arguments, str):
        arguments = arguments.strip() or "{}"
        return arguments if is_object(arguments) else None
    try:
        text = dump({} if arguments is None else arguments)
    except (TypeError, ValueError, RecursionError):
        return None
    return text if is_object(text) else None


def dump(value: object) -> str:
    """Encode as JSON, in ASCII only if the value has lone surrogates, which UTF-8 cannot encode."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(value, allow_nan=False)
    return text


# ---- text


def read_value(
    text: str, tool: Tool, key: str, *, untyped_json: bool = False, json_strings: bool = False
) -> object:
    """Return an argument with a type that the tool's schema gives it. Text of no such type stays text.

    `null` is no string unless the schema requires one. Where a string is allowed beside other types, only JSON is of these.
    With `untyped_json`, so is an argument that the schema does not describe. Otherwise it is text, or JSON of several values.
    A string may be JSON too with `json_strings`, and with `untyped_json` if it may have another type.
    """
    properties, word = properties_of(tool), text.strip()
    kinds = kinds_of(properties.get(key), tool.parameters or {})
    if word.lower() == "null" and not (kinds == {"string"} and key in required_of(tool)):
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
    for json_text in dict.fromkeys((text, _CUT_LINE.sub(_with_backslash, text))):
        try:
            return json.loads(json_text, strict=False, parse_constant=_refuse, parse_float=_finite)
        except (ValueError, RecursionError):
            pass
    try:
        with silence():
            return json.loads(json.dumps(ast.literal_eval(text.strip()), allow_nan=False))
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return _NO_VALUE


def _with_backslash(found: re.Match[str]) -> str:
    return f"\\{found[0]}" if found[0][1] < " " else found[0]


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

# ---- arguments that mlx-lm's parsers refuse or lose

_Parser = Callable[[str, list[dict[str, object]]], object]
_EMPTY_ARGUMENTS = re.compile(r"\[ARGS\]\s*(?=\[TOOL_CALLS\]|$)")
_KEYWORD_MARK = "_keyword_"
_STRING_OR_KEYWORD = re.compile(
    rf"""\"(?:\\.|[^"\\])*\"|'(?:\\.|[^'\\])*'|\b(?:{"|".join(keyword.kwlist)})(?=\s*=[^=])""", re.DOTALL
)
"""Strings, and names of arguments that Python does not allow."""
_ESCAPE = re.compile(r"\\.|\n", re.DOTALL)


def listed_length(text: str) -> int:
    """Return the length of the list or object in JSON with which a text begins, or of a text without one."""
    start = len(text) - len(text.lstrip())
    try:
        return json.JSONDecoder(strict=False).raw_decode(text, start)[1]
    except (ValueError, RecursionError):
        return len(text)


def parse_mistral(own: _Parser, text: str, tools: list[dict[str, object]]) -> object:
    """Parse calls without arguments too, and lists of calls."""
    if not text.lstrip().startswith(("[", "{")):
        return own(_EMPTY_ARGUMENTS.sub("[ARGS]{}", text), tools)
    return json.loads(text, strict=False)


def python_tree(text: str) -> ast.expr:
    """Return the tree of an expression in Python, whose strings may have line breaks, and arguments any name.

    Raises:
        SyntaxError: it is no expression.
    """
    with silence():
        try:
            return ast.parse(text, mode="eval").body
        except SyntaxError:
            return ast.parse(_STRING_OR_KEYWORD.sub(_mended, text), mode="eval").body


def silence() -> warnings.catch_warnings[None]:
    """Return a context without warnings, because Python warns of escapes that it does not know."""
    return warnings.catch_warnings(action="ignore")


def _mended(found: re.Match[str]) -> str:
    if found[0][0] not in "\"'":
        return found[0] + _KEYWORD_MARK
    return _ESCAPE.sub(lambda each: "\\n" if each[0] == "\n" else each[0], found[0])


def parse_pythonic(text: str, tools: list[dict[str, object]]) -> list[dict[str, object]]:
    """Parse a list of calls, also without its brackets. Arguments without names are in the order of the schema.

    Raises:
        SyntaxError: the text is not Python.
        ValueError: it is no list of calls, or an argument has no value or belongs to no parameter.
    """
    text = text.strip()
    listed = python_tree(text if text.startswith("[") else f"[{text}]")
    calls = (
        [each for each in listed.elts if isinstance(each, ast.Call)] if isinstance(listed, ast.List) else []
    )
    if not isinstance(listed, ast.List) or len(calls) != len(listed.elts):
        raise ValueError(text)
    return [{"name": ast.unparse(call.func), "arguments": _arguments_of(call, tools)} for call in calls]


def _arguments_of(call: ast.Call, tools: list[dict[str, object]]) -> dict[str, object]:
    name = ast.unparse(call.func).removeprefix("functions.")
    functions = (cast("dict[str, Any]", tool["function"]) for tool in tools)
    schemas: list[dict[str, Any]] = [each["parameters"] for each in functions if each["name"] == name]
    names: list[str] = [key for schema in schemas for key in schema.get("properties", ())]
    pairs = _spread(call.args[0], names) if len(call.args) == 1 else None
    if pairs is None:
        pairs = list(zip(names, call.args, strict=False))
        if len(names) < len(call.args):
            raise ValueError(name)
    for given in call.keywords:
        spread = _spread(given.value, names) if given.arg is None else None
        if given.arg is None and spread is None:
            raise ValueError(name)
        pairs += spread or [] if given.arg is None else [(given.arg.removesuffix(_KEYWORD_MARK), given.value)]
    if len(dict(pairs)) != len(pairs):
        raise ValueError(name)
    return {key: _value_of(value) for key, value in pairs}


def _spread(value: ast.expr, names: Sequence[str]) -> list[tuple[str, ast.expr]] | None:
    """Return the items of a dictionary if all its keys are parameters."""
    if not isinstance(value, ast.Dict):
        return None
    keys = [key.value for key in value.keys if isinstance(key, ast.Constant) and key.value in names]
    if len(keys) != len(value.keys):
        return None
    return list(zip(map(str, keys), value.values, strict=True))


class _JsonWords(ast.NodeTransformer):
    """Replacement of `true`, `false` and `null` by values."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        words = {"true": True, "false": False, "null": None}
        return ast.Constant(words[node.id]) if node.id in words else node


def _value_of(written: ast.expr) -> object:
    value = _JsonWords().visit(written)
    return value.id if isinstance(value, ast.Name) else ast.literal_eval(value)


_DOUBLE, _SINGLE = r'"(?:\\.|[^"\\])*(?:"|\Z)', r"'(?:\\.|[^'\\])*(?:'|\Z)"
_TOKENS: Mapping[str, re.Pattern[str]] = {
    "mistral": re.compile(rf"{_DOUBLE}|[][{{}},]", re.DOTALL),
    "pythonic": re.compile(rf"{_DOUBLE}|{_SINGLE}|[][(){{}},]", re.DOTALL),
}
"""Strings, of which the last may lack its end, brackets and commas of these formats."""


def last_comma(parser: str, text: str) -> int:
    """Return the place of the last comma between entries of a list, outside strings and inner brackets; without one 0."""
    depth = last = 0
    for token in _TOKENS[parser].finditer(text):
        if token[0] in "[({":
            depth += 1
        elif token[0] in "])}":
            depth -= 1
        elif token[0] == "," and depth == 1:
            last = token.start()
    return last
