"""A case is one question with its right answer; the hold-out rule says which cases training never sees."""

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
    """One question with history and tools, its answer, and how an answer is graded.

    `grade` is "word" (the answer holds `expected` as whole words and none of `wrong`), "text" (the
    answer is `expected`) or "call" (the tool call equals the one in `answer`).
    """

    prompt: tuple[Message, ...]
    answer: Message
    expected: str
    thought: str
    wrong: frozenset[str] = frozenset()
    tools: tuple[Tool, ...] = ()
    grade: Literal["word", "text", "call"] = "word"


@dataclass(frozen=True)
class Fact:
    """What a question is about: a key for the hold-out rule and the values that fill a phrasing."""

    key: str
    values: dict[str, str] = field(hash=False)


@dataclass(frozen=True)
class Skill:
    """One kind of question: facts to draw, phrasings to put them in, and how a case is made.

    Skills of one `family` share their phrasings, so that what is held out of one is held out of all.
    """

    topic: str
    name: str
    phrasings: tuple[str, ...]
    draw: Callable[[Random], Fact]
    build: Callable[[Fact, str, Random], Case]
    family: str = ""

    def phrasing_key(self, phrasing: str) -> str:
        """Tell equal phrasings of two skills apart."""
        return f"{self.family or self.name}|{phrasing}"


def stable_hash(*parts: str) -> int:
    """Hash strings alike in every process and Python version, which `hash` does not."""
    return int.from_bytes(hashlib.sha256("\x1f".join(parts).encode()).digest()[:8], "big")


def held_out_phrasings(skills: tuple[Skill, ...], seed: int) -> frozenset[str]:
    """Choose five whole phrasings of one topic's skills, as phrasing keys."""
    keys = {skill.phrasing_key(phrasing) for skill in skills for phrasing in skill.phrasings}
    ranked = sorted(keys, key=lambda key: stable_hash(str(seed), "phrasing", key))
    return frozenset(ranked[:HELD_PHRASINGS_PER_TOPIC])


def is_held_out_pair(skill: Skill, fact: Fact, phrasing: str, seed: int) -> bool:
    """Say whether this fact in this phrasing is kept for the evaluation."""
    key = stable_hash(str(seed), "pair", skill.phrasing_key(phrasing), fact.key)
    return key % HELD_PAIR_ONE_IN == 0


def user(content: str) -> Message:
    """Make a message of the user."""
    return {"role": "user", "content": content}


def assistant(content: str) -> Message:
    """Make a message of the assistant."""
    return {"role": "assistant", "content": content}
