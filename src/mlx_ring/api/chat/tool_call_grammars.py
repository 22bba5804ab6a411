"""Grammars of tool calls in each format, from which mlx-lm's parsers get arguments that match the tool's schema.

If arguments are JSON, the schema is enforced as it is. Formats that name arguments one by one write strings without quotes.
There each property has its own rule, and schemas that unquoted text cannot satisfy are refused for strict tools.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from mlx_ring.api.chat import gemma
from mlx_ring.api.chat.json_schemas import Schema
from mlx_ring.api.chat.lark import (
    DEFINITIONS,
    NOTHING,
    PYTHON_STRINGS,
    SPACE,
    LarkGrammar,
    either,
    options_of,
)
from mlx_ring.api.chat.model_format import INNER_MARKS, JSON_SPELLINGS, CallMarks, JsonSpelling
from mlx_ring.api.chat.request import Tool
from mlx_ring.api.chat.tagged_calls import TAGS
from mlx_ring.core.errors import RequestError
from mlx_ring.models.grammars import JSON_OPTIONS

_STRING_KEYS = frozenset({"type", "enum", "const", "title", "description", "default", "examples", "$comment"})
"""Keywords of a string's schema that lists its texts or allows any."""
_PLAIN_KEYS = frozenset(
    {
        *("type", "properties", "required", "additionalProperties", *DEFINITIONS),
        *("title", "description", "$schema", "$id", "$comment", "default", "examples"),
    }
)
"""Keywords of a schema whose arguments can be written one by one."""
_COMMA = f'"," {SPACE}?'
JSON_TYPES = ("integer", "number", "boolean", "object", "array")
_GEMMA_NAME = re.compile(r"[\w-]+", re.ASCII)
_MUSE_NAME = re.compile(r"(?!(?:self|user|commentary)$)[\w.-]+", re.ASCII)
"""Pattern of a tool's name. The excluded names are recipients of messages."""
_IDENTIFIER = re.compile(r"[A-Za-z_]\w*")
SPACES = r"[\s\x1c-\x1f]*"
"""Pattern of white space as Python knows it, in grammars."""
JSON_SPACE = f"/{JSON_OPTIONS['whitespace_pattern']}/"
_KIND = '"type": "function", '
"""Member that a call may have before its tool's name."""


def write_calls(
    grammar: LarkGrammar, marks: CallMarks, tools: Sequence[Tool], *, parallel: bool, beside_json: bool
) -> tuple[str, str]:
    """Return the text that opens the calls, and the rule of the calls after it; the answer may be JSON `beside_json`.

    Raises:
        RequestError: the format has no grammar, or a tool's schema cannot be enforced in it.
    """
    calls = _Calls(grammar, marks, tools, parallel, beside_json)
    if (spelling := JSON_SPELLINGS.get(marks.parser)) is not None:
        return _json_calls(calls, spelling)
    spell = _SPELLINGS.get(marks.parser)
    if spell is None:
        raise RequestError(
            f"Calls in this model's format ({marks.parser}) cannot be enforced: leave 'strict' out and tool_choice at 'auto'.",
            param="tool_choice",
        )
    return spell(calls)


@dataclass(frozen=True, slots=True)
class _Calls:
    """Input of a format's writer."""

    grammar: LarkGrammar
    marks: CallMarks
    tools: Sequence[Tool]
    parallel: bool
    beside_json: bool = False

    def one_of(self, write: Callable[[Tool], str]) -> str:
        """Return a rule of a call to any of the tools."""
        return either(self.grammar.fresh(write(tool)) for tool in self.tools)

    def repeated(self, call: str, between: str) -> str:
        return f"{call} ({between} {call})*" if self.parallel else call

    def arguments(self, tool: Tool, **options: object) -> str:
        """Return a rule of one tool's arguments as a JSON object."""
        return self.grammar.json(tool.parameters or NOTHING, **options_of(tool), **options)

    def exactly(self, text: str) -> str:
        return self.grammar.exactly(text)

    def written(self, text: str, tool: Tool | None = None) -> str:
        """Return a rule of a text with the words of `WrittenCalls` for its variable parts."""
        name = "" if tool is None else tool.name
        known = {"NAME": name, "START": self.marks.start, "END": self.marks.end}
        rules, literal = list[str](), ""
        for word in re.split("(NAME|JSON|NUMBER|START|END|~)", text):
            if word in ("JSON", "NUMBER", "~"):
                rules += [self.exactly(literal), self._variable(word, tool)]
                literal = ""
            else:
                literal += known.get(word, word)
        return " ".join(filter(None, [*rules, self.exactly(literal)]))

    def _variable(self, word: str, tool: Tool | None) -> str:
        if word == "JSON" and tool is not None:
            return self.arguments(tool)
        return f"{SPACE}?" if word == "~" else "/[0-9]{1,4}/"


