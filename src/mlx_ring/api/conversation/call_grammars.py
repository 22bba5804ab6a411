"""How each format writes calls, as a grammar: what mlx-lm's parsers read back as arguments that hold to the tool's schema.

Where arguments are JSON, the schema is enforced as it is. Formats that name arguments one by one write strings without quotes:
there each property has its own rule, and what cannot be told from its text alone is refused for tools that are strict.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from mlx_ring.api.conversation.asked import Tool
from mlx_ring.api.conversation.format import CallMarks
from mlx_ring.api.conversation.lark import PYTHON_STRINGS, SPACE, LarkGrammar, either
from mlx_ring.core.errors import RequestError

Schema = Mapping[str, object]

_NOTHING: Schema = {"type": "object", "properties": {}, "additionalProperties": False}
_LENIENT = {"lenient": True, "coerce_one_of": True}
"""For tools that are not strict: what cannot be enforced is left out."""
_COMMA = f'"," {SPACE}?'
_DEFINITIONS = ("$defs", "definitions")
_PLAIN_KEYS = frozenset(
    {
        *("type", "properties", "required", "additionalProperties", *_DEFINITIONS),
        *("title", "description", "$schema", "$id", "$comment", "default", "examples"),
    }
)
"""Of a schema of arguments that can be written one by one."""
_STRING_KEYS = frozenset({"type", "enum", "const", "title", "description", "default", "examples", "$comment"})
_JSON_TYPES = ("integer", "number", "boolean", "object", "array")
_IDENTIFIER = re.compile(r"[A-Za-z_]\w*")


def write_calls(
    grammar: LarkGrammar, marks: CallMarks, tools: Sequence[Tool], *, parallel: bool
) -> tuple[str, str]:
    """What opens calls, and what follows it: one call, or several.

    Raises:
        RequestError: the model's format has no grammar, or a tool's schema has none in it.
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
    """What is to be written."""

    grammar: LarkGrammar
    marks: CallMarks
    tools: Sequence[Tool]
    parallel: bool

    def one_of(self, write: Callable[[Tool], str]) -> str:
        """A call of any of the tools."""
        return either(self.grammar.fresh(write(tool)) for tool in self.tools)

    def repeated(self, call: str, between: str) -> str:
        return f"{call} ({between} {call})*" if self.parallel else call

    def arguments(self, tool: Tool, **options: object) -> str:
        """Of one tool, as one JSON object."""
        return self.grammar.json(tool.parameters or _NOTHING, **options_of(tool), **options)

    def exactly(self, text: str) -> str:
        return self.grammar.exactly(text)


def write_harmony_calls(grammar: LarkGrammar, tools: Sequence[Tool]) -> list[str]:
    """gpt-oss's: one message to a function ends the answer. Its last mark may be one of the tokens that end answers."""
    return [
        grammar.fresh(
            f"{grammar.exactly(f'<|channel|>commentary to=functions.{tool.name} <|constrain|>json<|message|>')} "
            f"{grammar.json(tool.parameters or _NOTHING, **options_of(tool))} ({grammar.exactly('<|call|>')})?"
        )
        for tool in tools
    ]


def options_of(tool: Tool) -> Mapping[str, object]:
    return {} if tool.strict else _LENIENT


_Spelling = Callable[[_Calls], tuple[str, str]]


def _json_tools(calls: _Calls) -> tuple[str, str]:
    r"""`<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>`, each call with marks of its own."""
    inside = calls.one_of(lambda tool: f"{calls.exactly(_json_heading(tool))} {calls.arguments(tool)}")
    end = f'"}}" {SPACE}? {calls.exactly(calls.marks.end)}'
    again = f"{calls.exactly(calls.marks.start)} {SPACE}? {inside} {end}"
    more = f"({SPACE}? {calls.grammar.fresh(again)})*" if calls.parallel else ""
    return calls.marks.start, f"{SPACE}? {inside} {end} {more}"


def _json_heading(tool: Tool) -> str:
    return f'{{"name": {json.dumps(tool.name)}, "arguments": '


