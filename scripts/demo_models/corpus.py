"""Generate the training conversations and the held-out questions from one seed.

Two things are held out of training: five whole phrasings of every topic, and one in twelve pairs of
fact and phrasing. The questions of the evaluation are drawn from exactly these.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from random import Random

import facts
from cases import Case, Message, Skill, Tool, held_out_phrasings, is_held_out_pair
from topics_facts import FACT_SKILLS
from topics_lists import LIST_SKILLS
from topics_talk import talk_skills
from topics_text import DRILLS, TEXT_SKILLS
from topics_tools import TOOL_SKILLS, some_tools

DEFAULT_SEED = 0
QUESTIONS_PER_TOPIC = 30
MOST_ATTEMPTS = 20

# Weight of each skill (or group of skills, by topic). "broad" teaches the facts. "careful" teaches the
# slowest skills: exact copying, editing, counting, sums. "reading" has more tools and edits. "whole" combines the first two.
BROAD: dict[str, float] = {
    "greeting": 4, "capital": 8, "country": 7, "add": 9, "subtract": 9, "multiply": 6, "colour": 8,
    "opposite": 10, "about": 8, "unknown": 4, "unknown-question": 3, "text": 22, "talk": 13,
    "tools": 11, "lists": 5,
}  # fmt: skip
CAREFUL: dict[str, float] = {
    "greeting": 2, "capital": 4, "country": 4, "add": 10, "subtract": 10, "multiply": 7, "colour": 4,
    "opposite": 6, "about": 5, "unknown": 3, "unknown-question": 2, "drill": 14, "repeat": 5,
    "replace": 5, "upper": 5, "reverse": 4, "append": 5, "remove": 5, "pick": 4, "count": 6,
    "recite": 2, "talk": 12, "tools": 16,
}  # fmt: skip
READING: dict[str, float] = CAREFUL | {
    "add": 7, "subtract": 8, "multiply": 5, "replace": 8, "reverse": 7, "append": 6, "remove": 6,
    "talk": 8, "tools": 40,
}  # fmt: skip
WHOLE = {name: BROAD.get(name, 0) + CAREFUL.get(name, 0) for name in (*CAREFUL, *BROAD)}
MIXES: dict[str, dict[str, float]] = {"broad": BROAD, "careful": CAREFUL, "reading": READING, "whole": WHOLE}

# Sometimes put before a question; no phrasing begins with one of them.
OPENERS = ("Excuse me.", "By the way,", "Listen,", "Alright.", "Um,", "One thing:", "Look,", "Hmm,", "Fine.")

SPACED_SIGN = re.compile(r"(?<=\d) ([-+*x]) (?=\d)")


@dataclass(frozen=True)
class Conversation:
    """Messages as an API client would send them, with the assistant's turns filled in."""

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    thinking: bool = False


@dataclass(frozen=True)
class Question:
    """Held-out case with its topic. If `whole` is set, it is held out because of `phrasing`."""

    topic: str
    skill: str
    phrasing: str
    whole: bool
    case: Case


