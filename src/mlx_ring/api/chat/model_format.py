"""Format of a model's answers: the marks of its reasoning and its tool calls, read from its tokenizer.

gpt-oss's format, Harmony, is here too, because mlx-lm has no reader for it. An answer consists of messages, each with a header
that names its channel: `analysis` is reasoning, and a message to a function is a call. See
https://cookbook.openai.com/articles/openai-harmony.

    <|channel|>analysis<|message|>TEXT<|end|>
    <|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{"city": "Paris"}<|call|>
    <|start|>assistant<|channel|>final<|message|>answer<|return|>
"""

from __future__ import annotations

import importlib
import inspect
import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from types import SimpleNamespace
from typing import Any, Literal, cast

from mlx_ring.api.chat import gemma
from mlx_ring.api.chat.argument_values import parse_mistral, parse_pythonic, parsed_json
from mlx_ring.api.chat.lark import WrittenCalls
from mlx_ring.api.service import Tokenizer

TOKENS = frozenset({"<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>"})
"""Tokens of Harmony. A vocabulary with all of them uses the format."""
TRANSITIONS: Mapping[str, list[tuple[str, str]]] = {
    "header": [("<|channel|>analysis<|message|>", "reasoning"), ("<|message|>", "normal")],
    "reasoning": [("<|end|>", "header")],
    "normal": [("<|end|>", "header")],
}
"""Marks that end each state, with the state that follows, under mlx-lm's names, as in `TokenizerWrapper`."""
HEADING = re.compile(
    r"(?P<name>[\w-]++)(?P<id>)[^{<]*+(?:<(?!\|(?:message|call)\|>)[^{<]*+)*<\|message\|>\s*(?=\{)"
)
"""Heading of a call up to its arguments. It is matched again after each token. So runs of characters are possessive, because
the time of a long name would grow with its square. Groups are not, because Python before 3.11.5 matches them wrongly.
"""


def parse_tool_call(text: str, tools: object) -> object:
    """Parse a call from its function's name on. Raise `ValueError` for text that is not a call."""
    del tools
    heading, mark, arguments = text.strip().partition("<|message|>")
    name = re.match(r"[\w-]+", heading)
    if name is None or not mark:
        raise ValueError("There is no function.")
    return {"name": name[0], "arguments": json.loads(arguments or "{}")}


State = Literal["start", "content", "reasoning", "calls", "header"]
"""Part of an answer. At the `start`, also after a closing mark, there is no text yet.

A `header` names the recipient of the next text. Clients do not see it.
"""

ParseCalls = Callable[[str, list[dict[str, object]]], object]
"""Parser of mlx-lm. It takes the text between the marks and the tools for templates, and returns one or several calls."""

_STATES: Mapping[str, State] = {
    "normal": "start",
    "tool": "calls",
    "reasoning": "reasoning",
    "header": "header",
}
"""States by mlx-lm's names."""
_DEEPSEEK = tuple(
    f"<\uff5ctool\u2581{name}\uff5c>"
    for name in ("calls\u2581begin", "calls\u2581end", "call\u2581begin", "sep", "call\u2581end")
)
"""Tokens around DeepSeek's calls, around each one, and behind its tool's name. Their bars and spaces are wide."""
_DSML = "\uff5cDSML\uff5cfunction_calls"
_COMMAND_MARKS = tuple(
    f"<|{name}|>" for name in ("START_THINKING", "END_THINKING", "START_RESPONSE", "END_RESPONSE")
)
"""Marks of Command around reasoning, and around text."""
INNER_MARKS: Mapping[str, tuple[str, ...]] = {
    "function_gemma": ("<escape>",),
    "gemma4": ('<|"|>',),
    "glm47": ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    "kimi_k2": ("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"),
    "mistral": ("[ARGS]", "[CALL_ID]"),
    "deepseek_v3": _DEEPSEEK[2:],
    "deepseek_v31": _DEEPSEEK[2:],
}
"""Further special tokens that calls may contain, by the name of mlx-lm's parser."""
_BARE_STARTS: Mapping[str, tuple[str, str]] = {
    "qwen3_coder": ("<function=", ">"),
    "seed_oss": ("<function=", ">"),
}
"""Texts before and after the name of a tool that a model often calls without the first mark, by the parser's name."""
_WORD = re.compile(r"\w+")


