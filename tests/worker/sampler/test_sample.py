"""Sampling of tokens, compared with a plain reference."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any, cast

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import find, given
from hypothesis import strategies as st
from tests.examples import examples
from tests.worker.sampler import reference
from tests.worker.sampler.strategies import DRAWN, EOS, VALUES, VOCABULARY, sampler_rows

from mlx_ring.core.errors import RequestError
from mlx_ring.rpc.protos import step_pb2
from mlx_ring.worker.sampler import History, LazySample, Parameters, SamplerRow, sample
from mlx_ring.worker.sampler.sample import adjust

GREEDY = Parameters()


def row(sampling: Parameters = GREEDY, seed: int = 0, position: int = 4) -> SamplerRow:
    return SamplerRow(sampling, seed, position, [3, 1, 4, 1], 2)


def random_logits(rows: int, seed: int, vocabulary: int = VOCABULARY, scale: float = 3.0) -> mx.array:
    values = np.random.default_rng(seed).normal(size=(rows, vocabulary)) * scale
    return mx.array(values.astype(np.float32))


def drawn(logits: mx.array, *rows: SamplerRow) -> list[int]:
    tokens = sample(logits, rows)
    assert tokens.dtype == mx.int32
    assert tokens.shape == (len(rows),)
    return [int(token) for token in np.array(tokens)]


@examples(1.5)
@given(st.lists(sampler_rows(), min_size=1, max_size=4), st.integers(0, 1000))
def test_tokens_equal_the_references(rows: list[SamplerRow], seed: int) -> None:
    logits = random_logits(len(rows), seed)
    tokens = drawn(logits, *rows)
    for index, each in enumerate(rows):
        expected, lead = reference.token(np.array(logits[index], dtype=np.float64), each)
        if lead > 1e-4:
            assert tokens[index] == expected


@pytest.mark.slow
@pytest.mark.parametrize("name", DRAWN)
def test_each_parameter_has_values_that_change_a_token(name: str) -> None:
    logits = mx.full((128, VOCABULARY), -10.0)
    logits[:, :10] = random_logits(1, 0, vocabulary=10, scale=1.0)

    def tokens(**values: Any) -> list[int]:
        fields: dict[str, Any] = {"temperature": 1.0} | values
        sampling = Parameters(**fields)
        return drawn(logits, *(SamplerRow(sampling, seed, 4, [3, 1, 4, 1], 2, EOS) for seed in range(128)))

    default = tokens()
    find(VALUES[name], lambda value: tokens(**{name: value}) != default)


@examples(0.6)
@given(st.lists(sampler_rows(), min_size=1, max_size=6), st.integers(0, 1000), st.sampled_from([0.05, 3.0]))
def test_lazy_sample_reads_the_same_tokens_and_reports_changed_rows(
    rows: list[SamplerRow], seed: int, scale: float
) -> None:
    logits = random_logits(len(rows), seed, scale=scale)
    lazy = LazySample(logits, rows)
    before = [int(token) for token in np.array(lazy.tokens)]
    tokens, changed = lazy.read()
    assert tokens == drawn(logits, *rows)
    assert changed == [index for index, token in enumerate(tokens) if token != before[index]]


def test_rows_with_and_without_a_grammar_are_drawn_again_in_one_step() -> None:
    sampling = Parameters(temperature=1.0, top_p=0.99)
    rows = [SamplerRow(sampling, seed, 4, [3, 1, 4, 1], 2) for seed in range(8)]
    rows[4:] = [replace(each, allowed=np.arange(4096) % 2 == 0) for each in rows[4:]]
    logits = mx.zeros((8, 4096))
    assert LazySample(logits, rows).read()[0] == drawn(logits, *rows)


@examples(0.6)
@given(st.lists(sampler_rows(), min_size=2, max_size=6), st.integers(0, 1000))
def test_row_draws_the_same_token_in_any_batch(rows: list[SamplerRow], seed: int) -> None:
    logits = random_logits(len(rows), seed)
    together = drawn(logits, *rows)
    assert together == [drawn(logits[i : i + 1], rows[i])[0] for i in range(len(rows))]
    reverse = mx.array(list(range(len(rows)))[::-1])
    assert together[::-1] == drawn(logits[reverse], *rows[::-1])


@pytest.mark.parametrize("scale", [0.05, 1.0, 8.0])
@pytest.mark.parametrize(
    "sampling",
    [Parameters(top_p=0.9), Parameters(top_p=0.6, min_p=0.01), Parameters(top_k=3000), Parameters(min_p=0.2)],
)
def test_large_vocabularies_take_enough_candidates_for_the_exact_token(
    scale: float, sampling: Parameters
) -> None:
    vocabulary = 32 * 400
    logits = random_logits(3, 5, vocabulary, scale)
    rows = [row(replace(sampling, temperature=1.0), seed) for seed in (1, 2, 3)]
    tokens = drawn(logits, *rows)
    for index, each in enumerate(rows):
        expected, lead = reference.token(np.array(logits[index], dtype=np.float64), each)
        assert lead < 1e-5 or tokens[index] == expected
        assert tokens[index] == drawn(logits[index : index + 1], each)[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    "sampling",
    [
        Parameters(temperature=1.0),
        Parameters(temperature=0.7),
        Parameters(temperature=2.0, min_p=0.1),
        Parameters(temperature=1.0, top_p=0.8),
        Parameters(temperature=1.5, top_k=7),
        Parameters(temperature=1.0, top_k=20, top_p=0.9, min_p=0.02),
        Parameters(temperature=1.0, repetition_penalty=1.5, presence_penalty=0.5, frequency_penalty=0.5),
    ],
)
def test_frequencies_follow_the_exact_probabilities(sampling: Parameters) -> None:
    draws = 20_000
    logits = random_logits(1, 3, vocabulary=60, scale=1.5)
    rows = [row(sampling, seed % 100, 4 + seed // 100) for seed in range(draws)]
    tokens = drawn(mx.repeat(logits, draws, axis=0), *rows)
    exact = reference.probabilities(np.array(logits[0], dtype=np.float64), row(sampling))
    counts = np.bincount(tokens, minlength=60)
    assert counts[exact == 0].sum() == 0
    expected = exact[exact > 0] * draws
    seen = counts[exact > 0]
    chi_square = ((seen - expected) ** 2 / expected).sum()
    freedom = len(expected) - 1
    assert chi_square < freedom + 4 * np.sqrt(2 * freedom)


def test_top_p_applies_to_the_mass_that_top_k_leaves_in_each_row() -> None:
    # Top-k leaves two of eight equal tokens, and the first alone is half of their mass.
    narrow = Parameters(temperature=1.0, top_k=2, top_p=0.5)
    wide = Parameters(temperature=1.0, top_p=0.5)
    logits = mx.repeat(mx.zeros((1, 8)), 200, axis=0)
    tokens = drawn(logits, *(row(narrow if seed % 2 else wide, seed) for seed in range(200)))
    assert set(tokens[1::2]) == {0}
    assert set(tokens[::2]) == {0, 1, 2, 3}


def test_top_p_applies_to_the_mass_that_top_k_leaves_beyond_the_first_candidates() -> None:
    # The first 100 of 4096 tokens have 0.3 of the mass, and about two thirds of what the first 1000 have.
    probabilities = np.full(4096, 0.7 / 3996, np.float32)
    probabilities[:100] = 0.003
    logits = mx.repeat(mx.log(mx.array(probabilities))[None], 200, axis=0)
    sampling = Parameters(temperature=1.0, top_k=1000, top_p=0.2)
    nucleus = int(np.ceil(0.2 * float(probabilities[:1000].sum()) / 0.003))
    assert nucleus == 31
    rows = [row(sampling, seed) for seed in range(200)]
    assert max(drawn(logits, *rows)) < nucleus
    lazy = LazySample(logits, rows)
    mx.eval(lazy.arrays)
    assert max(lazy.read()[0]) < nucleus


def test_top_p_applies_to_the_mass_that_min_p_leaves() -> None:
    # The second token has 0.4 of the first's weight. The first alone suffices for top-p only without the rest.
    logits = mx.repeat(mx.log(mx.array([[1.0, 0.4, 0.3, 0.3, 0.3]])), 200, axis=0)
    both = Parameters(temperature=1.0, min_p=0.35, top_p=0.6)
    assert set(drawn(logits, *(row(both, seed) for seed in range(200)))) == {0}
    without = Parameters(temperature=1.0, top_p=0.6)
    assert set(drawn(logits, *(row(without, seed) for seed in range(200)))) == {0, 1}


def test_successive_positions_and_seeds_are_not_correlated() -> None:
    logits = mx.zeros((4096, 16))
    sampling = Parameters(temperature=1.0)
    by_seed = drawn(logits, *(row(sampling, seed, 9) for seed in range(4096)))
    by_position = drawn(logits, *(row(sampling, 9, position) for position in range(4096)))
    for drawn_tokens in (by_seed, by_position):
        tokens = np.array(drawn_tokens, dtype=np.int64)
        pairs = np.bincount(tokens[:-1] * 16 + tokens[1:], minlength=256)
        expected = 4095 / 256
        assert ((pairs - expected) ** 2 / expected).sum() < 255 + 4 * np.sqrt(2 * 255)


def test_rows_of_one_sequence_at_several_positions_verify_a_draft() -> None:
    tokens = [3, 1, 4, 1, 5, 9, 2, 6]
    sampling = Parameters(temperature=1.0, top_p=0.9, repetition_penalty=1.2, frequency_penalty=0.3)
    logits = random_logits(4, 8)
    rows = [SamplerRow(sampling, 11, 4 + index, tokens, 3) for index in range(4)]
    one_by_one = [
        drawn(logits[i : i + 1], SamplerRow(sampling, 11, 4 + i, tokens[: 4 + i], 3))[0] for i in range(4)
    ]
    assert drawn(logits, *rows) == one_by_one


def test_greedy_and_top_k_1_take_the_lowest_of_equal_tokens() -> None:
    logits = mx.zeros((2, VOCABULARY))
    logits[:, 17] = 2.0
    logits[:, 250] = 2.0
    assert drawn(logits, row(), row(Parameters(temperature=1.0, top_k=1))) == [17, 17]


def test_ties_at_the_top_k_threshold_keep_the_lowest_ids() -> None:
    logits = mx.repeat(mx.zeros((1, VOCABULARY)), 500, axis=0)
    tokens = drawn(logits, *(row(Parameters(temperature=1.0, top_k=3), seed) for seed in range(500)))
    assert set(tokens) == {0, 1, 2}


def test_negative_zero_ties_with_zero() -> None:
    logits = mx.full((1, 64), -1.0)
    logits[0, 5] = -0.0
    logits[0, 9] = 0.0
    assert drawn(logits, row(Parameters(temperature=1.0, top_k=1))) == [5]


@pytest.mark.parametrize(
    "sampling",
    [
        Parameters(),
        Parameters(temperature=1e-300),
        Parameters(temperature=2e-5),
        Parameters(temperature=2e-5, top_p=0.5),
    ],
)
def test_tiny_temperatures_are_greedy_and_do_not_overflow(sampling: Parameters) -> None:
    logits = random_logits(1, 2, scale=100.0)
    assert drawn(logits, row(sampling)) == [int(np.array(logits).argmax())]


@pytest.mark.parametrize(
    "sampling",
    [
        Parameters(),
        Parameters(top_k=3),
        Parameters(top_p=0.9),
        Parameters(min_p=0.1),
        Parameters(top_k=10**9),
    ],
)
@pytest.mark.parametrize("fill", [0.0, -1e30, float("-inf")])
def test_flat_logits_draw_a_token_of_the_vocabulary(fill: float, sampling: Parameters) -> None:
    for vocabulary in (1, 2, 31, 300):
        logits = mx.full((1, vocabulary), fill)
        assert 0 <= drawn(logits, row(replace(sampling, temperature=1.0)))[0] < vocabulary


@pytest.mark.parametrize(
    "sampling",
    [
        Parameters(),
        Parameters(temperature=5.0),
        Parameters(temperature=5.0, top_p=0.9999),
        Parameters(temperature=5.0, top_k=50),
    ],
)
def test_tokens_at_minus_infinity_are_never_drawn(sampling: Parameters) -> None:
    allowed = [4, 8, 200]
    logits = mx.full((200, VOCABULARY), -mx.inf)
    logits[:, mx.array(allowed)] = mx.array([0.0, 1.0, -1.0])
    assert set(drawn(logits, *(row(sampling, seed) for seed in range(200)))) <= set(allowed)


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
def test_half_precision_logits_are_computed_in_float32(dtype: mx.Dtype) -> None:
    logits = random_logits(3, 4).astype(dtype)
    rows = [row(Parameters(temperature=0.8), 1), row(Parameters(temperature=0.8, top_p=0.9), 2), row()]
    assert drawn(logits, *rows) == drawn(logits.astype(mx.float32), *rows)


def test_sampling_does_not_change_the_callers_logits() -> None:
    logits = random_logits(1, 1)
    before = np.array(logits, dtype=np.float32)
    drawn(logits, row(Parameters(repetition_penalty=2.0, presence_penalty=1.0)))
    assert (np.array(logits) == before).all()


def test_greedy_and_bounded_rows_stay_lazy() -> None:
    logits = random_logits(3, 1)
    tokens = sample(
        logits,
        [row(), row(Parameters(temperature=1.0)), row(Parameters(temperature=1.0, top_k=20, top_p=0.5))],
    )
    follower = mx.take_along_axis(logits, tokens[:, None], axis=-1)
    assert follower.shape == (3, 1)


@pytest.mark.parametrize(
    ("sampling", "param"),
    [
        (Parameters(logit_bias=((VOCABULARY, 1.0),)), "logit_bias"),
        (Parameters(logit_bias=((-1, 1.0),)), "logit_bias"),
        (Parameters(logit_bias=((1, float("nan")),)), "logit_bias"),
        (Parameters(temperature=float("nan")), "temperature"),
        (Parameters(top_p=float("inf")), "top_p"),
        (Parameters(repetition_penalty=-1.0), "repetition_penalty"),
    ],
)
def test_parameters_that_cannot_be_applied_are_refused_by_name(sampling: Parameters, param: str) -> None:
    with pytest.raises(RequestError, match=param) as raised:
        sample(random_logits(1, 0), [row(sampling)])
    assert raised.value.param == param


@examples(0.2)
@given(st.integers(0, 2**64 - 1), st.integers(0, 2**32))
def test_another_seed_or_position_gives_another_draw(seed: int, position: int) -> None:
    other = (seed + 1) % 2**64
    logits = mx.zeros((3, 2**20))
    sampling = Parameters(temperature=1.0)
    rows = [row(sampling, seed, position), row(sampling, other, position), row(sampling, seed, position + 1)]
    tokens = drawn(logits, *rows)
    assert len(set(tokens)) == 3


def test_no_rows_give_no_tokens() -> None:
    assert drawn(mx.zeros((0, VOCABULARY))) == []


def test_parameters_of_a_wire_message_have_one_normal_form() -> None:
    assert Parameters.from_message(step_pb2.Sampling()) == Parameters()
    message = step_pb2.Sampling(
        temperature=0.5, top_p=0.25, top_k=3, logit_bias={9: 1.5, 2: -1.0}, min_tokens=4
    )
    assert Parameters.from_message(message) == Parameters(
        temperature=0.5, top_p=0.25, top_k=3, logit_bias=((2, -1.0), (9, 1.5)), min_tokens=4
    )


def adjusted(logits: list[float], row: SamplerRow) -> list[float]:
    return [float(value) for value in np.array(adjust(mx.array([logits]), [row]), dtype=np.float64)[0]]


@examples(2)
@given(sampler_rows(), sampler_rows())
def test_adjusted_logits_equal_the_references(first: SamplerRow, second: SamplerRow) -> None:
    logits = np.random.default_rng(0).normal(size=(2, VOCABULARY)) * 3
    changed = np.array(adjust(mx.array(logits.astype(np.float32)), [first, second]), dtype=np.float64)
    for index, row in enumerate((first, second)):
        assert np.allclose(changed[index], reference.adjusted(logits[index], row), atol=1e-4)


def test_repetition_penalty_applies_once_to_prompt_and_answer_tokens_of_either_sign() -> None:
    row = SamplerRow(Parameters(repetition_penalty=2.0), 0, 4, [0, 1, 1, 1], 2)
    assert adjusted([4.0, -4.0, 4.0], row) == [2.0, -8.0, 4.0]


def test_presence_and_frequency_penalties_count_only_the_answer() -> None:
    row = SamplerRow(Parameters(presence_penalty=0.5, frequency_penalty=0.25), 0, 5, [0, 0, 1, 1, 2], 2)
    assert adjusted([1.0, 1.0, 1.0, 1.0], row) == [1.0, 0.0, 0.25, 1.0]


def test_penalties_ignore_tokens_from_the_position_on() -> None:
    row = SamplerRow(Parameters(repetition_penalty=2.0, frequency_penalty=1.0), 0, 2, [0, 1, 2, 2], 1)
    assert adjusted([2.0, 2.0, 2.0], row) == [1.0, 0.0, 2.0]


@pytest.mark.parametrize(
    "sampling",
    [
        Parameters(frequency_penalty=0.25, logit_bias=((3, 1.5),), min_tokens=500),
        Parameters(frequency_penalty=0.25, repetition_penalty=1.3, logit_bias=((3, 1.5),)),
        Parameters(presence_penalty=0.5, repetition_penalty=0.8, min_tokens=500),
    ],
)
def test_a_history_that_grows_and_is_rolled_back_adjusts_as_one_that_is_read_anew(
    sampling: Parameters,
) -> None:
    random, history = Random(5), History()
    tokens = [random.randrange(VOCABULARY) for _ in range(300)]
    logits = random_logits(4, 6)
    for _ in range(40):
        start = len(tokens)
        tokens += [random.randrange(12) for _ in range(40)]
        # The rows of one step: the last known token, and drafts.
        rows = [
            SamplerRow(sampling, 0, position, tokens, 100, EOS, history=history)
            for position in (start, start + 1, start + 20, start + 40)
        ]
        anew = [replace(one, history=None) for one in rows]
        assert mx.array_equal(adjust(logits, rows), adjust(logits, anew)).item()
        values = cast("list[list[float]]", logits.tolist())
        changed = cast("list[list[float]]", adjust(logits, rows).tolist())
        for one, before, after in zip(rows, values, changed, strict=True):
            expected = reference.adjusted(np.array(before), one)
            np.testing.assert_allclose(after, expected, rtol=1e-5, atol=1e-5)
        left = start + 7 if random.random() < 0.9 else start - 200
        del tokens[left:]
        history.cut(left)


class ReadTokens(list[int]):
    """Tokens that count how many of them are read."""

    num_read = 0

    def __getitem__(self, key: Any) -> Any:
        part = cast("list[int]", super().__getitem__(key))
        self.num_read += len(part)
        return part


def test_a_token_reads_only_the_last_tokens_of_a_long_history() -> None:
    tokens, history = ReadTokens([*range(VOCABULARY)] * 200), History()
    sampling = Parameters(repetition_penalty=1.3, presence_penalty=0.5)
    for position in range(len(tokens) - 300, len(tokens)):
        adjust(random_logits(1, 7), [SamplerRow(sampling, 0, position, tokens, 10, history=history)])
    assert tokens.num_read < 2 * len(tokens) + 300 * 2 * 256


def test_bias_is_added_before_the_repetition_penalty() -> None:
    row = SamplerRow(Parameters(repetition_penalty=2.0, logit_bias=((0, 3.0),)), 0, 1, [0], 1)
    assert adjusted([-1.0, 0.0], row) == [1.0, 0.0]


@pytest.mark.parametrize(("position", "excluded"), [(2, True), (3, True), (4, False)])
def test_eos_tokens_are_excluded_until_min_tokens_were_drawn(position: int, excluded: bool) -> None:  # noqa: FBT001  # a column of the table
    row = SamplerRow(
        Parameters(min_tokens=2, logit_bias=((1, 50.0),)), 0, position, [0] * 6, 2, frozenset({1})
    )
    assert (adjusted([0.0, 0.0], row)[1] == -np.inf) is excluded
