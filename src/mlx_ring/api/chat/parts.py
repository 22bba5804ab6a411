"""Parts of an answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

EndReason = Literal["stop", "length", "tool_calls"]
"""Reason of an answer's end: the model or a stop string ended it, its limit, or tool calls."""


@dataclass(frozen=True, slots=True)
class ReasoningText:
    """Text of the reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class ContentText:
    """Text of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class CallOpening:
    """Start of a tool call. It has the whole name. The arguments follow before any other part."""

    index: int
    """Number of the call in the answer, from 0."""
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """Piece of a call's arguments. All pieces joined are one JSON object."""

    index: int
    text: str


AnswerPart = ReasoningText | ContentText | CallOpening | CallArguments
