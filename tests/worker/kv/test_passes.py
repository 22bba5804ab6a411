"""Passes built on passes under way: begun, committed, undone or failed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import mlx.core as mx
import pytest
from mlx_lm.models.cache import KVCache
from tests.worker.kv.passes import feed, to_list

from mlx_ring.core.errors import StepFailed
from mlx_ring.worker.kv import Batch, KVStore

pytestmark = pytest.mark.usefixtures("writing")


def store_of(lengths: Mapping[int, int]) -> KVStore:
    """Return a store with sequences of those lengths, whose tokens are 1, 2, 3, ..."""
    store = KVStore([KVCache()], mx.float32)
    for sequence, length in lengths.items():
        store.open(sequence, 100)
        (batch,) = build(store, {sequence: range(1, length + 1)})
        finish(store, batch)
    return store


def build(store: KVStore, work: Mapping[int, Sequence[int]]) -> list[Batch]:
    """Begin passes over the work without evaluating them."""
    batches = store.batches([(sequence, len(row)) for sequence, row in work.items()])
    for batch in batches:
        batch.remember()
        feed(batch, list(work.values()))
        store.begin(batch)
    return batches


def finish(store: KVStore, batch: Batch) -> None:
    batch.forget()
    mx.eval(batch.arrays)
    store.commit(batch)


def content(store: KVStore, sequence: int) -> list[float]:
    keys, _ = store.read(sequence, 0, (0, 1), (0, store.length(sequence)))
    return to_list(keys[0, :, 0])


def test_pass_counts_once_begun_and_another_can_be_built_on_it() -> None:
    store = store_of({1: 3, 2: 5})
    (first,) = build(store, {1: [4], 2: [6]})
    assert (store.length(1), store.length(2)) == (4, 6)
    (second,) = build(store, {1: [5], 2: [7]})
    finish(store, first)
    finish(store, second)
    assert content(store, 1) == [1, 2, 3, 4, 5]
    assert content(store, 2) == [1, 2, 3, 4, 5, 6, 7]


def test_undone_pass_leaves_no_trace() -> None:
    store = store_of({1: 3, 2: 5})
    (first,) = build(store, {1: [4], 2: [6]})
    bank = first.members.bank
    planes = [mx.array(plane) for plane in bank.arrays()]
    second = build(store, {1: [50, 51], 2: [70]})
    store.undo(second)
    assert (store.length(1), store.length(2)) == (4, 6)
    finish(store, first)
    assert all(map(mx.array_equal, planes, bank.arrays()))
    (again,) = build(store, {1: [5]})
    finish(store, again)
    assert content(store, 1) == [1, 2, 3, 4, 5]
    assert content(store, 2) == [1, 2, 3, 4, 5, 6]


def test_pass_that_has_not_begun_can_be_undone() -> None:
    store = store_of({1: 3})
    batches = store.batches([(1, 2)])
    store.undo(batches)
    with pytest.raises(StepFailed, match="not the last one asked for"):
        store.begin(batches[0])
    assert content(store, 1) == [1, 2, 3]


def test_failed_pass_restores_its_sequences() -> None:
    store = store_of({1: 3, 2: 5})
    batches = build(store, {1: [4], 2: [6]})
    store.fail(batches)
    assert content(store, 1) == [1, 2, 3]
    assert content(store, 2) == [1, 2, 3, 4, 5]
    (batch,) = build(store, {1: [4]})
    finish(store, batch)
    assert content(store, 1) == [1, 2, 3, 4]


def test_row_can_join_while_the_others_pass_is_under_way() -> None:
    store = store_of({1: 3, 2: 5})
    (first,) = build(store, {1: [4]})
    first.forget()
    mx.async_eval(first.arrays)
    (second,) = build(store, {2: [6], 1: [5]})
    store.commit(first)
    finish(store, second)
    assert content(store, 1) == [1, 2, 3, 4, 5]
    assert content(store, 2) == [1, 2, 3, 4, 5, 6]
