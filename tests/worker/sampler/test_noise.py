from __future__ import annotations

import mlx.core as mx
import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from tests.examples import examples
from tests.worker.sampler import reference

from mlx_ring.worker.sampler import draw as noise

seeds = st.integers(0, 2**64 - 1)


@examples(0.5)
@given(seeds, st.integers(0, 2**40), st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=8))
def test_bits_are_the_integer_construction(seed: int, position: int, indices: list[int]) -> None:
    key = noise.keys([(seed, position)])
    drawn = noise.bits(key[:, :2], mx.array([indices]))
    first, second, *_ = reference.words(seed, position)
    assert drawn.tolist() == [[reference.bits(first, second, index) for index in indices]]


def test_bits_of_known_keys_never_change() -> None:
    key = noise.keys([(0, 0), (2**64 - 1, 12345)])
    assert noise.bits(key[:, :2], mx.arange(3)[None]).tolist() == [
        [2927211507, 3986118191, 64137156],
        [1635982164, 312718757, 1308529831],
    ]


def test_gumbel_noise_has_its_mean_and_variance_and_is_finite() -> None:
    key = noise.keys([(1, 2)])
    values = np.array(noise.gumbel(key[:, :2], mx.arange(200_000)[None]), dtype=np.float64)
    assert np.isfinite(values).all()
    assert abs(values.mean() - np.euler_gamma) < 4 * np.pi / np.sqrt(6 * 200_000)
    assert abs(values.var() - np.pi**2 / 6) < 0.03
