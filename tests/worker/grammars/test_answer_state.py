"""Steps with grammars: every answer matches, in any batch and over any number of stages."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, cast

import jsonschema
import pytest
from tests.tiny_model import write_tiny_model
from tests.worker.stages import (
    CUTS,
    Pipeline,
    ReadyGrammars,
    Steps,
    answer_all,
    chunk,
    grammar_id,
    make_stages,
    open_sequence,
    previous,
    tokens_of,
    trim,
    want,
)

from mlx_ring.core.errors import ModelCorrupt
from mlx_ring.models.model_folder import read_model_folder
from mlx_ring.rpc.protos import step_pb2
from mlx_ring.worker.grammars import AnswerGrammar, Drawing
from mlx_ring.worker.grammars.answer_state import Compiled
from mlx_ring.worker.grammars.masks import make_masks
from mlx_ring.worker.sequences import SequenceTable

END = 1
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["ab", "ac", "b"]},
        "count": {"type": "integer", "minimum": -3, "maximum": 120},
        "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
    },
    "required": ["kind", "count", "tags"],
    "additionalProperties": False,
}
PROMPT = [40, 50, 60]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


def open_constrained(
    sequence: int, schema: object, *, kind: str = "json_schema", eos: Sequence[int] = (END,), **sampling: Any
) -> step_pb2.CacheOperation:
    operation = open_sequence(sequence, len(PROMPT), eos, **sampling)
    operation.open.max_length = 1600
    operation.open.seed = sequence
    operation.open.grammar = grammar_id(kind, schema if isinstance(schema, str) else json.dumps(schema))
    return operation


def open_regex(sequence: int, pattern: str, **sampling: Any) -> step_pb2.CacheOperation:
    return open_constrained(sequence, pattern, kind="regex", **sampling)


def decode_text(folder: Path, tokens: Sequence[int]) -> str:
    from transformers import AutoTokenizer  # takes seconds to import

    return cast("str", AutoTokenizer.from_pretrained(folder).decode(list(tokens), skip_special_tokens=True))


def tokens_of_text(folder: Path, text: str) -> list[int]:
    from transformers import AutoTokenizer  # takes seconds to import

    return cast("list[int]", AutoTokenizer.from_pretrained(folder).encode(text, add_special_tokens=False))


def generate(
    pipeline: Pipeline, opened: Sequence[step_pb2.CacheOperation], count: int = 1500
) -> dict[int, list[int]]:
    """Return each sequence's answer to its end, or `count` tokens; all step together."""
    sequences = [operation.open.sequence for operation in opened]
    first = pipeline.results(*(chunk(each, 0, PROMPT, want()) for each in sequences), operations=opened)
    answers = {each: tokens_of(first[each]) for each in sequences}
    feed_back = len(pipeline.runners) > 1
    while going := [each for each in sequences if answers[each][-1] != END and len(answers[each]) < count]:
        rows = [
            step_pb2.Row(
                sequence=each,
                start=len(PROMPT) + len(answers[each]) - 1,
                token=answers[each][-1],
                wants=[want()],
            )
            for each in going
        ]
        for sequence, result in pipeline.results(*rows, feed_back=feed_back).items():
            answers[sequence] += tokens_of(result)
    return answers


@pytest.mark.slow
def test_constrained_answers_match_in_a_batch_with_an_unconstrained_one(folder: Path) -> None:
    pipeline = Pipeline(folder, CUTS[1])
    noisy: dict[str, Any] = {"temperature": 1.0}
    free = open_sequence(9, len(PROMPT), (END,), temperature=1.0)
    free.open.max_length = 1600
    answers = generate(
        pipeline,
        [
            open_constrained(1, SCHEMA),
            open_constrained(2, SCHEMA, **noisy),
            free,
            open_constrained(3, SCHEMA, **noisy, top_p=0.9, min_p=0.01),
        ],
    )
    for sequence in (1, 2, 3):
        assert answers[sequence][-1] == END
        jsonschema.validate(json.loads(decode_text(folder, answers[sequence])), SCHEMA)
    alone = open_sequence(9, len(PROMPT), (END,), temperature=1.0)
    alone.open.max_length = 1600
    assert generate(Pipeline(folder, CUTS[1]), [alone])[9] == answers[9]


