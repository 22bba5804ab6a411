"""Example tool calls in every format, and a tokenizer of bytes and marks for them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module
from typing import Any

from llguidance import LLTokenizer
from tests.api.twins import ByteTokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from mlx_ring.api.chat.model_format import CallMarks, ChatFormat, Marks, parser_of, read_format
from mlx_ring.api.chat.request import Tool

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "unit": {"enum": ["C", "F"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 14},
        "hours": {"type": "array", "items": {"$ref": "#/$defs/hour"}},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
    "$defs": {"hour": {"type": "integer", "minimum": 0, "maximum": 23}},
}
ARGUMENTS = '{"city": "Rome", "unit": "C", "days": 3, "hours": [8, 20]}'
MINIMAL_ARGUMENTS = '{"city": "Rome", "days": 3}'
WEATHER = Tool("get_weather", parameters=SCHEMA, strict=True)
CLOCK = Tool("clock", strict=True)
BAR, WIDE_SPACE = "\uff5c", "\u2581"
DSML = f"{BAR}DSML{BAR}"
"""Mark of DeepSeek V3.2, which is part of each tag."""


def deepseek(name: str) -> str:
    """Return one of DeepSeek's marks."""
    return f"<{BAR}tool{WIDE_SPACE}{name.replace(' ', WIDE_SPACE)}{BAR}>"


