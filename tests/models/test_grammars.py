"""Hostile grammars are refused one by one, within limits of time and memory."""

from __future__ import annotations

import gc
import json
import random
import sys
from collections.abc import Callable
from typing import Any

import psutil
import pytest
from llguidance import LLMatcher, LLTokenizer
from tests.processes import command_of

from mlx_ring.core.errors import ServingError
from mlx_ring.core.types import Grammar
from mlx_ring.models import grammars
from mlx_ring.models.grammars import (
    GrammarTrials,
    grammar_limits,
    in_one_line,
    to_llguidance,
)

GOOD = Grammar("json_schema", '{"type": "integer"}')


def expensive_grammar() -> Grammar:
    """Return a small grammar beyond llguidance's own limits, which takes minutes and unlimited memory."""
    chance = random.Random(1)
    words = ["".join(chance.choices("abcdefghij", k=9)) for _ in range(501)]
    schema = {
        "type": "string",
        "allOf": [{"pattern": f"{words[at]}.*{words[at + 1]}"} for at in range(500)],
    }
    return Grammar("json_schema", json.dumps(schema))


def references(count: int) -> Grammar:
    deep: dict[str, Any] = {
        f"d{at}": {"type": "object", "properties": {"a": {"$ref": f"#/$defs/d{(at + 1) % count}"}}}
        for at in range(count)
    }
    return Grammar("json_schema", json.dumps({"$defs": deep, "$ref": "#/$defs/d0"}))


@pytest.fixture
def children() -> Callable[[], list[psutil.Process]]:
    """Return the processes for trials that started since the test began."""

    def now() -> list[psutil.Process]:
        return [each for each in psutil.Process().children() if grammars.__name__ in command_of(each)]

    before = now()
    return lambda: [each for each in now() if each not in before]


def test_a_grammar_that_takes_too_long_is_refused_and_the_next_is_tried() -> None:
    trials = GrammarTrials(cpu_s=0.5)
    assert trials.problem(GOOD) == ""
    assert "more than 0.5 s" in trials.problem(expensive_grammar())
    assert trials.problem(GOOD) == ""


def test_references_thousands_deep_do_not_end_the_process(
    children: Callable[[], list[psutil.Process]],
) -> None:
    trials = GrammarTrials()
    assert trials.problem(references(3000)) == ""
    assert len(children()) == 1


def test_a_problem_is_reported_in_one_sentence() -> None:
    problem = GrammarTrials().problem(Grammar("json_schema", '{"not": {}}'))
    assert '"not"' in problem
    assert "\n" not in problem


@pytest.mark.parametrize(
    "grammar",
    [Grammar("json_schema", '{"$ref": "#"}'), Grammar("regex", r"[^\s\S]")],
    ids=["reference to itself", "empty character class"],
)
def test_a_grammar_that_allows_no_first_token_is_refused(grammar: Grammar) -> None:
    assert (
        GrammarTrials().problem(grammar) == "No answer can match this schema: it allows no first character."
    )


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar("regex", ""),
        Grammar("json_schema", '{"anyOf": [{"$ref": "#"}, {"type": "null"}]}'),
        Grammar("lark", 'start: "" | <|call|>'),
    ],
    ids=["empty text", "one finite alternative", "special token"],
)
def test_a_grammar_that_allows_an_end_or_one_alternative_is_accepted(grammar: Grammar) -> None:
    assert GrammarTrials().problem(grammar) == ""


def test_the_process_ends_with_its_owner(children: Callable[[], list[psutil.Process]]) -> None:
    trials = GrammarTrials()
    assert trials.problem(GOOD) == ""
    (child,) = children()
    del trials
    gc.collect()
    assert not child.is_running()


def test_a_killed_process_is_replaced(
    children: Callable[[], list[psutil.Process]],
) -> None:
    trials = GrammarTrials()
    assert trials.problem(GOOD) == ""
    (child,) = children()
    child.kill()
    psutil.wait_procs([child])
    assert trials.problem(GOOD) == ""


def test_a_process_that_cannot_start_is_a_server_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(ServingError, match="code 1"):
        GrammarTrials().problem(GOOD)


def test_too_many_optional_properties_are_named_as_such() -> None:
    schema = {"type": "object", "properties": {f"p{at}": {"type": "null"} for at in range(1000)}}
    matcher = LLMatcher(
        LLTokenizer("byte"),
        to_llguidance("json_schema", json.dumps(schema)),
        limits=grammar_limits(),
        log_level=0,
    )
    matcher.consume_tokens(list(b"{"))
    matcher.compute_bitmask()
    assert in_one_line(matcher.get_error()).endswith("; require more of its properties, or name fewer.")
