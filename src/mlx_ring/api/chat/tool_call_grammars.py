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
from mlx_ring.api.chat.lark import (
    DEFINITIONS,
    NOTHING,
    PYTHON_STRINGS,
    SPACE,
    LarkGrammar,
    Schema,
    either,
    options_of,
)
from mlx_ring.api.chat.model_format import CallMarks
from mlx_ring.api.chat.request import Tool
from mlx_ring.core.errors import RequestError

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
_JSON_TYPES = ("integer", "number", "boolean", "object", "array")
_GEMMA_NAME = re.compile(r"[\w-]+", re.ASCII)
_MUSE_NAME = re.compile(r"(?!(?:self|user|commentary)$)[\w.-]+", re.ASCII)
"""Pattern of a tool's name. The excluded names are recipients of messages."""
_IDENTIFIER = re.compile(r"[A-Za-z_]\w*")


def write_calls(
    grammar: LarkGrammar, marks: CallMarks, tools: Sequence[Tool], *, parallel: bool
) -> tuple[str, str]:
    """Return the text that opens the calls, and the rule of the calls after it.

    Raises:
        RequestError: the format has no grammar, or a tool's schema cannot be enforced in it.
    """
    spell = _SPELLINGS.get(marks.parser)
    if spell is None:
        raise RequestError(
            f"Calls in this model's format ({marks.parser}) cannot be enforced: leave 'strict' out and tool_choice at 'auto'.",
            param="tool_choice",
        )
    return spell(_Calls(grammar, marks, tools, parallel))


@dataclass(frozen=True, slots=True)
class _Calls:
    """Input of a format's writer."""

    grammar: LarkGrammar
    marks: CallMarks
    tools: Sequence[Tool]
    parallel: bool

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


def write_harmony_calls(grammar: LarkGrammar, tools: Sequence[Tool]) -> list[str]:
    """Write gpt-oss's call: a message to a function, which ends the answer.

    Its last mark may be a token that ends answers.
    """
    return [
        grammar.fresh(
            f"{grammar.exactly(f'<|channel|>commentary to=functions.{tool.name} <|constrain|>json<|message|>')} "
            f"{grammar.json(tool.parameters or NOTHING, **options_of(tool))} ({grammar.exactly('<|call|>')})?"
        )
        for tool in tools
    ]


def write_muse_calls(grammar: LarkGrammar, marks: CallMarks, tools: Sequence[Tool], *, parallel: bool) -> str:
    """Write Muse's calls, each with its tool's name, in one or several messages, without the first space."""
    calls = _Calls(grammar, marks, tools, parallel)

    def write(tool: Tool) -> str:
        _require_muse_names(tool)
        invoke = grammar.fresh(
            " ".join(
                [
                    calls.exactly(f'<atem:invoke name="{tool.name}">\n'),
                    *_arguments(grammar, tool, _MUSE),
                    calls.exactly("</atem:invoke>\n"),
                ]
            )
        )
        opening = calls.exactly(f"to={tool.name}<|message|>{marks.start}\n")
        return f"{opening} {calls.repeated(invoke, '')} {calls.exactly(marks.end)}"

    return calls.repeated(calls.one_of(write), calls.exactly("<|eom|><|start|>assistant "))


def _require_muse_names(tool: Tool) -> None:
    if not _MUSE_NAME.fullmatch(tool.name):
        raise _no_name(tool, tool.name)
    for name in _properties_of(tool):
        if '"' in name:
            raise _no_name(tool, name)


_Spelling = Callable[[_Calls], tuple[str, str]]


def _json_tools(calls: _Calls) -> tuple[str, str]:
    r"""Write `<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>`, each call with its own marks."""
    inside = calls.one_of(lambda tool: f"{calls.exactly(_json_heading(tool))} {calls.arguments(tool)}")
    end = f'"}}" {SPACE}? {calls.exactly(calls.marks.end)}'
    again = f"{calls.exactly(calls.marks.start)} {SPACE}? {inside} {end}"
    more = f"({SPACE}? {calls.grammar.fresh(again)})*" if calls.parallel else ""
    return calls.marks.start, f"{SPACE}? {inside} {end} {more}"