FIXED = "^(ab|cd){3}$"
"""Regular expression with a few answers, each of six tokens and an end."""


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("submits_ahead", [False, True])
def test_steps_built_ahead_draw_the_same_answers(folder: Path, stages: int, *, submits_ahead: bool) -> None:
    """Step one answer with a grammar and one without. The head names tokens as `previous` before it knows them."""
    expected = generate(Pipeline(folder, CUTS[1]), [open_regex(1, FIXED, temperature=1.0)])[1]
    runners = make_stages(folder, CUTS[stages], submits_ahead=submits_ahead)
    steps = Steps()
    free = open_sequence(2, len(PROMPT), (END,), temperature=1.0)
    operations = [open_regex(1, FIXED, temperature=1.0), free]
    made = [
        steps.make(
            *(chunk(each, 0, PROMPT, want()) for each in (1, 2)), operations=operations, feed_back=True
        )
    ]
    made += [
        steps.make(*(previous(each, len(PROMPT) + at) for each in (1, 2)), feed_back=True)
        for at in range(len(expected) + 2)
    ]
    dones: list[step_pb2.StepDone] = []
    for window in [made] if stages == 1 else [[step] for step in made]:
        for runner in runners:
            answered = answer_all(runner, *window)
            dones += answered if runner is runners[-1] else []
    assert [done.failure.message for done in dones] == [""] * len(made)
    tokens = [
        token
        for done in dones
        for result in done.results
        if result.sequence == 1
        for token in tokens_of(result)
    ]
    assert tokens[: len(expected)] == expected


def test_drafts_are_verified_under_the_grammar(folder: Path) -> None:
    expected = generate(Pipeline(folder, CUTS[1]), [open_regex(1, FIXED)])[1]
    right, wrong = expected[1:4], [*expected[1:3], 77, expected[4]]
    for draft, accepted in ((right, 4), (wrong, 3)):
        pipeline = Pipeline(folder, CUTS[1])
        first = pipeline.results(chunk(1, 0, PROMPT, want()), operations=[open_regex(1, FIXED)])
        result = pipeline.results(previous(1, len(PROMPT), draft))[1]
        assert [*tokens_of(first[1]), *tokens_of(result)] == expected[: accepted + 1]
        start = len(PROMPT) + accepted
        rest = pipeline.results(previous(1, start), operations=[trim(1, start)] if draft is wrong else [])[1]
        assert tokens_of(rest) == expected[accepted + 1 : accepted + 2]


def test_answer_continues_from_its_tokens_after_a_replay(folder: Path) -> None:
    expected = generate(Pipeline(folder, CUTS[1]), [open_regex(1, FIXED, temperature=1.0)])[1]
    again = open_regex(5, FIXED, temperature=1.0)
    again.open.seed = 1
    result = Pipeline(folder, CUTS[1]).results(
        chunk(5, 0, [*PROMPT, *expected[:4]], want()), operations=[again]
    )[5]
    assert tokens_of(result) == expected[4:5]


@pytest.mark.parametrize(
    "sampling",
    [
        {"min_tokens": 20},
        {"logit_bias": {END: 100.0}},
        {"logit_bias": dict.fromkeys(range(60, 120), -100.0)},
        {"temperature": 1.0, "top_k": 2, "repetition_penalty": 1.8, "presence_penalty": 2.0},
        {"temperature": 1.5, "top_p": 0.3, "min_p": 0.2},
        {"logprobs": True, "top_logprobs": 3},
    ],
    ids=str,
)
def test_no_other_parameter_breaks_a_grammar(folder: Path, sampling: dict[str, Any]) -> None:
    tokens = generate(Pipeline(folder, CUTS[1]), [open_regex(1, FIXED, **sampling)], 20)[1]
    assert tokens[-1] == END
    assert re.fullmatch(FIXED, decode_text(folder, tokens))


def test_answer_ends_once_the_grammar_is_satisfied_and_not_before(folder: Path) -> None:
    other = 45
    sampling: dict[str, Any] = {"logit_bias": {END: 100.0, other: 100.0}}
    tokens = generate(Pipeline(folder, CUTS[1]), [open_regex(1, "^(ab){2,9}$", **sampling)], 30)[1]
    assert decode_text(folder, tokens) == "abab"
    assert tokens[-1] == END
    longer: dict[str, Any] = {**sampling, "min_tokens": 9}
    tokens = generate(Pipeline(folder, CUTS[1]), [open_regex(1, "^(ab){2,9}$", **longer)], 30)[1]
    assert len(tokens) >= 9


