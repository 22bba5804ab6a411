"""`mlx-ring bench` without a server: its load, its reading of streams, its arithmetic."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_ring.cli.bench.events import EventReader, read_event
from mlx_ring.cli.bench.summary import Record, percentile, summarise


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=40), st.floats(0, 100))
def test_a_percentile_lies_between_the_least_and_the_most(values: list[float], share: float) -> None:
    ordered = sorted(values)
    assert ordered[0] <= percentile(ordered, share) <= ordered[-1]


def test_percentiles_of_a_hundred_numbers() -> None:
    ordered = [float(number) for number in range(101)]
    assert [percentile(ordered, share) for share in (0, 50, 95, 100)] == [0, 50, 95, 100]


@given(st.lists(st.integers(1, 40), min_size=1, max_size=20))
def test_events_are_whole_however_the_bytes_are_cut(cuts: list[int]) -> None:
    stream = b': comment\n\ndata: {"a": 1}\r\n\r\ndata: {"b": 2}\n\ndata: [DONE]\n\n'
    reader, found, place = EventReader(), list[str](), 0
    for cut in [*cuts, len(stream)]:
        found += reader.feed(stream[place : place + cut])
        place += cut
    assert found == ['{"a": 1}', '{"b": 2}', "[DONE]"]


def test_an_event_says_what_it_brings() -> None:
    text = read_event('{"choices": [{"text": "hi", "finish_reason": null}]}')
    assert (text.says_something, text.finish_reason, text.error) == (True, None, None)
    chat = read_event('{"choices": [{"delta": {"role": "assistant"}}]}')
    assert not chat.says_something
    end = read_event('{"choices": [], "usage": {"completion_tokens": 3}}')
    assert end.usage == {"completion_tokens": 3}
    assert read_event('{"error": {"message": "lost"}}').error == "lost"
    with pytest.raises(ValueError, match="3"):
        read_event("3")


def test_a_run_in_numbers_counts_answers_and_errors() -> None:
    good = Record(0, 1.0, [2.0, 2.5, 3.0], 3.0, prompt_tokens=10, cached_tokens=4, output_tokens=3)
    several = Record(1, 0.0, [1.0, 2.0], 2.0, prompt_tokens=10, output_tokens=5)
    bad = Record(2, 0.0, error="stream ended early")
    summary = summarise([good, several, bad], 4.0)
    assert (summary.completed, summary.errors) == (2, {"stream ended early": 1})
    assert (summary.output_tokens, summary.cached_tokens) == (8, 4)
    assert summary.output_tokens_per_s == 2.0
    assert good.inter_token_s() == [0.5, 0.5]
    assert several.inter_token_s() == [0.25], "one gap, four tokens"
