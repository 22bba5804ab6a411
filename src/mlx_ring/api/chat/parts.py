"""Parts of an answer, in the order in which they come."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

EndReason = Literal["stop", "length", "tool_calls"]
"""Reason of an answer's end: by itself or at a stop string, at its limit, or for tool calls."""


@dataclass(frozen=True, slots=True)
class ReasoningText:
    """Text that the model thinks before it answers."""

    text: str


@dataclass(frozen=True, slots=True)
class AnswerText:
    """Text of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class CallOpening:
    """A tool call begins. Its name comes whole; its arguments follow before anything else opens."""

    index: int
    """Among the answer's calls, from 0."""
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of the arguments of a call: all pieces joined are one JSON object."""

    index: int
    text: str


AnswerPart = ReasoningText | AnswerText | CallOpening | CallArguments