def test_stop_token_of_a_request_is_drawn_before_its_minimum_only_if_no_other_is_allowed(
    folder: Path,
) -> None:
    (stop,) = tokens_of_text(folder, "b")
    sampling: dict[str, Any] = {"eos": (END, stop), "min_tokens": 20, "logit_bias": {stop: 50.0}}
    opened = [open_regex(1, "^abab$", **sampling), open_regex(2, "^a[bc]d$", **sampling)]
    answers = generate(Pipeline(folder, CUTS[1]), opened, 2)
    assert [decode_text(folder, answers[each]) for each in (1, 2)] == ["ab", "ac"]


def test_tokens_beyond_the_tokenizer_are_never_drawn(folder: Path) -> None:
    sampling: dict[str, Any] = {"logit_bias": dict.fromkeys(range(258, 320), 100.0)}
    tokens = generate(Pipeline(folder, CUTS[1]), [open_regex(1, "^.{9}$", **sampling)], 60)[1]
    assert max(tokens) < 258


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        ("json_schema", '{"not": {}}', '"not"'),
        ("json_schema", "{", "cannot be read"),
        ("regex", "a(", "unclosed"),
        ("lark", "start: nowhere", "nowhere"),
        ("ebnf", "", "ebnf"),
        ("json_schema", '{"$ref": "#"}', "no longer be enforced"),
    ],
)
def test_failed_grammar_ends_only_its_own_answer(folder: Path, kind: str, text: str, message: str) -> None:
    pipeline = Pipeline(folder, CUTS[1])
    (done,) = pipeline.run(
        *(chunk(each, 0, PROMPT, want()) for each in (1, 2)),
        operations=[open_constrained(1, text, kind=kind), open_regex(2, FIXED)],
    )
    assert (done.failure.kind, list(done.failure.sequences)) == ("RequestError", [1])
    assert message in done.failure.message
    results = {result.sequence: tokens_of(result) for result in done.results}
    assert len(results[2]) == 1
    assert not results[1]


class Panic(BaseException):
    """Stand-in for a panic in Rust, which is no `Exception`."""


@pytest.mark.parametrize("failure", [ModelCorrupt("no tokenizer"), TypeError("failed"), Panic("panicked")])
def test_rows_with_a_failed_grammar_may_draw_any_token(failure: BaseException) -> None:
    """Allow every token: one rank of a stage may fail alone, and all must draw the same rows in the same way."""
    compiled = Future[Compiled]()
    compiled.set_exception(failure)
    grammar = AnswerGrammar(compiled, len(PROMPT), frozenset((END,)))
    masks = make_masks([Drawing(7, grammar, PROMPT, [len(PROMPT)])], 320)
    assert str(failure) in str(masks.failed[7])
    assert masks.allowed[7, len(PROMPT)].tokens.all()


def test_tokenizer_may_have_tokens_that_its_model_lacks(tmp_path: Path) -> None:
    """Add a token for images, as tokenizers have that serve models of text and images."""
    folder = write_tiny_model(tmp_path, 258)
    file = folder / "tokenizer.json"
    described = json.loads(file.read_text())
    described["added_tokens"].append({**described["added_tokens"][-1], "id": 258, "content": "<image>"})
    file.write_text(json.dumps(described))
    tokens = generate(Pipeline(folder, CUTS[1]), [open_regex(1, FIXED)], 20)[1]
    assert re.fullmatch(FIXED, decode_text(folder, tokens))


class NoKv:
    """KV store that holds nothing."""

    def open(self, sequence: int, max_length: int, fill_tokens: int) -> None: ...
    def retain(self, sequence: int) -> None: ...


def test_retained_sequence_keeps_no_grammar(folder: Path) -> None:
    compiler = ReadyGrammars(read_model_folder(folder))
    table = SequenceTable(cast("Any", NoKv()), 320, compiler)
    assert table.apply([open_constrained(1, SCHEMA)]) == {}
    assert table[1].grammar is not None
    assert table.apply([step_pb2.CacheOperation(retain=step_pb2.Retain(sequence=1))]) == {}
    assert table[1].grammar is None


def test_any_token_may_be_drawn_after_the_end_of_an_answer(folder: Path) -> None:
    """Step past the end of an answer, as steps under way do: they must not fail, and their tokens are not used."""
    pipeline = Pipeline(folder, CUTS[1])
    answer = [*PROMPT, *generate(pipeline, [open_regex(1, FIXED)])[1]]
    assert len(tokens_of(pipeline.results(previous(1, len(answer) - 1))[1])) == 1
    assert len(tokens_of(pipeline.results(previous(1, len(answer)))[1])) == 1
