"""Rows that cannot step: each fails alone, on one stage and on several, and the others continue."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.worker.random_models import QWEN3, write_random_model
from tests.worker.stages import (
    CUTS,
    PROMPT,
    Pipeline,
    Want,
    chunk,
    decode,
    free,
    open_sequence,
    previous,
    tokens_of,
    want,
)

from mlx_ring.core.errors import StepFailed
from mlx_ring.rpc.protos import step_pb2
from mlx_ring.worker.kv import KVStore


def open_noisy(sequence: int, **sampling: Any) -> step_pb2.CacheOperation:
    """Open a sequence that samples with noise, because a greedy random model repeats one token."""
    values: dict[str, Any] = {"temperature": 0.8, **sampling}
    return open_sequence(sequence, **values)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_model(tmp_path_factory.mktemp("qwen3"), QWEN3)


@pytest.fixture(
    params=[(1, False), (2, False), (3, False), (3, True)],
    ids=["1 stage", "2 stages", "3 stages", "3 stages over collectives"],
)
def pipeline(request: pytest.FixtureRequest, folder: Path) -> Pipeline:
    stages, collective = request.param
    return Pipeline(folder, CUTS[stages], collective=collective)


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[int]:
    """Return the answer to the prompt when nothing fails."""
    pipeline = Pipeline(folder, CUTS[1])
    tokens = tokens_of(pipeline.results(chunk(1, 0, PROMPT, want()), operations=[open_noisy(1)])[1])
    for index in range(3):
        tokens += tokens_of(pipeline.results(previous(1, len(PROMPT) + index))[1])
    return tokens


def failures(answers: Sequence[step_pb2.StepDone]) -> list[tuple[str, list[int]]]:
    return [(answer.failure.kind, list(answer.failure.sequences)) for answer in answers]


def sampled(answers: Sequence[step_pb2.StepDone]) -> dict[int, list[int]]:
    return {result.sequence: tokens_of(result) for result in answers[-1].results}


def test_sequence_with_invalid_sampling_fails_alone(pipeline: Pipeline, expected: list[int]) -> None:
    operations = [open_noisy(1), open_noisy(2, logit_bias={QWEN3["vocab_size"]: 1.0}), open_noisy(3)]
    rows = [chunk(sequence, 0, PROMPT, want()) for sequence in (1, 2, 3)]
    answers = pipeline.run(*rows, operations=operations)
    assert failures(answers) == [("RequestError", [2])] * len(answers)
    assert all("logit_bias names token 320" in answer.failure.message for answer in answers)
    assert sampled(answers) == {1: expected[:1], 3: expected[:1]}


def test_refused_sequence_can_be_freed_and_opened_again(pipeline: Pipeline, expected: list[int]) -> None:
    pipeline.run(operations=[open_noisy(1, temperature=float("nan"))])
    later = pipeline.run(chunk(1, 0, PROMPT, want()))
    assert failures(later) == [("RequestError", [1])] * len(later)
    freed = pipeline.run(operations=[free(1)])
    assert failures(freed) == [("", [])] * len(freed)
    result = pipeline.results(chunk(1, 0, PROMPT, want()), operations=[open_noisy(1)])
    assert tokens_of(result[1]) == expected[:1]


def test_row_that_does_not_start_at_the_end_of_its_kv_fails_alone(
    pipeline: Pipeline, expected: list[int]
) -> None:
    pipeline.results(
        chunk(1, 0, PROMPT, want()), chunk(2, 0, PROMPT), operations=[open_noisy(1), open_noisy(2)]
    )
    answers = pipeline.run(decode(2, 9, 5), decode(1, len(PROMPT), expected[0]))
    assert failures(answers) == [("ProtocolError", [2])] * len(answers)
    assert sampled(answers) == {1: expected[1:2]}


def test_rows_of_unknown_sequences_fail_and_the_rest_of_the_batch_runs(
    pipeline: Pipeline, expected: list[int]
) -> None:
    rows = [chunk(8, 0, [1, 2, 3]), chunk(1, 0, PROMPT, want()), chunk(9, 0, [4])]
    answers = pipeline.run(*rows, operations=[open_noisy(1)])
    assert failures(answers) == [("ProtocolError", [8, 9])] * len(answers)
    assert sampled(answers) == {1: expected[:1]}


def test_no_stage_waits_for_a_step_whose_rows_all_fail(pipeline: Pipeline, expected: list[int]) -> None:
    answers = pipeline.run(chunk(8, 0, [1, 2, 3]), chunk(9, 0, [4], want()))
    assert failures(answers) == [("ProtocolError", [8, 9])] * len(answers)
    result = pipeline.results(chunk(1, 0, PROMPT, want()), operations=[open_noisy(1)])
    assert tokens_of(result[1]) == expected[:1]


def test_row_refused_only_by_the_last_stage_is_reported_by_that_stage_alone(
    folder: Path, expected: list[int]
) -> None:
    pipeline = Pipeline(folder, CUTS[3])
    wrong = chunk(2, 0, [1], want(), want(Want.LOGITS, Want.LISTED, listed=[4]))
    operations = [open_noisy(1), open_noisy(2)]
    answers = pipeline.run(wrong, chunk(1, 0, PROMPT, want()), operations=operations, feed_back=True)
    assert failures(answers) == [("", []), ("", []), ("ProtocolError", [2])]
    assert sampled(answers) == {1: expected[:1]}
    next_answers = pipeline.run(previous(2, 1), previous(1, len(PROMPT)), feed_back=True)
    assert failures(next_answers) == [("ProtocolError", [2])] * 3
    assert all("offset 4 of a row of 1" in answer.failure.message for answer in next_answers)
    assert sampled(next_answers) == {1: expected[1:2]}


def test_failed_cache_operation_names_its_sequence_and_the_others_run(
    pipeline: Pipeline, expected: list[int]
) -> None:
    pipeline.results(chunk(1, 0, PROMPT, want()), operations=[open_noisy(1)])
    fork = step_pb2.CacheOperation(fork=step_pb2.Fork(source=7, destination=2, length=5))
    answers = pipeline.run(
        chunk(2, 5, [8], want()),
        decode(1, len(PROMPT), expected[0]),
        operations=[open_noisy(2), fork, free(6), open_noisy(3)],
    )
    assert failures(answers) == [("ProtocolError", [2, 6])] * len(answers)
    assert sampled(answers) == {1: expected[1:2]}
    result = pipeline.results(chunk(3, 0, PROMPT, want()))
    assert tokens_of(result[3]) == expected[:1]


def test_drafts_after_a_chunk_are_refused(pipeline: Pipeline) -> None:
    row = step_pb2.Row(
        sequence=1, tokens=step_pb2.Tokens(ids=PROMPT), draft=[1], wants=[want(where=Want.ALL)]
    )
    answers = pipeline.run(row, operations=[open_noisy(1)])
    assert all("has drafts after more than one token" in answer.failure.message for answer in answers)


@pytest.mark.parametrize(
    ("wants", "message"),
    [
        ([want(), want(where=Want.ALL)], "requests tokens more than once"),
        ([want(), want(Want.HIDDEN)], "hidden states and logits at once"),
        ([want(Want.LOGPROBS, Want.ALL, targets=[1])], "2 positions want log-probabilities of 1 tokens"),
    ],
)
def test_contradictory_wants_fail_their_row(folder: Path, wants: list[step_pb2.Want], message: str) -> None:
    answers = Pipeline(folder, CUTS[1]).run(chunk(1, 0, [4, 5], *wants), operations=[open_noisy(1)])
    assert message in answers[0].failure.message
    assert list(answers[0].failure.sequences) == [1]


def test_row_with_a_draft_must_want_every_token(folder: Path) -> None:
    pipeline = Pipeline(folder, CUTS[1])
    pipeline.results(chunk(1, 0, PROMPT, want()), operations=[open_noisy(1)])
    row = step_pb2.Row(sequence=1, start=len(PROMPT), token=4, draft=[5], wants=[want()])
    assert "does not request every token" in pipeline.run(row)[0].failure.message


def test_retained_sequence_can_be_forked_but_not_stepped(pipeline: Pipeline, expected: list[int]) -> None:
    pipeline.results(chunk(1, 0, PROMPT, want()), operations=[open_noisy(1)])
    retain = step_pb2.CacheOperation(retain=step_pb2.Retain(sequence=1))
    answers = pipeline.run(previous(1, len(PROMPT)), operations=[retain])
    assert failures(answers) == [("ProtocolError", [1])] * len(answers)
    assert all("Sequence 1 is retained" in answer.failure.message for answer in answers)
    fork = step_pb2.CacheOperation(fork=step_pb2.Fork(source=1, destination=2, length=len(PROMPT)))
    row = decode(2, len(PROMPT), expected[0])
    assert tokens_of(pipeline.results(row, operations=[open_noisy(2), fork])[2]) == expected[1:2]


def test_fork_that_takes_its_source_closes_it_and_continues(pipeline: Pipeline, expected: list[int]) -> None:
    pipeline.results(chunk(1, 0, PROMPT, want()), operations=[open_noisy(1)])
    take = step_pb2.CacheOperation(fork=step_pb2.Fork(source=1, destination=2, length=len(PROMPT), take=True))
    row = decode(2, len(PROMPT), expected[0])
    assert tokens_of(pipeline.results(row, operations=[open_noisy(2), take])[2]) == expected[1:2]
    answers = pipeline.run(decode(1, len(PROMPT), expected[0]))
    assert all("Sequence 1 is not open here" in answer.failure.message for answer in answers)
    assert all(runner.num_sequences == 1 for runner in pipeline.runners)


def test_operation_that_fails_on_the_device_names_its_sequence_and_the_others_run(
    pipeline: Pipeline, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline.results(chunk(1, 0, PROMPT, want()), operations=[open_noisy(1)])

    def no_memory(*_: object) -> None:
        raise RuntimeError("[malloc] Unable to allocate")

    with monkeypatch.context() as patch:
        patch.setattr(KVStore, "retain", no_memory)
        retain = step_pb2.CacheOperation(retain=step_pb2.Retain(sequence=1))
        answers = pipeline.run(chunk(3, 0, PROMPT, want()), operations=[retain, open_noisy(3)])
    assert failures(answers) == [("StepFailed", [1])] * len(answers)
    assert sampled(answers) == {3: expected[:1]}


def test_failed_fork_asks_for_a_new_prefill_and_frees_the_taken_source(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline.results(chunk(1, 0, PROMPT, want()), operations=[open_noisy(1)])

    def fail_fork(*_: object, **__: object) -> None:
        raise StepFailed("a layer holds tokens from 7 on only")

    with monkeypatch.context() as patch:
        patch.setattr(KVStore, "fork", fail_fork)
        fork = step_pb2.CacheOperation(fork=step_pb2.Fork(source=1, destination=2, length=5, take=True))
        answers = pipeline.run(chunk(2, 5, [8], want()), operations=[open_noisy(2), fork])
    assert {kind for kind, _ in failures(answers)} == {"ProtocolError"}
    freed = pipeline.run(operations=[free(2)])
    assert [answer.kv_bytes for answer in freed] == [0] * len(freed)
