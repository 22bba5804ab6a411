"""Skills with longer answers, so that a hundred and more tokens stay coherent."""

from __future__ import annotations

from random import Random

import facts
import phrasings
from cases import Case, Fact, Skill, assistant, user
from topics_facts import say

LARGEST_COUNT = 30


def _bullets(lines: list[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)


def _capitals(number: int) -> str:
    pairs = list(facts.CAPITALS.items())[:number]
    return _bullets([f"{country}: {capital}" for country, capital in pairs])


ABOUT_TEXT = (
    "mlx-ring serves one language model across several machines.\n"
    "It splits the model into stages and runs each stage on one of your machines.\n"
    "You start it with mlx-ring serve and add a machine with mlx-ring join.\n"
    "It offers an API in the style of OpenAI, so that your usual client works.\n"
    "When a machine leaves, the other machines take over its layers, and the answers go on.\n"
    "I am its demo model: small, quick to load, and ignorant of everything outside my topics."
)

DAYS = "Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday"
MONTHS = "January, February, March, April, May, June, July, August, September, October, November, December"
COLOUR_NAMES = [
    "red",
    "orange",
    "yellow",
    "green",
    "blue",
    "purple",
    "pink",
    "brown",
    "grey",
    "black",
    "white",
]

# Each entry: the request, as "<verb> ..." without the final stop, and the answer.
RECITALS: tuple[tuple[str, str], ...] = (
    ("name the days of the week", f"The days of the week are {DAYS}."),
    ("name the months of the year", f"The months of the year are {MONTHS}."),
    ("say the alphabet", " ".join("abcdefghijklmnopqrstuvwxyz")),
    ("name the four seasons", "The four seasons are spring, summer, autumn and winter."),
    ("list five capitals", _capitals(5)),
    ("list ten capitals", _capitals(10)),
    ("list twenty capitals", _capitals(20)),
    ("list all the colours you know", _bullets(COLOUR_NAMES)),
    ("list ten pairs of opposites", _bullets([f"{one} and {other}" for one, other in facts.OPPOSITES[:10]])),
    ("write the numbers up to twenty in words", ", ".join(facts.NUMBER_WORDS[1:])),
    ("write a short text about mlx-ring", ABOUT_TEXT),
)


def _draw_count(rng: Random) -> Fact:
    first = 1 if rng.random() < 0.4 else rng.randint(0, LARGEST_COUNT - 3)
    last = rng.randint(first + 2, LARGEST_COUNT)
    return Fact(f"{first},{last}", {"a": str(first), "b": str(last)})


def _build_count(fact: Fact, phrasing: str, _: Random) -> Case:
    first, last = int(fact.values["a"]), int(fact.values["b"])
    answer = ", ".join(str(number) for number in range(first, last + 1))
    reasoning = f"I count from {first} to {last}."
    return Case((user(say(phrasing, fact.values)),), assistant(answer), answer, reasoning, grade="text")


def _draw_recital(rng: Random) -> Fact:
    indirect, answer = rng.choice(RECITALS)
    direct = indirect[:1].upper() + indirect[1:] + "."
    return Fact(indirect, {"indirect": indirect, "direct": direct, "answer": answer})


def _build_recital(fact: Fact, phrasing: str, _: Random) -> Case:
    answer = fact.values["answer"]
    reasoning = f"I {fact.values['indirect']}."
    return Case((user(say(phrasing, fact.values)),), assistant(answer), answer, reasoning, grade="text")


LIST_SKILLS: tuple[Skill, ...] = (
    Skill("lists", "count", phrasings.COUNT, _draw_count, _build_count),
    Skill("lists", "recite", phrasings.RECITE, _draw_recital, _build_recital),
)
