"""The demo models' corpus: true, seeded, and without held-out questions in the training data."""

from __future__ import annotations

import operator
import re
import subprocess
import sys
from collections import Counter
from itertools import islice
from pathlib import Path
from random import Random

import facts
import pytest
from cases import HELD_PHRASINGS_PER_TOPIC, Case, Message
from corpus import MIXES, Conversation, Corpus

pytestmark = pytest.mark.slow

CONVERSATIONS = 8_000
LONGEST_CASE = 4
FOLDER = Path(__file__).parents[2] / "scripts" / "demo_models"
OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul}


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return Corpus(seed=0)


@pytest.fixture(scope="module")
def conversations(corpus: Corpus) -> list[Conversation]:
    """Return some thousand training conversations of every mix."""
    return [one for mix in MIXES for one in islice(corpus.conversations(mix=mix), CONVERSATIONS)]


def normalized(text: str) -> str:
    """Return a text without punctuation, capitals and extra spaces."""
    return " ".join(re.sub(r"[?.!,:']", "", text).lower().split())


def user_turns(messages: tuple[Message, ...]) -> list[str]:
    return [normalized(str(message["content"])) for message in messages if message["role"] == "user"]


def question_of(case: Case) -> str:
    return "\n".join(user_turns(case.prompt))


def training_turns(conversations: list[Conversation]) -> set[str]:
    """Return all user turns of the training data, alone and in the runs that a case can have."""
    runs: set[str] = set()
    for conversation in conversations:
        turns = user_turns(conversation.messages)
        for start in range(len(turns)):
            runs.update("\n".join(turns[start : start + length]) for length in range(1, LONGEST_CASE))
    return runs


def test_a_seed_fixes_the_corpus_and_the_questions() -> None:
    first, again, other = Corpus(0), Corpus(0), Corpus(1)
    assert list(islice(first.conversations(), 50)) == list(islice(again.conversations(), 50))
    assert first.questions() == again.questions()
    assert list(islice(first.conversations(), 50)) != list(islice(other.conversations(), 50))
    assert first.held_phrasings != other.held_phrasings


def test_five_phrasings_of_every_topic_are_held_out(corpus: Corpus) -> None:
    for topic in corpus.topics:
        keys = {skill.phrasing_key(text) for skill in corpus.skills_of(topic) for text in skill.phrasings}
        assert len(keys & corpus.held_phrasings) == HELD_PHRASINGS_PER_TOPIC


def test_there_are_at_least_200_questions_and_no_duplicates(corpus: Corpus) -> None:
    questions = corpus.questions()
    assert len(questions) >= 200
    assert len({repr(question.case.prompt) for question in questions}) == len(questions)
    assert {question.topic for question in questions} == set(corpus.topics)


@pytest.mark.slow
def test_no_question_occurs_in_training(corpus: Corpus, conversations: list[Conversation]) -> None:
    seen = training_turns(conversations)
    questions = [question.case for question in corpus.questions(per_topic=60)]
    assert [question_of(case) for case in questions if question_of(case) in seen] == []


def test_no_held_out_phrasing_occurs_in_training(corpus: Corpus, conversations: list[Conversation]) -> None:
    """Fill every held-out phrasing with many facts: none of the sentences is a training sentence."""
    seen = {text for conversation in conversations for text in user_turns(conversation.messages)}
    rng = Random(0)
    held = [
        (skill, phrasing)
        for skill in corpus.skills
        for phrasing in skill.phrasings
        if corpus.is_held_phrasing(skill, phrasing)
    ]
    for skill, phrasing in held:
        for _ in range(60):
            case = skill.build(skill.draw(rng), phrasing, rng)
            assert user_turns(case.prompt)[-1] not in seen


def test_phrasings_of_a_skill_differ_in_words(corpus: Corpus) -> None:
    for skill in corpus.skills:
        counts = Counter(normalized(phrasing) for phrasing in skill.phrasings)
        assert [text for text, number in counts.items() if number > 1] == [], skill.name


def test_every_sum_in_the_corpus_is_right(conversations: list[Conversation]) -> None:
    answers = [str(message["content"]) for one in conversations for message in one.messages]
    sums = [re.fullmatch(r"(\d+) ([+*-]) (\d+) = (\d+)", answer) for answer in answers]
    found = [match.groups() for match in sums if match]
    assert len(found) > 1000
    for first, sign, second, result in found:
        assert OPERATORS[sign](int(first), int(second)) == int(result)


def test_every_word_has_one_opposite_and_every_capital_one_country() -> None:
    words = [word for pair in facts.OPPOSITES for word in pair]
    assert len(words) == len(set(words)) >= 160
    assert len(facts.CAPITALS) == len(set(facts.CAPITALS.values())) >= 60


def test_the_corpus_needs_only_the_standard_library() -> None:
    script = "import sys; sys.path.insert(0, '.'); import corpus; next(corpus.Corpus().conversations())"
    isolated = [sys.executable, "-I", "-S", "-c", script]
    subprocess.run(isolated, cwd=FOLDER, check=True, timeout=60)


def test_conversations_include_tool_calls_reasoning_and_several_turns(
    conversations: list[Conversation],
) -> None:
    called = [one for one in conversations if any("tool_calls" in message for message in one.messages)]
    reasoned = [one for one in conversations if one.thinking]
    long = [one for one in conversations if sum(message["role"] == "user" for message in one.messages) > 1]
    assert min(len(called), len(reasoned), len(long)) > len(conversations) // 50
