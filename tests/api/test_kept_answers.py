"""Deltas of kept answers: their encoding, and their cut into tokens."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mlx_ring.api.kept_answers import by_token, decode_delta, encode_delta
from mlx_ring.core.generation import Delta, RequestTimings
from mlx_ring.core.types import TokenLogprob

COUNTS = st.integers(0, 1 << 20)
TEXTS = st.text(max_size=8)
SCORES = st.floats(allow_nan=False, width=32)
LOGPROBS = st.builds(TokenLogprob, COUNTS, SCORES, st.lists(st.tuples(COUNTS, SCORES), max_size=3).map(tuple))


@st.composite
def deltas(draw: st.DrawFn) -> Delta:
    tokens = draw(st.lists(COUNTS, max_size=5))
    pieces = draw(st.lists(TEXTS, min_size=len(tokens) or 1, max_size=len(tokens) or 1))
    ends = draw(st.booleans())
    has_logprobs = draw(st.booleans())
    return Delta(
        text="".join(pieces),
        token_ids=tuple(tokens),
        logprobs=tuple(draw(LOGPROBS) for _ in tokens) if has_logprobs else (),
        prompt_tokens=draw(COUNTS),
        completion_tokens=len(tokens) + draw(COUNTS),
        cached_tokens=draw(COUNTS),
        finish_reason=draw(st.sampled_from(["stop", "length"])) if ends else None,
        stop_match=draw(st.none() | st.text(min_size=1, max_size=4)) if ends else None,
        prompt_logprobs=draw(st.none() | st.lists(st.none() | LOGPROBS, min_size=1, max_size=3).map(tuple)),
        timings=RequestTimings(0.5, 0.0, 1.25) if ends else None,
        pieces=tuple(pieces),
    )


@given(index=st.integers(0, 127), delta=deltas())
def test_decoded_delta_is_what_was_encoded(index: int, delta: Delta) -> None:
    assert decode_delta(encode_delta(index, delta)) == (index, delta)


@given(delta=deltas())
def test_cut_delta_has_the_same_parts_in_order(delta: Delta) -> None:
    parts = list(by_token(delta))
    assert all(len(part.token_ids) <= 1 for part in parts)
    assert sum((part.token_ids for part in parts), ()) == delta.token_ids
    assert sum((part.logprobs for part in parts), ()) == delta.logprobs
    assert "".join(part.text for part in parts) == delta.text
    assert sum((part.pieces for part in parts), ()) == delta.pieces
    *_, last = parts
    assert (last.completion_tokens, last.finish_reason) == (delta.completion_tokens, delta.finish_reason)
    assert (last.stop_match, last.timings) == (delta.stop_match, delta.timings)
    assert [part.finish_reason for part in parts[:-1]] == [None] * (len(parts) - 1)
    assert parts[0].prompt_logprobs == delta.prompt_logprobs
    counts = [part.completion_tokens for part in parts]
    assert counts == list(range(counts[-1] - len(parts) + 1, counts[-1] + 1))


@given(first=deltas(), second=deltas())
def test_cut_does_not_depend_on_how_tokens_came(first: Delta, second: Delta) -> None:
    tokens = [part.token_ids for delta in (first, second) for part in by_token(delta) if part.token_ids]
    joined = Delta("", first.token_ids + second.token_ids, (), 1, 9, pieces=first.pieces + second.pieces)
    assert [part.token_ids for part in by_token(joined) if part.token_ids] == tokens
