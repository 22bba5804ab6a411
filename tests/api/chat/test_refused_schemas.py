"""Schemas and formats that no grammar enforces: a request is refused, and the problem named."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from tests.api.chat.call_examples import CLOCK, WEATHER, example_of
from tests.api.chat.test_answer_grammars import (
    JSON_TOOLS,
    grammar_of,
    schema_conversation,
    tools_conversation,
)
from tests.eventually import run_tasks_until

from mlx_ring.api.chat.answer_grammars import GrammarChecks, answer_grammar
from mlx_ring.api.chat.model_format import ChatFormat
from mlx_ring.api.chat.request import Conversation, Tool
from mlx_ring.core.errors import Overloaded, RequestError, ServingError
from mlx_ring.core.traces import CLIENT
from mlx_ring.core.types import Grammar
from mlx_ring.models.grammars import GrammarTrials


def test_format_without_a_grammar_is_refused_by_name() -> None:
    marks = replace(JSON_TOOLS.marks(), parser="unknown_parser")
    with pytest.raises(RequestError, match="unknown_parser"):
        answer_grammar(
            ChatFormat(calls=marks), tools_conversation(WEATHER), thinking_open=False, open_schemas=False
        )


def refused(conversation: Conversation, format_: ChatFormat) -> RequestError:
    async def check() -> None:
        grammar = answer_grammar(format_, conversation, thinking_open=False, open_schemas=False)
        await GrammarChecks().check(grammar, conversation)

    with pytest.raises(RequestError) as raised:
        asyncio.run(check())
    return raised.value


@pytest.mark.processes
@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ({"not": {"type": "string"}}, '"not"'),
        ({"type": "array", "uniqueItems": True}, '"uniqueItems"'),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf"),
        ({"type": "string", "pattern": "(?=a)b"}, "look-around"),
        ({"type": "string", "format": "iban"}, "iban"),
        ({"$ref": "https://example.org/schema"}, "example.org"),
        ({"type": "integer", "minimum": 2, "maximum": 1}, "Unsatisfiable"),
        ({"enum": ["x" * 300_000]}, "262144"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_unenforceable_schema_is_refused_and_its_problem_is_named(schema: Any, expected: str) -> None:
    error = refused(schema_conversation(schema, param="text.format.schema"), ChatFormat())
    assert expected in str(error)
    assert error.param == "text.format.schema"
    tool = Tool(
        "f", parameters={"type": "object", "properties": {"a": schema}, "required": ["a"]}, strict=True
    )
    error = refused(tools_conversation(CLOCK, tool), JSON_TOOLS.format())
    assert expected in str(error)
    assert (error.param, "'f'" in str(error)) == ("tools[1].function.parameters", True)
    assert not re.search(r"llguidance|coerce_one_of|start:", str(error))


@pytest.mark.processes
def test_refusal_names_the_schema_at_fault_beside_one_in_keywords_that_are_replaced() -> None:
    email = {"type": "object", "properties": {"to": {"type": "string", "pattern": "^(?!x)"}}}
    flags = {"type": "object", "propertyNames": {"enum": ["a"]}, "additionalProperties": {"type": "boolean"}}
    wrong = Tool("wrong", parameters={"type": "object", "properties": {"a": {"not": {}}}}, strict=True)
    tools = (Tool("send", parameters=email), Tool("set", parameters=flags, strict=True), wrong)
    error = refused(tools_conversation(*tools), JSON_TOOLS.format())
    assert (error.param, "'wrong'" in str(error)) == ("tools[2].function.parameters", True)


def test_llguidance_options_in_a_schema_are_refused() -> None:
    schema = {"type": "object", "x-guidance": {"lenient": True}}
    assert "x-guidance" in str(refused(schema_conversation(schema), ChatFormat()))
    assert "x-guidance" in str(refused(tools_conversation(Tool("f", parameters=schema)), JSON_TOOLS.format()))


@pytest.mark.processes
def test_grammar_checks_keep_no_whole_grammar() -> None:
    """Check grammars whose length clients decide."""
    checks, grammar = GrammarChecks(), Grammar("json_schema", json.dumps({"description": "x" * (1 << 20)}))
    with pytest.raises(RequestError, match="the limit is 262144 bytes"):
        asyncio.run(checks.check(grammar, tools_conversation(choice="auto")))
    assert len(repr(vars(checks))) < 10_000


@pytest.mark.processes
@pytest.mark.parametrize("depth", [150, 900])
def test_deeply_nested_schema_is_refused(depth: int) -> None:
    schema: dict[str, Any] = {}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    assert "recursion" in str(refused(schema_conversation(schema), ChatFormat()))


@pytest.mark.parametrize(
    "schema", [{"type": "string", "pattern": "^a"}, {"anyOf": [{"type": "string"}, {"type": "integer"}]}]
)
def test_strict_tool_is_refused_where_an_unquoted_format_is_ambiguous(schema: Any) -> None:
    tool = Tool("f", parameters={"type": "object", "properties": {"a": schema}}, strict=True)
    with pytest.raises(RequestError, match="'a' of tool 'f'"):
        grammar_of(example_of("qwen3_coder"), tools_conversation(tool))


@pytest.mark.parametrize("parser", ["deepseek_v32", "minimax_m2", "qwen3_coder", "glm47", "minicpm5"])
@pytest.mark.parametrize("name", ["a>b", "a<b", "a'", '"', "a\nb", "a" * 300])
def test_property_that_would_be_read_under_another_name_is_refused(parser: str, name: str) -> None:
    parameters = {"type": "object", "properties": {name: {"type": "string"}}}
    with pytest.raises(RequestError, match="is a name that this model's format cannot write"):
        grammar_of(example_of(parser), tools_conversation(Tool("f", parameters=parameters, strict=True)))


class HeldTrials(GrammarTrials):
    """Trials of which each lasts until `may_end` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.may_end = threading.Event()
        self.tried: list[Grammar] = []
        self.error: ServingError | None = None
        """Failure of every trial."""

    def problem(self, grammar: Grammar) -> str:
        self.tried.append(grammar)
        self.may_end.wait()
        if self.error is not None:
            raise self.error
        return ""


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[GrammarChecks, HeldTrials]]:
    """Yield checks whose trials are held."""
    checks, trials = GrammarChecks(), HeldTrials()
    monkeypatch.setattr(checks, "_trials", trials)
    yield checks, trials
    trials.may_end.set()


