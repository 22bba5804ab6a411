"""Tool calls in an answer's text, from their first mark to their last.

mlx-lm's parsers read a call when it is complete. Arguments that are JSON anyway are streamed after the tool's name as they
arrive. Only the heading before them has to be parsed for that.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import cast

from mlx_ring.api.chat.argument_values import JsonObjectReader, is_object, parsed_json
from mlx_ring.api.chat.model_format import CALL_NAMES, JSON_SPELLINGS, CallMarks, open_end
from mlx_ring.api.chat.request import AnswerPart, CallArguments, CallOpening, Tool
from mlx_ring.api.chat.tagged_calls import TAGS, Progress, TaggedReader
from mlx_ring.api.streaming import new_id

_NUMBER = re.compile(r"[:_]\d{1,9}$")


def new_call_id() -> str:
    return new_id("call_")


@dataclass(frozen=True, slots=True)
class CallRules:
    """Rules for recognizing calls in text."""

    marks: CallMarks
    tools: Sequence[Tool]
    """Callable tools."""
    parallel: bool = True
    """True if several calls are allowed; otherwise all text after the first is dropped."""
    required: bool = False
    """True if the answer must be a call, so that text of an incomplete one is no text of the answer."""
    early: bool = False
    """True to stream arguments before it is known that they are valid."""
    new_id: Callable[[], str] = new_call_id
    names: frozenset[str] = field(init=False)
    as_templates_read: list[dict[str, object]] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "names", frozenset(tool.name for tool in self.tools))
        object.__setattr__(self, "as_templates_read", [tool.for_template() for tool in self.tools])

    def find_tool(self, written: str) -> Tool | None:
        """Return the callable tool of a name as a model writes it: in quotes, or after `functions.`. Kimi numbers its calls."""
        name = written.strip().strip("\"'")
        if name not in self.names:
            name = name.removeprefix("functions.")
        if name not in self.names and self.marks.parser == "kimi_k2":
            name = _NUMBER.sub("", name.removeprefix("functions_"))
        return next((tool for tool in self.tools if tool.name == name), None)


@dataclass(frozen=True, slots=True)
class ReadCalls:
    """Result of reading a piece of calls."""

    parts: list[AnswerPart]
    rest: str | None = None
    """Text after the calls; None if they have not ended."""
    no_call: str = ""
    """Text between calls, and text that looked like a call but is not one."""


class CallsReader:
    """Reader of the text between one pair of marks: a call, in some formats several."""

    def __init__(
        self, rules: CallRules, calls: int, mark: str, *, begun: str = "", is_bare: bool = False
    ) -> None:
        """Start after `calls` earlier calls of the answer, behind a mark, whose end may belong to the call that has `begun`.

        With `is_bare` it is the start of a call without a mark.
        """
        self.calls = calls
        self._first = calls
        self._rules = rules
        self._spelling = JSON_SPELLINGS.get(rules.marks.parser)
        self._tagged = self._tagged_reader(is_bare=is_bare)
        self._is_bare = is_bare
        self._begun = begun
        self._text = begun
        """Text that is not parsed yet."""
        self._raw = mark.removesuffix(begun)
        """Original text that was parsed since the last complete call."""
        self._call: _JsonCall | None = None
        """Call whose arguments are incomplete."""
        self._parts: list[AnswerPart] = []

    def push(self, text: str) -> ReadCalls:
        """Return the parts that `text` completes."""
        self._text += text
        if self._tagged is not None and (reading := self._read_tagged(self._tagged)) is not None:
            return reading
        rest = None
        while rest is None and self._advance():
            if self._call is None and self.calls > self._first and not self._rules.parallel:
                rest = self._text
        if rest is None and self._call is None and self.calls > self._first:
            following = self._text[self._closing_end() :]
            # The mark after a call may be missing before the next one.
            rest = following if following.startswith(self._rules.marks.start) else None
        if self._is_bare and self._call is None and self.calls == self._first and not self._may_begin():
            return self._reading("", self._raw + self._text)
        return self._reading(rest) if rest is not None else self._look_for_end()

    def finish(self, *, cut_off: bool) -> ReadCalls:
        """End the answer without a mark that ends calls, because some formats have none.

        A call that is cut off in its arguments is a call with the arguments so far, streamed or not. A required one
        has none if it is cut off before them, or if its format is read at the end. It is dropped if its name is
        incomplete.
        """
        if self._tagged is not None and not (cut_off and self.is_cut_off):
            reading = self._read_tagged(self._tagged, is_end=True, cut_off=cut_off)
            reading = self._look_for_end() if reading is None else reading
            if reading.rest is not None:
                return reading
        if cut_off and self.is_cut_off and self._call is None:
            return self._end_in_heading()
        if cut_off and self.is_cut_off and self._call is not None and not self._call.is_out:
            self._call.is_out = True
            self._parts += [self._call.opening, CallArguments(self.calls, self._call.arguments)]
        return self._conclude("", "")

    @property
    def parallel(self) -> bool:
        return self._rules.parallel

    @property
    def is_calling(self) -> bool:
        """True if a call's name is sent and the call has not ended."""
        return self._call is not None and self._call.is_out

    @property
    def is_cut_off(self) -> bool:
        """True if a call has not ended, should the answer end here. One without arguments counts only if it is required."""
        if self._call is not None:
            return self._call.is_out or not self._call.json.is_broken
        if not self._rules.required:
            return False
        if self.calls > self._first:
            return bool(self._text[self._closing_end() :].strip())
        return not parse_calls(self._rules, self._text)

    def _reading(self, rest: str | None, no_call: str = "") -> ReadCalls:
        parts, self._parts = self._parts, []
        return ReadCalls(parts, rest, no_call)

    # ---- calls with tags

    def _tagged_reader(self, *, is_bare: bool = False, follows: bool = False) -> TaggedReader | None:
        tags = TAGS.get(self._rules.marks.parser)
        return tags and TaggedReader(tags, self._rules.find_tool, is_bare=is_bare, follows=follows)

    def _read_tagged(
        self, reader: TaggedReader, *, is_end: bool = False, cut_off: bool = False
    ) -> ReadCalls | None:
        """Read calls with tags. Return None for text that mlx-lm's parser may still read."""
        while True:
            progress = reader.read(self._text)
            if is_end and progress.kind == "more":
                progress = reader.finish(self._text, cut_off=cut_off)
            match progress.kind:
                case "more":
                    return self._reading(None)
                case "end":
                    return self._reading(self._text[progress.end :])
                case "broken":
                    self._tagged = None
                    is_text = self._is_bare or self.calls > self._first
                    return self._reading("", self._raw + self._text) if is_text else None
                case "call":
                    self._add_tagged(progress)
                    if progress.is_last or not self._rules.parallel:
                        return self._reading(self._text)
                    reader = self._tagged = self._tagged_reader(follows=True) or reader

    def _add_tagged(self, progress: Progress) -> None:
        name = progress.tool.name if progress.tool is not None else ""
        self._add([(name, _dump(progress.arguments), None)])
        self._take(progress.end)
        self._raw = ""

    # ---- calls whose arguments are JSON

    def _advance(self) -> bool:
        """Return True if a call starts or its arguments end."""
        return self._begin() if self._call is None else self._go_on(self._call)

    def _may_begin(self) -> bool:
        """Return True if the JSON of a call without a mark may continue with arguments."""
        following = "".join(self._text[len(self._begun) :].split())
        return any(
            following.startswith(heading) or heading.startswith(following)
            for heading in (',"parameters":{', ',"arguments":{')
        )

    def _begin(self) -> bool:
        if self._spelling is None:
            return False
        start = 0 if self.calls == self._first else self._closing_end()
        found = self._spelling.heading.match(self._text, start)
        tool = None if found is None else self._rules.find_tool(found["name"])
        if found is None or tool is None:
            return False
        opening = CallOpening(self.calls, found["id"] or self._rules.new_id(), tool.name)
        self._call = _JsonCall(opening, is_out=self._rules.early)
        if self._rules.early:
            self._parts.append(opening)
        self._take(found.end())
        return True

    def _go_on(self, call: _JsonCall) -> bool:
        if call.json.is_broken:
            return False
        piece, rest = call.json.push(self._text)
        self._take(len(self._text) - len(rest or ""))
        call.arguments += piece
        if call.is_out and piece:
            self._parts.append(CallArguments(self.calls, piece))
        return rest is not None and not call.json.is_broken and self._end(call)

    def _end(self, call: _JsonCall) -> bool:
        """Return True if the arguments are valid; otherwise keep the text, to send it unchanged."""
        if not call.is_out:
            if not is_object(call.arguments):
                call.json.is_broken = True
                return False
            self._parts += [call.opening, CallArguments(self.calls, call.arguments)]
        self.calls += 1
        self._call, self._raw = None, ""
        return True

    # ---- the end

    def _look_for_end(self) -> ReadCalls:
        """Send broken arguments unchanged, because their start is already sent."""
        end = self._rules.marks.end
        place = self._text.find(end) if end and (self._call is None or self._call.json.is_broken) else -1
        if place >= 0:
            rest = self._text[place + len(end) :]
            self._text = self._text[:place]
            return self._conclude(rest, end)
        if self._call is not None and self._call.is_out and self._call.json.is_broken:
            self._pass_on(len(self._text) - (open_end(self._text, [end]) if end else 0))
        return self._reading(None)

    def _conclude(self, rest: str, end: str) -> ReadCalls:
        """Return the result at the end of the calls."""
        if self._call is not None and self._call.is_out:
            self._pass_on(len(self._text))
            self._call = None
            self.calls += 1
            return self._reading(rest)
        if self._call is not None:
            return self._reading(rest, self._raw + self._text + end)
        if self.calls > self._first:
            left = self._text[self._closing_end() :]
            return self._reading(rest, left + end if left.strip() else "")
        return self._parse(rest, end)

    def _end_in_heading(self) -> ReadCalls:
        """Return the call that was cut off before its arguments, if its name is complete."""
        pattern = CALL_NAMES.get(self._rules.marks.parser)
        start = 0 if self.calls == self._first else self._closing_end()
        complete, left = _calls_before_cut(self._rules, self._text[start:])
        self._add(complete)
        is_last = bool(complete) and not self._rules.parallel
        found = None if pattern is None or is_last else pattern.match(left)
        if found is not None and (tool := self._rules.find_tool(found["name"])) is not None:
            opening = CallOpening(self.calls, self._rules.new_id(), tool.name)
            self._parts += [opening, CallArguments(self.calls, "")]
            self.calls += 1
        return self._reading("")

    def _parse(self, rest: str, end: str) -> ReadCalls:
        """Read the calls with mlx-lm's parser."""
        parsed = [] if self._is_bare else parse_calls(self._rules, self._text)
        if not parsed:
            return self._reading(rest, self._raw + self._text + end)
        self._add(parsed)
        return self._reading(rest)

    def _add(self, parsed: Sequence[_ParsedCall]) -> None:
        """Add complete calls, or only the first one if several are not allowed."""
        for name, arguments, call_id in parsed if self._rules.parallel else parsed[:1]:
            opening = CallOpening(self.calls, call_id or self._rules.new_id(), name)
            self._parts += [opening, CallArguments(self.calls, arguments)]
            self.calls += 1

    def _pass_on(self, length: int) -> None:
        if length:
            self._parts.append(CallArguments(self.calls, self._text[:length]))
            self._take(length)

    def _take(self, length: int) -> None:
        self._raw += self._text[:length]
        self._text = self._text[length:]

    def _closing_end(self) -> int:
        """Return the number of characters that still belong to the previous call."""
        found = None if self._spelling is None else self._spelling.closing.match(self._text)
        return 0 if found is None else found.end()


