"""Reader of one answer, which splits streamed text into the answer's parts."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from mlx_ring.api.chat.argument_values import json_opening
from mlx_ring.api.chat.model_format import ChatFormat, State
from mlx_ring.api.chat.request import AnswerPart, CallArguments, ContentText, ReasoningText
from mlx_ring.api.chat.tool_calls import CallRules, CallsReader, ReadCalls
from mlx_ring.core.generation import StopMatcher, open_end

_BLOCK = re.compile(r"\s*(`{3,}|~{3,})([^`]*)$")
"""Line that opens a block of code, or closes one."""
_MOST_INDENT = 3
"""Number of spaces before a line that do not make it code."""
_LONGEST_START = 256
_MOST_NO_CALLS = 64
"""Limit of call marks without a call in one answer. After more of them, marks are plain text."""


@dataclass(frozen=True, slots=True)
class ReadingRules:
    """Rules for reading one answer."""

    format: ChatFormat
    calls: CallRules | None = None
    """Rules for calls. None: the answer cannot call tools, and marks of calls are text."""
    thinking_open: bool = False
    """True if the answer starts inside reasoning."""
    stops: tuple[str, ...] = ()
    """Strings that end the answer when its content contains one.

    They do not count in reasoning and calls, which clients do not see as text of the answer.
    """
    min_tokens: int = 0
    """Number of tokens before which stop strings do not count."""
    continues: bool = False
    """True if the answer starts inside a text that the prompt begins."""
    stop_tokens: frozenset[int] = frozenset()
    """The request's own tokens that end the answer wherever they come."""

    @property
    def must_call(self) -> bool:
        return self.calls is not None and self.calls.required


class _TextPlace:
    """Place at the end of the content so far."""

    def __init__(self) -> None:
        self._line = ""
        """Start of the last line."""
        self._block = ""
        """Mark of the open block of code."""
        self.is_blank = True
        """True before the first text and the first call of the answer."""

    def follow(self, text: str) -> None:
        self.is_blank = self.is_blank and not text.strip()
        first, *lines = text.split("\n")
        self._line += first[: _LONGEST_START - len(self._line)]
        for line in lines:
            self._end_line()
            self._line = line[:_LONGEST_START]

    def start_line(self) -> None:
        """Note that a call, which is no content, ends here."""
        self._end_line()
        self._line = ""

    def after(self, text: str) -> _TextPlace:
        """Return the place after further text."""
        place = _TextPlace()
        place._line, place._block, place.is_blank = self._line, self._block, self.is_blank
        place.follow(text)
        return place

    @property
    def begins_line(self) -> bool:
        """True at the start of a line that is no code."""
        return not self._block and not self._line.strip(" ") and len(self._line) <= _MOST_INDENT

    def _end_line(self) -> None:
        found = _BLOCK.match(self._line)
        if found is None:
            return
        if not self._block:
            self._block = found[1]
        elif found[1].startswith(self._block) and not found[2].strip():
            self._block = ""


