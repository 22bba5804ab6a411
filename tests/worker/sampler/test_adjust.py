from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from tests.examples import examples
from tests.worker.sampler import reference
from tests.worker.sampler.strategies import VOCABULARY, sampler_rows

from mlx_ring.worker.sampler import Parameters, SamplerRow
from mlx_ring.worker.sampler.sample import adjust


def adjusted(logits: list[float], row: SamplerRow) -> list[float]:
    return [float(value) for value in np.array(adjust(mx.array([logits]), [row]), dtype=np.float64)[0]]


@examples(2)
@given(sampler_rows(), sampler_rows())
def test_every_logit_is_that_of_the_plain_chain(first: SamplerRow, second: SamplerRow) -> None:
    logits = np.random.default_rng(0).normal(size=(2, VOCABULARY)) * 3
    changed = np.array(adjust(mx.array(logits.astype(np.float32)), [first, second]), dtype=np.float64)
    for index, row in enumerate((first, second)):
        assert np.allclose(changed[index], reference.adjusted(logits[index], row), atol=1e-4)


def test_the_repetition_penalty_makes_both_signs_less_likely_once_over_prompt_and_answer() -> None:
    row = SamplerRow(Parameters(repetition_penalty=2.0), 0, 4, [0, 1, 1, 1], 2)
    assert adjusted([4.0, -4.0, 4.0], row) == [2.0, -8.0, 4.0]


def test_presence_and_frequency_count_the_answer_alone() -> None:
    row = SamplerRow(Parameters(presence_penalty=0.5, frequency_penalty=0.25), 0, 5, [0, 0, 1, 1, 2], 2)
    assert adjusted([1.0, 1.0, 1.0, 1.0], row) == [1.0, 0.0, 0.25, 1.0]


def test_tokens_from_the_position_on_do_not_count_yet() -> None:
    row = SamplerRow(Parameters(repetition_penalty=2.0, frequency_penalty=1.0), 0, 2, [0, 1, 2, 2], 1)
    assert adjusted([2.0, 2.0, 2.0], row) == [1.0, 0.0, 2.0]


def test_bias_comes_before_the_repetition_penalty() -> None:
    row = SamplerRow(Parameters(repetition_penalty=2.0, logit_bias=((0, 3.0),)), 0, 1, [0], 1)
    assert adjusted([-1.0, 0.0], row) == [1.0, 0.0]


@pytest.mark.parametrize(("position", "barred"), [(2, True), (3, True), (4, False)])
def test_the_eos_set_is_barred_until_min_tokens_were_drawn(position: int, barred: bool) -> None:  # noqa: FBT001  # a column of the table
    row = SamplerRow(
        Parameters(min_tokens=2, logit_bias=((1, 50.0),)), 0, position, [0] * 6, 2, frozenset({1})
    )
    assert (adjusted([0.0, 0.0], row)[1] == -np.inf) is barred
