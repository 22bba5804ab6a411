"""gpt-oss's format, Harmony, which mlx-lm has no reader for.

An answer is of messages, each with a header that names its channel: `analysis` is thought, and one to a function
is a call of it. See https://cookbook.openai.com/articles/openai-harmony.

    <|channel|>analysis<|message|>thought<|end|>
    <|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{"city": "Paris"}<|call|>
    <|start|>assistant<|channel|>final<|message|>answer<|return|>
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping

TOKENS = frozenset({"<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>"})
"""A vocabulary that has them all is of this format."""
TRANSITIONS: Mapping[str, list[tuple[str, str]]] = {
    "header": [("<|channel|>analysis<|message|>", "reasoning"), ("<|message|>", "normal")],
    "reasoning": [("<|end|>", "header")],
    "normal": [("<|end|>", "header")],
}
"""By mlx-lm's names, as the wrapper has them for other formats of several messages."""
CALL_START, CALL_END = "to=functions.", "<|call|>"
CALL_INNER = ("<|constrain|>",)
HEADING = re.compile(r"(?P<name>[\w-]++)(?P<id>)[^{<]*+(?:<(?!\|message\|>)[^{<]*+)*<\|message\|>\s*(?=\{)")
"""Heading of a call up to its arguments. It is tried again with each token, so runs of characters are possessive:
a long name must not cost its square. Groups are not, because Python before 3.11.5 matches possessive groups wrongly.
"""
_BODY = "<|message|>"
_NAME = re.compile(r"[\w-]+")


def is_harmony(added: Collection[str]) -> bool:
    """Whether a vocabulary with these added tokens is."""
    return set(added) >= TOKENS


def parse_tool_call(text: str, tools: object) -> object:
    """A call from its function's name on. Raises `ValueError` where it is none."""
    del tools
    heading, mark, arguments = text.strip().partition(_BODY)
    name = _NAME.match(heading)
    if name is None or not mark:
        raise ValueError("There is no function.")
    return {"name": name[0], "arguments": json.loads(arguments or "{}")}
