"""Radix index of the prefix cache, compared with a list of token lists."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mlx_ring.engine.prefix_cache import PrefixIndex

TOKENS = st.lists(st.integers(0, 2), max_size=9).map(tuple)
CHANGES = st.lists(st.tuples(st.integers(0, 4), TOKENS | st.none()), max_size=25)


def _shared(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    return next(
        (place for place, (a, b) in enumerate(zip(one, other, strict=False)) if a != b),
        min(len(one), len(other)),
    )


@given(CHANGES, TOKENS)
def test_the_longest_shared_prefix_is_found_with_all_its_sequences(
    changes: list[tuple[int, tuple[int, ...] | None]], prompt: tuple[int, ...]
) -> None:
    index, known = PrefixIndex(), dict[int, tuple[int, ...]]()
    for sequence, tokens in changes:
        if tokens is None:
            index.remove(sequence)
            known.pop(sequence, None)
        else:
            index.put(sequence, tokens)
            known[sequence] = tokens
    assert len(index) == len(known)
    found = {length: set(holders) for length, holders in index.prefixes(prompt)}
    longest = max((_shared(tokens, prompt) for tokens in known.values()), default=0)
    assert max(found, default=0) == longest
    for length, holders in found.items():
        assert holders == {one for one, tokens in known.items() if _shared(tokens, prompt) >= length}
    for tokens in known.values():
        end = len(tokens)
        assert end == 0 or tokens != prompt[:end] or end in found, (
            "the end of a sequence is a point of its own"
        )


def test_longer_prefixes_come_first() -> None:
    index = PrefixIndex()
    index.put(1, (1, 2))
    index.put(2, (1, 2, 3, 4))
    assert [(length, list(holders)) for length, holders in index.prefixes((1, 2, 3, 9))] == [
        (3, [2]),
        (2, [1, 2]),
    ]


def test_prefixes_of_removed_sequences_are_forgotten() -> None:
    index = PrefixIndex()
    index.put(1, (1, 2, 3))
    index.put(2, (1, 2, 4))
    index.remove(1)
    index.remove(1)
    assert [length for length, _ in index.prefixes((1, 2, 3))] == [2]
    index.remove(2)
    assert list(index.prefixes((1, 2, 3))) == []
