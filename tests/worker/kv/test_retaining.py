"""Retained sequences: kept without spare room, forked by copy or taken over, and their memory."""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import ArraysCache, KVCache, RotatingKVCache
from tests.worker.kv.passes import HEADS, WIDTH, ModelRun, difference, feed, to_list
from tests.worker.kv.small_models import CONFIGURATIONS, small_model

from mlx_ring.core.errors import ProtocolError, StepFailed
from mlx_ring.worker.kv import KVStore

pytestmark = pytest.mark.usefixtures("writing")

TOKEN_BYTES = 2 * HEADS * WIDTH * 4


def append(store: KVStore, work: Mapping[int, Sequence[int]]) -> None:
    rows = list(work.values())
    for batch in store.batches([(sequence, len(row)) for sequence, row in work.items()]):
        mx.eval(feed(batch, rows), *batch.arrays)
        store.commit(batch)


def content(store: KVStore, sequence: int) -> list[float]:
    keys, _ = store.read(sequence, 0, (0, 1), (0, store.length(sequence)))
    return to_list(keys[0, :, 0])


def store_with(tokens: int, *caches: Any, **options: Any) -> KVStore:
    """Return a store whose sequence 1 has stepped beside sequence 2."""
    store = KVStore(list(caches) or [KVCache()], mx.float32, **options)
    for sequence in (1, 2):
        store.open(sequence, 2000)
    append(store, {1: range(tokens), 2: range(tokens)})
    return store


def test_retained_sequence_takes_only_the_bytes_of_its_tokens() -> None:
    store = store_with(300)
    store.free(2)
    store.retain(1)
    assert store.nbytes == 300 * TOKEN_BYTES
    assert content(store, 1) == list(range(300))


def test_retained_row_shares_no_memory_with_the_bank_it_left() -> None:
    tokens = 100 * 256
    store = KVStore([KVCache()], mx.float32)
    for sequence in (1, 2):
        store.open(sequence, 2 * tokens)
        append(store, {sequence: range(tokens)})
    append(store, {1: range(256), 2: range(256)})
    gc.collect()
    before = mx.get_active_memory()
    store.retain(1)
    store.free(2)
    gc.collect()
    freed = before - mx.get_active_memory()
    assert freed >= 0.9 * tokens * TOKEN_BYTES, "the bank is freed, and the retained row is not part of it"


def test_retaining_a_sequence_leaves_other_rows_in_place() -> None:
    store = store_with(300)
    store.retain(1)
    append(store, {2: [7]})
    assert content(store, 2) == [*range(300), 7]
    assert content(store, 1) == list(range(300))


def test_retained_sequence_cannot_be_stepped() -> None:
    store = store_with(20)
    store.retain(1)
    with pytest.raises(ProtocolError, match="kept for forks"):
        store.batches([(1, 1)])
    append(store, {2: [1]})


def test_fork_of_a_retained_sequence_continues_independently() -> None:
    store = store_with(300)
    store.retain(1)
    store.open(3, 1000)
    store.fork(1, 3, 100)
    append(store, {3: [5, 6], 2: [8]})
    assert content(store, 3) == [*range(100), 5, 6]
    assert content(store, 1) == list(range(300))


def test_fork_that_takes_its_source_moves_the_memory_and_closes_it() -> None:
    store = store_with(300)
    store.retain(1)
    store.open(3, 1000)
    before = store.nbytes
    store.fork(1, 3, 290, take=True)
    assert store.nbytes == before
    with pytest.raises(ProtocolError, match="not open"):
        store.length(1)
    append(store, {3: [5], 2: [8]})
    assert content(store, 3) == [*range(290), 5]


def test_refused_take_keeps_the_source() -> None:
    store = store_with(200, RotatingKVCache(8), slack=4)
    store.retain(1)
    store.open(3, 100)
    with pytest.raises(StepFailed):
        store.fork(1, 3, 5, take=True)
    assert store.length(1) == 200


def test_traits_give_a_sequences_size_and_where_it_can_be_cut() -> None:
    plain = store_with(4).traits()
    assert (plain.bytes_per_token, plain.bytes_per_sequence, plain.recurrent) == (TOKEN_BYTES, 0, False)
    sliding = store_with(4, KVCache(), RotatingKVCache(8), slack=4).traits()
    assert (sliding.slack, sliding.exact_length) == (4, 11)
    assert sliding.bytes_per_token == TOKEN_BYTES
    assert sliding.bytes_per_sequence >= 11 * TOKEN_BYTES


def test_traits_include_recurrent_states_once_a_sequence_was_freed() -> None:
    store = KVStore([ArraysCache(1)], mx.float32)
    store.open(1, 10)
    (batch,) = store.batches([(1, 1)])
    batch.caches[0][0] = mx.zeros((1, 5))
    store.commit(batch)
    store.free(1)
    assert (store.traits().recurrent, store.traits().bytes_per_sequence) == (True, 20)


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGURATIONS)
@pytest.mark.parametrize("take", [False, True])
def test_fork_of_a_retained_sequence_gives_the_same_logits_as_alone(name: str, *, take: bool) -> None:
    run = ModelRun(small_model(name))
    run.open(1, 2)
    prompt = [3, 1, 4, 1, 5, 9, 2, 6]
    run.step({1: prompt})
    run.store.retain(1)
    run.store.fork(1, 2, len(prompt), take=take)
    logits = run.step({2: [5, 3]})[2]
    assert difference(logits, run.alone([prompt, [5, 3]])) < 1e-4