class Corpus:
    """All skills under one seed, and the held-out part."""

    def __init__(self, seed: int = DEFAULT_SEED) -> None:
        """Choose the held-out part; generate nothing yet."""
        self.seed = seed
        by_name = {skill.name: skill for skill in FACT_SKILLS}
        talk = talk_skills(FACT_SKILLS, lambda name, rng: self.allowed_case(by_name[name], rng))
        self.skills = (*FACT_SKILLS, *TEXT_SKILLS, *LIST_SKILLS, *talk, *TOOL_SKILLS)
        self.topics = tuple(dict.fromkeys(skill.topic for skill in self.skills))
        self.held_phrasings = frozenset(
            key for topic in self.topics for key in held_out_phrasings(self.skills_of(topic), seed)
        )

    def skills_of(self, topic: str) -> tuple[Skill, ...]:
        """List the skills of a topic."""
        return tuple(skill for skill in self.skills if skill.topic == topic)

    def is_held_phrasing(self, skill: Skill, phrasing: str) -> bool:
        """Return true if this phrasing is one of its topic's five that training never sees."""
        return skill.phrasing_key(phrasing) in self.held_phrasings

    def allowed_case(self, skill: Skill, rng: Random) -> Case:
        """Draw a case that training may see."""
        phrasings = [text for text in skill.phrasings if not self.is_held_phrasing(skill, text)]
        while True:
            fact, phrasing = skill.draw(rng), rng.choice(phrasings)
            if not is_held_out_pair(skill, fact, phrasing, self.seed):
                return skill.build(fact, phrasing, rng)

    def held_question(self, topic: str, *, whole: bool, rng: Random) -> Question:
        """Draw a question by a held-out phrasing (`whole`) or a held-out pair."""
        candidates = [
            (skill, phrasing)
            for skill in self.skills_of(topic)
            for phrasing in skill.phrasings
            if self.is_held_phrasing(skill, phrasing) == whole
        ]
        while True:
            skill, phrasing = rng.choice(candidates)
            fact = skill.draw(rng)
            if whole or is_held_out_pair(skill, fact, phrasing, self.seed):
                return Question(topic, skill.name, phrasing, whole, skill.build(fact, phrasing, rng))

    def questions(self, per_topic: int = QUESTIONS_PER_TOPIC) -> list[Question]:
        """Make the evaluation: per topic about half held-out phrasings, half held-out pairs."""
        rng = Random(f"questions {self.seed}")
        made: list[Question] = []
        for topic in self.topics:
            seen: set[str] = set()
            for attempt in range(MOST_ATTEMPTS * per_topic):
                question = self.held_question(topic, whole=attempt % 2 == 0, rng=rng)
                text = repr(question.case.prompt)
                if text not in seen:
                    seen.add(text)
                    made.append(question)
                if len(seen) == per_topic:
                    break
        return made

    def conversations(self, stream: str = "train", mix: str = "broad") -> Iterator[Conversation]:
        """Yield training conversations without end; `stream` names an independent sequence."""
        rng = Random(f"{stream} {self.seed}")
        weights = MIXES[mix]
        while True:
            yield self._conversation(weights, rng)

    def _conversation(self, weights: dict[str, float], rng: Random) -> Conversation:
        system: list[Message] = []
        if rng.random() < 0.4:
            system.append({"role": "system", "content": rng.choice(facts.SYSTEM_PROMPTS)})
        cases = [self._draw(weights, rng)]
        if not cases[0].tools:
            more = rng.randint(8, 24) if rng.random() < 0.01 else rng.choice((0, 0, 0, 1, 1, 2, 3))
            cases += [case for case in (self._draw(weights, rng) for _ in range(more)) if not case.tools]
        thinking = rng.random() < 0.25
        if thinking:
            answer = {**cases[-1].answer, "reasoning_content": cases[-1].reasoning}
            cases[-1] = replace(cases[-1], answer=answer)
        turns = [message for case in cases for message in (*case.prompt, case.answer)]
        return Conversation((*system, *turns), cases[0].tools, thinking)

    def _draw(self, weights: dict[str, float], rng: Random) -> Case:
        chosen = rng.choices(tuple(weights), tuple(weights.values()))[0]
        skills = [skill for skill in self.skills if chosen in (skill.name, skill.topic)]
        skills = skills or [skill for skill in DRILLS if skill.name == chosen]
        case = self.allowed_case(rng.choice(skills), rng)
        if case.grade == "word":
            case = replace(case, prompt=tuple(_varied(message, rng) for message in case.prompt))
        if not case.tools and rng.random() < 0.02:
            return replace(case, tools=tuple(some_tools(rng)))
        return case


def _varied(message: Message, rng: Random) -> Message:
    """Write a user's message carelessly at random: 7+5, no capitals, no full stop."""
    content = message["content"]
    if message["role"] != "user" or not isinstance(content, str):
        return message
    if rng.random() < 0.08:
        content = f"{rng.choice(OPENERS)} {content}"
    if rng.random() < 0.3:
        content = SPACED_SIGN.sub(r"\1", content)
    if rng.random() < 0.12:
        content = content.rstrip("?.!")
    if rng.random() < 0.12:
        content = content.lower()
    return {**message, "content": content}