@dataclass(frozen=True, slots=True)
class Marks:
    """Marks before and after a part of an answer's text."""

    start: str
    end: str
    """Mark after the part. If it is empty, the part lasts to the answer's end."""


@dataclass(frozen=True, slots=True)
class CallMarks(Marks):
    """Marks around tool calls, and the parser of the text between them."""

    parser: str
    """mlx-lm's name of the parser, such as `json_tools`."""
    parse: ParseCalls = field(repr=False)
    inner: tuple[str, ...] = ()
    """Further marks inside that may be special tokens."""
    is_single: bool = False
    """True if the template refuses several calls in one message."""

    def other_starts(self, names: Iterable[str]) -> dict[str, str]:
        """Return the marks with which models also open calls of these tools, each with its part that belongs to the call."""
        match self.parser:
            case "kimi_k2":
                return {"<|tool_call_section_begin|>": "", "<|tool_call_begin|>": "<|tool_call_begin|>"}
            case "deepseek_v3" | "deepseek_v31":
                return {_DEEPSEEK[2]: _DEEPSEEK[2]}
            case "granite":
                return {"<tool_call>": ""}
            case "minicpm5":
                return {self.start: self.start}
            case "harmony":
                return {f"to={name}{end}": f"{name}{end}" for name in names for end in " <"}
            case _:
                return {}

    @property
    def bare(self) -> tuple[str, str] | None:
        """Text before and after the tool's name where a model may leave out the mark; None if a call needs it."""
        return _BARE_STARTS.get(self.parser)

    @property
    def is_bare_json(self) -> bool:
        """True if an answer may begin with the JSON of a call, without a mark."""
        return self.parser == "llama3"


@dataclass(frozen=True, slots=True)
class JsonSpelling:
    """Syntax of a call whose arguments are a JSON object: how a model writes it, and all that is read as one."""

    written: tuple[WrittenCalls, ...]
    """Texts of demanded calls. The first counts whose inner marks are all tokens, else the last."""
    heading: re.Pattern[str] = re.compile(r"(?!)")
    """Pattern up to the object, with the groups `name`, of the tool, and `id`, of the call if it has one.

    Without one, mlx-lm's parser reads the call when it is complete.
    """
    closing: re.Pattern[str] = re.compile(r"\s*")
    """Text that may follow the object. It is taken as it comes, so each piece of it must match alone."""
    following: tuple[str, ...] = ()
    """Starts of further calls and of marks after one. Without any, all text up to the mark after calls belongs to them."""
    is_object: bool = False
    """True if the arguments are a member of the call's own object."""


def _json_heading(before: str) -> re.Pattern[str]:
    """Return the heading of a call that is an object itself, with a pattern of the text before its members."""
    return re.compile(
        rf'\s*+{before}\s*+(?:"(?:type|id|tool_call_id)"\s*+:\s*+"[^"\\]*+"\s*+,\s*+)?"(?:tool_)?name"\s*+:'
        r'\s*+"(?P<name>[^"\\]*+)"\s*+,\s*+"(?:arguments|parameters)"\s*+:\s*+(?=\{)(?P<id>)'
    )


