"""Calls with tags around each argument, whose text has no quotes: Qwen3-Coder's, MiniMax's and GLM's formats.

    <function=NAME><parameter=KEY>text</parameter></function>

An argument may itself contain such tags. It ends where the rest of the call follows, and pairs of tags within it do not count.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from mlx_ring.api.chat.argument_values import read_value
from mlx_ring.api.chat.request import Tool, properties_of

_NAME = r"[^<>\n]{1,200}"
"""Pattern of a name. It is limited, so that a long text after its start is no tag."""
_LONGEST_TAG = 512
_CDATA, _CDATA_END = re.compile(r"<!\[CDATA\[(.*?)\]\]>", re.DOTALL), "]]>"


@dataclass(frozen=True, slots=True)
class Tags:
    """Tags of one format."""

    tag: re.Pattern[str]
    """Pattern of any tag: a group `call_tag`, `key_tag`, `end_call`, `end_value` or `end`, and the name in `call` or `key`.

    A group `cdata` is the start of a text at the beginning of an argument in which no tags count. A group `string` is
    `true` in the tag before an argument that is a string as it stands, whatever its schema is, and `false` before JSON.
    """
    openings: tuple[str, ...]
    """Starts of all tags."""
    is_trimmed: bool = True
    """True if a line break at either end of an argument belongs to its tags, else only if there is one at both ends."""
    untyped_json: bool = False
    """True if an argument without a type in the schema is read as JSON if it is JSON."""
    json_strings: bool = False
    """True if strings may also be written as JSON."""
    most_brackets: int = 1
    """Largest number of opening brackets in a tag."""

    def key_of(self, tag: str) -> str | None:
        """Return the name of an argument from the tag before it; None if there is none."""
        found = self.tag.fullmatch(tag.strip())
        return None if found is None or found.lastgroup != "key_tag" else _unquoted(found["key"])

    @property
    def has_call_tags(self) -> bool:
        """False if a call begins with its tool's name, before any tag."""
        return "call" in self.tag.groupindex


def _functions(end: str) -> Tags:
    """Return Qwen3-Coder's tags with another mark after calls."""
    return Tags(
        re.compile(
            rf"(?P<call_tag><function=(?P<call>{_NAME})>)|(?P<key_tag><parameter=(?P<key>{_NAME})>)"
            rf"|(?P<end_call></function>)|(?P<end_value></parameter>)|(?P<end>{end})"
        ),
        ("<function=", "<parameter=", "</function>", "</parameter>", end),
    )


def _glm(prefix: str = "") -> Tags:
    """Return GLM's tags with a prefix in each name."""
    key, value, call = f"{prefix}arg_key>", f"{prefix}arg_value>", f"</{prefix}tool_call>"
    return Tags(
        re.compile(
            rf"(?P<key_tag><{key}(?P<key>{_NAME})</{key}\s{{0,16}}<{value})|(?P<end_value></{value})|(?P<end>{call})"
        ),
        (f"<{key}", f"</{value}", call),
        is_trimmed=False,
        untyped_json=True,
        most_brackets=3,
    )


def _invocations(prefix: str, end: str, **options: bool) -> Tags:
    """Return the tags of calls as Anthropic's models once wrote them, with a prefix in each name."""
    call, value = f"</{prefix}invoke>", f"</{prefix}parameter>"
    starts = f"<{prefix}invoke name=", f"<{prefix}parameter name="
    return Tags(
        re.compile(
            rf"(?P<call_tag>{starts[0]}(?P<call>{_NAME})>)|(?P<end_call>{call})|(?P<end_value>{value})|(?P<end>{end})"
            rf'|(?P<key_tag>{starts[1]}(?P<key>{_NAME}?)(?:\s+string="(?P<string>true|false)")?>)'
        ),
        (*starts, call, value, end),
        is_trimmed=False,
        **options,
    )


_MINICPM = Tags(
    re.compile(
        rf"(?P<call_tag><function name=(?P<call>{_NAME})>)|(?P<key_tag><param name=(?P<key>{_NAME})>)"
        r"|(?P<end_call></function>)|(?P<end_value></param>)|(?P<cdata><!\[CDATA\[)"
    ),
    ("<function name=", "<param name=", "</function>", "</param>"),
)
TAGS: Mapping[str, Tags] = {
    "qwen3_coder": _functions("</tool_call>"),
    "seed_oss": _functions("</seed:tool_call>"),
    "minimax_m2": _invocations("", "</minimax:tool_call>"),
    "deepseek_v32": _invocations("\uff5cDSML\uff5c", "</\uff5cDSML\uff5cfunction_calls>", untyped_json=True),
    "muse_spark": _invocations("atem:", "</atem:function_calls>", untyped_json=True, json_strings=True),
    "minicpm5": _MINICPM,
    "glm47": _glm(),
    "laguna": _glm(),
    "longcat": _glm("longcat_"),
}
"""Tags by the name of mlx-lm's parser."""