class AnswerReader:
    """Reader of one answer's text, token by token. White space next to a mark belongs to the mark."""

    def __init__(self, rules: ReadingRules) -> None:
        self._rules = rules
        calls = rules.calls
        self._other_starts = {} if calls is None else calls.marks.other_starts(calls.names)
        """Other marks that open calls, each with its part that belongs to the call."""
        self._marks = _marks_by_state(rules.format, with_calls=calls is not None, others=self._other_starts)
        self._bare = None if calls is None else calls.marks.bare
        """Text around the tool's name where a call begins without a mark. It counts at the start of a line of content."""
        self._may_be_call = calls is not None and calls.marks.is_bare_json
        """True if an answer that begins as JSON may be a call."""
        self._names = frozenset(_written_names(rules.calls))
        self._place = _TextPlace()
        begins = "content" if rules.continues and rules.format.begins == "header" else rules.format.begins
        self._state: State = "reasoning" if rules.thinking_open else begins
        self._behind_mark = rules.thinking_open
        self._stops = StopMatcher(rules.stops)
        self._held = ""
        """Text that may be the start of a mark, or belong to one."""
        self._blank = ""
        """White space that belongs to a mark if one follows next."""
        self._calls: CallsReader | None = None
        self._before_calls: State = "start"
        self._tokens = 0
        self._parts: list[AnswerPart] = []
        self._no_calls = 0
        self.calls = 0
        """Number of calls in the answer, an incomplete one included."""
        self.ended = False
        """True if the following text does not belong to the answer."""
        self.stop_match: str | None = None
        """Stop string that ended the answer."""
        self.was_cut_off = False
        """True if the answer was cut off within a call."""

    @property
    def in_reasoning(self) -> bool:
        return self._state == "reasoning"

    def push(self, text: str) -> list[AnswerPart]:
        """Return the parts that one token's text adds or extends."""
        self._tokens += 1
        held, self._held = self._held, ""
        self._read(held + text)
        return self._taken()

    def finish(self, *, cut_off: bool = False) -> list[AnswerPart]:
        """Return the parts that were held back until the end of the text, which was cut off or which the model ended."""
        while self._calls is not None and not self.ended:
            is_cut_off = self._calls.is_calling or (cut_off and self._calls.is_cut_off)
            self.was_cut_off |= cut_off and is_cut_off
            self._read(self._take_calls(self._calls, self._calls.finish(cut_off=cut_off)))
            # A call that was cut off is the last, and did not end the answer.
            self.ended = self.ended and not is_cut_off
        if cut_off and self._rules.must_call and not self.in_reasoning:
            return self._taken()
        if not self.ended:
            self._emit(self._held)
        if not self.ended:
            self._emit_last()
        return self._taken()

    def _read(self, text: str | None) -> None:
        while text is not None and not self.ended:
            text = self._advance(text)

    def _taken(self) -> list[AnswerPart]:
        parts, self._parts = self._parts, []
        return join_parts(parts) if len(parts) > 1 else parts

    # ---- from mark to mark

    def _advance(self, text: str) -> str | None:
        """Read up to the next mark. Return the text after it, or None if all text is read."""
        if self._calls is not None:
            return self._take_calls(self._calls, self._calls.push(text))
        if self._state == "start":
            return self._begin(text)
        marks = self._marks[self._state]
        found = self._first_mark(text, marks)
        if found is None:
            said = len(text) - max(open_end(text, marks), self._open_bare(text))
            self._emit(text[:said])
            self._held = text[said:]
            return None
        place, mark = found
        self._emit(text[:place])
        self._turn(mark)
        return text[place + len(mark) :]

    def _first_mark(self, text: str, marks: Mapping[str, State]) -> tuple[int, str] | None:
        """Return the position and the text of the first mark. Of several at one position, return the longest."""
        places = [(place, mark) for mark in marks if (place := text.find(mark)) >= 0]
        found = min(places, key=lambda one: (one[0], -len(one[1])), default=None)
        return self._first_bare(text if found is None else text[: found[0]]) or found

    def _first_bare(self, text: str) -> tuple[int, str] | None:
        """Return the position and the text of the first start of a call without a mark."""
        if (opening := self._json_opening(text)) is not None:
            return opening if opening[1] else None
        if self._bare is None or self._state != "content":
            return None
        before, behind = self._bare
        place = text.find(before)
        while place >= 0:
            name, closing, _ = text[place + len(before) :].partition(behind)
            if closing and name in self._names and self._place.after(text[:place]).begins_line:
                return place, f"{before}{name}{behind}"
            place = text.find(before, place + 1)
        return None

    def _json_opening(self, text: str) -> tuple[int, str] | None:
        """Return the position and the start of the JSON of a call with which the answer begins, empty if it is incomplete."""
        said = text.lstrip()
        if not (self._may_be_call and self._place.is_blank and self._state == "content" and said):
            return None
        opening = json_opening(said, self._names)
        return None if opening is None else (len(text) - len(said), opening)

    def _open_bare(self, text: str) -> int:
        """Return the number of characters at the end that may start a call without a mark."""
        if (opening := self._json_opening(text)) is not None:
            return len(text) - opening[0]
        if self._bare is None or self._state != "content":
            return 0
        before, behind = self._bare
        place = text.rfind(before[0])
        start = text[place:] if place >= 0 else ""
        name = start.removeprefix(before) if start.startswith(before) else None
        is_open = (
            before.startswith(start)
            if name is None
            else any(f"{known}{behind}".startswith(name) for known in self._names)
        )
        return len(start) if start and is_open and self._place.after(text[:place]).begins_line else 0

    def _begin(self, text: str) -> str | None:
        """Read the first text of the answer, in which some marks count that count nowhere else."""
        marks, said = self._marks["start"], text.lstrip()
        mark = max((mark for mark in marks if said.startswith(mark)), key=len, default=None)
        if mark is not None:
            if not self._behind_mark and marks[mark] == "calls":
                self._blank = text[: len(text) - len(said)]
            self._turn(mark)
            return said[len(mark) :]
        if marks and any(mark.startswith(said) for mark in marks):
            self._held = text
            return None
        self._state = "content"
        return said if self._behind_mark else text

    def _turn(self, mark: str) -> None:
        then = self._marks[self._state].get(mark, "calls")
        if then == "calls" and self._rules.calls is not None:
            self._flush_stops()
            self._before_calls = self._state
            is_bare = mark not in self._marks[self._state]
            begun = mark if is_bare else self._other_starts.get(mark, "")
            # A demanded call is one from its start, also without a mark.
            is_bare = is_bare and not self._rules.must_call
            self._calls = CallsReader(self._rules.calls, self.calls, mark, begun=begun, is_bare=is_bare)
        else:
            self._flush_all()
            self._state = then
            self._place.start_line()
        self._behind_mark = True

    def _take_calls(self, reader: CallsReader, reading: ReadCalls) -> str | None:
        """Return the text after the calls if they have ended. Text that is no call is read again as plain text."""
        self._parts += reading.parts
        if reading.parts:
            self._blank = ""
        self.calls = reader.calls + reader.is_calling
        if reading.rest is None:
            return None
        self._calls = None
        if reading.no_call:
            self._note_no_call()
            return self._read_again(reading.no_call) + reading.rest
        is_reasoning = self._before_calls == "reasoning" and self._rules.format.thinking is not None
        self._state, self._behind_mark = "reasoning" if is_reasoning else self._rules.format.begins, True
        self._place.start_line()
        self._place.is_blank = False
        self.ended = self.calls > 0 and not reader.parallel
        return reading.rest

    def _note_no_call(self) -> None:
        """Count text that is no call.

        Each is read again after its mark, so the time of nested ones grows with the square of their number.
        """
        self._no_calls += 1
        if self._no_calls >= _MOST_NO_CALLS:
            self._marks = _marks_by_state(self._rules.format, with_calls=False)
            self._bare, self._may_be_call = None, False

    def _read_again(self, text: str) -> str:
        """Return the text after the mark. This mark is now plain text; later ones may still count."""
        self._state = "reasoning" if self._before_calls == "reasoning" else "content"
        self._behind_mark = False
        marks = (*self._marks[self._state], *(self._bare or ())[:1], *("{" * self._may_be_call))
        mark = max((mark for mark in marks if text.startswith(mark)), key=len, default="")
        self._emit(mark)
        return text[len(mark) :]

    # ---- output

    def _emit(self, text: str) -> None:
        if self._state == "reasoning":
            self._emit_reasoning(text)
        elif self._state != "header":
            self._place.follow(text)
            self._emit_content(text)

    def _emit_reasoning(self, text: str) -> None:
        text = self._without_blanks(text)
        if text:
            self._parts.append(ReasoningText(text))

    def _emit_content(self, text: str) -> None:
        if self._tokens > self._rules.min_tokens:
            text, self.stop_match = self._stops.push(text)
            self.ended = self.stop_match is not None
        text = self._blank + text if self.ended else self._without_blanks(text)
        if text:
            self._parts.append(ContentText(text))

    def _without_blanks(self, text: str) -> str:
        """Return the text without the white space after the last mark. Hold back the text that may precede another mark."""
        if self._behind_mark:
            text = text.lstrip()
            self._behind_mark = not text
        if not self._marks[self._state]:
            return text
        text = self._blank + text
        said = text.rstrip()
        self._blank = text[len(said) :]
        return said

    def _flush_stops(self) -> None:
        """Release the held text, because a stop string does not continue after a mark."""
        text = self._without_blanks(self._stops.flush()) if self._state != "reasoning" else ""
        if text:
            self._parts.append(ContentText(text))

    def _flush_all(self) -> None:
        self._flush_stops()
        self._blank = ""

    def _emit_last(self) -> None:
        text = self._blank + self._stops.flush()
        part = ReasoningText if self._state == "reasoning" else ContentText
        if text:
            self._parts.append(part(text))