def schema_of(name: str) -> Grammar:
    return Grammar("json_schema", json.dumps({"title": name}))


def begin(checks: GrammarChecks, grammar: Grammar, client: str = "") -> asyncio.Task[None]:
    """Begin the check of a client's grammar."""
    CLIENT.set(client)
    return asyncio.ensure_future(checks.check(grammar, tools_conversation(choice="auto")))


async def give_up(*checks: asyncio.Task[None]) -> None:
    for each in checks:
        each.cancel()
    await asyncio.wait(checks)


def test_schema_behind_slow_ones_of_others_may_be_sent_again(held: tuple[GrammarChecks, HeldTrials]) -> None:
    checks, trials = held
    slow, simple = schema_of("slow"), schema_of("simple")

    async def run() -> None:
        other = begin(checks, slow)
        await run_tasks_until(lambda: trials.tried)
        checks.turn_within_s = 0.0
        with pytest.raises(Overloaded, match="too busy with other schemas") as refused:
            await begin(checks, simple)
        assert refused.value.retry_after_s > 0
        trials.may_end.set()
        await other
        await begin(checks, slow)

    asyncio.run(run())
    assert trials.tried == [slow], "a refused schema takes no time of the next ones"


def test_equal_schemas_are_tried_once(held: tuple[GrammarChecks, HeldTrials]) -> None:
    checks, trials = held

    async def run() -> None:
        together = [begin(checks, schema_of("one"), f"client {number}") for number in range(8)]
        await run_tasks_until(lambda: trials.tried)
        await give_up(*together[:4])
        trials.may_end.set()
        await asyncio.gather(*together[4:])

    asyncio.run(run())
    assert trials.tried == [schema_of("one")]


def test_trial_that_outlasts_its_requests_is_remembered(held: tuple[GrammarChecks, HeldTrials]) -> None:
    checks, trials = held
    slow, given_up, next_one = map(schema_of, ("slow", "given up", "next"))

    async def run() -> None:
        checks.tried_within_s = 0.0
        with pytest.raises(
            Overloaded, match=r"could not check this schema within 0 s; simplify it"
        ) as refused:
            await begin(checks, slow)
        assert refused.value.retry_after_s > 0
        waiting = begin(checks, given_up)
        await asyncio.sleep(0)
        await give_up(waiting)
        trials.may_end.set()
        checks.tried_within_s = 60.0
        await begin(checks, next_one)
        await begin(checks, slow)

    asyncio.run(run())
    assert trials.tried == [slow, next_one], "a schema is tried if its request left before its turn"


def test_clients_take_turns_to_have_schemas_tried(held: tuple[GrammarChecks, HeldTrials]) -> None:
    checks, trials = held
    many, other = [schema_of(f"{number}") for number in range(4)], schema_of("other")

    async def run() -> None:
        first = [begin(checks, each, "a") for each in many]
        await run_tasks_until(lambda: trials.tried)
        second = begin(checks, other, "b")
        await asyncio.sleep(0)
        trials.may_end.set()
        await asyncio.gather(*first, second)

    asyncio.run(run())
    assert trials.tried == [many[0], other, *many[1:]]


def test_failed_trial_is_repeated(held: tuple[GrammarChecks, HeldTrials]) -> None:
    checks, trials = held
    trials.error = ServingError("The process for it ended.")
    trials.may_end.set()

    async def run() -> None:
        with pytest.raises(ServingError, match="ended"):
            await begin(checks, schema_of("one"))
        trials.error = None
        await begin(checks, schema_of("one"))

    asyncio.run(run())
    assert trials.tried == [schema_of("one")] * 2