@dataclass(slots=True)
class _JsonCall:
    """Call whose arguments are incomplete."""

    opening: CallOpening
    is_out: bool
    """True if the call's name is sent."""
    json: JsonObjectReader = field(default_factory=JsonObjectReader)
    arguments: str = ""


_ParsedCall = tuple[str, str, str | None]
"""Name of a call's tool, its arguments as JSON, and its id if it has one."""
_READ_LIST: Mapping[str, Callable[[str], object]] = {
    "mistral": json.loads,
    "pythonic": partial(ast.parse, mode="eval"),
}
"""Readers of the formats that write several calls as one list, by parser. They fail for an incomplete list."""
_DOUBLE, _SINGLE = r'"(?:\\.|[^"\\])*(?:"|\Z)', r"'(?:\\.|[^'\\])*(?:'|\Z)"
_TOKENS: Mapping[str, re.Pattern[str]] = {
    "mistral": re.compile(rf"{_DOUBLE}|[][{{}},]", re.DOTALL),
    "pythonic": re.compile(rf"{_DOUBLE}|{_SINGLE}|[][(){{}},]", re.DOTALL),
}
"""Strings, of which the last may lack its end, brackets and commas of these formats."""


def _calls_before_cut(rules: CallRules, text: str) -> tuple[Sequence[_ParsedCall], str]:
    """Return the complete calls of a list that was cut off, and the rest as if the list began there."""
    read, pattern = _READ_LIST.get(rules.marks.parser), CALL_NAMES.get(rules.marks.parser)
    if read is None or pattern is None:
        return [], text
    for end in (len(text), _last_comma(_TOKENS[rules.marks.parser], text)):
        whole = f"{text[:end]}]"
        try:
            read(whole)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            continue
        if complete := parse_calls(rules, whole):
            return complete, f"[{text[end + 1 :]}"
    return [], text