def _written_names(calls: CallRules | None) -> Iterable[str]:
    """Return the names of the callable tools as a model writes them."""
    names = () if calls is None else calls.names
    return (*names, *(f"functions.{name}" for name in names))


def join_parts(parts: Iterable[AnswerPart]) -> list[AnswerPart]:
    """Return the same parts with adjacent ones of one kind joined."""
    joined: list[AnswerPart] = []
    for part in parts:
        last = joined[-1] if joined else None
        if isinstance(part, ReasoningText) and isinstance(last, ReasoningText):
            joined[-1] = ReasoningText(last.text + part.text)
        elif isinstance(part, ContentText) and isinstance(last, ContentText):
            joined[-1] = ContentText(last.text + part.text)
        elif isinstance(part, CallArguments) and isinstance(last, CallArguments) and part.index == last.index:
            joined[-1] = CallArguments(last.index, last.text + part.text)
        else:
            joined.append(part)
    return joined


def _marks_by_state(
    format_: ChatFormat, *, with_calls: bool, others: Iterable[str] = ()
) -> Mapping[State, Mapping[str, State]]:
    """Return the marks that count in each state, each with the state that follows."""
    start: dict[str, State] = dict.fromkeys(format_.dropped, "start")
    reasoning: dict[str, State] = {}
    header: dict[str, State] = dict(format_.turns.get("header", ()))
    start |= format_.turns.get("start", ())
    reasoning |= format_.turns.get("reasoning", ())
    content = dict(start)
    if format_.thinking is not None:
        # An answer may close reasoning that the prompt has already closed.
        start |= {format_.thinking.start: "reasoning", format_.thinking.end: "start"}
        reasoning[format_.thinking.end] = "start"
    if with_calls and format_.calls is not None:
        # In formats with headers, a header announces a call.
        for marks in [header] if header else [start, content, reasoning]:
            marks.update(dict.fromkeys((format_.calls.start, *others), "calls"))
    return {"start": start, "content": content, "reasoning": reasoning, "header": header, "calls": {}}