def write_harmony_calls(grammar: LarkGrammar, marks: CallMarks, tools: Sequence[Tool]) -> list[str]:
    """Write gpt-oss's call: a message to a function, which ends the answer.

    Its last mark may be a token that ends answers.
    """
    calls = _Calls(grammar, marks, tools, parallel=False)
    (written,) = JSON_SPELLINGS[marks.parser].written
    text = f"<|channel|>commentary START{written.call}"
    return [grammar.fresh(f"{calls.written(text, tool)} ({calls.written('END')})?") for tool in tools]


def write_muse_calls(grammar: LarkGrammar, marks: CallMarks, tools: Sequence[Tool], *, parallel: bool) -> str:
    """Write Muse's calls, each with its tool's name, in one or several messages, without the first space."""
    calls = _Calls(grammar, marks, tools, parallel)

    def write(tool: Tool) -> str:
        if not _MUSE_NAME.fullmatch(tool.name):
            raise _no_name(tool, tool.name)
        invoke = grammar.fresh(
            " ".join(
                [
                    calls.exactly(f'<atem:invoke name="{tool.name}">\n'),
                    *_arguments(calls, tool, _MUSE),
                    calls.exactly("</atem:invoke>\n"),
                ]
            )
        )
        opening = calls.exactly(f"to={tool.name}<|message|>{marks.start}\n")
        return f"{opening} {calls.repeated(invoke, '')} {calls.exactly(marks.end)}"

    return calls.repeated(calls.one_of(write), calls.exactly("<|eom|><|start|>assistant "))


_Spelling = Callable[[_Calls], tuple[str, str]]


def _json_calls(calls: _Calls, spelling: JsonSpelling) -> tuple[str, str]:
    """Write calls whose arguments are JSON, in the first spelling whose inner marks are all tokens, else the last."""
    marks, tokens = calls.marks, calls.grammar.tokens
    inner = INNER_MARKS.get(marks.parser, ())
    known = (each for each in spelling.written if tokens.keys() >= set(filter(each.call.count, inner)))
    text = next(known, spelling.written[-1])
    write = _bare_call if marks.is_bare_json else _Calls.written
    call = calls.one_of(lambda tool: write(calls, text.call, tool))
    between = calls.written(text.between)
    return (
        marks.start,
        f"{calls.written(text.before)} {calls.repeated(call, between)} {calls.written(f'{text.behind}END')}",
    )


def _bare_call(calls: _Calls, text: str, tool: Tool) -> str:
    """Write a call that needs no mark, in JSON's tokens beside JSON, since each text is read as the longest token."""
    heading, _, end = text.replace("NAME", tool.name).partition("JSON")

    def apart(words: str) -> str:
        found = re.findall(r'"[^"]*"|[^\s"]', words)
        return " ".join(f"{json.dumps(word)} {JSON_SPACE}?" for word in found)

    if calls.beside_json:
        opening = f"{apart(heading[0])} ({apart(_KIND)})? {apart(heading[1:])}"
        return f"{opening} {calls.arguments(tool)} {JSON_SPACE}? {json.dumps(end)}"
    opening = rf"/[ \t\r\n]{{0,8}}\{{({_KIND})?{re.escape(heading[1:])}/"
    return f"{opening} {calls.arguments(tool)} {json.dumps(end)}"


def _pythonic(calls: _Calls) -> tuple[str, str]:
    """Write `[f(a=1, b="x"), g()]`."""

    def write(tool: Tool) -> str:
        _require_identifiers(tool, [tool.name.replace(".", "_"), *_properties_of(tool)])
        values = {
            name: f"{json.dumps(f'{name}=')} {calls.grammar.json(_alone_of(tool, schema), **options_of(tool), **PYTHON_STRINGS)}"
            for name, schema in _properties_of(tool).items()
        }
        return f'{json.dumps(tool.name + "(")} {calls.grammar.in_order(values, _required_of(tool), between=_COMMA)} ")"'

    call = calls.one_of(write)
    return calls.marks.start, f'"[" {calls.repeated(call, _COMMA)} "]" {calls.exactly(calls.marks.end)}'


def _gemma(quote: str) -> _Spelling:
    """Write `call:f{a:1}`, each call with its own marks."""

    def write(calls: _Calls, tool: Tool) -> str:
        if not _GEMMA_NAME.fullmatch(tool.name):
            raise _no_name(tool, tool.name)
        return gemma.write_call(calls.grammar, tool, quote)

    def spell(calls: _Calls) -> tuple[str, str]:
        call = f"{calls.one_of(lambda tool: write(calls, tool))} {calls.exactly(calls.marks.end)}"
        again = calls.grammar.fresh(f"{SPACE}? {calls.exactly(calls.marks.start)} {call}")
        return calls.marks.start, f"{call} ({again})*" if calls.parallel else call

    return spell


