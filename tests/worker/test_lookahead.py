"""Steps built ahead, before the previous step is done: they give the same tokens in every case."""

# Only private attributes show when a step is built.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import pytest
from tests.worker.random_models import QWEN3, write_random_model
from tests.worker.stages import (
    CUTS,
    PROMPT,
    Pipeline,
    Steps,
    answer_all,
    chunk,
    free,
    make_stages,
    open_sequence,
    previous,
    tokens_of,
    trim,
    want,
)

from mlx_ring.rpc.protos import step_pb2
from mlx_ring.worker.runner import StageRunner
from mlx_ring.worker.step import StepWork

SAMPLINGS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.8},
    {"temperature": 0.9, "top_k": 5, "top_p": 0.9},
    {"temperature": 1.2, "top_p": 0.95},
    {"temperature": 0.7, "repetition_penalty": 1.3, "frequency_penalty": 0.4},
    {"temperature": 0.9, "min_p": 0.05, "min_tokens": 6, "eos": [5, 7, 9, 11]},
    {"logprobs": True, "top_logprobs": 2},
    # Greedy, this model repeats itself, which reveals every token that the penalty misses.
    {"frequency_penalty": 1.5},
)
LENGTH = 14
GEMMA3: dict[str, Any] = {
    **QWEN3,
    "model_type": "gemma3_text",
    "sliding_window": 16,
    "sliding_window_pattern": 2,
    "query_pre_attn_scalar": 16,
    "rope_local_base_freq": 10000.0,
    "tie_word_embeddings": True,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_model(tmp_path_factory.mktemp("qwen3"), QWEN3)


@dataclass
class Answer:
    """Sequence, its tokens when it steps alone, and a script's progress with it."""

    sequence: int
    prompt: list[int]
    sampling: dict[str, Any]
    tokens: list[int]
    fed: int = 0
    drawn: int = 0

    def opened(self) -> step_pb2.CacheOperation:
        return open_sequence(self.sequence, len(self.prompt), **self.sampling)


@dataclass
class Script:
    """Steps, and the tokens that each must give, by sequence."""

    steps: list[step_pb2.Step] = field(default_factory=list[step_pb2.Step])
    expected: list[dict[int, list[int]]] = field(default_factory=list[dict[int, list[int]]])
    operations: list[step_pb2.CacheOperation] = field(default_factory=list[step_pb2.CacheOperation])
    """Operations for the next step."""

    def add(self, rows: Sequence[step_pb2.Row], expected: dict[int, list[int]]) -> None:
        operations, self.operations = self.operations, []
        self.steps.append(
            step_pb2.Step(
                instance="test",
                epoch=1,
                step=len(self.steps) + 1,
                rows=rows,
                operations=operations,
                deadline_s=5.0,
                feed_back_tokens=True,
            )
        )
        self.expected.append(expected)


def tokens_alone(folder: Path, prompt: list[int], sampling: dict[str, Any]) -> list[int]:
    """Return the tokens of a sequence that steps alone, waiting for each step."""
    pipeline = Pipeline(folder, CUTS[1])
    first = pipeline.results(
        chunk(1, 0, prompt, want()), operations=[open_sequence(1, len(prompt), **sampling)]
    )
    tokens = tokens_of(first[1])
    while len(tokens) < LENGTH:
        row = previous(1, len(prompt) + len(tokens) - 1)
        tokens += tokens_of(pipeline.results(row)[1])
    return tokens


@pytest.fixture(scope="module")
def answers(folder: Path) -> list[Answer]:
    prompts = [PROMPT[: 3 + index] if index % 2 else [*PROMPT, 30 + index] for index in range(len(SAMPLINGS))]
    return [
        Answer(index + 1, prompt, sampling, tokens_alone(folder, prompt, sampling))
        for index, (prompt, sampling) in enumerate(zip(prompts, SAMPLINGS, strict=True))
    ]


def write_script(answers: Sequence[Answer], seed: int) -> Script:
    """Write a script of sequences that join, prefill in chunks, decode in changing batches, verify drafts and leave."""
    chance = random.Random(seed)
    waiting = [Answer(each.sequence, each.prompt, each.sampling, each.tokens) for each in answers]
    chance.shuffle(waiting)
    running: list[Answer] = []
    script = Script()
    while waiting or running:
        if waiting and (not running or chance.random() < 0.3):
            _prefill(script, joining := waiting.pop(), chance)
            running.append(joining)
        stepping = chance.sample(running, chance.randint(1, len(running)))
        for _ in range(chance.randint(1, 4)):
            stepping = [each for each in stepping if each.drawn < LENGTH]
            if stepping:
                _decode(script, stepping, chance)
        for each in [each for each in running if each.drawn >= LENGTH]:
            running.remove(each)
            script.operations.append(free(each.sequence))
    script.add([], {})
    return script


def _prefill(script: Script, answer: Answer, chance: random.Random) -> None:
    cut = chance.randrange(len(answer.prompt))
    script.operations.append(answer.opened())
    if cut:
        script.add([chunk(answer.sequence, 0, answer.prompt[:cut])], {})
    row = chunk(answer.sequence, cut, answer.prompt[cut:], want())
    script.add([row], {answer.sequence: answer.tokens[:1]})
    answer.fed, answer.drawn = len(answer.prompt), 1


def _decode(script: Script, answers: Sequence[Answer], chance: random.Random) -> None:
    rows: list[step_pb2.Row] = []
    cuts: list[step_pb2.CacheOperation] = []
    expected: dict[int, list[int]] = {}
    for answer in answers:
        draft = _draft(answer, chance) if chance.random() < 0.2 else []
        right = next(
            (at for at, token in enumerate(draft) if token != answer.tokens[answer.drawn + at]), None
        )
        accepted = len(draft) if right is None else right
        rows.append(previous(answer.sequence, answer.fed, draft))
        expected[answer.sequence] = answer.tokens[answer.drawn : answer.drawn + accepted + 1]
        answer.fed += accepted + 1
        answer.drawn += accepted + 1
        if accepted < len(draft):
            cuts.append(trim(answer.sequence, answer.fed))
    script.add(rows, expected)
    script.operations += cuts


def _draft(answer: Answer, chance: random.Random) -> list[int]:
    draft = answer.tokens[answer.drawn : answer.drawn + chance.randint(1, 4)]
    draft = draft[: LENGTH - answer.drawn - 1]
    return [token if chance.random() < 0.8 else (token + 1) % QWEN3["vocab_size"] for token in draft]


def tokens_by_sequence(done: step_pb2.StepDone) -> dict[int, list[int]]:
    return {result.sequence: tokens_of(result) for result in done.results}


def record_steps_built_ahead(runner: StageRunner, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list to which the runner's steps that are built ahead add their numbers."""
    ahead: list[int] = []
    can_build_ahead = runner._can_build_ahead

    def record(before: Any, step: step_pb2.Step) -> bool:
        if can_build_ahead(before, step):
            ahead.append(step.step)
            return True
        return False

    monkeypatch.setattr(runner, "_can_build_ahead", record)
    return ahead


def assert_expected(dones: Sequence[step_pb2.StepDone], script: Script) -> None:
    assert [done.step for done in dones] == [step.step for step in script.steps]
    assert [done.failure.message for done in dones] == [""] * len(dones)
    assert [tokens_by_sequence(done) for done in dones] == script.expected


SEEDS = [
    0,
    *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2)),
    *(pytest.param(seed, marks=pytest.mark.thorough) for seed in (3, 4, 5)),
]
"""Seeds of schedules; the quick tests try the first."""