_State = Literal["heading", "body", "value", "closed", "unclosed", "after"]
"""State of a reader. It is at `closed` or `unclosed` behind a tag that may end an argument, if the call continues there."""


@dataclass(frozen=True, slots=True)
class Progress:
    """Result of reading a call."""

    kind: Literal["more", "call", "end", "broken"]
    """A complete call, the end of all calls, text that is no call, or none of them yet."""
    end: int = 0
    """Number of characters up to the end of the call or of all calls."""
    tool: Tool | None = None
    arguments: Mapping[str, object] = field(default_factory=dict[str, object])
    is_last: bool = False
    """True if the end of the call is that of all calls."""


_MORE, _BROKEN = Progress("more"), Progress("broken")


class TaggedReader:
    """Reader of one call, or of the end of all calls."""

    def __init__(
        self,
        tags: Tags,
        find_tool: Callable[[str], Tool | None],
        *,
        is_bare: bool = False,
        follows: bool = False,
        is_flat: bool = False,
    ) -> None:
        """Create a reader.

        Args:
            tags: the format.
            find_tool: finds a callable tool by its name.
            is_bare: True if the model left out the mark before the call.
            follows: True if the text follows a call, so that the calls may end.
            is_flat: True if tags within arguments count, because they do not come in pairs.
        """
        self._tags = tags
        self._find_tool = find_tool
        self._is_bare = is_bare
        self._is_flat = is_flat
        self._state: _State = "after" if follows else "heading"
        self._at = 0
        """Start of the text without a complete tag."""
        self._last = 0
        """End of the last tag that is part of the call."""
        self._tool: Tool | None = None
        self._key = ""
        self._value = 0
        """Start of the argument."""
        self._close = 0
        """End of the argument, if the call continues there."""
        self._open: list[str] = []
        """Tags within the argument that are open."""
        self._counts = Counter[str]()
        """Number of the open tags of each kind."""
        self._closed_inner = False
        """True if the last tag that may end the argument also closes one within it."""
        self._texts: dict[str, str] = {}
        self._strings: dict[str, bool] = {}
        """Keys of the arguments whose tags say that they are strings as they stand, or JSON."""
        self._is_cdata = False
        """True within a text in which no tags count."""

    def read(self, text: str) -> Progress:
        """Read all text so far, which begins where this reader began."""
        while not self._is_in_cdata(text) and (tag := self._tags.tag.search(text, self._at)) is not None:
            self._at = tag.end()
            if (progress := self._take(text, tag)) is not _MORE:
                return progress
        self._at = self._at if self._is_cdata else self._open_tag(text)
        return self._look_between(text)

    def _is_in_cdata(self, text: str) -> bool:
        """Skip a text in which no tags count. Return True if it has not ended."""
        if self._is_cdata:
            place = text.find(_CDATA_END, self._at)
            self._is_cdata = place < 0
            self._at = max(self._at, len(text) - len(_CDATA_END)) if place < 0 else place + len(_CDATA_END)
        return self._is_cdata

    def finish(self, text: str, *, cut_off: bool) -> Progress:
        """Read all text after the answer has ended, by the model or cut off."""
        if self._state == "after":
            return Progress("end", self._last)
        if cut_off:
            return _BROKEN
        if self._is_whole(text):
            if self._state != "body":
                self._keep(text)
            return self._complete(len(text), is_last=True)
        if self._state == "body" or self._is_flat or self._state == "heading":
            return _BROKEN
        flat = TaggedReader(self._tags, self._find_tool, is_bare=self._is_bare, is_flat=True)
        progress = flat.read(text)
        return flat.finish(text, cut_off=False) if progress is _MORE else progress

    def has_begun(self, text: str, *, cut_off: bool) -> bool:
        """Return True if the text is a call of this format, complete or not."""
        if self._tool is None and self._tags.has_call_tags:
            return text.lstrip().startswith(self._tags.openings[0])
        return self.begun_tool(f"{text}<" if cut_off else text) is not None

    def begun_tool(self, text: str) -> Tool | None:
        """Return the tool of the call if its name is complete."""
        if self._tool is not None or self._tags.has_call_tags:
            return self._tool
        name, bracket, _ = text.partition("<")
        return self._find_tool(name) if bracket else None

    def _is_whole(self, text: str) -> bool:
        """Return True if only closing tags of the call are missing."""
        if text[self._last :].strip():
            return False
        if self._state == "unclosed":
            return True
        is_closed = self._state == "closed" and not self._closed_inner
        return not self._is_bare and (is_closed or (self._state == "body" and bool(self._texts)))

    # ---- between tags

    def _open_tag(self, text: str) -> int:
        """Return the position from which the end of the text may be the start of a tag."""
        place = end = len(text)
        least = max(self._at, end - _LONGEST_TAG)
        for _ in range(self._tags.most_brackets):
            found = text.rfind("<", least, end)
            if found < 0:
                break
            place = end = found
        return place

    def _look_between(self, text: str) -> Progress:
        """Look for text where only tags may come."""
        if self._state not in ("heading", "body", "after"):
            return _MORE
        rest = text[self._last :].lstrip()
        if not rest or self._may_open(rest):
            return _MORE
        if self._state == "after":
            return Progress("end", self._last)
        is_name = self._state == "heading" and not self._tags.has_call_tags and not rest.startswith("{")
        return _MORE if is_name else _BROKEN

    def _may_open(self, rest: str) -> bool:
        is_long = len(rest) > _LONGEST_TAG or ("\n" in rest and self._tags.most_brackets == 1)
        return not is_long and any(
            opening.startswith(rest) or rest.startswith(opening) for opening in self._tags.openings
        )

    # ---- at a tag

    def _take(self, text: str, tag: re.Match[str]) -> Progress:
        kind = str(tag.lastgroup)
        is_next = not text[self._last : tag.start()].strip()
        if kind == "cdata":
            self._is_cdata = (
                self._state == "value" and not self._is_flat and self._value == self._last and is_next
            )
            return _MORE
        match self._state:
            case "heading":
                return self._begin(text, tag, kind, is_next=is_next)
            case "after":
                return self._follow(text, tag, kind, is_next=is_next)
            case "body":
                return self._continue(text, tag, kind) if is_next else _BROKEN
            case _:
                is_next = is_next or self._follows_stray_text(text, tag, kind)
                if self._state != "value" and is_next and self._ends_value(tag, kind):
                    return self._end_value(text, tag, kind)
                return self._pass_within(tag, kind)

    def _begin(self, text: str, tag: re.Match[str], kind: str, *, is_next: bool) -> Progress:
        if not self._tags.has_call_tags:
            self._tool = self._find_tool(text[: tag.start()])
            self._state, self._last = "body", tag.start()
            return _BROKEN if self._tool is None else self._continue(text, tag, kind)
        self._tool = self._find_tool(tag["call"]) if is_next and kind == "call_tag" else None
        self._state, self._last = "body", tag.end()
        return _BROKEN if self._tool is None else _MORE

    def _follow(self, text: str, tag: re.Match[str], kind: str, *, is_next: bool) -> Progress:
        if is_next and kind == "end":
            return Progress("end", tag.end())
        if not is_next or kind != "call_tag" or self._find_tool(tag["call"]) is None:
            return Progress("end", self._last)
        return self._begin(text, tag, kind, is_next=True)

    def _continue(self, text: str, tag: re.Match[str], kind: str) -> Progress:
        """Continue where an argument or the end of the call may come. The text may still lack an argument's start."""
        del text
        self._last = tag.end()
        if kind == "key_tag":
            self._key = _unquoted(tag["key"])
            if word := tag.groupdict().get("string"):
                self._strings[self._key] = word == "true"
            self._value = tag.end()
            self._state, self._open, self._counts = "value", [], Counter()
            return _MORE
        if kind == "end_call" or (kind == "end" and not self._is_bare):
            return self._complete(tag.end(), is_last=kind == "end")
        return _MORE if kind == "end_value" else _BROKEN

    def _ends_value(self, tag: re.Match[str], kind: str) -> bool:
        """Return True if the call continues with a tag, so that the last one ended the argument."""
        if self._state == "unclosed":
            return kind == "end" or (kind == "call_tag" and self._find_tool(tag["call"]) is not None)
        if kind == "end_call":
            return not (self._closed_inner and self._counts["call"])
        return kind in ("key_tag", "end") and not self._closed_inner

    def _follows_stray_text(self, text: str, tag: re.Match[str], kind: str) -> bool:
        """Return True for the tag of an argument that is still missing, after other text behind the last argument.

        The text is punctuation, or the tag begins a line.
        """
        if self._state != "closed" or kind != "key_tag" or tag.start() - self._last > _LONGEST_TAG:
            return False
        given = self._texts.keys() | {self._key}
        if _unquoted(tag["key"]) not in properties_of(self._tool).keys() - given:
            return False
        is_punctuation = not text[self._last : tag.start()].strip(",;. \t\r\n")
        return is_punctuation or _begins_line(text, tag.start())

    def _end_value(self, text: str, tag: re.Match[str], kind: str) -> Progress:
        self._keep(text)
        if self._state == "unclosed":
            is_last = kind == "end"
            return self._complete(tag.end() if is_last else self._last, is_last=is_last)
        return self._continue(text, tag, kind)

    def _pass_within(self, tag: re.Match[str], kind: str) -> Progress:
        """Pass a tag within an argument, which may be the end of it."""
        self._state = "value"
        if kind in ("key_tag", "call_tag") and not self._is_flat:
            inner = "value" if kind == "key_tag" else "call"
            self._open.append(inner)
            self._counts[inner] += 1
        elif kind == "end_value":
            self._closed_inner = self._close_inner("value")
            if not self._counts["value"]:
                self._state, self._close, self._last = "closed", tag.start(), tag.end()
        elif kind == "end_call" and not self._close_inner("call"):
            self._state, self._close, self._last = "unclosed", tag.start(), tag.end()
        return _MORE

    def _close_inner(self, kind: str) -> bool:
        """Close the last tag of a kind within the argument, and those in it. Return False if there is none."""
        if not self._counts[kind]:
            return False
        closed = ""
        while closed != kind:
            closed = self._open.pop()
            self._counts[closed] -= 1
        return True

    # ---- arguments

    def _keep(self, text: str) -> None:
        """Keep an argument, or several whose closing tags are missing."""
        value = text[self._value : self._close]
        key, start = self._key, 0
        if "cdata" in self._tags.tag.groupindex and value.lstrip().startswith("<![CDATA["):
            self._texts[key] = _CDATA.sub(r"\1", value.strip())
            return
        for tag in self._missed(value):
            self._texts[key] = self._trimmed(_without_end(self._tags, value[start : tag.start()]), loose=True)
            key, start = _unquoted(tag["key"]), tag.end()
        self._texts[key] = self._trimmed(value[start:], loose=self._state == "unclosed")

    def _missed(self, value: str) -> list[re.Match[str]]:
        """Return the tags of further arguments in one whose closing tag is missing."""
        tags = list(self._tags.tag.finditer(value))
        openings = [tag for tag in tags if tag.lastgroup == "key_tag"]
        if len(openings) <= sum(tag.lastgroup == "end_value" for tag in tags):
            return []
        known = properties_of(self._tool).keys() - self._texts.keys() - {self._key}
        return [
            tag
            for tag in openings
            if _unquoted(tag["key"]) in known
            and (not self._tags.has_call_tags or _begins_line(value, tag.start()))
        ]

    def _trimmed(self, value: str, *, loose: bool) -> str:
        if self._strings.get(self._key) and not loose:
            return value
        if self._tags.is_trimmed or (value.startswith("\n") and value.endswith("\n")):
            return value.removeprefix("\n").removesuffix("\n")
        return value.removesuffix("\n") if loose else value

    def _complete(self, end: int, *, is_last: bool) -> Progress:
        if self._tool is None:
            return _BROKEN
        arguments = {
            key: text
            if self._strings.get(key)
            else read_value(
                text,
                self._tool,
                key,
                untyped_json=self._tags.untyped_json,
                json_strings=self._tags.json_strings or key in self._strings,
            )
            for key, text in self._texts.items()
        }
        return Progress("call", end, self._tool, arguments, is_last)


def _begins_line(text: str, place: int) -> bool:
    return not text[text.rfind("\n", 0, place) + 1 : place].strip()


def _without_end(tags: Tags, value: str) -> str:
    """Return an argument without its closing tag and the text after it."""
    ends = [tag.start() for tag in tags.tag.finditer(value) if tag.lastgroup == "end_value"]
    return value[: ends[-1]] if ends and not tags.tag.sub("", value[ends[-1] :]).strip() else value


def _unquoted(name: str) -> str:
    return name.strip().strip("\"'")
