"""Workloads generated from a seed."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_ring.cli.bench.workload import Range, Words, Workload, make_jobs

VOCABULARY = 300


def workload(requests: int = 20, **fields: float | Range) -> Workload:
    given = {"prompt_tokens": Range(30, 60), "output_tokens": Range(1, 9)} | fields
    return Workload(requests, **given)  # pyright: ignore[reportArgumentType] - a test names the fields it changes


@given(st.integers(0, 99), st.integers(0, 29), st.integers(30, 50), st.integers(0, 20))
def test_prompts_have_the_requested_length(seed: int, shared: int, low: int, more: int) -> None:
    load = workload(8, seed=seed, shared_prefix=shared, prompt_tokens=Range(low, low + more))
    jobs = list(make_jobs(load, VOCABULARY))
    assert [job.number for job in jobs] == list(range(8))
    for job in jobs:
        assert isinstance(job.prompt, list)
        assert low <= len(job.prompt) <= low + more
        assert all(0 <= token < VOCABULARY for token in job.prompt)
        assert 1 <= job.output_tokens <= 9
        assert job.prompt[:shared] == jobs[0].prompt[:shared]
    assert len({str(job.prompt[shared:]) for job in jobs}) == len(jobs)


def test_equal_seeds_give_equal_jobs_and_other_seeds_others() -> None:
    load = workload(shared_prefix=10, rate=3.0)
    assert list(make_jobs(load, VOCABULARY)) == list(make_jobs(load, VOCABULARY))
    first, other = (next(make_jobs(workload(shared_prefix=10, seed=seed), VOCABULARY)) for seed in (0, 1))
    assert first.prompt[:10] != other.prompt[:10]


def test_later_jobs_have_other_prompts_and_the_same_prefix() -> None:
    first, later = (next(make_jobs(workload(shared_prefix=10), VOCABULARY, first=at)) for at in (0, 1000))
    assert first.prompt[:10] == later.prompt[:10]
    assert first.prompt[10:] != later.prompt[10:]


def test_arrivals_follow_a_poisson_process() -> None:
    times = [job.arrives_s for job in make_jobs(workload(5000, rate=4.0), VOCABULARY)]
    gaps = [later - earlier for earlier, later in pairwise(times)]
    mean = sum(gaps) / len(gaps)
    assert times[0] == 0
    assert mean == pytest.approx(1 / 4, rel=0.05)
    variance = sum((gap - mean) ** 2 for gap in gaps) / len(gaps)
    assert variance == pytest.approx(mean**2, rel=0.1)
    assert sum(gap > mean for gap in gaps) / len(gaps) == pytest.approx(0.368, abs=0.02)


def test_without_a_rate_all_jobs_arrive_at_time_zero() -> None:
    assert {job.arrives_s for job in make_jobs(workload(), VOCABULARY)} == {0.0}


@given(st.integers(1, 6), st.integers(0, 40), st.integers(1, 400))
def test_the_number_of_words_gives_the_requested_tokens(per_word: int, fixed: int, wanted: int) -> None:
    measured = Words.measured((32, fixed + 32 * per_word), (160, fixed + 160 * per_word))
    tokens = wanted * per_word + fixed
    assert measured.whole_prompt(tokens) == wanted
    assert measured.whole_prompt(0) == 1


def test_without_a_measurable_slope_one_prompt_sets_the_tokens_per_word() -> None:
    assert Words.measured((32, 64), (160, 64)) == Words(2.0)
    assert Words.measured((32, 0), (160, 0)).whole_prompt(64) >= 1


def test_prompts_of_words_share_a_prefix_and_have_the_requested_length() -> None:
    load = workload(5, prompt_tokens=Range(207, 207), shared_prefix=100)
    words = [str(job.prompt).split() for job in make_jobs(load, None, words=Words(2.0, 7.0))]
    assert [len(prompt) for prompt in words] == [100] * 5
    assert all(prompt[:50] == words[0][:50] for prompt in words)
    assert len({" ".join(prompt[50:]) for prompt in words}) == 5
