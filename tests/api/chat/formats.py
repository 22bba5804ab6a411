"""Answer formats, and helpers that read text in them."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Sequence
from itertools import count, pairwise
from typing import Any

from mlx_ring.api.chat.model_format import CallMarks, ChatFormat, Marks, parser_of
from mlx_ring.api.chat.reader import AnswerReader, ReadingRules, join_parts
from mlx_ring.api.chat.request import AnswerPart, Tool
from mlx_ring.api.chat.tool_calls import CallRules
from mlx_ring.core.lean_imports import import_bare

WEATHER = Tool(
    "get_weather",
    parameters={
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "sky": {"type": "boolean"}},
    },
)
TIME = Tool("get_time", parameters={"type": "object", "properties": {"city": {"type": "string"}}})
TOOLS = (WEATHER, TIME)
THINKING = Marks("<think>", "</think>")


def call_marks(parser: str) -> CallMarks:
    """Return the marks of one of mlx-lm's parsers."""
    import_bare("mlx_lm")
    module: Any = importlib.import_module(f"mlx_lm.tool_parsers.{parser}")
    parse = parser_of(parser, module.parse_tool_call)
    return CallMarks(module.tool_call_start, module.tool_call_end, parser, parse)


QWEN = ChatFormat(THINKING, call_marks("json_tools"))


def rules(
    format_: ChatFormat = QWEN,
    *,
    tools: Sequence[Tool] = TOOLS,
    early: bool = False,
    parallel: bool = True,
    required: bool = False,
    **more: Any,
) -> ReadingRules:
    """Return rules that number tool calls instead of giving them random ids."""
    numbers = count()
    calls = None
    if tools and format_.calls is not None:
        calls = CallRules(
            format_.calls,
            tools,
            parallel=parallel,
            required=required,
            early=early,
            new_id=lambda: f"c{next(numbers)}",
        )
    return ReadingRules(format_, calls, **more)


def read(pieces: Iterable[str], reading_rules: ReadingRules, *, cut_off: bool = False) -> list[AnswerPart]:
    """Read a whole answer into parts, with neighbours joined."""
    reader, parts = AnswerReader(reading_rules), list[AnswerPart]()
    for piece in pieces:
        if reader.ended:
            break
        parts += reader.push(piece)
    return join_parts(parts + reader.finish(cut_off=cut_off))


def split_at(text: str, places: Iterable[int]) -> list[str]:
    """Split a text at these places, each taken modulo its length."""
    edges = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    return [text[start:end] for start, end in pairwise(edges)]