@pytest.mark.slow
@pytest.mark.parametrize("submits_ahead", [False, True])
@pytest.mark.parametrize("seed", SEEDS)
def test_sequences_in_any_schedule_give_the_tokens_they_give_alone(
    folder: Path, answers: list[Answer], monkeypatch: pytest.MonkeyPatch, seed: int, *, submits_ahead: bool
) -> None:
    script = write_script(answers, seed)
    (runner,) = make_stages(folder, CUTS[1], submits_ahead=submits_ahead)
    ahead = record_steps_built_ahead(runner, monkeypatch)
    assert_expected(answer_all(runner, *script.steps), script)
    assert len(ahead) > len(script.steps) // 8


def windows(steps: Sequence[step_pb2.Step]) -> Iterator[list[step_pb2.Step]]:
    """Yield groups of steps that a stage can take in before the last stage has answered any of them."""
    window: list[step_pb2.Step] = []
    for step in steps:
        open_rows = {row.sequence for other in window for row in other.rows}
        if len(window) == 3 or any(row.sequence in open_rows for row in step.rows if row.previous):
            yield window
            window = []
        window.append(step)
    yield window


@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize("seed", SEEDS[:3])
def test_stages_that_build_ahead_give_the_same_tokens(
    folder: Path, answers: list[Answer], monkeypatch: pytest.MonkeyPatch, seed: int, stages: int
) -> None:
    script = write_script(answers, seed)
    runners = make_stages(folder, CUTS[stages], submits_ahead=False)
    ahead = [record_steps_built_ahead(runner, monkeypatch) for runner in runners]
    dones: list[list[step_pb2.StepDone]] = [[] for _ in runners]
    for window in windows(script.steps):
        for runner, answered in zip(runners, dones, strict=True):
            answered.extend(answer_all(runner, *window))
    assert [done.failure.message for answered in dones for done in answered if done.HasField("failure")] == []
    assert_expected(dones[-1], script)
    assert all(ahead)