_FENCE = r"(?P<fence>```(?:json)?\s*+)?"
_BEGIN, _SEPARATOR, _END = _DEEPSEEK[2:]
_JSON_CALL = '{"name": "NAME", "arguments": JSON}'
_KIMI_K2_CALL = "<|tool_call_begin|>functions.NAME:NUMBER<|tool_call_argument_begin|>JSON<|tool_call_end|>"
_COMMAND_CALL = '{"tool_call_id": "NUMBER", "tool_name": "NAME", "parameters": JSON}'
_COMMAND = WrittenCalls(_COMMAND_CALL, ",\n    ", "[\n    ", "\n]")
_GRANITE = WrittenCalls('{~"name": "NAME",~"arguments": JSON~}', ",~", "[~", "~]")
_JSON_TOOLS = JsonSpelling(
    (WrittenCalls(f"~{_JSON_CALL}~", "END~START"),),
    _json_heading(rf"{_FENCE}\{{{{1,2}}"),
    re.compile(r"[\s}]*"),
    is_object=True,
)
_JSON_LIST = JsonSpelling(
    (WrittenCalls(_JSON_CALL, ", ", "[", "]"),),
    _json_heading(rf"{_FENCE}(?:\[\s*+)?\{{{{1,2}}"),
    re.compile(r"[\s}\],]*"),
    ("{", "["),
    is_object=True,
)
_DEEPSEEK_V31 = JsonSpelling(
    (WrittenCalls(f"{_BEGIN}NAME{_SEPARATOR}JSON{_END}"),),
    re.compile(
        rf"\s*+(?:{re.escape(_BEGIN)}\s*+)?(?:function{re.escape(_SEPARATOR)})?(?P<name>[\w.-]++)(?P<id>)"
        rf"\s*+(?:{re.escape(_SEPARATOR)}\s*+)?{_FENCE}(?=\{{)"
    ),
    re.compile(rf"(?:\s|{re.escape(_END)})*"),
    (_BEGIN, _END, f"function{_SEPARATOR}"),
)
JSON_SPELLINGS: Mapping[str, JsonSpelling] = {
    "harmony": JsonSpelling((WrittenCalls("NAME <|constrain|>json<|message|>JSON"),), HEADING),
    "json_tools": _JSON_TOOLS,
    "longcat": _JSON_TOOLS,
    "nemotron": _JSON_LIST,
    "granite": replace(_JSON_LIST, written=(_GRANITE,)),
    "command": replace(_JSON_LIST, written=(_COMMAND,)),
    "llama3": JsonSpelling(
        (WrittenCalls('{"name": "NAME", "parameters": JSON}', "; "),),
        _json_heading(r"\{"),
        re.compile(r"[\s};]*"),
        ("<|python_tag|>",),
        is_object=True,
    ),
    "deepseek_v31": _DEEPSEEK_V31,
    "deepseek_v3": replace(
        _DEEPSEEK_V31,
        written=(WrittenCalls(f"{_BEGIN}function{_SEPARATOR}NAME\n```json\nJSON\n```{_END}", "\n"),),
    ),
    "mistral": JsonSpelling(
        (WrittenCalls("NAME[ARGS]JSON", "START"), WrittenCalls(_JSON_CALL, ",~", "~[", "]")),
        re.compile(
            r"\s*+(?:\[TOOL_CALLS\]\s*+)?(?P<name>[\w-]++)\s*+"
            r"(?:\[CALL_ID\]\s*+(?P<id>\w++)\s*+)?(?:\[ARGS\]\s*+)?(?=\{)"
        ),
        following=("[TOOL_CALLS]",),
    ),
    "kimi_k2": JsonSpelling(
        (WrittenCalls(_KIMI_K2_CALL),),
        re.compile(
            r"\s*+(?:<\|tool_call_begin\|>\s*+)?(?=(?P<name>[^\s<]++))(?:(?P<id>[^\s<]{1,300}[:_]\d{1,9})(?=[\s<])|[^\s<]++)"
            r"\s*+<\|tool_call_argument_begin\|>\s*+(?=\{)"
        ),
        re.compile(r"(?:\s|<\|tool_call_(?:section_)?end\|>)*"),
        tuple(f"<|tool_call_{name}|>" for name in ("begin", "end", "section_end", "section_begin")),
    ),
    "kimi_k3": JsonSpelling(
        (
            WrittenCalls(
                '<|open|>call tool="NAME" index="NUMBER"<|sep|><|open|>json type="object"<|sep|>JSON'
                "<|close|>json<|sep|><|close|>call<|sep|>"
            ),
        )
    ),
}
"""Spellings of calls by the name of the parser: mlx-lm's, or ours."""
_OTHER_NAME = re.compile(r"\s*(?:\[\s*|call:)(?P<name>[\w.-]+)[({]")
"""Start of a call of Gemma, or in Python."""


