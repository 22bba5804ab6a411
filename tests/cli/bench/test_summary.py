"""Metrics of a run, computed from its records."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_ring.cli.bench.summary import STOPPED, Percentiles, Record, percentile, summarize


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=40), st.floats(0, 100))
def test_a_percentile_equals_numpy_s(values: list[float], share: float) -> None:
    ordered = sorted(values)
    assert percentile(ordered, share) == pytest.approx(float(np.percentile(ordered, share)))
    assert ordered[0] <= percentile(ordered, share) <= ordered[-1]


def test_a_distribution_holds_the_mean_percentiles_and_the_worst() -> None:
    numbers = [float(number) for number in range(100, -1, -1)]
    assert Percentiles.of(numbers) == Percentiles(mean=50, p50=50, p95=95, p99=99, worst=100)
    assert Percentiles.of([]) is None


def record(*arrivals: float, tokens: int | None = None, sent: float = 0.0, **fields: object) -> Record:
    made = Record(0, sent, list(arrivals), max(arrivals, default=sent))
    made.output_tokens = len(arrivals) if tokens is None else tokens
    for name, value in fields.items():
        setattr(made, name, value)
    return made


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        (record(2.0, 2.5, 3.0), [0.5, 0.5]),
        (record(1.0, 2.0, tokens=5), [0.25]),
        (record(1.0, 3.0, 3.0), [1.0, 1.0]),
        (record(1.0, 3.0, 3.0, tokens=5), [0.5, 0.5]),
        (record(1.0, 1.0, 3.0), [2.0]),
        (record(1.0, 2.0, 3.0, tokens=2), [1.0, 1.0]),
        (record(1.0, 1.0), []),
        (record(1.0), []),
        (record(), []),
    ],
    ids=[
        "one token per event",
        "four tokens in one event",
        "two events in one read",
        "four tokens in two events of one read",
        "the first chunk has no wait",
        "more events than tokens",
        "all at once",
        "one token",
        "no tokens",
    ],
)
def test_a_wait_is_divided_among_the_tokens_that_it_brought(seen: Record, expected: list[float]) -> None:
    assert seen.inter_token_s() == expected


@given(
    st.lists(st.floats(0.001, 1.0), min_size=1, max_size=30),
    st.lists(st.integers(1, 4), min_size=31, max_size=31),
    st.integers(1, 5),
)
def test_no_time_between_tokens_is_lost_or_invented(
    waits: list[float], sizes: list[int], per_event: int
) -> None:
    times = [sum(waits[:place]) for place in range(len(waits) + 1)]
    arrivals = [time for time, size in zip(times, sizes, strict=False) for _ in range(size)]
    after_first = (len(arrivals) - sizes[0]) * per_event
    seen = record(*arrivals, tokens=sizes[0] + after_first)
    gaps = seen.inter_token_s()
    assert len(gaps) == len(arrivals) - sizes[0]
    assert per_event * sum(gaps) == pytest.approx(times[-1] - times[0])
    assert sum(seen.between_chunks_s()) == pytest.approx(times[-1] - times[0])


def test_a_summary_counts_answers_and_errors_separately() -> None:
    records = [
        record(2.0, 2.5, 3.0, sent=1.0, prompt_tokens=10, cached_tokens=4),
        record(1.0, 2.0, tokens=5, prompt_tokens=10, asked_tokens=6),
        record(1.0, 9.0, error="stream ended early: ReadError", prompt_tokens=10),
        record(error="stream ended early"),
        record(error="HTTP 429: full"),
        record(1.0, error=STOPPED),
    ]
    summary = summarize(records, 4.0)
    assert (summary.requests, summary.completed, summary.stopped, summary.shorter) == (6, 2, 1, 1)
    assert summary.errors == {"stream ended early": 2, "HTTP 429": 1}
    assert (summary.prompt_tokens, summary.cached_tokens, summary.output_tokens) == (20, 4, 8)
    assert (summary.output_tokens_per_s, summary.total_tokens_per_s, summary.requests_per_s) == (2, 7, 0.5)
    assert summary.tokens_per_event == 8 / 5
    assert summary.ttft == Percentiles(1.0, 1.0, 1.0, 1.0, 1.0)
    assert summary.end_to_end == Percentiles(2.0, 2.0, 2.0, 2.0, 2.0)
    assert summary.inter_token is not None
    assert summary.inter_token.worst == 0.5
    speeds = summary.request_tokens_per_s
    assert speeds is not None
    assert (speeds.mean, speeds.p50, speeds.p95, speeds.worst) == pytest.approx((3.0, 3.0, 2.1, 2.0))


def test_a_run_without_answers_has_no_latencies() -> None:
    for records in ([], [record(error="timeout")]):
        summary = summarize(records, 0.0)
        assert (summary.completed, summary.output_tokens_per_s, summary.tokens_per_event) == (0, 0, None)
        assert (summary.ttft, summary.inter_token, summary.end_to_end) == (None, None, None)
        assert summary.request_tokens_per_s is None
