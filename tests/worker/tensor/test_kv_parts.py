"""KV stores of ranks with unequal shares: all must group the same rows, or their sums would not match."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import mlx.core as mx
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.models.cache import KVCache
from tests.examples import examples

from mlx_ring.models.tensor_shares import TensorSizes, part_of_kv, share_out
from mlx_ring.worker.kv import KVStore
from mlx_ring.worker.kv.bank_memory import STEP_BYTES

HEADS = 8
SHARES = share_out(TensorSizes(HEADS, HEADS, 64, 128, 0, 320), (6, 1, 1))
WIDTH = 64
STEP_BYTES_OF_ALL = 1 << 20
"""Bytes that all ranks together may move in a step: those of one block of a sequence."""

Passes = list[tuple[tuple[int, ...], tuple[int, ...]]]


class Rank:
    """Store of two layers, with some of the heads."""

    def __init__(self, heads: int, step_bytes: int) -> None:
        self._heads = heads
        self.store = KVStore([KVCache(), KVCache()], mx.float16, step_bytes=step_bytes)

    def step(self, work: Mapping[int, int]) -> tuple[bool, Passes]:
        """Step the rows; return whether they could have stayed in place, and the rows that shared each pass."""
        stays = self.store.stay(list(work.items()))
        batches = self.store.batches(list(work.items()))
        for batch in batches:
            shape = (len(batch.rows), self._heads, max(batch.counts), WIDTH)
            for cache in batch.caches:
                cache.update_and_fetch(mx.zeros(shape, mx.float16), mx.zeros(shape, mx.float16))
            mx.eval(batch.arrays)
            self.store.commit(batch)
        return stays, [(batch.rows, batch.counts) for batch in batches]


def ranks(step_bytes: Sequence[int], limit_bytes: int | None = None) -> list[Rank]:
    """Return a rank for each share; `step_bytes` are the bytes that each may move in a step."""
    made = [Rank(len(share.kv_heads), own_bytes) for share, own_bytes in zip(SHARES, step_bytes, strict=True)]
    for index, rank in enumerate(made):
        rank.store.limit(None if limit_bytes is None else part_of_kv(SHARES, index, limit_bytes))
    return made


def join_one_by_one(made: Sequence[Rank]) -> list[list[tuple[bool, Passes]]]:
    """Add a dozen sequences while the others decode; return the result of each step by rank."""
    seen: list[list[tuple[bool, Passes]]] = [[] for _ in made]
    for sequence in range(12):
        for rank in made:
            rank.store.open(sequence, 2048)
        for work in ({sequence: 300}, *(dict.fromkeys(range(sequence + 1), 1) for _ in range(4))):
            for steps, rank in zip(seen, made, strict=True):
                steps.append(rank.step(work))
    return seen


def test_stores_with_proportional_limits_group_the_same_rows() -> None:
    first, *others = join_one_by_one(
        ranks([part_of_kv(SHARES, rank, STEP_BYTES_OF_ALL) for rank in range(3)])
    )
    assert any(len(passes) > 1 for _, passes in first)
    assert all(steps == first for steps in others)


def test_stores_with_equal_limits_group_different_rows() -> None:
    """Show why limits must be proportional."""
    first, *others = join_one_by_one(ranks([STEP_BYTES_OF_ALL // 4] * 3))
    assert any(steps != first for steps in others)


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["step", "step", "step", "free", "trim", "retain"]),
        st.sets(st.integers(0, 5), min_size=1),
    ),
    min_size=4,
    max_size=14,
)


@examples(0.25)
@given(
    steps=STEPS,
    counts=st.lists(st.sampled_from([1, 1, 3, 40, 290]), min_size=6, max_size=6),
    limit=st.booleans(),
)
def test_stores_group_the_same_rows_after_any_operations(
    steps: list[tuple[str, set[int]]],
    counts: list[int],
    limit: bool,  # noqa: FBT001 - hypothesis passes by name
) -> None:
    made = ranks(
        [part_of_kv(SHARES, rank, STEP_BYTES_OF_ALL) for rank in range(3)],
        3 * STEP_BYTES_OF_ALL if limit else None,
    )
    known, retained = set[int](), set[int]()
    for what, sequences in steps:
        if what == "step":
            for sequence in sequences - known:
                for rank in made:
                    rank.store.open(sequence, 4096)
            known |= sequences
            work = {sequence: counts[sequence] for sequence in sorted(sequences - retained)}
            first, *others = [rank.step(work) for rank in made] if work else [None]
            assert all(other == first for other in others)
            continue
        for sequence in sorted(sequences & known):
            for rank in made:
                _operate(rank.store, what, sequence)
            if what == "free":
                known.remove(sequence)
            retained = (retained | {sequence} if what == "retain" else retained) & known


def _operate(store: KVStore, what: str, sequence: int) -> None:
    if what == "free":
        store.free(sequence)
    elif what == "trim":
        store.trim(sequence, store.length(sequence) // 2)
    else:
        store.retain(sequence)


def test_default_step_bytes_are_divided_without_remainder() -> None:
    assert sum(part_of_kv(SHARES, rank, STEP_BYTES) for rank in range(3)) == STEP_BYTES