def two_steps() -> tuple[step_pb2.Step, step_pb2.Step]:
    steps = Steps()
    first = steps.make(chunk(1, 0, PROMPT, want()), operations=[open_sequence(1)])
    return first, steps.make(previous(1, len(PROMPT)))


def record_events(runner: StageRunner, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record what happens, in order, when the second of two steps continues the first."""
    events: list[str] = []
    forward = runner._model.forward
    evaluate = cast("Callable[..., None]", mx.async_eval)

    def record_forward(*arguments: Any, **named: Any) -> mx.array:
        events.append("built")
        return forward(*arguments, **named)

    def record_evaluate(*arguments: Any) -> None:
        events.append("computed")
        evaluate(*arguments)

    monkeypatch.setattr(runner._model, "forward", record_forward)
    monkeypatch.setattr(mx, "async_eval", record_evaluate)
    for step in two_steps():
        for done in runner.take(step, 0):
            events.append(f"answered {done.step}")  # noqa: PERF401 - in its place among the other events
    return [*events, *(f"answered {done.step}" for done in runner.finish())]


def test_answer_is_sent_after_the_next_step_is_built_and_before_it_is_computed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (runner,) = make_stages(folder, CUTS[1], submits_ahead=False)
    assert record_events(runner, monkeypatch) == [
        "built",
        "computed",
        "built",
        "answered 1",
        "computed",
        "answered 2",
    ]


def test_device_that_takes_steps_ahead_gets_the_next_one_before_the_answer(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (runner,) = make_stages(folder, CUTS[1], submits_ahead=True)
    assert record_events(runner, monkeypatch) == [
        "built",
        "computed",
        "built",
        "computed",
        "answered 1",
        "answered 2",
    ]


def test_redrawn_token_rolls_back_the_step_built_on_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # So flat that 256 of the 320 tokens do not cover the nucleus: the first draw is often wrong.
    sampling: dict[str, Any] = {"temperature": 50.0, "top_p": 0.98}
    expected = tokens_alone(folder, PROMPT, sampling)
    (runner,) = make_stages(folder, CUTS[1])
    rolled_back: list[int] = []
    roll_back = runner._roll_back

    def record(work: StepWork) -> None:
        rolled_back.append(work.step.step)
        roll_back(work)

    monkeypatch.setattr(runner, "_roll_back", record)
    steps = Steps()
    first = steps.make(chunk(1, 0, PROMPT, want()), operations=[open_sequence(1, **sampling)])
    more = [steps.make(previous(1, len(PROMPT) + index)) for index in range(LENGTH - 1)]
    dones = answer_all(runner, first, *more)
    assert [token for done in dones for token in tokens_of(done.results[0])] == expected
    assert rolled_back


@pytest.mark.parametrize("submits_ahead", [False, True])
def test_device_failure_fails_only_rows_built_on_the_failed_step(
    folder: Path, monkeypatch: pytest.MonkeyPatch, *, submits_ahead: bool
) -> None:
    (runner,) = make_stages(folder, CUTS[1], submits_ahead=submits_ahead)
    steps = Steps()
    opened = [open_sequence(1), open_sequence(2)]
    runner.run(steps.make(chunk(1, 0, PROMPT, want()), operations=opened), 0)
    other = tokens_of(runner.run(steps.make(chunk(2, 0, PROMPT[:5], want())), 0).results[0])
    evaluate = cast("Callable[..., None]", mx.async_eval)
    failing = iter([True])

    def break_once(*arguments: Any) -> None:
        evaluate(*arguments)
        if next(failing, False):
            raise RuntimeError("out of memory")

    monkeypatch.setattr(mx, "async_eval", break_once)
    first, second = answer_all(
        runner,
        steps.make(previous(1, len(PROMPT))),
        steps.make(previous(1, len(PROMPT) + 1), previous(2, 5)),
    )
    assert (first.failure.message, list(first.failure.sequences)) == ("RuntimeError: out of memory", [])
    assert not first.results
    assert (second.failure.kind, list(second.failure.sequences)) == ("ProtocolError", [1])
    assert [result.sequence for result in second.results] == [2]
    _, last = answer_all(
        runner,
        steps.make(chunk(1, 0, PROMPT, want()), operations=[free(1), open_sequence(1)]),
        steps.make(previous(1, len(PROMPT)), previous(2, 6)),
    )
    reference = tokens_alone(folder, PROMPT, {})
    beside = [*other, *tokens_of(second.results[0]), *tokens_by_sequence(last)[2]]
    assert tokens_by_sequence(last)[1] == reference[1:2]
    assert beside == tokens_alone(folder, PROMPT[:5], {})[:3]


def begin_unreadable(runner: StageRunner, step: step_pb2.Step, monkeypatch: pytest.MonkeyPatch) -> None:
    """Start a step whose tokens cannot be read."""
    assert not list(runner.take(step, 0))
    work = runner._pending
    assert work is not None
    assert work.draws is not None

    def unreadable() -> None:
        raise RuntimeError("the device is lost")

    monkeypatch.setattr(work.draws, "read", unreadable)


def test_fork_waits_until_its_source_is_known_to_be_valid(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (runner,) = make_stages(folder, CUTS[1])
    steps = Steps()
    begin_unreadable(
        runner, steps.make(chunk(1, 0, PROMPT, want()), operations=[open_sequence(1)]), monkeypatch
    )
    fork = step_pb2.CacheOperation(fork=step_pb2.Fork(source=1, destination=2, length=len(PROMPT)))
    step = steps.make(chunk(2, len(PROMPT), [5], want()), operations=[open_sequence(2), fork])
    _, forked = answer_all(runner, step)
    assert "Sequence 1 has 0 tokens" in forked.failure.message
    assert list(forked.failure.sequences) == [2]


@pytest.mark.parametrize("submits_ahead", [False, True])
def test_unreadable_step_does_not_affect_other_rows_of_the_next_step(
    folder: Path, monkeypatch: pytest.MonkeyPatch, *, submits_ahead: bool
) -> None:
    (runner,) = make_stages(folder, CUTS[1], submits_ahead=submits_ahead)
    steps = Steps()
    sampling: dict[str, Any] = {"temperature": 0.8}
    opened = [open_sequence(sequence, **sampling) for sequence in (1, 2)]
    runner.run(steps.make(chunk(2, 0, PROMPT, want()), operations=opened), 0)
    begin_unreadable(runner, steps.make(chunk(1, 0, PROMPT, want())), monkeypatch)
    both = steps.make(previous(1, len(PROMPT)), previous(2, len(PROMPT)))
    broken, follower = answer_all(runner, both)
    expected = tokens_alone(folder, PROMPT, sampling)
    assert broken.failure.message == "RuntimeError: the device is lost"
    assert "has 0 tokens of KV here; the step expects 8" in follower.failure.message
    assert list(follower.failure.sequences) == [1]
    assert tokens_by_sequence(follower) == {2: expected[1:2]}
    assert tokens_by_sequence(runner.run(steps.make(chunk(1, 0, PROMPT, want())), 0)) == {1: expected[:1]}


def test_chunks_longer_than_a_sliding_window_give_the_same_tokens_built_ahead(tmp_path: Path) -> None:
    sliding = write_random_model(tmp_path, GEMMA3)
    ids = [3 + 7 * index % 300 for index in range(700)]
    rows = [chunk(1, begin, ids[begin : begin + 300]) for begin in (0, 300)]
    rows += [chunk(1, 600, ids[600:], want()), previous(1, 700), previous(1, 701)]
    opened = step_pb2.CacheOperation(open=step_pb2.Open(sequence=1, prompt_length=700, max_length=800))
    (ahead,) = make_stages(sliding, [0, GEMMA3["num_hidden_layers"]])
    (waiting,) = make_stages(sliding, [0, GEMMA3["num_hidden_layers"]])
    steps = Steps()
    script = [steps.make(row, operations=[] if row.start else [opened]) for row in rows]
    expected = [tokens_by_sequence(waiting.run(step, 0)) for step in script]
    assert [tokens_by_sequence(done) for done in answer_all(ahead, *script)] == expected


def test_building_ahead_copies_no_kv(folder: Path) -> None:
    (runner,) = make_stages(folder, CUTS[1], submits_ahead=False)
    steps = Steps()
    opened = step_pb2.CacheOperation(open=step_pb2.Open(sequence=1, prompt_length=3000, max_length=4000))
    ids = [token % QWEN3["vocab_size"] for token in range(3000)]
    runner.run(steps.make(chunk(1, 0, ids, want()), operations=[opened]), 0)
    for index in range(2):
        list(runner.take(steps.make(previous(1, 3000 + index)), 0))
    plane = runner.kv_bytes // (2 * QWEN3["num_hidden_layers"])
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    for index in range(2, 8):
        list(runner.take(steps.make(previous(1, 3000 + index)), 0))
    list(runner.finish())
    assert mx.get_peak_memory() - before < plane // 2
