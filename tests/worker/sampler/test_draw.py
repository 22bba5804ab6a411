"""Parts of drawing a token: noise, and exact arithmetic that is the same in any batch."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.examples import examples
from tests.worker.sampler import reference

from mlx_ring.worker.sampler import draw

seeds = st.integers(0, 2**64 - 1)


@examples(0.5)
@given(seeds, st.integers(0, 2**40), st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=8))
def test_bits_equal_the_integer_reference(seed: int, position: int, indices: list[int]) -> None:
    key = draw.keys([(seed, position)])
    drawn = draw.bits(key[:, :2], mx.array([indices]))
    first, second, *_ = reference.words(seed, position)
    assert drawn.tolist() == [[reference.bits(first, second, index) for index in indices]]


def test_bits_of_known_keys_never_change() -> None:
    key = draw.keys([(0, 0), (2**64 - 1, 12345)])
    assert draw.bits(key[:, :2], mx.arange(3)[None]).tolist() == [
        [2927211507, 3986118191, 64137156],
        [1635982164, 312718757, 1308529831],
    ]


def test_gumbel_noise_has_its_mean_and_variance_and_is_finite() -> None:
    key = draw.keys([(1, 2)])
    values = np.array(draw.gumbel(key[:, :2], mx.arange(200_000)[None]), dtype=np.float64)
    assert np.isfinite(values).all()
    assert abs(values.mean() - np.euler_gamma) < 4 * np.pi / np.sqrt(6 * 200_000)
    assert abs(values.var() - np.pi**2 / 6) < 0.03


def test_exponential_is_close_to_exp() -> None:
    x = -np.linspace(0, 86, 100_001, dtype=np.float32)
    ours = np.array(draw.exponential(mx.array(x)[None]), dtype=np.float64)[0]
    assert np.abs(ours / np.exp(x.astype(np.float64)) - 1).max() < 8e-6
    assert np.abs(ours[:2000] / np.exp(x[:2000].astype(np.float64)) - 1).max() < 3e-7
    assert ours[0] == 1.0


def test_exponential_of_very_negative_numbers_is_nearly_zero() -> None:
    far = np.array(draw.exponential(mx.array([[-87.0, -1e30, -mx.inf]])), dtype=np.float64)
    assert (far >= 0).all()
    assert (far < 1e-37).all()


@given(
    st.sampled_from([1, 2, 31, 64, 100, 1024, 4096, 4100]),
    st.integers(1, 300),
    st.integers(0, 10_000),
    st.sampled_from([1, 4, 1000]),
)
def test_largest_equal_a_full_sort_with_ties_by_lowest_id(
    columns: int, count: int, seed: int, distinct: int
) -> None:
    count = min(count, columns)
    values = np.random.default_rng(seed).integers(-distinct, distinct, (2, columns)).astype(np.float32)
    values[values == distinct - 1] = -np.inf
    largest, ids = draw.largest(mx.array(values), count)
    for row in range(2):
        order = np.lexsort((np.arange(columns), -values[row]))[:count]
        assert np.array(ids, dtype=np.int64)[row].tolist() == order.tolist()
        assert np.array(largest, dtype=np.float64)[row].tolist() == values[row][order].tolist()


@pytest.mark.parametrize("columns", [1, 5, 128, 1000, 128 * 129, 40_001])
def test_totals_are_exact_sums_with_the_same_bits_in_any_batch(columns: int) -> None:
    values = np.random.default_rng(columns).random((7, columns)).astype(np.float32)
    totals = np.array(draw.total(mx.array(values)), dtype=np.float64)
    assert np.allclose(totals[:, 0], values.astype(np.float64).sum(axis=1), rtol=1e-6)
    for row in range(7):
        assert np.array(draw.total(mx.array(values[row : row + 1])), dtype=np.float64)[0, 0] == totals[row, 0]


def test_log_total_is_logsumexp_even_with_minus_infinities() -> None:
    values = np.random.default_rng(1).normal(size=(2, 1000)).astype(np.float32) * 10
    expected = np.log(np.exp(values.astype(np.float64)).sum(axis=1))
    assert np.allclose(
        np.array(draw.log_total(mx.array(values)), dtype=np.float64)[:, 0], expected, atol=1e-5
    )
    values[0, 1:] = -np.inf
    assert np.array(draw.log_total(mx.array(values)), dtype=np.float64)[0, 0] == pytest.approx(
        values[0, 0], abs=1e-6
    )
