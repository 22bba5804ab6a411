"""Skills over two turns that must use the earlier turn."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import facts
import phrasings
from cases import Case, Fact, Message, Skill, assistant, user

AskEarlier = Callable[[str, Random], Case]
"""Function that returns a case of the named skill that training may see, for the earlier turns."""

FOLLOWED = {"capital": "country", "country": "capital", "colour": "thing", "opposite": "word"}
CHATTER = ("capital", "add", "colour", "opposite", "about")


def _with_chatter(turns: tuple[Message, ...], ask_earlier: AskEarlier, rng: Random) -> tuple[Message, ...]:
    """Put another question at random between a statement and the question about it."""
    if rng.random() < 0.65:
        return turns
    other = ask_earlier(rng.choice(CHATTER), rng)
    return (*turns, *other.prompt, other.answer)


def _draw_name(rng: Random) -> Fact:
    name = rng.choice(facts.NAMES)
    return Fact(name, {"name": name})


def _name_builder(ask_earlier: AskEarlier) -> Callable[[Fact, str, Random], Case]:
    def build(fact: Fact, phrasing: str, rng: Random) -> Case:
        name = fact.values["name"]
        given = user(rng.choice(phrasings.NAME_GIVEN).format(name=name))
        turns = _with_chatter((given, assistant(f"Nice to meet you, {name}!")), ask_earlier, rng)
        wrong = frozenset(facts.NAMES) - {name}
        reasoning = f"The user said the name {name}."
        return Case((*turns, user(phrasing)), assistant(f"Your name is {name}."), name, reasoning, wrong)

    return build


def _draw_favourite(rng: Random) -> Fact:
    kind = rng.choice(tuple(facts.FAVOURITES))
    value = rng.choice(facts.FAVOURITES[kind])
    return Fact(f"{kind}:{value}", {"kind": kind, "value": value})


def _favourite_builder(ask_earlier: AskEarlier) -> Callable[[Fact, str, Random], Case]:
    def build(fact: Fact, phrasing: str, rng: Random) -> Case:
        kind, value = fact.values["kind"], fact.values["value"]
        given = user(rng.choice(phrasings.FAVOURITE_GIVEN).format(kind=kind, value=value))
        confirmed = assistant(f"I will remember that your favourite {kind} is {value}.")
        turns = _with_chatter((given, confirmed), ask_earlier, rng)
        wrong = frozenset(facts.FAVOURITES[kind]) - {value}
        answer = assistant(f"Your favourite {kind} is {value}.")
        reasoning = f"The user said that the favourite {kind} is {value}."
        return Case((*turns, user(phrasing.format(kind=kind))), answer, value, reasoning, wrong)

    return build


def _follow_up(base: Skill, ask_earlier: AskEarlier) -> Skill:
    def draw(rng: Random) -> Fact:
        fact = base.draw(rng)
        return Fact(fact.key, fact.values | {"next": fact.values[FOLLOWED[base.name]]})

    def build(fact: Fact, phrasing: str, rng: Random) -> Case:
        earlier = ask_earlier(base.name, rng)
        case = base.build(fact, phrasing.format(next=fact.values["next"]), rng)
        prompt = (*earlier.prompt, earlier.answer, *case.prompt)
        return Case(prompt, case.answer, case.expected, case.reasoning, case.wrong)

    return Skill("talk", f"follow-{base.name}", phrasings.FOLLOW_UP, draw, build, family="follow")


def talk_skills(base: tuple[Skill, ...], ask_earlier: AskEarlier) -> tuple[Skill, ...]:
    """Make the two-turn skills over the fact skills `base`."""
    followed = tuple(_follow_up(skill, ask_earlier) for skill in base if skill.name in FOLLOWED)
    name = Skill("talk", "name", phrasings.NAME_ASKED, _draw_name, _name_builder(ask_earlier))
    favourite = Skill(
        "talk", "favourite", phrasings.FAVOURITE_ASKED, _draw_favourite, _favourite_builder(ask_earlier)
    )
    return (name, favourite, *followed)