def _mistral(calls: _Calls) -> tuple[str, str]:
    """`[TOOL_CALLS]f[ARGS]{}`, or `[TOOL_CALLS][{"name": "f", "arguments": {}}]` where there is no such mark."""
    if "[ARGS]" not in calls.grammar.tokens:
        call = calls.one_of(lambda tool: f'{calls.exactly(_json_heading(tool))} {calls.arguments(tool)} "}}"')
        return calls.marks.start, f'{SPACE}? "[" {calls.repeated(call, _COMMA)} "]"'
    call = calls.one_of(lambda tool: f"{calls.exactly(f'{tool.name}[ARGS]')} {calls.arguments(tool)}")
    return calls.marks.start, calls.repeated(call, calls.exactly(calls.marks.start))


def _kimi_k2(calls: _Calls) -> tuple[str, str]:
    """`<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{}<|tool_call_end|>`, all between two marks."""

    def write(tool: Tool) -> str:
        begin = calls.exactly(f"<|tool_call_begin|>functions.{tool.name}:")
        middle, end = calls.exactly("<|tool_call_argument_begin|>"), calls.exactly("<|tool_call_end|>")
        return f"{begin} /[0-9]{{1,4}}/ {middle} {calls.arguments(tool)} {end}"

    call = calls.one_of(write)
    return calls.marks.start, f"{calls.repeated(call, '')} {calls.exactly(calls.marks.end)}"


def _kimi_k3(calls: _Calls) -> tuple[str, str]:
    """Arguments as one block of JSON, which this format has beside those that come one by one."""

    def write(tool: Tool) -> str:
        begin = calls.exactly(f'<|open|>call tool="{tool.name}" index="')
        middle = calls.exactly('"<|sep|><|open|>json type="object"<|sep|>')
        end = calls.exactly("<|close|>json<|sep|><|close|>call<|sep|>")
        return f"{begin} /[0-9]{{1,4}}/ {middle} {calls.arguments(tool)} {end}"

    call = calls.one_of(write)
    return calls.marks.start, f"{calls.repeated(call, '')} {calls.exactly(calls.marks.end)}"


def _pythonic(calls: _Calls) -> tuple[str, str]:
    """`[f(a=1, b="x"), g()]`."""

    def write(tool: Tool) -> str:
        _require_identifiers(tool, [tool.name.replace(".", "_"), *_properties(tool)])
        values = {
            name: f"{json.dumps(f'{name}=')} {calls.grammar.json(_alone(tool, schema), **options_of(tool), **PYTHON_STRINGS)}"
            for name, schema in _properties(tool).items()
        }
        return f'{json.dumps(tool.name + "(")} {_in_order(calls.grammar, tool, values)} ")"'

    call = calls.one_of(write)
    return calls.marks.start, f'"[" {calls.repeated(call, _COMMA)} "]" {calls.exactly(calls.marks.end)}'


def _require_identifiers(tool: Tool, names: Sequence[str]) -> None:
    for name in names:
        if not _IDENTIFIER.fullmatch(name):
            raise RequestError(
                f"'{name}' of tool '{tool.name}' is no name that this model's format can write.",
                param="tools",
            )


def _in_order(grammar: LarkGrammar, tool: Tool, values: dict[str, str]) -> str:
    """Each property once at most, in their order, those that are required always; with commas between."""
    required = _required(tool)
    first = after = '""'
    for name, value in reversed(values.items()):
        optional = name not in required
        written = f"{grammar.fresh(value)} {after}"
        first = grammar.fresh(f"{written} | {first}" if optional else written)
        after = grammar.fresh(f"{_COMMA} {written} | {after}" if optional else f"{_COMMA} {written}")
    return first


# ---- arguments one by one


@dataclass(frozen=True, slots=True)
class _Tagged:
    """How a format writes one argument, and what it makes of its text."""

    before: str
    """With `{}` for its name."""
    behind: str
    no_string: str = ""
    """What a string must not be, for it would be read as something else."""
    any_json: bool = False
    """Whether JSON of whatever type is read as what it is."""