def begun_name(marks: CallMarks, text: str) -> str:
    """Return the tool's name of a call that begins here, without tags; empty if it is incomplete."""
    spelling = JSON_SPELLINGS.get(marks.parser)
    written = () if spelling is None else spelling.written
    patterns = (_OTHER_NAME, *(each.name_pattern(marks.start, marks.end) for each in written))
    return next((found["name"] for pattern in patterns if (found := pattern.match(text))), "")


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """Format of one model's answers, made once from its tokenizer."""

    thinking: Marks | None = None
    calls: CallMarks | None = None
    dropped: tuple[str, ...] = ()
    """Marks without meaning, which clients do not see."""
    begins: State = "start"
    turns: Mapping[State, tuple[tuple[str, State], ...]] = field(
        default_factory=dict[State, tuple[tuple[str, State], ...]]
    )
    """Further marks by the state in which they count, each with the state that follows."""
    words: frozenset[str] = frozenset()
    """Words of the template. An argument that is not among them has no effect."""
    special: Mapping[str, int] = field(default_factory=dict[str, int])
    """Special tokens that are part of marks, by their text."""
    added: Mapping[str, int] = field(default_factory=dict[str, int])
    """The same, with tokens that were added by name and are not special. A tokenizer makes them only of this text."""

    @property
    def reasons(self) -> bool:
        """True if a part of an answer can be reasoning, between marks or after a header."""
        return self.thinking is not None or any(
            state == "reasoning" for turns in self.turns.values() for _, state in turns
        )

    def knows(self, word: str) -> bool:
        """Return True if the template seems to have a variable of that name."""
        return word in self.words

    def shown_tokens(self, *, calls: bool) -> frozenset[int]:
        """Return the special tokens that an answer's text must contain so that its marks can be found."""
        texts = self.marks(calls=calls)
        return frozenset(token for name, token in self.special.items() if any(name in text for text in texts))

    def opens_thinking(self, prompts_end: str) -> bool:
        """Return True if the answer to this prompt starts inside reasoning."""
        return self.thinking is not None and prompts_end.rstrip().endswith(self.thinking.start)

    def marks(self, *, calls: bool) -> list[str]:
        """Return all marks that may be special tokens."""
        marks = [*self.dropped, *(mark for turns in self.turns.values() for mark, _ in turns)]
        if self.thinking is not None:
            marks += [self.thinking.start, self.thinking.end]
        if calls and self.calls is not None:
            marks += [self.calls.start, self.calls.end, *self.calls.inner]
        return marks


def read_format(tokenizer: Tokenizer) -> ChatFormat:
    """Return the format that mlx-lm's wrapper found for a tokenizer, or one that this module defines."""
    words = frozenset(_WORD.findall(_template_text(tokenizer)))
    if {added.content for added in tokenizer.added_tokens_decoder.values()} >= TOKENS:
        return _with_special(_harmony(words), tokenizer)
    calls = _read_calls(tokenizer)
    is_command = calls is not None and calls.parser == "command"
    plain = ChatFormat(
        thinking=Marks(*_COMMAND_MARKS[:2]) if is_command else _read_thinking(tokenizer),
        calls=calls,
        dropped=_COMMAND_MARKS[2:] if is_command else tuple(tokenizer.structural_markers),
        begins=_STATES.get(tokenizer.response_initial_state or "", "start"),
        turns=_read_turns(tokenizer.response_transitions, calls),
        words=words,
    )
    return _with_special(plain, tokenizer)


def _harmony(words: frozenset[str]) -> ChatFormat:
    calls = CallMarks("to=functions.", "<|call|>", "harmony", parse_tool_call, ("<|constrain|>",))
    return ChatFormat(calls=calls, begins="header", turns=_read_turns(TRANSITIONS, calls), words=words)


def _read_thinking(tokenizer: Tokenizer) -> Marks | None:
    start, end = tokenizer.think_start, tokenizer.think_end
    return Marks(start, end) if start and end else None


def _read_calls(tokenizer: Tokenizer) -> CallMarks | None:
    """Return the marks and the parser of calls. Each of mlx-lm's parsers is a module with the name of its format."""
    start, end, parse = tokenizer.tool_call_start, tokenizer.tool_call_end, tokenizer.tool_parser
    if (not start or parse is None) and (template := _template_for_tools(tokenizer)):
        start, end, parse = _inferred_calls(tokenizer, template)
    if not start or parse is None:
        return _own_calls(_template_for_tools(tokenizer) or _template_text(tokenizer))
    parser = parse.__module__.rpartition(".")[2]
    inner = INNER_MARKS.get(parser, ())
    return CallMarks(start, end or "", parser, parser_of(parser, parse), inner)


_OWN_CALLS: tuple[tuple[tuple[str, ...], str, str, str], ...] = (
    (("<seed:tool_call>",), "<seed:tool_call>", "</seed:tool_call>", "seed_oss"),
    (("\uff5cDSML\uff5c", "function_calls"), f"<{_DSML}>", f"</{_DSML}>", "deepseek_v32"),
    ((_DEEPSEEK[0], "```json"), _DEEPSEEK[0], _DEEPSEEK[1], "deepseek_v3"),
    ((_DEEPSEEK[0],), _DEEPSEEK[0], _DEEPSEEK[1], "deepseek_v31"),
    (("<TOOLCALL>",), "<TOOLCALL>", "</TOOLCALL>", "nemotron"),
    (("<|START_ACTION|>",), "<|START_ACTION|>", "<|END_ACTION|>", "command"),
    (("<|tool_call|>", "<|start_of_role|>"), "<|tool_call|>", "", "granite"),
    (("<tool_call>", '"name"', '"arguments"'), "<tool_call>", "</tool_call>", "json_tools"),
    (("<|start_header_id|>", "ipython", '"parameters"'), "<|python_tag|>", "", "llama3"),
)
"""Texts of a template by which a format is known that mlx-lm does not read, its marks, and our name of its parser."""


