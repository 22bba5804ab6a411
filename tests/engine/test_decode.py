"""Decode steps: micro-batches of sequences, over ranks that continue in any order."""

from __future__ import annotations

from itertools import pairwise
from random import Random

import pytest
from tests.engine.pipeline import Pipeline, is_prefill

from mlx_ring.core.types import SamplingParams


@pytest.mark.parametrize("late", [0, 7, 20])
def test_micro_batches_alternate_whenever_they_begin(late: int) -> None:
    pipeline, random = Pipeline((1, 1)), Random(0)
    pipeline.add(3, SamplingParams(ignore_eos=True))
    for _ in range(late):
        pipeline.run_any(random)
    pipeline.add(3, SamplingParams(ignore_eos=True))
    pipeline.run_out(random)
    decoded = [step.rows[0].sequence for step in pipeline.twin.sent if step.rows and not is_prefill(step)]
    both = decoded[decoded.index(2) : len(decoded) - decoded[::-1].index(1)]
    assert all(one != other for one, other in pairwise(both))
    assert len(both) > 40


def test_five_sequences_share_two_decode_steps_evenly() -> None:
    pipeline = Pipeline((1, 1))
    for _ in range(5):
        pipeline.add(3, SamplingParams(ignore_eos=True, max_tokens=40))
    random = Random(1)
    for _ in range(120):
        pipeline.run_any(random)
    assert {len(step.rows) for step in pipeline.twin.sent[-10:]} == {2, 3}


def test_one_stage_decodes_all_sequences_in_one_step() -> None:
    pipeline = Pipeline((1,))
    for _ in range(4):
        pipeline.add(3, SamplingParams(ignore_eos=True))
    for _ in range(12):
        pipeline.run(0)
    assert len(pipeline.twin.sent[-1].rows) == 4
