"""Skills that work on a given text: copying it, editing it, and picking a word from it."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import facts
import phrasings
from cases import Case, Fact, Skill, assistant, user

ORDINALS = {"first": 0, "second": 1, "last": -1}


def _sentence(rng: Random) -> str:
    subject = f"{rng.choice(facts.ADJECTIVES)} {rng.choice(facts.NOUNS)}"
    words = f"the {subject} {rng.choice(facts.VERBS)} the {rng.choice(facts.NOUNS)}"
    if rng.random() < 0.4:
        words += f" {rng.choice(facts.PLACES)}"
    return words


def _word_list(rng: Random) -> str:
    pool = facts.NOUNS + facts.ADJECTIVES + facts.NUMBER_WORDS + facts.NAMES
    return " ".join(rng.sample(pool, rng.randint(3, 6)))


def invented_word(rng: Random) -> str:
    """Make a word without meaning, so that copying is learned independently of the vocabulary."""
    word = "".join(rng.choice(facts.SYLLABLES) for _ in range(rng.randint(2, 4)))
    shape = rng.random()
    if shape < 0.2:
        return word.capitalize()
    return word + str(rng.randint(0, 999)) if shape < 0.3 else word


def _invented(rng: Random) -> str:
    return " ".join(invented_word(rng) for _ in range(rng.randint(1, 5)))


def any_text(rng: Random) -> str:
    """Draw a text to work on: a sentence, a list of words, or invented words."""
    kind = rng.random()
    if kind < 0.45:
        text = _sentence(rng)
        return text if rng.random() < 0.5 else text[:1].upper() + text[1:] + "."
    return _word_list(rng) if kind < 0.75 else _invented(rng)


def _draw_copy(rng: Random) -> Fact:
    text = any_text(rng)
    return Fact(text, {"text": text, "result": text})


def _distinct_words(rng: Random, shortest: int, longest: int) -> list[str]:
    pool = facts.NOUNS + facts.ADJECTIVES
    return rng.sample(pool, rng.randint(shortest, longest))


def _sentence_or_list(rng: Random) -> list[str]:
    return _sentence(rng).split() if rng.random() < 0.5 else _distinct_words(rng, 3, 6)


def _draw_replace(rng: Random) -> Fact:
    words = _sentence_or_list(rng)
    old = rng.choice([word for word in words if words.count(word) == 1])
    new = rng.choice(facts.NOUNS + facts.NAMES)
    result = " ".join(new if word == old else word for word in words)
    return _edit(words, result, old=old, new=new)


def _draw_upper(rng: Random) -> Fact:
    words = _distinct_words(rng, 1, 4)
    return _edit(words, " ".join(words).upper())


def _draw_reverse(rng: Random) -> Fact:
    words = _distinct_words(rng, 3, 5)
    return _edit(words, " ".join(reversed(words)))


def _draw_append(rng: Random) -> Fact:
    words = _sentence_or_list(rng)
    new = rng.choice(facts.NOUNS + facts.NAMES)
    return _edit(words, " ".join([*words, new]), new=new)


def _draw_remove(rng: Random) -> Fact:
    words = _sentence_or_list(rng)
    old = rng.choice([word for word in words if words.count(word) == 1])
    return _edit(words, " ".join(word for word in words if word != old), old=old)


def _draw_pick(rng: Random) -> Fact:
    words = _distinct_words(rng, 3, 6)
    which = rng.choice(tuple(ORDINALS))
    return _edit(words, words[ORDINALS[which]], which=which)


def _edit(words: list[str], result: str, **values: str) -> Fact:
    text = " ".join(words)
    key = "|".join((text, *values.values()))
    return Fact(key, {"text": text, "result": result, **values})


def _builder(reasoning: str) -> Callable[[Fact, str, Random], Case]:
    def build(fact: Fact, phrasing: str, _: Random) -> Case:
        result = fact.values["result"]
        question = phrasing.format_map(fact.values)
        return Case((user(question),), assistant(result), result, reasoning, grade="text")

    return build


def _draw_drill(rng: Random) -> Fact:
    """Draw a long text with unrelated words, which teaches exact copying faster than short sentences."""
    pool = facts.NOUNS + facts.ADJECTIVES + facts.NUMBER_WORDS + facts.NAMES + tuple(facts.CAPITALS)
    words = [
        rng.choice(pool) if rng.random() < 0.8 else invented_word(rng) for _ in range(rng.randint(4, 20))
    ]
    if rng.random() < 0.2:
        words = [word.upper() for word in words]
    text = " ".join(words)
    return Fact(text, {"text": text, "result": text})


def _build_drill(fact: Fact, phrasing: str, rng: Random) -> Case:
    on_own_line = phrasing.replace(" {text}", "\n{text}") if rng.random() < 0.5 else phrasing
    return _builder("I copy the text as it is.")(fact, on_own_line, rng)


DRILLS: tuple[Skill, ...] = (
    Skill("text", "drill", phrasings.REPEAT, _draw_drill, _build_drill, family="repeat"),
)
TEXT_SKILLS: tuple[Skill, ...] = (
    Skill("text", "repeat", phrasings.REPEAT, _draw_copy, _builder("I copy the text as it is.")),
    Skill("text", "replace", phrasings.REPLACE, _draw_replace, _builder("I change one word of the text.")),
    Skill("text", "upper", phrasings.UPPER, _draw_upper, _builder("I write the text in capitals.")),
    Skill(
        "text", "reverse", phrasings.REVERSE, _draw_reverse, _builder("I go from the last word to the first.")
    ),
    Skill("text", "append", phrasings.APPEND, _draw_append, _builder("I add a word at the end.")),
    Skill("text", "remove", phrasings.REMOVE, _draw_remove, _builder("I leave out one word.")),
    Skill("text", "pick", phrasings.PICK, _draw_pick, _builder("I look for one word in the text.")),
)