def _json_heading(tool: Tool) -> str:
    return f'{{"name": {json.dumps(tool.name)}, "arguments": '


def _mistral(calls: _Calls) -> tuple[str, str]:
    """Write `[TOOL_CALLS]f[ARGS]{}`, or `[TOOL_CALLS][{"name": "f", "arguments": {}}]` where there is no such mark."""
    if "[ARGS]" not in calls.grammar.tokens:
        call = calls.one_of(lambda tool: f'{calls.exactly(_json_heading(tool))} {calls.arguments(tool)} "}}"')
        return calls.marks.start, f'{SPACE}? "[" {calls.repeated(call, _COMMA)} "]"'
    call = calls.one_of(lambda tool: f"{calls.exactly(f'{tool.name}[ARGS]')} {calls.arguments(tool)}")
    return calls.marks.start, calls.repeated(call, calls.exactly(calls.marks.start))


def _kimi_k2(calls: _Calls) -> tuple[str, str]:
    """Write `<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{}<|tool_call_end|>`, all between two marks."""

    def write(tool: Tool) -> str:
        begin = calls.exactly(f"<|tool_call_begin|>functions.{tool.name}:")
        middle, end = calls.exactly("<|tool_call_argument_begin|>"), calls.exactly("<|tool_call_end|>")
        return f"{begin} /[0-9]{{1,4}}/ {middle} {calls.arguments(tool)} {end}"

    call = calls.one_of(write)
    return calls.marks.start, f"{calls.repeated(call, '')} {calls.exactly(calls.marks.end)}"


def _kimi_k3(calls: _Calls) -> tuple[str, str]:
    """Write arguments as one JSON block, which this format has beside those that come one by one."""

    def write(tool: Tool) -> str:
        begin = calls.exactly(f'<|open|>call tool="{tool.name}" index="')
        middle = calls.exactly('"<|sep|><|open|>json type="object"<|sep|>')
        end = calls.exactly("<|close|>json<|sep|><|close|>call<|sep|>")
        return f"{begin} /[0-9]{{1,4}}/ {middle} {calls.arguments(tool)} {end}"

    call = calls.one_of(write)
    return calls.marks.start, f"{calls.repeated(call, '')} {calls.exactly(calls.marks.end)}"


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


def _texts_of(schema: Schema) -> list[str] | None:
    """Return the possible texts of a property if the schema lists them."""
    if not schema.keys() <= _STRING_KEYS:
        return None
    given = [schema["const"]] if "const" in schema else schema.get("enum")
    if not isinstance(given, list) or not given:
        return None
    values = cast("list[object]", given)
    return [str(value) for value in values] if all(isinstance(value, str) for value in values) else None


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


def _tagged(call_before: str, call_behind: str, argument: _Tagged) -> _Spelling:
    """Return the writer of calls with separate marks for arguments; `{}` is replaced by the tool's name."""

    def spell(calls: _Calls) -> tuple[str, str]:
        def write(tool: Tool) -> str:
            arguments = _arguments(calls.grammar, tool, argument)
            return " ".join(
                [calls.exactly(call_before.format(tool.name)), *arguments, calls.exactly(call_behind)]
            )

        call = calls.one_of(write)
        end = calls.exactly(calls.marks.end)
        again = f"{SPACE}? {calls.exactly(calls.marks.start)} {call} {end}"
        more = f"({calls.grammar.fresh(again)})*" if calls.parallel else ""
        return calls.marks.start, f"{call} {end} {more}"

    return spell


def _arguments(grammar: LarkGrammar, tool: Tool, how: _Tagged) -> list[str]:
    """Return the rules of one call's arguments; optional ones have a question mark."""
    required = _required_of(tool)
    return [
        grammar.fresh(_argument(grammar, tool, name, schema, how)) + ("" if name in required else "?")
        for name, schema in _properties_of(tool).items()
    ]


