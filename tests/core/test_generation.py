from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_ring.core.generation import StopMatcher

LETTERS = st.text("ab", max_size=30)
STOPS = st.lists(st.text("ab", min_size=1, max_size=4), max_size=3)


def cut(stops: list[str], pieces: list[str]) -> tuple[str, str | None]:
    """Return all text that is released, and the stop string that ended it."""
    matcher = StopMatcher(stops)
    out = ""
    for piece in pieces:
        text, match = matcher.push(piece)
        out += text
        if match is not None:
            return out, match
    return out + matcher.flush(), None


def cut_by_definition(stops: list[str], text: str) -> tuple[str, str | None]:
    """Cut at the first end of any stop string; of those that end there, at the longest."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            stop = max(complete, key=len)
            return text[: end - len(stop)], stop
    return text, None


@given(STOPS, st.lists(LETTERS, max_size=8))
def test_text_is_cut_at_the_same_place_however_it_is_split(stops: list[str], pieces: list[str]) -> None:
    assert cut(stops, pieces) == cut_by_definition(stops, "".join(pieces))


@given(STOPS, st.lists(LETTERS, max_size=8))
def test_only_a_possible_start_of_a_stop_string_is_held_back(stops: list[str], pieces: list[str]) -> None:
    matcher = StopMatcher(stops)
    given_text = out = ""
    for piece in pieces:
        text, match = matcher.push(piece)
        given_text, out = given_text + piece, out + text
        if match is not None:
            return
        held_back = given_text[len(out) :]
        assert not held_back or any(
            len(held_back) < len(stop) and stop.startswith(held_back) for stop in stops
        )


def test_a_stop_string_may_span_many_pieces() -> None:
    assert cut(["</end>"], ["a <", "/", "e", "nd", "> b"]) == ("a ", "</end>")


def test_an_unfinished_stop_string_is_released() -> None:
    matcher = StopMatcher(["</end>"])
    assert matcher.push("a </en") == ("a ", None)
    assert matcher.push("try") == ("</entry", None)


@pytest.mark.parametrize("stops", [[], [""]])
def test_without_stop_strings_all_text_passes_at_once(stops: list[str]) -> None:
    assert StopMatcher(stops).push("text") == ("text", None)
