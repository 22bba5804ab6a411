"""Proposals of prompt lookup, and their frequency."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mlx_ring.engine.prompt_lookup import DraftedStep, PromptLookup


def free_step(rows: int = 1) -> DraftedStep:
    """Return a step in which verification costs nothing."""
    return DraftedStep(rows, lambda _: 1.0)


def costly_step(each: float, rows: int = 1) -> DraftedStep:
    """Return a step to which every draft token adds this share of its time."""
    return DraftedStep(rows, lambda count: 1.0 + each * count)


def test_the_continuation_of_an_earlier_match_is_proposed() -> None:
    text = [1, 2, 3, 4, 5, 6, 7, 8, 9, 2, 3, 4]
    assert PromptLookup().propose(text, 0, 4, free_step()) == (5, 6, 7, 8)


def test_tokens_being_sampled_are_assumed_to_follow_the_match() -> None:
    text = [1, 2, 3, 4, 5, 6, 7, 8, 9, 2, 3, 4]
    assert PromptLookup().propose(text, 2, 3, free_step()) == (7, 8, 9)


def test_the_latest_match_counts() -> None:
    text = [1, 2, 3, 7, 0, 1, 2, 3, 8, 0, 1, 2, 3]
    assert PromptLookup().propose(text, 0, 2, free_step()) == (8, 0)


def test_a_longer_match_counts_before_a_later_one() -> None:
    text = [9, 8, 7, 1, 2, 3, 5, 0, 0, 1, 2, 3, 6, 9, 8, 7, 1, 2, 3]
    assert PromptLookup().propose(text, 0, 1, free_step()) == (5,)


def test_a_repeating_text_is_continued() -> None:
    assert PromptLookup().propose([1, 2, 1, 2, 1, 2], 0, 5, free_step()) == (1, 2, 1, 2, 1)


def test_text_without_repetition_has_no_proposal() -> None:
    assert PromptLookup().propose(list(range(50)), 0, 8, free_step()) == ()
    assert PromptLookup().propose([1, 2], 0, 8, free_step()) == ()


def test_rejected_proposals_become_ever_rarer() -> None:
    lookup, text = PromptLookup(), [1, 2, 3, 4, 1, 2, 3]
    proposed = 0
    for _ in range(2000):
        draft = lookup.propose(text, 0, 8, free_step())
        if draft:
            proposed += 1
            lookup.record_verified(len(draft), 0)
    assert 3 < proposed < 20


def test_proposals_resume_when_they_are_accepted_again() -> None:
    lookup, text = PromptLookup(), [1, 2, 3, 4, 1, 2, 3]
    for _ in range(20):
        if draft := lookup.propose(text, 0, 8, free_step()):
            lookup.record_verified(len(draft), 0)
    drafts = [lookup.propose(text, 0, 8, free_step()) for _ in range(600)]
    lookup.record_verified(1, 1)
    for draft in filter(None, (lookup.propose(text, 0, 8, free_step()) for _ in range(100))):
        lookup.record_verified(len(draft), len(draft))
    assert any(drafts)
    assert len(lookup.propose(text, 0, 8, free_step())) > 1


def test_expensive_verification_prevents_proposals() -> None:
    lookup, text = PromptLookup(), [1, 2, 3, 4, 5, 6, 1, 2, 3]
    assert lookup.propose(text, 0, 8, costly_step(1.0)) == ()
    assert len(lookup.propose(text, 0, 8, costly_step(0.01))) > 2


@given(st.lists(st.integers(0, 3), max_size=60), st.integers(0, 3), st.integers(1, 8))
def test_a_proposal_follows_an_earlier_match(text: list[int], unknown: int, most: int) -> None:
    lookup = PromptLookup()
    for end in range(0, len(text), 7):
        lookup.propose(text[:end], 0, most, free_step())
    draft = lookup.propose(text, unknown, most, free_step())
    assert len(draft) <= most
    if draft and not unknown:
        run = text[-3:]
        followers = {text[end] for end in range(3, len(text)) if text[end - 3 : end] == run}
        assert draft[0] in followers