def _last_comma(tokens: re.Pattern[str], text: str) -> int:
    """Return the place of the last comma between entries of a list, outside strings and inner brackets; without one 0."""
    depth = last = 0
    for token in tokens.finditer(text):
        if token[0] in "[({":
            depth += 1
        elif token[0] in "])}":
            depth -= 1
        elif token[0] == "," and depth == 1:
            last = token.start()
    return last


def parse_calls(rules: CallRules, text: str) -> list[_ParsedCall]:
    """Return all calls between marks; none if one of them is not a call."""
    return _read_calls(rules, lambda: rules.marks.parse(text, rules.as_templates_read)) or _read_calls(
        rules, lambda: parsed_json(text)
    )


def _read_calls(rules: CallRules, parse: Callable[[], object]) -> list[_ParsedCall]:
    try:
        found = parse()
    except Exception:  # noqa: BLE001 - each parser fails with its own exceptions on unexpected text
        return []
    calls = [
        _read_call(rules, call)
        for call in cast("list[object]", found if isinstance(found, list) else [found])
    ]
    return [call for call in calls if call is not None] if all(calls) else []


def _read_call(rules: CallRules, found: object) -> _ParsedCall | None:
    if not isinstance(found, dict):
        return None
    call = cast("dict[str, object]", found)
    call_id, name = call.get("id"), call.get("name", call.get("function", call.get("tool_name")))
    if isinstance(name, dict):
        call = cast("dict[str, object]", name)
        name = call.get("name")
    arguments = _arguments_text(call.get("arguments", call.get("parameters")))
    tool = rules.find_tool(name) if isinstance(name, str) else None
    if tool is None or arguments is None:
        return None
    return tool.name, arguments, call_id if isinstance(call_id, str) else None


def _arguments_text(arguments: object) -> str | None:
    """Return arguments as JSON; None if they are no object."""
    if isinstance(arguments, str):
        arguments = arguments.strip() or "{}"
        return arguments if is_object(arguments) else None
    try:
        text = _dump({} if arguments is None else arguments)
    except (TypeError, ValueError, RecursionError):
        return None
    return text if is_object(text) else None


def _dump(value: object) -> str:
    """Encode as JSON, in ASCII only if the value has lone surrogates, which UTF-8 cannot encode."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(value, allow_nan=False)
    return text
