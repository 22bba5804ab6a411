"""Cases (questions with their right answers), and the rule that holds cases out of training."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Literal

Message = dict[str, object]
Tool = dict[str, object]

HELD_PHRASINGS_PER_TOPIC = 5
HELD_PAIR_ONE_IN = 12


@dataclass(frozen=True)
class Case:
    """Question with history and tools, its answer, and the grading rule.

    `grade` is "word" (the answer holds `expected` as whole words and none of `wrong`), "text" (the
    answer is `expected`) or "call" (the tool call equals the one in `answer`).
    """

    prompt: tuple[Message, ...]
    answer: Message
    expected: str
    reasoning: str
    wrong: frozenset[str] = frozenset()
    tools: tuple[Tool, ...] = ()
    grade: Literal["word", "text", "call"] = "word"


@dataclass(frozen=True)
class Fact:
    """Subject of a question: a key for the hold-out rule, and the values that fill a phrasing."""

    key: str
    values: dict[str, str] = field(hash=False)


@dataclass(frozen=True)
class Skill:
    """Kind of question: facts to draw, phrasings, and a function that makes a case.

    Skills of one `family` share their phrasings, so that a phrasing is held out of all of them.
    """

    topic: str
    name: str
    phrasings: tuple[str, ...]
    draw: Callable[[Random], Fact]
    build: Callable[[Fact, str, Random], Case]
    family: str = ""

    def phrasing_key(self, phrasing: str) -> str:
        """Return a key that distinguishes equal phrasings of two skills."""
        return f"{self.family or self.name}|{phrasing}"


def stable_hash(*parts: str) -> int:
    """Hash strings equally in every process and Python version, unlike `hash`."""
    return int.from_bytes(hashlib.sha256("\x1f".join(parts).encode()).digest()[:8], "big")


def held_out_phrasings(skills: tuple[Skill, ...], seed: int) -> frozenset[str]:
    """Choose five whole phrasings of one topic's skills, as phrasing keys."""
    keys = {skill.phrasing_key(phrasing) for skill in skills for phrasing in skill.phrasings}
    ranked = sorted(keys, key=lambda key: stable_hash(str(seed), "phrasing", key))
    return frozenset(ranked[:HELD_PHRASINGS_PER_TOPIC])


def is_held_out_pair(skill: Skill, fact: Fact, phrasing: str, seed: int) -> bool:
    """Return true if this fact in this phrasing is held out for the evaluation."""
    key = stable_hash(str(seed), "pair", skill.phrasing_key(phrasing), fact.key)
    return key % HELD_PAIR_ONE_IN == 0


def user(content: str) -> Message:
    """Make a message of the user."""
    return {"role": "user", "content": content}


def assistant(content: str) -> Message:
    """Make a message of the assistant."""
    return {"role": "assistant", "content": content}
