"""Choice of the rows that share a pass."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mlx_ring.worker.kv.bank_memory import SHORT_TOKENS
from mlx_ring.worker.kv.passes import (
    DECODE_TOKENS,
    SHORT_PROMPT_TOKENS,
    Candidate,
    group_even_rows,
    group_rows,
)


@st.composite
def candidates(draw: st.DrawFn) -> list[Candidate]:
    sizes = st.tuples(st.integers(0, 5000), st.integers(1, 600), st.integers(0, 3))
    return [Candidate(index, *size) for index, size in enumerate(draw(st.lists(sizes, max_size=20)))]


@given(candidates())
def test_each_row_runs_exactly_once(rows: list[Candidate]) -> None:
    for groups in (group_rows(rows), group_even_rows(rows)):
        assert sorted(index for group in groups for index in group) == list(range(len(rows)))


@given(candidates())
def test_rows_that_share_a_pass_have_similar_lengths(rows: list[Candidate]) -> None:
    for group in group_rows(rows):
        ends = [rows[index].end for index in group]
        banks = {rows[index].bank for index in group}
        most = 4 if len(banks) < len(group) else 2
        assert max(ends) <= SHORT_TOKENS or max(ends) <= most * min(ends)


@given(candidates())
def test_long_chunks_run_alone(rows: list[Candidate]) -> None:
    for group in group_rows(rows):
        if any(rows[index].count > SHORT_PROMPT_TOKENS for index in group):
            assert len(group) == 1


@given(candidates())
def test_even_rows_share_start_and_count(rows: list[Candidate]) -> None:
    for group in group_even_rows(rows):
        assert len({(rows[index].start, rows[index].count) for index in group}) == 1


def test_decoding_rows_share_a_pass_with_or_without_drafts() -> None:
    rows = [Candidate(index, 300 + index, count, 0) for index, count in enumerate((1, DECODE_TOKENS, 5, 1))]
    assert [sorted(group) for group in group_rows(rows)] == [[0, 1, 2, 3]]


def test_chunk_does_not_delay_decoding_rows() -> None:
    rows = [Candidate(0, 100, 1, 0), Candidate(1, 0, 128, 0), Candidate(2, 90, 1, 0)]
    assert [sorted(group) for group in group_rows(rows)] == [[0, 2], [1]]


def test_short_prompts_share_a_pass() -> None:
    rows = [Candidate(0, 0, 120, 0), Candidate(1, 0, 200, 0)]
    assert [sorted(group) for group in group_rows(rows)] == [[0, 1]]


def test_rests_of_prompts_after_a_cached_prefix_share_a_pass() -> None:
    rows = [Candidate(0, 300, 40, 0), Candidate(1, 320, 30, 0)]
    assert [sorted(group) for group in group_rows(rows)] == [[0, 1]]


def test_prompt_is_not_padded_to_more_than_twice_its_length() -> None:
    rows = [Candidate(0, 0, 20, 0), Candidate(1, 0, 200, 0)]
    assert [sorted(group) for group in group_rows(rows)] == [[1], [0]]


def test_row_in_the_others_bank_is_not_separated_at_half_their_length() -> None:
    two_banks = [Candidate(0, 2000, 1, 1), Candidate(1, 900, 1, 2)]
    one_bank = [Candidate(0, 2000, 1, 1), Candidate(1, 900, 1, 1)]
    assert len(group_rows(two_banks)) == 2
    assert len(group_rows(one_bank)) == 1