def _own_calls(template: str) -> CallMarks | None:
    """Return the calls of Seed-OSS, DeepSeek, Nemotron, Command, Granite 3, SmolLM3 and Llama 3, by their templates."""
    for texts, start, end, parser in _OWN_CALLS:
        if all(text in template for text in texts):
            is_single = "single tool-calls" in template
            inner = INNER_MARKS.get(parser, ())
            return CallMarks(start, end, parser, lambda text, _: parsed_json(text), inner, is_single)
    return None


def _template_for_tools(tokenizer: Tokenizer) -> str:
    """Return the template that transformers chooses for tools, of several; empty if there is one, which mlx-lm reads."""
    templates: object = getattr(_beneath(tokenizer), "chat_template", None)
    if not isinstance(templates, dict):
        return ""
    named = cast("dict[str, str]", templates)
    return named.get("tool_use") or named.get("default") or ""


def _inferred_calls(tokenizer: Tokenizer, template: str) -> tuple[str | None, str | None, ParseCalls | None]:
    """Return the marks and the parser of calls that mlx-lm finds for a template."""
    wrapped: Any = importlib.import_module("mlx_lm.tokenizer_utils")
    single = SimpleNamespace(chat_template=template, get_vocab=_beneath(tokenizer).get_vocab)
    name: str | None = wrapped._infer_tool_parser(single)  # noqa: SLF001 - there is no public one
    if name is None:
        return None, None, None
    module: Any = importlib.import_module(f"mlx_lm.tool_parsers.{name}")
    return module.tool_call_start, module.tool_call_end, module.parse_tool_call


def parser_of(name: str, own: ParseCalls) -> ParseCalls:
    """Return the parser of a format: mlx-lm's parser of that name, or a better one under another name."""
    match name:
        case "mistral":
            return partial(parse_mistral, own)
        case "pythonic":
            return parse_pythonic
        case "gemma4":
            return gemma.parse_gemma(own)
        case "function_gemma":
            module = importlib.import_module(own.__module__.replace(name, "gemma4"))
            return gemma.parse_function_gemma(own, gemma.parse_gemma(module.parse_tool_call))
        case _:
            return own


def _read_turns(
    transitions: Mapping[str, Iterable[tuple[str, str]]], calls: CallMarks | None
) -> dict[State, tuple[tuple[str, State], ...]]:
    """Return the turns without the mark of calls, which counts only in its own state."""
    start = None if calls is None else calls.start
    return {
        _STATES[state]: tuple((mark, _STATES[then]) for mark, then in turns if mark != start)
        for state, turns in transitions.items()
    }


def _template_text(tokenizer: Tokenizer) -> str:
    """Return the text of the template or templates, or the source of a renderer in Python."""
    renderer: object = getattr(tokenizer, "_chat_template", None)
    template: object = getattr(_beneath(tokenizer), "chat_template", None)
    if renderer is not None:
        module = inspect.getmodule(renderer)
        return "" if module is None else inspect.getsource(module)
    if isinstance(template, dict):
        return "\n".join(str(text) for text in cast("dict[str, object]", template).values())
    return template if isinstance(template, str) else ""


def _beneath(tokenizer: Tokenizer) -> Any:
    """Return the tokenizer in mlx-lm's wrapper."""
    return getattr(tokenizer, "_tokenizer", tokenizer)


def _with_special(plain: ChatFormat, tokenizer: Tokenizer) -> ChatFormat:
    marks = [*plain.marks(calls=True), *(TOKENS if plain.begins == "header" else ())]
    known = tokenizer.added_tokens_decoder
    added = {
        each.content: token
        for token, each in known.items()
        if each.content and any(each.content in mark for mark in marks)
    }
    special = {text: token for text, token in added.items() if known[token].special}
    return replace(plain, special=special, added=added)