def _require_identifiers(tool: Tool, names: Sequence[str]) -> None:
    for name in names:
        if not _IDENTIFIER.fullmatch(name):
            raise _no_name(tool, name)


def _no_name(tool: Tool, name: str) -> RequestError:
    return RequestError(
        f"'{name}' of tool '{tool.name}' is a name that this model's format cannot write.", param="tools"
    )


# ---- arguments one by one


def _properties_of(tool: Tool) -> Mapping[str, Schema]:
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
    missing = [name for name in _required_of(tool) if name not in given]
    if missing and tool.strict:
        raise RequestError(f"Tool '{tool.name}' requires '{missing[0]}', which has no schema.", param="tools")
    return {
        name: cast("Schema", value) if isinstance(value, Mapping) else {} for name, value in given.items()
    }


def _required_of(tool: Tool) -> list[str]:
    """Return the names of the required arguments."""
    required = (tool.parameters or NOTHING).get("required", [])
    return [str(name) for name in cast("list[object]", required)] if isinstance(required, list) else []


def _alone_of(tool: Tool, schema: Schema) -> Schema:
    """Return a property's schema with the definitions that it may refer to."""
    given = tool.parameters or {}
    return {**{key: given[key] for key in DEFINITIONS if key in given}, **schema}


def _texts_of(schema: Schema, *, mixed: bool = False) -> list[str] | None:
    """Return the possible texts of a property if the schema lists them, `mixed` with other values or alone."""
    if not schema.keys() <= _STRING_KEYS:
        return None
    given = [schema["const"]] if "const" in schema else schema.get("enum")
    if not isinstance(given, list) or not given:
        return None
    values = cast("list[object]", given)
    texts = [value for value in values if isinstance(value, str)]
    return texts if mixed or len(texts) == len(values) else None


@dataclass(frozen=True, slots=True)
class _Tagged:
    """Syntax of one argument in a format, and the conversion of its text."""

    before: str
    """Mark before the argument, with `{}` for its name."""
    behind: str
    no_string: str = ""
    """Pattern of texts that would not be read as strings."""
    any_json: bool = False
    """True if JSON of any type but string is read as that type."""
    json_strings: bool = False
    """True if strings may be written as JSON too, so that strings that look like JSON are read back."""
    before_json: str = ""
    """Mark before an argument in JSON, if it is another one."""


def _tagged(call_before: str, call_behind: str, argument: _Tagged, *, together: bool = False) -> _Spelling:
    """Return the writer of calls with separate marks for arguments; `{}` is replaced by the tool's name.

    Each call has its own marks, or all are `together` on lines between two marks.
    """

    def spell(calls: _Calls) -> tuple[str, str]:
        def write(tool: Tool) -> str:
            arguments = _arguments(calls, tool, argument)
            if together and not _required_of(tool):  # templates write an empty line where arguments would be
                arguments.append('"\\n"?')
            return " ".join(
                [calls.exactly(call_before.format(tool.name)), *arguments, calls.exactly(call_behind)]
            )

        call = calls.one_of(write)
        end = calls.exactly(calls.marks.end)
        if together:
            return calls.marks.start, f'"\\n" {calls.repeated(call, "")} {end}'
        again = f"{SPACE}? {calls.exactly(calls.marks.start)} {call} {end}"
        more = f"({calls.grammar.fresh(again)})*" if calls.parallel else ""
        return calls.marks.start, f"{call} {end} {more}"

    return spell


def _arguments(calls: _Calls, tool: Tool, how: _Tagged) -> list[str]:
    """Return the rules of one call's arguments; optional ones have a question mark."""
    required, properties = _required_of(tool), _properties_of(tool)
    for name in properties:
        if (tool.strict or how is _MUSE) and TAGS[calls.marks.parser].key_of(how.before.format(name)) != name:
            raise _no_name(tool, name)
    return [
        calls.grammar.fresh(_argument(calls.grammar, tool, name, schema, how))
        + ("" if name in required else "?")
        for name, schema in properties.items()
    ]


def _argument(grammar: LarkGrammar, tool: Tool, name: str, schema: Schema, how: _Tagged) -> str:
    before = grammar.exactly(how.before.format(name))
    before_json = grammar.exactly((how.before_json or how.before).format(name))
    options = [f"{before} {text}" for text in _as_text(grammar, tool, schema, how)]
    if how.json_strings or not (options and _is_text(schema)):
        options += [f"{before_json} {value}" for value in _as_json(grammar, tool, schema, how)]
    if options:
        return either(options)
    if tool.strict:
        raise RequestError(
            f"Property '{name}' of tool '{tool.name}' cannot be enforced in this model's format, which writes strings "
            "without quotes: give it one plain type, or an enum of strings.",
            param="tools",
        )
    return f"{before} {grammar.until(how.behind)}"