def _tagged(call_before: str, call_behind: str, argument: _Tagged) -> _Spelling:
    """Calls that name their arguments one by one, in marks of their own each; `{}` stands for the tool's name."""

    def spell(calls: _Calls) -> tuple[str, str]:
        def write(tool: Tool) -> str:
            arguments = [
                calls.grammar.fresh(_argument(calls.grammar, tool, name, schema, argument))
                + ("" if name in _required(tool) else "?")
                for name, schema in _properties(tool).items()
            ]
            return " ".join(
                [calls.exactly(call_before.format(tool.name)), *arguments, calls.exactly(call_behind)]
            )

        call = calls.one_of(write)
        end = calls.exactly(calls.marks.end)
        again = f"{SPACE}? {calls.exactly(calls.marks.start)} {call} {end}"
        more = f"({calls.grammar.fresh(again)})*" if calls.parallel else ""
        return calls.marks.start, f"{call} {end} {more}"

    return spell


def _argument(grammar: LarkGrammar, tool: Tool, name: str, schema: Schema, how: _Tagged) -> str:
    before = grammar.exactly(how.before.format(name))
    texts = _texts(schema)
    if texts is not None:
        written = either(grammar.exactly(text + how.behind) for text in texts)
        if all(_is_safe(text, how) for text in texts):
            return f"{before} {written}"
    elif schema.get("type") == "string" and (schema.keys() <= _STRING_KEYS or not tool.strict):
        return f"{before} {grammar.until(how.behind, besides=how.no_string)}"
    elif schema.get("type") in _JSON_TYPES or (how.any_json and schema.get("type") != "string"):
        value = grammar.json(_alone(tool, schema), **options_of(tool))
        return f"{before} {value} {grammar.exactly(how.behind)}"
    if tool.strict:
        raise RequestError(
            f"Property '{name}' of tool '{tool.name}' cannot be enforced in this model's format, which writes strings "
            "without quotes: give it one plain type, or an enum of strings.",
            param="tools",
        )
    return f"{before} {grammar.until(how.behind)}"


def _texts(schema: Schema) -> list[str] | None:
    """The texts of which a property is one, where that is so."""
    if not schema.keys() <= _STRING_KEYS:
        return None
    given = [schema["const"]] if "const" in schema else schema.get("enum")
    if not isinstance(given, list) or not given:
        return None
    values = cast("list[object]", given)
    return [str(value) for value in values] if all(isinstance(value, str) for value in values) else None


def _is_safe(text: str, how: _Tagged) -> bool:
    """Whether a text comes back as it is."""
    return (
        text == text.strip()
        and how.behind.strip() not in text
        and not (how.no_string and re.fullmatch(how.no_string, text))
    )


def _properties(tool: Tool) -> Mapping[str, Schema]:
    """Of a tool whose arguments come one by one.

    Raises:
        RequestError: it is strict, and says more of its arguments than what each of them is.
    """
    schema = tool.parameters or _NOTHING
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
    missing = [name for name in _required(tool) if name not in given]
    if missing and tool.strict:
        raise RequestError(f"Tool '{tool.name}' requires '{missing[0]}', which has no schema.", param="tools")
    return {
        name: cast("Schema", value) if isinstance(value, Mapping) else {} for name, value in given.items()
    }


def _required(tool: Tool) -> list[str]:
    required = (tool.parameters or _NOTHING).get("required", [])
    return [str(name) for name in cast("list[object]", required)] if isinstance(required, list) else []


def _alone(tool: Tool, schema: Schema) -> Schema:
    """A property's schema with the definitions that it may refer to."""
    given = tool.parameters or {}
    return {**{key: given[key] for key in _DEFINITIONS if key in given}, **schema}


_GLM = _Tagged("<arg_key>{}</arg_key><arg_value>", "</arg_value>", any_json=True)
_NULLS = "(?i:null|none|nil)"
_SPELLINGS: Mapping[str, _Spelling] = {
    "json_tools": _json_tools,
    "longcat": _json_tools,
    "mistral": _mistral,
    "kimi_k2": _kimi_k2,
    "kimi_k3": _kimi_k3,
    "pythonic": _pythonic,
    "glm47": _tagged("{}", "", _GLM),
    "laguna": _tagged("{}", "", _GLM),
    "qwen3_coder": _tagged(
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
"""By the name of mlx-lm's parser. Those of function_gemma, gemma4 and muse_spark have no quotes to hold on to, or headers around
every part of an answer."""