def _argument(grammar: LarkGrammar, tool: Tool, name: str, schema: Schema, how: _Tagged) -> str:
    before = grammar.exactly(how.before.format(name))
    if options := [*_as_text(grammar, tool, schema, how), *_as_json(grammar, tool, schema, how)]:
        return f"{before} {either(options)}"
    if tool.strict:
        raise RequestError(
            f"Property '{name}' of tool '{tool.name}' cannot be enforced in this model's format, which writes strings "
            "without quotes: give it one plain type, or an enum of strings.",
            param="tools",
        )
    return f"{before} {grammar.until(how.behind)}"


def _as_text(grammar: LarkGrammar, tool: Tool, schema: Schema, how: _Tagged) -> list[str]:
    """Return the rule of a string without quotes, if a wrong one can be recognized."""
    texts = _texts_of(schema)
    if texts is not None:
        safe = all(_is_safe(text, how) for text in texts)
        return [grammar.exactly(text + how.behind) for text in texts] if safe else []
    if not any(each.keys() <= _STRING_KEYS or not tool.strict for each in _strings(schema, how)):
        return []
    return [grammar.until(how.behind, besides=how.no_string)]


def _strings(schema: Schema, how: _Tagged) -> list[Schema]:
    """Return the schema if it is of a string, otherwise its choices that are of strings."""
    if not how.json_strings or "anyOf" not in schema:
        return [schema] if schema.get("type") == "string" else []
    options = schema["anyOf"]
    given = cast("list[object]", options) if isinstance(options, list) else []
    choices = [cast("Schema", each) for each in given if isinstance(each, dict)]
    return [each for each in choices if each.get("type") == "string" and _texts_of(each) is None]


def _as_json(grammar: LarkGrammar, tool: Tool, schema: Schema, how: _Tagged) -> list[str]:
    if how.json_strings:
        is_json = True
    elif _texts_of(schema) is not None or schema.get("type") == "string":
        is_json = False
    else:
        is_json = how.any_json or schema.get("type") in _JSON_TYPES
    value = grammar.json(_alone_of(tool, schema), **options_of(tool)) if is_json else ""
    return [f"{value} {grammar.exactly(how.behind)}"] if is_json else []


def _is_safe(text: str, how: _Tagged) -> bool:
    """Return True if a text is read back unchanged."""
    return (
        text == text.strip()
        and how.behind.strip() not in text
        and not (how.no_string and re.fullmatch(how.no_string, text))
    )


_GLM = _Tagged("<arg_key>{}</arg_key><arg_value>", "</arg_value>", any_json=True)
_MUSE = _Tagged(
    '<atem:parameter name="{}">',
    "</atem:parameter>\n",
    no_string=r'\s*(-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?|true|false|null|NaN|-?Infinity|["\[{](?s:.*))\s*',
    json_strings=True,
)
_NULLS = "(?i:null|none|nil)"
_SPELLINGS: Mapping[str, _Spelling] = {
    "json_tools": _json_tools,
    "longcat": _json_tools,
    "mistral": _mistral,
    "kimi_k2": _kimi_k2,
    "kimi_k3": _kimi_k3,
    "pythonic": _pythonic,
    "gemma4": _gemma(gemma.QUOTE),
    "function_gemma": _gemma(gemma.FUNCTION_GEMMA_QUOTE),
    "glm47": _tagged("{}", "", _GLM),
    "laguna": _tagged("{}", "", _GLM),
    "qwen3_coder": _tagged(
        "\n<function={}>\n",
        "</function>\n",
        _Tagged("<parameter={}>\n", "\n</parameter>\n", no_string="(?i:null)"),
    ),
    "seed_oss": _tagged(
        "\n<function={}>\n",
        "</function>\n",
        _Tagged("<parameter={}>\n", "\n</parameter>\n", no_string="(?i:null)"),
    ),
    "minimax_m2": _tagged(
        '\n<invoke name="{}">\n',
        "</invoke>\n",
        _Tagged('<parameter name="{}">', "</parameter>\n", no_string=rf"\s*{_NULLS}\s*"),
    ),
    "minicpm5": _tagged(
        '"{}">',
        "",
        _Tagged('<param name="{}">', "</param>", no_string=rf"\s*({_NULLS}|<!\[CDATA\[(?s:.*))\s*"),
    ),
}
"""Writers by the name of mlx-lm's parser. Formats with a header around each part of an answer have separate ones."""
