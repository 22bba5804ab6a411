"""Passes that are computed while they are built: the same tokens, and no harm where one is broken off."""

# How passes are built shows only inside.
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
from tests.worker.test_lookahead import GEMMA3, SAMPLINGS, alone, drawn, watch

from mlx_ring.worker.platform import attention

COUNTED = "_exponentials"


@pytest.fixture(scope="module", params=["qwen3", "gemma3"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = {"qwen3": QWEN3, "gemma3": GEMMA3}[request.param]
    return write_random_model(tmp_path_factory.mktemp(request.param), config)


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Every row of more than one token is computed at once; what was, in scores."""
    computed: list[int] = []
    exponentials = attention._exponentials

    def count(scores: attention._Numbers, *others: Any) -> attention._Numbers:
        computed.append(scores.size)
        return exponentials(scores, *others)

    monkeypatch.setattr(attention, COUNTED, count)
    monkeypatch.setattr(attention, "WORTH_IT", 1)
    monkeypatch.setattr(attention, "is_slow_here", lambda: True)
    return computed


@pytest.mark.parametrize("stages", sorted(CUTS))
@pytest.mark.parametrize("sampling", SAMPLINGS[:3], ids=str)
def test_tokens_are_those_of_passes_that_are_built_first(
    folder: Path, at_once: list[int], sampling: dict[str, Any], stages: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "is_slow_here", lambda: False)
        expected = alone(folder, PROMPT, sampling)
    assert not at_once
    pipeline = Pipeline(folder, CUTS[stages])
    pipeline.results(chunk(1, 0, PROMPT[:4]), operations=[open_sequence(1, **sampling)])
    first = pipeline.results(chunk(1, 4, PROMPT[4:], want()), hand_over=True)
    tokens = tokens_of(first[1])
    while len(tokens) < len(expected):
        row = previous(1, len(PROMPT) + len(tokens) - 1)
        tokens += tokens_of(pipeline.results(row, hand_over=True)[1])
    assert tokens == expected
    assert at_once


def test_a_chunk_that_is_computed_at_once_is_not_built_ahead(
    folder: Path, at_once: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    (runner,) = make_stages(folder, CUTS[1], submits_ahead=False)
    ahead = watch(runner, monkeypatch)
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
    assert at_once
    tokens = [*drawn(dones[0])[1], *drawn(dones[1])[1], *drawn(dones[3])[1]]
    assert tokens == alone(folder, PROMPT, {})[:3]


def test_a_pass_that_is_broken_off_harms_no_other_row(
    folder: Path, at_once: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    (runner,) = make_stages(folder, CUTS[1], submits_ahead=False)
    steps = Steps()
    opened = [open_sequence(1), open_sequence(2)]
    first, second = answer_all(
        runner,
        steps.make(chunk(1, 0, PROMPT, want()), operations=opened),
        steps.make(chunk(1, len(PROMPT), [3, 4], want()), chunk(2, 0, PROMPT[:3], want())),
    )
    told = [*drawn(first)[1], *drawn(second)[1]]
    compute, left = attention._exponentials, [1]

    def break_off(*given: Any) -> attention._Numbers:
        if not left:
            monkeypatch.setattr(attention, COUNTED, compute)
            raise MemoryError("no room")
        left.pop()
        return compute(*given)

    monkeypatch.setattr(attention, COUNTED, break_off)
    failed = runner.run(steps.make(chunk(1, len(PROMPT) + 2, [7, 8, 9], want())), 0)
    assert failed.failure.message == "MemoryError: no room"
    again = runner.run(steps.make(chunk(1, len(PROMPT) + 2, [7, 8, 9], want()), previous(2, 3)), 0)
    assert not again.HasField("failure")
    (fresh,) = make_stages(folder, CUTS[1], submits_ahead=False)
    whole = Steps()
    third = fresh.run(
        whole.make(chunk(1, 0, [*PROMPT, 3, 4, 7, 8, 9], want()), operations=[open_sequence(1)]), 0
    )
    assert drawn(again)[1] == drawn(third)[1]
    assert drawn(again)[2] == alone(folder, PROMPT[:3], {})[1:2]
    assert told[0] == alone(folder, PROMPT, {})[0]
    assert at_once
    assert not runner.run(steps.make(operations=[free(1), free(2)]), 0).kv_bytes
