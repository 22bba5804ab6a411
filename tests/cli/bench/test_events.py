"""Server-sent events, cut anywhere, and what they say."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_ring.cli.bench.client import DONE, EventReader, read_event


@given(st.lists(st.integers(1, 40), min_size=1, max_size=20))
def test_events_are_whole_however_the_bytes_are_cut(cuts: list[int]) -> None:
    stream = ': comment\n\ndata: {"a": 1}\r\n\r\nevent: x\ndata:{"b": "ü"}\n\ndata: [DONE]\n\n'.encode()
    reader, found, place = EventReader(), list[str](), 0
    for cut in [*cuts, len(stream)]:
        found += reader.feed(stream[place : place + cut])
        place += cut
    assert found == ['{"a": 1}', '{"b": "ü"}', DONE]


@pytest.mark.parametrize(
    ("data", "says", "finish"),
    [
        ('{"choices": [{"text": "hi", "finish_reason": null}]}', True, None),
        ('{"choices": [{"text": "", "finish_reason": "length"}]}', False, "length"),
        ('{"choices": [{"delta": {"role": "assistant", "content": ""}}]}', False, None),
        ('{"choices": [{"delta": {"content": "hi"}, "finish_reason": "stop"}]}', True, "stop"),
        ('{"choices": [{"delta": {"reasoning": "hm"}}]}', True, None),
        ('{"choices": [{"delta": {"reasoning_content": "hm"}}]}', True, None),
        ('{"choices": [{"delta": {"tool_calls": [{"index": 0}]}}]}', True, None),
        ('{"choices": []}', False, None),
        ('{"choices": null}', False, None),
    ],
)
def test_an_event_says_what_it_brings(data: str, says: bool, finish: str | None) -> None:  # noqa: FBT001 - an example
    event = read_event(data)
    assert (event.has_output, event.finish_reason, event.usage, event.error) == (says, finish, None, None)


def test_usage_comes_in_an_event_of_its_own() -> None:
    assert read_event('{"choices": [], "usage": {"completion_tokens": 3}}').usage == {"completion_tokens": 3}


@pytest.mark.parametrize("error", ['{"message": "lost"}', '"lost"'])
def test_an_error_is_told_by_its_message(error: str) -> None:
    assert read_event(f'{{"error": {error}}}').error == "lost"


@pytest.mark.parametrize("data", ["3", "{", ""])
def test_what_is_no_object_is_refused(data: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - json's own sentences
        read_event(data)
