"""What prompt look-up proposes, and when it stops asking."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mlx_ring.engine.prompt_lookup import DraftedStep, PromptLookup


def free(rows: int = 1) -> DraftedStep:
    """Of a step where verifying costs nothing."""
    return DraftedStep(rows, lambda _: 1.0)


def dear(each: float, rows: int = 1) -> DraftedStep:
    """Of a step to which every draft token adds so much of its time."""
    return DraftedStep(rows, lambda count: 1.0 + each * count)


def test_what_followed_the_last_tokens_before_is_proposed() -> None:
    text = [1, 2, 3, 4, 5, 6, 7, 8, 9, 2, 3, 4]
    assert PromptLookup().propose(text, 0, 4, free()) == (5, 6, 7, 8)


def test_tokens_that_are_being_sampled_are_taken_for_what_is_expected_of_them() -> None:
    text = [1, 2, 3, 4, 5, 6, 7, 8, 9, 2, 3, 4]
    assert PromptLookup().propose(text, 2, 3, free()) == (7, 8, 9)


def test_the_latest_occurrence_counts() -> None:
    text = [1, 2, 3, 7, 0, 1, 2, 3, 8, 0, 1, 2, 3]
    assert PromptLookup().propose(text, 0, 2, free()) == (8, 0)


def test_a_longer_run_counts_before_a_later_one() -> None:
    text = [9, 8, 7, 1, 2, 3, 5, 0, 0, 1, 2, 3, 6, 9, 8, 7, 1, 2, 3]
    assert PromptLookup().propose(text, 0, 1, free()) == (5,)


def test_a_circle_goes_on() -> None:
    assert PromptLookup().propose([1, 2, 1, 2, 1, 2], 0, 5, free()) == (1, 2, 1, 2, 1)


def test_new_text_proposes_nothing() -> None:
    assert PromptLookup().propose(list(range(50)), 0, 8, free()) == ()
    assert PromptLookup().propose([1, 2], 0, 8, free()) == ()


def test_what_is_never_right_is_asked_for_ever_more_seldom() -> None:
    lookup, text = PromptLookup(), [1, 2, 3, 4, 1, 2, 3]
    asked = 0
    for _ in range(2000):
        draft = lookup.propose(text, 0, 8, free())
        if draft:
            asked += 1
            lookup.record_verified(len(draft), 0)
    assert 3 < asked < 20


def test_what_becomes_right_again_is_asked_for_again() -> None:
    lookup, text = PromptLookup(), [1, 2, 3, 4, 1, 2, 3]
    for _ in range(20):
        if draft := lookup.propose(text, 0, 8, free()):
            lookup.record_verified(len(draft), 0)
    drafts = [lookup.propose(text, 0, 8, free()) for _ in range(600)]
    lookup.record_verified(1, 1)
    for draft in filter(None, (lookup.propose(text, 0, 8, free()) for _ in range(100))):
        lookup.record_verified(len(draft), len(draft))
    assert any(drafts)
    assert len(lookup.propose(text, 0, 8, free())) > 1


def test_dear_verification_is_not_asked_for() -> None:
    lookup, text = PromptLookup(), [1, 2, 3, 4, 5, 6, 1, 2, 3]
    assert lookup.propose(text, 0, 8, dear(1.0)) == ()
    assert len(lookup.propose(text, 0, 8, dear(0.01))) > 2


@given(st.lists(st.integers(0, 3), max_size=60), st.integers(0, 3), st.integers(1, 8))
def test_a_proposal_is_what_followed_some_earlier_occurrence(
    text: list[int], unknown: int, most: int
) -> None:
    lookup = PromptLookup()
    for end in range(0, len(text), 7):
        lookup.propose(text[:end], 0, most, free())
    draft = lookup.propose(text, unknown, most, free())
    assert len(draft) <= most
    if draft and not unknown:
        run = text[-3:]
        followers = {text[end] for end in range(3, len(text)) if text[end - 3 : end] == run}
        assert draft[0] in followers