def _as_text(grammar: LarkGrammar, tool: Tool, schema: Schema, how: _Tagged) -> list[str]:
    """Return the rule of a string without quotes, if a wrong one can be recognized."""
    texts = _texts_of(schema, mixed=bool(how.before_json))
    if texts:
        safe = all(_is_safe(text, how) for text in texts)
        return [grammar.exactly(text + how.behind) for text in texts] if safe else []
    if not any(each.keys() <= _STRING_KEYS or not tool.strict for each in _strings(schema, how)):
        return []
    return [grammar.until(how.behind, besides=how.no_string)]


def _strings(schema: Schema, how: _Tagged) -> list[Schema]:
    """Return the schema if it is of a string, otherwise its choices that are of strings."""
    options = schema.get("anyOf") if how.json_strings or how.before_json else None
    given = cast("list[object]", options) if isinstance(options, list) else [schema]
    choices = [cast("Schema", each) for each in given if isinstance(each, Mapping)]
    return [each for each in choices if _is_string(each, how)]


def _is_string(schema: Schema, how: _Tagged) -> bool:
    """Return True for a string that is not listed, also among other types where a mark tells it from JSON."""
    if not how.before_json:
        return schema.get("type") == "string" and _texts_of(schema) is None
    types = schema.get("type", "string" if schema.keys() <= _STRING_KEYS else "")
    may_be = "string" in cast("list[object]", types) if isinstance(types, list) else types == "string"
    return may_be and _texts_of(schema, mixed=True) is None


def _is_text(schema: Schema) -> bool:
    """Return True if every value is a string."""
    return schema.get("type") == "string" or _texts_of(schema) is not None


def _as_json(grammar: LarkGrammar, tool: Tool, schema: Schema, how: _Tagged) -> list[str]:
    is_json = (
        how.json_strings
        or how.before_json
        or (not _is_text(schema) and (how.any_json or schema.get("type") in JSON_TYPES))
    )
    value = grammar.json(_alone_of(tool, schema), **options_of(tool)) if is_json else ""
    return [f"{value} {grammar.exactly(how.behind)}"] if is_json else []


def _is_safe(text: str, how: _Tagged) -> bool:
    """Return True if a text is read back unchanged."""
    return (
        text == text.strip()
        and how.behind.strip() not in text
        and not (how.no_string and re.fullmatch(how.no_string, text))
    )


_NULL = f"{SPACES}(?i:null){SPACES}"
_GLM = _Tagged("<arg_key>{}</arg_key><arg_value>", "</arg_value>", no_string=_NULL, any_json=True)
_MUSE = _Tagged(
    '<atem:parameter name="{}">',
    "</atem:parameter>\n",
    no_string=SPACES
    + r'(-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?|true|false|null|NaN|-?Infinity|["\[{](?s:.*))'
    + SPACES,
    json_strings=True,
)
_DSML = "\uff5cDSML\uff5c"
_NULLS = "(?i:null|none|nil)"
_FUNCTIONS = _tagged(
    "\n<function={}>\n",
    "</function>\n",
    _Tagged("<parameter={}>\n", "\n</parameter>\n", no_string=_NULL),
)
_SPELLINGS: Mapping[str, _Spelling] = {
    "pythonic": _pythonic,
    "gemma4": _gemma(gemma.QUOTE),
    "function_gemma": _gemma(gemma.FUNCTION_GEMMA_QUOTE),
    "glm47": _tagged("{}", "", _GLM),
    "laguna": _tagged("{}", "", _GLM),
    "deepseek_v32": _tagged(
        f'<{_DSML}invoke name="{{}}">\n',
        f"</{_DSML}invoke>\n",
        _Tagged(
            f'<{_DSML}parameter name="{{}}" string="true">',
            f"</{_DSML}parameter>\n",
            any_json=True,
            before_json=f'<{_DSML}parameter name="{{}}" string="false">',
        ),
        together=True,
    ),
    "qwen3_coder": _FUNCTIONS,
    "seed_oss": _FUNCTIONS,
    "minimax_m2": _tagged(
        '\n<invoke name="{}">\n',
        "</invoke>\n",
        _Tagged('<parameter name="{}">', "</parameter>\n", no_string=rf"{SPACES}{_NULLS}{SPACES}"),
    ),
    "minicpm5": _tagged(
        '"{}">',
        "",
        _Tagged('<param name="{}">', "</param>", no_string=rf"{SPACES}({_NULLS}|<!\[CDATA\[(?s:.*)){SPACES}"),
    ),
}
"""Writers by the name of mlx-lm's parser. Formats with a header around each part of an answer have separate ones."""
