"""Stages that are linked with new ones after a loss: those behind the lost one continue from the KV that they keep."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.worker.in_process_link import InProcessLink
from tests.worker.stages import (
    CUTS,
    PROMPT,
    Pipeline,
    chunk,
    decode,
    free,
    grammar_id,
    open_sequence,
    previous,
    tokens_of,
    want,
)

from mlx_ring.rpc.protos import step_pb2, worker_pb2
from mlx_ring.worker.replies import StageLinks

KEPT = 1 << 49
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seeded": {"temperature": 1.0, "logprobs": True},
    "penalized": {"temperature": 1.0, "repetition_penalty": 1.4, "frequency_penalty": 0.7},
}


@pytest.fixture(scope="module")
def folder(tiny_model: Path) -> Path:
    return tiny_model


def answer(pipeline: Pipeline, opened: step_pb2.CacheOperation, count: int) -> list[int]:
    """Open sequence 1 and return so many tokens of its answer."""
    result = pipeline.results(chunk(1, 0, PROMPT, want()), operations=[opened], feed_back=True)[1]
    tokens = tokens_of(result)
    while len(tokens) < count:
        row = previous(1, len(PROMPT) + len(tokens) - 1)
        tokens += tokens_of(pipeline.results(row, feed_back=True)[1])
    return tokens


def patched(before: Pipeline, folder: Path, first_stage: int, *kept: worker_pb2.KeptSequence) -> Pipeline:
    """Return new stages, of which those from `first_stage` on are the stages of before."""
    after = Pipeline(folder, CUTS[3])
    for stage in range(first_stage, 3):
        runner, other = before.runners[stage], after.runners[stage]
        inbox = runner._inputs._inbox  # pyright: ignore[reportPrivateUsage] - a worker's server knows it
        runner.relink(other._answers._links)  # pyright: ignore[reportPrivateUsage] - links of a stage in its place
        link = after.runners[stage - 1]._answers._links  # pyright: ignore[reportPrivateUsage] - as above
        after.runners[stage - 1].relink(StageLinks(link.inbox, InProcessLink(inbox), link.first))
        after.runners[stage] = runner
        runner.reset(kept)
    return after


def fork(length: int, first_stage: int) -> step_pb2.CacheOperation:
    return step_pb2.CacheOperation(
        fork=step_pb2.Fork(source=KEPT, destination=1, length=length, take=True), first_stage=first_stage
    )


@pytest.mark.parametrize("first_stage", [1, 2])
@pytest.mark.parametrize("name", [*SAMPLINGS])
def test_an_answer_continues_from_kept_kv(name: str, first_stage: int, folder: Path) -> None:
    opened = open_sequence(1, **SAMPLINGS[name])
    expected = answer(Pipeline(folder, CUTS[3]), opened, 16)
    before = Pipeline(folder, CUTS[3])
    known = [*PROMPT, *answer(before, opened, 8)]
    length = len(known) - 2
    keep = worker_pb2.KeptSequence(sequence=1, kept_as=KEPT, length=length)
    after = patched(before, folder, first_stage, keep)
    for start, end in ((0, 5), (5, length)):
        operations = [] if start else [opened, fork(length, first_stage)]
        step = after.make(chunk(1, start, known[start:end]), operations=operations)
        step.end_stage = first_stage
        for done in [runner.run(step, 0) for runner in after.runners]:
            assert not done.failure.message
            assert bool(done.timings.compute_us) or done.stage >= first_stage
    redrawn = after.results(chunk(1, length, known[length : length + 1], want()), feed_back=True)[1]
    assert tokens_of(redrawn) == [known[-1]]
    tokens = tokens_of(after.results(decode(1, length + 1, known[-1]), feed_back=True)[1])
    while len(tokens) < 8:
        row = previous(1, len(known) + len(tokens) - 1)
        tokens += tokens_of(after.results(row, feed_back=True)[1])
    assert [*known[len(PROMPT) :], *tokens] == expected
    assert not any(done.failure.message for done in after.run(operations=[free(1)]))
    assert [runner.kv_bytes for runner in after.runners] == [0, 0, 0]


def test_a_grammar_continues_from_kept_kv(folder: Path) -> None:
    opened = open_sequence(1, temperature=1.0)
    opened.open.grammar = grammar_id("regex", "[a-z]{30}")
    expected = answer(Pipeline(folder, CUTS[3]), opened, 12)
    before = Pipeline(folder, CUTS[3])
    known = [*PROMPT, *answer(before, opened, 8)]
    length = len(known) - 2
    after = patched(before, folder, 2, worker_pb2.KeptSequence(sequence=1, kept_as=KEPT, length=length))
    step = after.make(chunk(1, 0, known[:length]), operations=[opened, fork(length, 2)])
    step.end_stage = 2
    assert not any(runner.run(step, 0).failure.message for runner in after.runners)
    redrawn = after.results(chunk(1, length, known[length : length + 1], want()), feed_back=True)[1]
    tokens = [*tokens_of(redrawn), *tokens_of(after.results(decode(1, length + 1, known[-1]))[1])]
    assert tokens == expected[7:9]


def test_a_sequence_that_a_stage_did_not_keep_fails_there_alone(folder: Path) -> None:
    before = Pipeline(folder, CUTS[3])
    answer(before, open_sequence(1), 4)
    after = patched(before, folder, 2)
    step = after.make(chunk(1, 0, PROMPT[:4]), operations=[open_sequence(1), fork(4, 2)])
    step.end_stage = 2
    failures = [runner.run(step, 0).failure for runner in after.runners]
    assert [list(failure.sequences) for failure in failures] == [[], [], [1]]
    assert failures[2].kind == "ProtocolError", "the head computes the sequence again, on all stages"
