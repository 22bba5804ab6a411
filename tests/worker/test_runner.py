"""Pipelines of stage runners in one process, compared with mlx-lm's whole model."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache  # pyright: ignore[reportUnknownVariableType] - untyped
from mlx_lm.utils import load_model  # pyright: ignore[reportUnknownVariableType] - untyped
from tests.eventually import eventually
from tests.worker.collective.in_process import InProcessTransport
from tests.worker.random_models import QWEN3, write_random_model
from tests.worker.stages import (
    CUTS,
    PROMPT,
    Pipeline,
    Steps,
    Want,
    chunk,
    decode,
    free,
    make_collective_stages,
    make_stages,
    open_sequence,
    previous,
    tokens_of,
    trim,
    want,
)

from mlx_ring.rpc.protos import step_pb2, worker_pb2
from mlx_ring.worker.compute_thread import Wait
from mlx_ring.worker.runner import computing_wait, receiving_wait
from mlx_ring.worker.tensor import Group
from mlx_ring.worker.tensors import from_message, to_message


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_model(tmp_path_factory.mktemp("qwen3"), QWEN3)


@pytest.fixture(params=sorted(CUTS), ids=lambda stages: f"{stages} stages")
def pipeline(request: pytest.FixtureRequest, folder: Path) -> Pipeline:
    return Pipeline(folder, CUTS[request.param])


@pytest.fixture(scope="module")
def reference(folder: Path) -> Any:
    return load_model(folder)[0]


def whole_logits(model: Any, tokens: Sequence[int]) -> mx.array:
    return model(mx.array([tokens]), cache=make_prompt_cache(model))[0]


def greedy(model: Any, tokens: Sequence[int], count: int) -> list[int]:
    ids = list(tokens)
    for _ in range(count):
        ids.append(cast("int", mx.argmax(whole_logits(model, ids)[-1]).item()))
    return ids[len(tokens) :]


def generate(pipeline: Pipeline, sequence: int, count: int, **sampling: Any) -> list[int]:
    first = pipeline.results(
        chunk(sequence, 0, PROMPT, want()), operations=[open_sequence(sequence, **sampling)]
    )
    tokens = [first[sequence].tokens[0].token]
    while len(tokens) < count:
        row = decode(sequence, len(PROMPT) + len(tokens) - 1, tokens[-1])
        tokens.append(pipeline.results(row)[sequence].tokens[0].token)
    return tokens


def test_greedy_tokens_equal_the_whole_models(pipeline: Pipeline, reference: Any) -> None:
    assert generate(pipeline, 1, 12) == greedy(reference, PROMPT, 12)


def test_chunked_prefill_gives_the_whole_models_logits(pipeline: Pipeline, reference: Any) -> None:
    pipeline.results(chunk(1, 0, PROMPT[:3]), operations=[open_sequence(1)])
    got = pipeline.results(chunk(1, 3, PROMPT[3:], want(Want.LOGITS, Want.ALL)))[1]
    assert mx.allclose(from_message(got.logits), whole_logits(reference, PROMPT)[3:], rtol=0, atol=2e-5)


def test_sequences_in_one_step_do_not_affect_each_other(pipeline: Pipeline, reference: Any) -> None:
    prompts = {1: PROMPT, 2: PROMPT[:3], 3: [*PROMPT, 5, 6]}
    rows = [chunk(sequence, 0, ids, want()) for sequence, ids in prompts.items()]
    first = pipeline.results(*rows, operations=[open_sequence(sequence) for sequence in prompts])
    tokens = {sequence: [first[sequence].tokens[0].token] for sequence in prompts}
    for _ in range(5):
        rows = [
            decode(sequence, len(prompts[sequence]) + len(ids) - 1, ids[-1])
            for sequence, ids in tokens.items()
        ]
        for sequence, result in pipeline.results(*rows).items():
            tokens[sequence].append(result.tokens[0].token)
    assert tokens == {sequence: greedy(reference, ids, 6) for sequence, ids in prompts.items()}


def test_rows_with_previous_continue_without_tokens_from_the_head(pipeline: Pipeline, reference: Any) -> None:
    first = pipeline.results(chunk(1, 0, PROMPT, want()), operations=[open_sequence(1)], feed_back=True)
    tokens = [first[1].tokens[0].token]
    for index in range(5):
        row = previous(1, len(PROMPT) + index)
        tokens.append(pipeline.results(row, feed_back=True)[1].tokens[0].token)
    assert tokens == greedy(reference, PROMPT, 6)


def test_seeded_tokens_do_not_depend_on_the_number_of_stages(folder: Path) -> None:
    sampling = {"temperature": 0.9, "top_p": 0.95, "frequency_penalty": 0.5}
    runs = [generate(Pipeline(folder, cuts), 1, 16, **sampling) for cuts in CUTS.values()]
    assert runs[0] == runs[1] == runs[2]


def test_draft_tokens_are_accepted_up_to_the_first_wrong_one(pipeline: Pipeline, reference: Any) -> None:
    expected = greedy(reference, PROMPT, 6)
    pipeline.results(chunk(1, 0, PROMPT, want()), operations=[open_sequence(1)])
    wrong = (expected[3] + 1) % QWEN3["vocab_size"]
    row = decode(1, len(PROMPT), expected[0], draft=[expected[1], expected[2], wrong])
    sampled = tokens_of(pipeline.results(row)[1])
    assert sampled == expected[1:4]
    row = decode(1, len(PROMPT) + 3, sampled[-1])
    after = pipeline.results(row, operations=[trim(1, len(PROMPT) + 3)])
    assert after[1].tokens[0].token == expected[4]


@pytest.mark.slow
@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0.9, "top_p": 0.9},
        {"temperature": 0.8, "repetition_penalty": 1.4, "presence_penalty": 0.6},
        {"frequency_penalty": 1.5},
        {"temperature": 1.1, "min_tokens": 7, "eos": list(range(2, 160))},
    ],
)
@pytest.mark.parametrize("by_token", [True, False], ids=["token", "previous"])
def test_tokens_with_verified_drafts_equal_those_without(
    pipeline: Pipeline, sampling: dict[str, Any], *, by_token: bool
) -> None:
    expected = generate(pipeline, 1, 14, **sampling)
    first = pipeline.results(
        chunk(2, 0, PROMPT, want()), operations=[open_sequence(2, **sampling)], feed_back=True
    )
    tokens = tokens_of(first[2])
    operations: list[step_pb2.CacheOperation] = []
    for right, wrong in ((2, 1), (0, 2), (3, 0), (1, 3)):
        known = len(tokens)
        draft = expected[known : known + right] + [(token + 1) % 320 for token in expected[known + right :]]
        draft = draft[: right + wrong]
        start = len(PROMPT) + known - 1
        row = decode(2, start, tokens[-1], draft) if by_token else previous(2, start, draft)
        tokens += tokens_of(pipeline.results(row, operations=operations, feed_back=True)[2])
        assert len(tokens) == known + right + 1
        operations = [trim(2, len(PROMPT) + len(tokens) - 1)] if wrong else []
    assert tokens == expected[: len(tokens)]


def test_fork_continues_from_the_shared_prefix(pipeline: Pipeline, reference: Any) -> None:
    pipeline.results(chunk(1, 0, PROMPT), operations=[open_sequence(1)])
    fork = step_pb2.CacheOperation(fork=step_pb2.Fork(source=1, destination=2, length=5))
    result = pipeline.results(chunk(2, 5, [8, 9], want()), operations=[open_sequence(2), fork])
    assert result[2].tokens[0].token == greedy(reference, [*PROMPT[:5], 8, 9], 1)[0]


def test_prompt_log_probabilities_are_the_models_own(pipeline: Pipeline, reference: Any) -> None:
    wants = want(Want.LOGPROBS, Want.ALL, targets=[*PROMPT[1:], 4], top_logprobs=2)
    got = pipeline.results(chunk(1, 0, PROMPT, wants), operations=[open_sequence(1)])[1].logprobs
    logits = whole_logits(reference, PROMPT)
    expected = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    for position, entry in enumerate(got):
        assert entry.logprob == pytest.approx(expected[position, entry.token].item(), abs=1e-4)
        assert entry.top_tokens[0] == mx.argmax(expected[position]).item()


def test_hidden_states_are_those_after_the_final_norm(pipeline: Pipeline, reference: Any) -> None:
    got = pipeline.results(
        chunk(1, 0, PROMPT, want(Want.HIDDEN, Want.LISTED, listed=[0, 7])), operations=[open_sequence(1)]
    )
    expected = reference.model(mx.array([PROMPT]))[0][mx.array([0, 7])]
    assert mx.allclose(from_message(got[1].hidden), expected, rtol=0, atol=2e-5)


def test_sums_of_hidden_states_are_float32_and_add_up_across_chunks(
    pipeline: Pipeline, reference: Any
) -> None:
    every = want(Want.HIDDEN_SUM, Want.ALL)
    parts = [
        from_message(pipeline.results(chunk(1, start, tokens, every), operations=opened)[1].hidden)
        for start, tokens, opened in ((0, PROMPT[:3], [open_sequence(1)]), (3, PROMPT[3:], []))
    ]
    expected = mx.sum(reference.model(mx.array([PROMPT]))[0], axis=0)
    assert [part.dtype for part in parts] == [mx.float32] * 2
    assert mx.allclose(parts[0] + parts[1], expected, rtol=0, atol=1e-4)


def test_embeddings_can_replace_tokens(pipeline: Pipeline, reference: Any) -> None:
    embeddings = reference.model.embed_tokens(mx.array(PROMPT))
    row = step_pb2.Row(sequence=1, embeddings=to_message(embeddings), wants=[want()])
    token = pipeline.results(row, operations=[open_sequence(1)])[1].tokens[0].token
    assert token == greedy(reference, PROMPT, 1)[0]


def test_step_that_fails_on_one_stage_fails_on_all_and_the_next_one_works(
    pipeline: Pipeline, reference: Any
) -> None:
    pipeline.results(chunk(1, 0, PROMPT[:4]), operations=[open_sequence(1)])
    answers = pipeline.run(chunk(1, 6, PROMPT[4:]))
    assert all("has 4 tokens of KV here; the step expects 6" in answer.failure.message for answer in answers)
    result = pipeline.results(chunk(1, 4, PROMPT[4:], want()))
    assert result[1].tokens[0].token == greedy(reference, PROMPT, 1)[0]


def test_upstream_failure_reaches_the_last_stage_as_a_tombstone(folder: Path) -> None:
    pipeline = Pipeline(folder, CUTS[3])
    pipeline.results(chunk(1, 0, PROMPT, want()), operations=[open_sequence(1)])
    answers = pipeline.run(previous(1, len(PROMPT)))
    messages = {answer.failure.message for answer in answers}
    assert messages == {"No sampled token was fed back for sequence 1."}


def test_step_of_another_epoch_is_refused(pipeline: Pipeline) -> None:
    answers = pipeline.run(chunk(1, 0, PROMPT), epoch=2)
    assert {answer.failure.kind for answer in answers} == {"StaleMessage"}


def test_freed_sequence_leaves_no_kv_bytes(pipeline: Pipeline) -> None:
    answers = pipeline.run(chunk(1, 0, PROMPT, want()), operations=[open_sequence(1)])
    assert all(answer.kv_bytes > 0 for answer in answers)
    freed = pipeline.run(operations=[free(1)])
    assert [answer.kv_bytes for answer in freed] == [0] * len(freed)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (step_pb2.Row(sequence=1), "has no input"),
        (chunk(9, 0, [1]), "equence 9"),
        (chunk(1, 0, []), "has no tokens"),
        (chunk(1, 0, [1], want(Want.LOGITS, Want.LISTED, listed=[4])), "offset 4 of a row of 1"),
    ],
)
def test_malformed_row_fails_its_step_with_a_specific_message(
    folder: Path, row: step_pb2.Row, message: str
) -> None:
    answers = Pipeline(folder, CUTS[2]).run(row, operations=[open_sequence(1)])
    assert message in answers[-1].failure.message


class CountingGroup(Group):
    """Group of this rank alone, which counts the ended steps."""

    def __init__(self) -> None:
        super().__init__(mx.distributed.init())
        self.ended = 0

    def end_step(self) -> None:
        super().end_step()
        self.ended += 1


def test_group_is_notified_at_the_end_of_every_step(
    folder: Path,
) -> None:
    group = CountingGroup()
    (runner,) = make_stages(folder, CUTS[1], group=group)
    steps = Steps()
    for rows in ([chunk(1, 0, PROMPT[:4])], [chunk(1, 4, PROMPT[4:])], [decode(1, len(PROMPT), 5)]):
        done = runner.run(steps.make(*rows, operations=[] if group.ended else [open_sequence(1)]), 0)
        assert not done.failure.message
    assert group.ended == 3


def test_rank_of_a_group_keeps_within_its_limit_until_it_is_reset(folder: Path) -> None:
    (runner,) = make_stages(folder, CUTS[1], group=CountingGroup())
    steps, prompt = Steps(), PROMPT * 31
    opened = step_pb2.CacheOperation(open=step_pb2.Open(sequence=1, max_length=2000))
    runner.run(steps.make(chunk(1, 0, prompt), operations=[opened]), 0)
    with_room = runner.kv_bytes
    runner.limit_kv(with_room - 1)
    runner.run(steps.make(decode(1, len(prompt), 5)), 0)
    assert runner.kv_bytes == with_room // 2, "a block of 256 tokens holds all, and no other is held ahead"
    runner.reset()
    runner.run(Steps().make(chunk(1, 0, prompt), operations=[opened]), 0)
    assert runner.kv_bytes == with_room


@pytest.mark.parametrize(("count", "is_computed"), [(1, True), (2, False)])
def test_ranks_compute_all_sums_of_single_tokens_whose_values_nobody_wants(
    folder: Path, *, count: int, is_computed: bool
) -> None:
    # Prepared layers compute the sums behind the last KV with it; a rank that has none would leave them out.
    (runner,) = make_stages(folder, CUTS[1], group=CountingGroup())
    steps = Steps()
    runner.run(steps.make(chunk(1, 0, PROMPT[:4]), operations=[open_sequence(1)]), 0)
    assert not list(runner.take(steps.make(chunk(1, 4, PROMPT[4 : 4 + count])), 0))
    work = runner._pending  # pyright: ignore[reportPrivateUsage]
    assert work is not None
    assert any(array is work.passes[0].values for array in work.outputs) is is_computed


class HungTransport(InProcessTransport):
    """Collective that hangs until it is released."""

    def __init__(self) -> None:
        super().__init__()
        self.released = threading.Event()

    def receive(self, nbytes: int) -> memoryview:
        assert self.released.wait(60)
        return super().receive(nbytes)


def test_other_threads_see_what_a_stage_waits_in(folder: Path) -> None:
    transport = HungTransport()
    first, last = make_collective_stages(folder, CUTS[2], lambda: transport)
    step = Steps().make(chunk(1, 0, PROMPT, want()), operations=[open_sequence(1)])

    def look_and_release() -> worker_pb2.Wait | None:
        try:
            return eventually(last.waits.status, lambda wait: wait is not None and wait.kind != "device")
        finally:
            transport.released.set()

    with ThreadPoolExecutor(1) as pool:
        seen = pool.submit(look_and_release)
        first.run(step, 0)
        assert not last.run(step, 0).HasField("failure")
        wait = seen.result()
    assert wait is not None
    assert (wait.kind, wait.backend, wait.peer) == ("collective", "ring", "stage 0")
    assert first.waits.status() is last.waits.status() is None


@pytest.mark.parametrize(
    ("assignment", "computing", "receiving"),
    [
        ({"stages": 2}, Wait("device"), Wait("link", peer="stage 1")),
        ({"stages": 2, "stage": 1}, Wait("device"), Wait("link", peer="stage 0")),
        ({"stages": 2, "stage": 1, "link": "jaccl"}, Wait("device"), Wait("collective", "jaccl", "stage 0")),
        (
            {"stages": 2, "stage": 1, "tp_size": 2, "backend": "ring"},
            Wait("collective", "ring", "the other ranks of stage 1"),
            Wait("link", peer="stage 0"),
        ),
    ],
)
def test_waits_are_those_of_the_assignment(
    assignment: dict[str, Any], computing: Wait, receiving: Wait
) -> None:
    message = worker_pb2.StageAssignment(**assignment)
    assert (computing_wait(message), receiving_wait(message)) == (computing, receiving)
