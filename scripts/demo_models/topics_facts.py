"""Skills whose answer is a fact: greetings, capitals, arithmetic, colours, opposites, the program."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import about
import facts
import phrasings
from cases import Case, Fact, Skill, assistant, user

LARGEST_SUM = 20
LARGEST_FACTOR = 10
OPPOSITE_OF = dict(facts.OPPOSITES) | {second: first for first, second in facts.OPPOSITES}
COUNTRY_OF = {capital: country for country, capital in facts.CAPITALS.items()}
NUMBERS = frozenset(str(number) for number in range(LARGEST_FACTOR**2 + 1))
ABOUT_MARKS = frozenset(mark for _, _, _, mark in about.ABOUT)
GREETING_MARKS = frozenset(mark for _, mark in about.GREETING_ANSWERS.values())


def say(template: str, values: dict[str, str]) -> str:
    """Fill a phrasing and begin it with a capital letter, as a person would write it."""
    filled = template.format_map(values)
    return filled[:1].upper() + filled[1:]


def _fact_case(answer: str, expected: str, reasoning: str, rivals: frozenset[str]) -> Callable[[str], Case]:
    def make(question: str) -> Case:
        wrong = frozenset(rival for rival in rivals if rival not in expected and rival not in question)
        return Case((user(question),), assistant(answer), expected, reasoning, wrong)

    return make


def _draw_greeting(rng: Random) -> Fact:
    kind = rng.choice(tuple(about.GREETINGS))
    word = rng.choice(about.GREETINGS[kind])
    return Fact(word, {"g": word, "kind": kind})


def _build_greeting(fact: Fact, phrasing: str, _: Random) -> Case:
    answer, mark = about.GREETING_ANSWERS[fact.values["kind"]]
    reasoning = f"The user says {fact.values['g']}. I answer politely."
    return _fact_case(answer, mark, reasoning, GREETING_MARKS)(say(phrasing, fact.values))


def _draw_country(rng: Random) -> Fact:
    country = rng.choice(tuple(facts.CAPITALS))
    return Fact(country, {"country": country, "capital": facts.CAPITALS[country]})


def _build_capital(fact: Fact, phrasing: str, _: Random) -> Case:
    country, capital = fact.values["country"], fact.values["capital"]
    reasoning = f"The user asks for the capital of {country}. That is {capital}."
    rivals = frozenset(facts.CAPITALS.values())
    answer = f"The capital of {country} is {capital}."
    return _fact_case(answer, capital, reasoning, rivals)(say(phrasing, fact.values))


def _build_country(fact: Fact, phrasing: str, _: Random) -> Case:
    country, capital = fact.values["country"], fact.values["capital"]
    reasoning = f"The user asks whose capital {capital} is. That is {country}."
    rivals = frozenset(facts.CAPITALS)
    answer = f"{capital} is the capital of {country}."
    return _fact_case(answer, country, reasoning, rivals)(say(phrasing, fact.values))


def _draw_sum(rng: Random) -> Fact:
    a = rng.randint(0, LARGEST_SUM)
    return _pair_of_numbers(a, rng.randint(0, LARGEST_SUM - a))


def _draw_difference(rng: Random) -> Fact:
    a = rng.randint(0, LARGEST_SUM)
    return _pair_of_numbers(a, rng.randint(0, a))


def _draw_product(rng: Random) -> Fact:
    return _pair_of_numbers(rng.randint(1, LARGEST_FACTOR), rng.randint(1, LARGEST_FACTOR))


def _pair_of_numbers(a: int, b: int) -> Fact:
    return Fact(f"{a},{b}", {"a": str(a), "b": str(b)})


def _arithmetic_builder(
    symbol: str, word: str, compute: Callable[[int, int], int]
) -> Callable[[Fact, str, Random], Case]:
    def build(fact: Fact, phrasing: str, _: Random) -> Case:
        a, b = fact.values["a"], fact.values["b"]
        result = str(compute(int(a), int(b)))
        rivals = NUMBERS - {a, b}
        make = _fact_case(
            f"{a} {symbol} {b} = {result}", result, f"{a} {word} {b} makes {result}.", frozenset()
        )
        case = make(say(phrasing, fact.values))
        return Case(case.prompt, case.answer, f"= {result}", case.reasoning, rivals - {result})

    return build


def _draw_thing(rng: Random) -> Fact:
    thing = rng.choice(tuple(facts.COLOURS))
    return Fact(thing, {"thing": thing})


def _build_colour(fact: Fact, phrasing: str, _: Random) -> Case:
    thing = fact.values["thing"]
    colour = facts.COLOURS[thing]
    rivals = frozenset(facts.COLOURS.values())
    reasoning = f"The user asks for the colour of {thing}. It is {colour}."
    answer = f"{thing[:1].upper()}{thing[1:]} is {colour}."
    if thing == "an orange":
        rivals = rivals - {"orange"}
    return _fact_case(answer, colour, reasoning, rivals)(say(phrasing, fact.values))


def _draw_word(rng: Random) -> Fact:
    word = rng.choice(tuple(OPPOSITE_OF))
    return Fact(word, {"word": word})


def _build_opposite(fact: Fact, phrasing: str, _: Random) -> Case:
    word = fact.values["word"]
    opposite = OPPOSITE_OF[word]
    reasoning = f"The user wants the opposite of {word}. That is {opposite}."
    answer = f"The opposite of {word} is {opposite}."
    case = _fact_case(answer, opposite, reasoning, frozenset())(say(phrasing, fact.values))
    return Case(case.prompt, case.answer, f"is {opposite}", reasoning)


def _draw_about(rng: Random) -> Fact:
    indirect, direct, answer, mark = rng.choice(about.ABOUT)
    return Fact(indirect, {"indirect": indirect, "direct": direct, "answer": answer, "mark": mark})


def _build_about(fact: Fact, phrasing: str, _: Random) -> Case:
    reasoning = f"The user wants to know {fact.values['indirect']}. I know that."
    make = _fact_case(fact.values["answer"], fact.values["mark"], reasoning, ABOUT_MARKS)
    return make(say(phrasing, fact.values))


def _draw_subject(rng: Random) -> Fact:
    subject = rng.choice(facts.OUT_OF_SCOPE)
    return Fact(subject, {"subject": subject})


def _draw_question(rng: Random) -> Fact:
    question = rng.choice(facts.OUT_OF_SCOPE_QUESTIONS)
    return Fact(question, {"question": question})


def _build_unknown(fact: Fact, phrasing: str, _: Random) -> Case:
    reasoning = "The user asks about something outside my topics."
    answer = "I am only a small demo model. I do not know about that."
    return _fact_case(answer, "do not know", reasoning, ABOUT_MARKS)(say(phrasing, fact.values))


FACT_SKILLS: tuple[Skill, ...] = (
    Skill("greetings", "greeting", phrasings.GREETING, _draw_greeting, _build_greeting),
    Skill("capitals", "capital", phrasings.CAPITAL, _draw_country, _build_capital),
    Skill("capitals", "country", phrasings.COUNTRY, _draw_country, _build_country),
    Skill(
        "arithmetic", "add", phrasings.ADD, _draw_sum, _arithmetic_builder("+", "plus", lambda a, b: a + b)
    ),
    Skill(
        "arithmetic", "subtract", phrasings.SUBTRACT, _draw_difference,
        _arithmetic_builder("-", "minus", lambda a, b: a - b),
    ),
    Skill(
        "arithmetic", "multiply", phrasings.MULTIPLY, _draw_product,
        _arithmetic_builder("*", "times", lambda a, b: a * b),
    ),
    Skill("colours", "colour", phrasings.COLOUR, _draw_thing, _build_colour),
    Skill("opposites", "opposite", phrasings.OPPOSITE, _draw_word, _build_opposite),
    Skill("program", "about", phrasings.ABOUT, _draw_about, _build_about),
    Skill("unknown", "unknown", phrasings.UNKNOWN, _draw_subject, _build_unknown),
    Skill("unknown", "unknown-question", phrasings.UNKNOWN_QUESTION, _draw_question, _build_unknown),
)  # fmt: skip
