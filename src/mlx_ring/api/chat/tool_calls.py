"""Tool calls in an answer's text, from their first mark to their last.

mlx-lm's parsers read a call when it is complete. Arguments that are JSON are streamed as they arrive, after the tool's name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

from mlx_ring.api.chat.argument_values import (
    LONGEST_HEADING,
    JsonObjectReader,
    MembersReader,
    arguments_text,
    dump,
    is_object,
    last_comma,
    listed_length,
    may_be_arguments,
    may_be_call,
    parsed_json,
    python_tree,
    silence,
)
from mlx_ring.api.chat.model_format import JSON_SPELLINGS, CallMarks, begun_name
from mlx_ring.api.chat.request import AnswerPart, CallArguments, CallOpening, Tool
from mlx_ring.api.chat.tagged_calls import TAGS, Progress, TaggedReader
from mlx_ring.api.streaming import new_id
from mlx_ring.core.generation import open_end

_FENCE = "```"
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
        """Start after `calls` earlier calls, behind a mark, whose end may belong to the call that has `begun`.

        With `is_bare` it is the start of a call without a mark, which may still be none.
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
        self._taken = [mark.removesuffix(begun)]
        """Pieces of the original text that was parsed since the last complete call."""
        self._call: _JsonCall | None = None
        """Call whose arguments are incomplete."""
        self._members: MembersReader | None = None
        """Reader of what a call's own object has after the arguments."""
        self._is_fenced = False
        """True if a call began with a fence of a block of code."""
        self._searched = 0
        """Number of characters that contain no mark after calls."""
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
            rest = self._text_after()
        if rest is None and self._is_bare and not self._may_be_bare():
            return self._reading("", self._raw())
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
        if self._tagged is not None and self._tagged.has_begun(self._text, cut_off=True):
            return True
        if self.calls > self._first:
            return bool(self._behind_closing().strip())
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
                    # mlx-lm's parser would drop the arguments that are incomplete.
                    is_text = is_text or reader.has_begun(self._text, cut_off=cut_off)
                    return self._reading("", self._raw()) if is_text else None
                case "call":
                    self._add_tagged(progress)
                    if progress.is_last or not self._rules.parallel:
                        return self._reading(self._text)
                    reader = self._tagged = self._tagged_reader(follows=True) or reader

    def _add_tagged(self, progress: Progress) -> None:
        name = progress.tool.name if progress.tool is not None else ""
        self._add([(name, dump(progress.arguments), None)])
        self._take(progress.end)
        self._taken.clear()

    # ---- calls whose arguments are JSON

    def _advance(self) -> bool:
        """Return True if a call starts or its arguments end."""
        if self._members is not None:
            return self._read_members(self._members)
        return self._begin() if self._call is None else self._go_on(self._call)

    def _may_be_bare(self) -> bool:
        """Return True if the JSON of a call without a mark may continue as a call."""
        if self._call is not None or self.calls > self._first or self._spelling is None:
            return self._call is None or not self._call.json.is_broken
        return may_be_arguments(self._text[len(self._begun) :])

    def _begin(self) -> bool:
        if self._spelling is None:
            return False
        self._take(len(self._text) - len(self._text.lstrip()))
        if self.calls > self._first and self._text_after() is not None:
            return False
        found = self._spelling.heading.match(self._text, 0, LONGEST_HEADING)
        tool = None if found is None else self._rules.find_tool(found["name"])
        if found is None or tool is None:
            return False
        opening = CallOpening(self.calls, found["id"] or self._rules.new_id(), tool.name)
        self._call = _JsonCall(opening, is_out=self._rules.early and not self._is_bare)
        self._is_fenced |= bool(found.groupdict().get("fence"))
        if self._call.is_out:
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
        if rest is None or call.json.is_broken:
            return False
        self._members = MembersReader() if self._spelling and self._spelling.is_object else None
        return self._is_bare or self._end(call)

    def _read_members(self, members: MembersReader) -> bool:
        """Read on to the closing brace of a call's own object. A call without a mark needs one."""
        # A description of a tool has further members. It is no call without a mark.
        is_other = self._is_bare and self._text.lstrip().startswith(",")
        rest = self._text if is_other else members.push(self._text)
        members.is_broken = members.is_broken or is_other
        if not members.is_broken:
            self._take(len(self._text) - len(rest or ""))
        if rest is None:
            return False
        self._members, call = None, self._call
        if call is None:
            self._text = self._raw() if members.is_broken else self._text
            self._taken.clear()
            return True
        call.json.is_broken = members.is_broken
        return not members.is_broken and self._end(call)

    def _end(self, call: _JsonCall) -> bool:
        """Return True if the arguments are valid; otherwise keep the text, to send it unchanged."""
        if not call.is_out:
            if not is_object(call.arguments):
                call.json.is_broken = True
                return False
            self._parts += [call.opening, CallArguments(self.calls, call.arguments)]
        self.calls += 1
        self._call = None
        self._taken.clear()
        return True

    # ---- the end

    def _look_for_end(self) -> ReadCalls:
        """Send broken arguments unchanged, because their start is already sent."""
        end = self._rules.marks.end
        is_between = end and (self._call is None or self._call.json.is_broken)
        place = self._text.find(end, max(0, self._searched - len(end))) if is_between else -1
        self._searched = len(self._text)
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
            return self._reading(rest, self._raw() + end)
        if self.calls > self._first:
            left = self._behind_closing()
            if self._rules.parallel and left.startswith("{"):
                parsed = parse_calls(self._rules, f"[{left.rstrip().removesuffix(']')}]")
                self._add(parsed)
                left = "" if parsed else left
            return self._reading(rest, left + end if left.strip() else "")
        return self._parse(rest, end)

    def _end_in_heading(self) -> ReadCalls:
        """Return the call that was cut off before its arguments, if its name is complete."""
        text = self._text if self.calls == self._first else self._behind_closing()
        complete, left = _calls_before_cut(self._rules, text)
        self._add(complete)
        if not complete or self._rules.parallel:
            tool = None if self._tagged is None else self._tagged.begun_tool(left)
            tool = tool or self._rules.find_tool(begun_name(self._rules.marks, left))
            self._add([] if tool is None else [(tool.name, "", None)])
        return self._reading("")

    def _parse(self, rest: str, end: str) -> ReadCalls:
        """Read the calls with mlx-lm's parser."""
        length = listed_length(self._text) if self._rules.marks.parser == "mistral" else len(self._text)
        parsed = [] if self._is_bare else parse_calls(self._rules, self._text[:length])
        if not parsed:
            return self._reading(rest, self._raw() + end)
        self._add(parsed)
        after = self._text[length:].lstrip()
        return self._reading(after + end + rest if after else rest)

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
        self._taken.append(self._text[:length])
        self._text = self._text[length:]
        self._searched = max(0, self._searched - length)

    def _raw(self) -> str:
        """Return the original text since the last complete call."""
        return "".join((*self._taken, self._text))

    def _behind_closing(self) -> str:
        """Take all text so far that still belongs to the previous call, and return the text after it."""
        while self._spelling is not None and (found := self._spelling.closing.match(self._text)) is not None:
            fence = len(_FENCE) if self._is_fenced and self._text.startswith(_FENCE, found.end()) else 0
            self._is_fenced &= not fence
            self._take(found.end() + fence)
            if not fence:
                break
        return self._text

    def _text_after(self) -> str | None:
        """Return the text after a call if neither the mark after calls nor another call within the marks can follow."""
        following = self._behind_closing()
        if following.startswith(self._rules.marks.start):
            return following
        spelling, marks = self._spelling, self._rules.marks
        if not following or spelling is None or not spelling.following or self._members is not None:
            return None
        starts = (marks.start, marks.end, *spelling.following, _FENCE if self._is_fenced else "")
        is_call = may_be_call(following, starts, self._rules.names, is_json=spelling.is_object)
        return None if is_call else following


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
_READ_LIST: Mapping[str, Callable[[str], object]] = {"mistral": json.loads, "pythonic": python_tree}
"""Readers of the formats that write several calls as one list, by parser. They fail for an incomplete list."""


def _calls_before_cut(rules: CallRules, text: str) -> tuple[Sequence[_ParsedCall], str]:
    """Return the complete calls of a list that was cut off, and the rest as if the list began there."""
    if (read := _READ_LIST.get(rules.marks.parser)) is None:
        return [], text
    for end in (len(text), last_comma(rules.marks.parser, text)):
        whole = f"{text[:end]}]"
        try:
            read(whole)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            continue
        if complete := parse_calls(rules, whole):
            return complete, f"[{text[end + 1 :]}"
    return [], text


def parse_calls(rules: CallRules, text: str) -> list[_ParsedCall]:
    """Return all calls between marks; none if one of them is not a call."""
    own = _read_calls(rules, lambda: rules.marks.parse(text, rules.as_templates_read))
    return own or _read_calls(rules, lambda: parsed_json(text))


def _read_calls(rules: CallRules, parse: Callable[[], object]) -> list[_ParsedCall]:
    try:
        with silence():
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
    arguments = arguments_text(call.get("arguments", call.get("parameters")))
    tool = rules.find_tool(name) if isinstance(name, str) else None
    if tool is None or arguments is None:
        return None
    return tool.name, arguments, call_id if isinstance(call_id, str) else None