MARKS = (
    *("<think>", "</think>", "<tool_call>", "</tool_call>", "<longcat_tool_call>", "</longcat_tool_call>"),
    *("[TOOL_CALLS]", "[ARGS]", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>"),
    *("<|tool_call_argument_begin|>", "<|tool_call_end|>", "<|tool_call_start|>"),
    *("<|tool_call>", "<tool_call|>", '<|"|>', "<start_function_call>", "<end_function_call>", "<escape>"),
    *("<|open|>", "<|close|>", "<|sep|>", "<minimax:tool_call>", "</minimax:tool_call>"),
    *("<TOOLCALL>", "</TOOLCALL>", "<|START_ACTION|>", "<|END_ACTION|>", "<|tool_call|>", "<|python_tag|>"),
    DSML,
    *map(deepseek, ("calls begin", "calls end", "call begin", "call end", "sep")),
)
END = 0
TEMPLATES = {
    "seed_oss": "{{ tools }}<seed:tool_call>\n<function=f>\n<parameter=k>",
    "deepseek_v3": f"{{{{ tools }}}}{deepseek('calls begin')}```json",
    "deepseek_v31": f"{{{{ tools }}}}{deepseek('calls begin')}",
    "deepseek_v32": f"{{{{ tools }}}}<{DSML}function_calls>",
    "nemotron": "{{ tools }}<TOOLCALL>[",
    "command": "{{ tools }}<|START_ACTION|>[",
    "granite": "{{ tools }}<|start_of_role|>assistant<|tool_call|>",
    "smollm": '{{ tools }}<tool_call>\n{"name": f, "arguments": {}}\n</tool_call>',
    "llama": '{{ tools }}<|start_header_id|>ipython"parameters": This model only supports single tool-calls at once!',
    "llama3": '{{ tools }}<|start_header_id|>ipython"parameters": ',
}
"""Texts of templates by which formats are known that mlx-lm does not read; `llama` refuses several calls."""


def own_format(name: str) -> ChatFormat:
    """Return the format of a template."""
    backend: Any = ByteTokenizer()
    backend.chat_template = TEMPLATES[name]
    backend.tool_call_start = backend.tool_call_end = backend.tool_parser = None
    return read_format(backend)


@dataclass(frozen=True)
class CallExample:
    """Tool calls in one format, without their outer marks."""

    parser: str
    call: str
    """`get_weather` with a city, a unit, days and hours."""
    minimal_call: str
    """`get_weather` with a city and days only."""
    empty_call: str
    """`clock` without arguments; empty if the format cannot write such a call."""
    separator: str | None = None
    """Text between two calls in one pair of marks; None if each call has its own pair."""
    added: tuple[str, ...] = MARKS
    """Marks that are single tokens."""

    def marks(self) -> CallMarks:
        if self.parser in TEMPLATES and (own := own_format(self.parser).calls) is not None:
            return own
        module: Any = import_module(f"mlx_lm.tool_parsers.{self.parser}")
        parse = parser_of(self.parser, module.parse_tool_call)
        return CallMarks(module.tool_call_start, module.tool_call_end, self.parser, parse)

    def marked(self, call: str) -> str:
        marks = self.marks()
        return marks.start + call + marks.end

    def whole(self, call: str) -> str:
        """Return a call as a whole answer, which may need no mark."""
        return call if self.marks().is_bare_json else self.marked(call)

    def two_calls(self) -> str:
        if self.separator is None:
            return f"{self.whole(self.call)}\n{self.whole(self.minimal_call)}"
        if self.call.startswith("["):
            return self.whole(self.call[:-1].rstrip() + self.separator + self.minimal_call[1:].lstrip())
        return self.whole(self.call + self.separator + self.minimal_call.removeprefix("\n"))

    def format(self, thinking: Marks | None = None) -> ChatFormat:
        return ChatFormat(thinking, self.marks(), added=tokenizer(self.added)[1])


@cache
def tokenizer(added: tuple[str, ...]) -> tuple[LLTokenizer, Mapping[str, int]]:
    """Return a tokenizer and its marks' ids. Every second mark is special, because real tokenizers have both kinds."""
    vocabulary = {"<|eos|>": END}
    vocabulary |= {letter: 1 + at for at, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens([AddedToken("<|eos|>", special=True)])
    backend.add_tokens([AddedToken(text, special=bool(at % 2)) for at, text in enumerate(added)])
    ids = {text: backend.token_to_id(text) or 0 for text in added}
    return LLTokenizer(backend.to_str(), eos_token=END), ids


_JSON = (
    f'\n{{"name": "get_weather", "arguments": {ARGUMENTS}}}\n',
    f'{{"name": "get_weather", "arguments": {MINIMAL_ARGUMENTS}}}',
    '\n{"name": "clock", "arguments": {}}\n',
)
_NAMED = (("get_weather", ARGUMENTS), ("get_weather", MINIMAL_ARGUMENTS), ("clock", "{}"))
_KIMI_K3 = (
    '<|open|>call tool="{}" index="1"<|sep|><|open|>json type="object"<|sep|>{}'
    "<|close|>json<|sep|><|close|>call<|sep|>"
)
_KIMI_K2 = "<|tool_call_begin|>functions.{}:0<|tool_call_argument_begin|>{}<|tool_call_end|>"


def _json(pattern: str) -> tuple[str, str, str]:
    """Return a format's three calls, from a pattern with `NAME` and `JSON`."""
    full, minimal, empty = (pattern.replace("NAME", name).replace("JSON", json) for name, json in _NAMED)
    return full, minimal, empty


def _tagged(heading: str, argument: str, end: str) -> tuple[str, str, str]:
    """Return a format's three calls, from patterns with `{}` for a tool, an argument and its value."""
    full = {"city": "Rome", "unit": "C", "days": "3", "hours": "[8, 20]"}
    minimal = {"city": "Rome", "days": "3"}

    def write(tool: str, arguments: Mapping[str, str]) -> str:
        return heading.format(tool) + "".join(argument.format(*each) for each in arguments.items()) + end

    return write("get_weather", full), write("get_weather", minimal), write("clock", {})


def _gemma(quote: str) -> tuple[str, str, str]:
    """Return the three calls of a Gemma format, with arguments in the order of their names."""
    city, unit = f"city:{quote}Rome{quote}", f"unit:{quote}C{quote}"
    return (
        f"call:get_weather{{{city},days:3,hours:[8,20],{unit}}}",
        f"call:get_weather{{{city},days:3}}",
        "call:clock{}",
    )


_GLM = (*_tagged("{}", "<arg_key>{}</arg_key><arg_value>{}</arg_value>", "")[:2], "")
_OF_MLX_LM = (
    CallExample("json_tools", *_JSON),
    CallExample("json_tools", *_JSON, added=("<think>", "</think>")),
    CallExample("longcat", *_JSON),
    CallExample(
        "mistral", *(f"{name}[ARGS]{arguments}" for name, arguments in _NAMED), separator="[TOOL_CALLS]"
    ),
    CallExample(
        "mistral",
        *(f'[{{"name": "{name}", "arguments": {arguments}}}]' for name, arguments in _NAMED),
        separator=", ",
        added=("[TOOL_CALLS]",),
    ),
    CallExample("kimi_k2", *(_KIMI_K2.format(*each) for each in _NAMED), separator=""),
    CallExample("kimi_k3", *(_KIMI_K3.format(*each) for each in _NAMED), separator=""),
    CallExample(
        "pythonic",
        '[get_weather(city="Rome", unit="C", days=3, hours=[8, 20])]',
        '[get_weather(city="Rome", days=3)]',
        "[clock()]",
        separator=", ",
    ),
    CallExample("gemma4", *_gemma('<|"|>')),
    CallExample("function_gemma", *_gemma("<escape>")),
    CallExample(
        "function_gemma", *_gemma("<escape>"), added=("<start_function_call>", "<end_function_call>")
    ),
    CallExample("glm47", *_GLM),
    CallExample("laguna", *_GLM),
    CallExample(
        "qwen3_coder", *_tagged("\n<function={}>\n", "<parameter={}>\n{}\n</parameter>\n", "</function>\n")
    ),
    CallExample(
        "minimax_m2",
        *_tagged('\n<invoke name="{}">\n', '<parameter name="{}">{}</parameter>\n', "</invoke>\n"),
    ),
    CallExample("minicpm5", *_tagged('"{}">', '<param name="{}">{}</param>', "")),
)
_LIST = _json('[{"name": "NAME", "arguments": JSON}]')
_BEGIN, _SEPARATOR, _END = map(deepseek, ("call begin", "sep", "call end"))


def _dsml() -> tuple[str, str, str]:
    """Return the three calls of DeepSeek V3.2, whose tags say if an argument is a string."""
    argument = f'<{DSML}parameter name="{{0}}" string="TYPE-{{0}}">{{1}}</{DSML}parameter>\n'
    full, minimal, empty = (
        call.replace("TYPE-city", "true").replace("TYPE-unit", "true")
        for call in _tagged(f'\n<{DSML}invoke name="{{}}">\n', argument, f"</{DSML}invoke>\n")
    )
    return re.sub("TYPE-[a-z]+", "false", full), re.sub("TYPE-[a-z]+", "false", minimal), empty


_OWN = (
    CallExample("deepseek_v32", *_dsml(), separator=""),
    CallExample(
        "seed_oss", *_tagged("\n<function={}>\n", "<parameter={}>\n{}\n</parameter>\n", "</function>\n")
    ),
    CallExample("nemotron", *_LIST, separator=", "),
    CallExample("granite", *_LIST, separator=", "),
    CallExample(
        "command",
        *_json('[\n    {"tool_call_id": "0", "tool_name": "NAME", "parameters": JSON}\n]'),
        separator=",\n    ",
    ),
    CallExample("llama3", *_json('{"name": "NAME", "parameters": JSON}'), separator="; "),
    CallExample(
        "deepseek_v3",
        *_json(f"{_BEGIN}function{_SEPARATOR}NAME\n```json\nJSON\n```{_END}"),
        separator="\n",
    ),
    CallExample("deepseek_v31", *_json(f"{_BEGIN}NAME{_SEPARATOR}JSON{_END}"), separator=""),
)
FORMATS = (*_OF_MLX_LM, *_OWN, *(replace(each, added=()) for each in _OWN))
"""Calls of each format, also where its marks are no tokens."""
IDS = [f"{each.parser}{'' if each.added == MARKS else ', marks as text'}" for each in FORMATS]


def example_of(parser: str) -> CallExample:
    return next(each for each in FORMATS if each.parser == parser)
