"""Passes evaluated while they are built: same tokens, and a pass that fails affects no other row. Heads that run later."""

# Only private attributes show how passes are built.
# pyright: reportPrivateUsage=false

from __future__ import annotations

from pathlib import Path
from typing import Any

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
    want,
)
from tests.worker.test_lookahead import (
    GEMMA3,
    SAMPLINGS,
    record_steps_built_ahead,
    tokens_alone,
    tokens_by_sequence,
)

from mlx_ring.rpc.protos import step_pb2
from mlx_ring.worker import forward
from mlx_ring.worker.platform import attention
from mlx_ring.worker.shard import StageModel

Want = step_pb2.Want

PATCHED = "_exponentials"


@pytest.fixture(scope="module", params=["qwen3", "gemma3"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = {"qwen3": QWEN3, "gemma3": GEMMA3}[request.param]
    return write_random_model(tmp_path_factory.mktemp(request.param), config)


@pytest.fixture
def evaluated_scores(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Evaluate every row of more than one token while its pass is built; return the numbers of scores."""
    computed: list[int] = []
    exponentials = attention._exponentials

    def count(scores: attention._Numbers, *others: Any) -> attention._Numbers:
        computed.append(scores.size)
        return exponentials(scores, *others)

    monkeypatch.setattr(attention, PATCHED, count)
    monkeypatch.setattr(attention, "WORTH_IT", 1)
    monkeypatch.setattr(attention, "is_slow_here", lambda: True)
    return computed


@pytest.mark.slow
@pytest.mark.parametrize("stages", sorted(CUTS))
@pytest.mark.parametrize("sampling", SAMPLINGS[:3], ids=str)
def test_passes_evaluated_while_built_give_the_tokens_of_lazy_passes(
    folder: Path, evaluated_scores: list[int], sampling: dict[str, Any], stages: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "is_slow_here", lambda: False)
        expected = tokens_alone(folder, PROMPT, sampling)
    assert not evaluated_scores
    pipeline = Pipeline(folder, CUTS[stages])
    pipeline.results(chunk(1, 0, PROMPT[:4]), operations=[open_sequence(1, **sampling)])
    first = pipeline.results(chunk(1, 4, PROMPT[4:], want()), feed_back=True)
    tokens = tokens_of(first[1])
    while len(tokens) < len(expected):
        row = previous(1, len(PROMPT) + len(tokens) - 1)
        tokens += tokens_of(pipeline.results(row, feed_back=True)[1])
    assert tokens == expected
    assert evaluated_scores


def test_chunk_evaluated_while_built_is_not_built_ahead(
    folder: Path, evaluated_scores: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    (runner,) = make_stages(folder, CUTS[1], submits_ahead=False)
    ahead = record_steps_built_ahead(runner, monkeypatch)
    steps = Steps()
    opened = [open_sequence(1), open_sequence(2)]
    dones = answer_all(
        runner,
        steps.make(chunk(1, 0, PROMPT, want()), operations=opened),
        steps.make(previous(1, len(PROMPT))),
        steps.make(chunk(2, 0, PROMPT, want())),
        steps.make(previous(1, len(PROMPT) + 1)),
    )
    assert ahead == [2, 4]
    assert evaluated_scores
    tokens = [
        *tokens_by_sequence(dones[0])[1],
        *tokens_by_sequence(dones[1])[1],
        *tokens_by_sequence(dones[3])[1],
    ]
    assert tokens == tokens_alone(folder, PROMPT, {})[:3]


def test_pass_that_fails_while_built_affects_no_other_row(
    folder: Path, evaluated_scores: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    (runner,) = make_stages(folder, CUTS[1], submits_ahead=False)
    steps = Steps()
    opened = [open_sequence(1), open_sequence(2)]
    first, second = answer_all(
        runner,
        steps.make(chunk(1, 0, PROMPT, want()), operations=opened),
        steps.make(chunk(1, len(PROMPT), [3, 4], want()), chunk(2, 0, PROMPT[:3], want())),
    )
    tokens_before = [*tokens_by_sequence(first)[1], *tokens_by_sequence(second)[1]]
    compute, calls_left = attention._exponentials, [1]

    def fail_second_call(*given: Any) -> attention._Numbers:
        if not calls_left:
            monkeypatch.setattr(attention, PATCHED, compute)
            raise MemoryError("no room")
        calls_left.pop()
        return compute(*given)

    monkeypatch.setattr(attention, PATCHED, fail_second_call)
    failed = runner.run(steps.make(chunk(1, len(PROMPT) + 2, [7, 8, 9], want())), 0)
    assert failed.failure.message == "MemoryError: no room"
    again = runner.run(steps.make(chunk(1, len(PROMPT) + 2, [7, 8, 9], want()), previous(2, 3)), 0)
    assert not again.HasField("failure")
    (fresh,) = make_stages(folder, CUTS[1], submits_ahead=False)
    whole = Steps()
    third = fresh.run(
        whole.make(chunk(1, 0, [*PROMPT, 3, 4, 7, 8, 9], want()), operations=[open_sequence(1)]), 0
    )
    assert tokens_by_sequence(again)[1] == tokens_by_sequence(third)[1]
    assert tokens_by_sequence(again)[2] == tokens_alone(folder, PROMPT[:3], {})[1:2]
    assert tokens_before[0] == tokens_alone(folder, PROMPT, {})[0]
    assert evaluated_scores
    assert not runner.run(steps.make(operations=[free(1), free(2)]), 0).kv_bytes


@pytest.mark.parametrize("stages", [1, 2])
def test_logits_that_would_be_large_are_computed_for_few_positions_at_a_time(
    folder: Path, stages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = [*PROMPT * 6, 3, 4]
    scored = want(Want.LOGPROBS, Want.ALL, targets=[*tokens[1:], 5], top_logprobs=2)
    rows = [chunk(1, 0, tokens, scored, want()), chunk(2, 0, tokens[2:], want())]
    opened = [open_sequence(1), open_sequence(2, temperature=1.0, logprobs=True)]

    def results() -> dict[int, step_pb2.RowResult]:
        pipeline = Pipeline(folder, CUTS[stages])
        pipeline.results(chunk(3, 0, PROMPT, want()), operations=[open_sequence(3)])
        return pipeline.results(*rows, operations=opened)

    expected, sizes = results(), list[int]()
    logits_of = StageModel.logits_of

    def count(model: StageModel, hidden: Any) -> Any:
        sizes.append(hidden.shape[0])
        return logits_of(model, hidden)

    monkeypatch.setattr(forward, "_MOST_LOGITS_BYTES", 0)
    monkeypatch.setattr(StageModel, "logits_of", count)
    found = results()
    assert max(sizes) == 32 < len(tokens) == sum(sizes) - 2
    for sequence in (1, 2):
        assert tokens_of(found[sequence]) == tokens_of(expected[sequence])
    for ours, theirs in zip(found[1].logprobs, expected[1].logprobs, strict=True):
        assert (ours.token, ours.top_tokens) == (theirs.token, theirs.top_tokens)
        assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-5)
        assert ours.top_logprobs == pytest.approx(theirs.top_logprobs, abs=1e-5)
