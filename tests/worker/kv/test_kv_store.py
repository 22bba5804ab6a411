"""Sequences of a KV store, their errors and their bytes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import ConcatenateKVCache, KVCache, RotatingKVCache
from tests.worker.kv.passes import HEADS, WIDTH, feed, to_list

from mlx_ring.core.errors import ProtocolError, RingError, StepFailed
from mlx_ring.worker.kv import Batch, KVStore

pytestmark = pytest.mark.usefixtures("writing")

TOKEN_BYTES = 2 * HEADS * WIDTH * 4


def store_of(*caches: Any, **options: Any) -> KVStore:
    return KVStore(list(caches) or [KVCache()], mx.float32, **options)


def append(store: KVStore, work: Mapping[int, Sequence[int]]) -> list[Batch]:
    """Feed tokens; values are the negatives of keys, which name the tokens."""
    rows = list(work.values())
    batches = store.batches([(sequence, len(row)) for sequence, row in work.items()])
    for batch in batches:
        mx.eval(feed(batch, rows), *batch.arrays)
        store.commit(batch)
    return batches


def content(store: KVStore, sequence: int) -> list[float]:
    keys, _ = store.read(sequence, 0, (0, 1), (0, store.length(sequence)))
    return to_list(keys[0, :, 0])


def test_no_memory_is_held_before_the_first_token() -> None:
    store = store_of()
    store.open(1, 100_000)
    assert store.nbytes == 0
    assert store.length(1) == 0


def test_sequence_never_holds_more_than_its_maximum_length() -> None:
    store = store_of()
    store.open(1, 10)
    append(store, {1: [1, 2, 3]})
    assert store.nbytes == 10 * TOKEN_BYTES


def test_freed_bytes_are_released_at_once() -> None:
    store = store_of()
    for sequence in range(4):
        store.open(sequence, 2000)
        append(store, {sequence: range(700)})
    held = store.nbytes
    store.free(2)
    assert store.nbytes == held * 3 // 4


def test_bank_releases_bytes_when_half_its_rows_have_left() -> None:
    store = store_of()
    for sequence in range(4):
        store.open(sequence, 2000)
    append(store, {sequence: [1, 2] for sequence in range(4)})
    held = store.nbytes
    store.free(0)
    store.free(2)
    assert store.nbytes == held // 2
    assert content(store, 1) == content(store, 3) == [1.0, 2.0]


def test_slots_shrink_when_the_long_row_leaves() -> None:
    store = store_of()
    for sequence, count in ((1, 100), (2, 300), (3, 120)):
        store.open(sequence, 20_000)
        append(store, {sequence: range(count)})
    for _ in range(20):
        append(store, {1: range(16), 2: range(16), 3: range(16)})
    append(store, {2: range(9000)})
    store.free(2)
    assert store.nbytes <= 2 * 4 * 1024 * TOKEN_BYTES
    assert content(store, 3)[:120] == list(range(120))


def test_reset_frees_every_sequence() -> None:
    store = store_of()
    store.open(1, 50)
    append(store, {1: [1]})
    store.reset()
    assert store.nbytes == 0
    store.open(1, 50)
    assert store.length(1) == 0


def test_append_copies_no_earlier_tokens() -> None:
    store = store_of(*[KVCache() for _ in range(4)])
    for sequence in range(4):
        store.open(sequence, 9000)
        append(store, {sequence: range(8000 + sequence)})
    rows = {sequence: [1] for sequence in range(4)}
    append(store, rows)
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    append(store, rows)
    assert mx.get_peak_memory() - before < store.nbytes // 16


def test_freeing_a_row_copies_at_most_one_other_row() -> None:
    store = store_of(*[KVCache() for _ in range(8)])
    for sequence in range(8):
        store.open(sequence, 5000)
    append(store, {sequence: range(4000 if sequence else 3990) for sequence in range(8)})
    append(store, {sequence: [1] for sequence in range(8)})
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    store.free(3)
    assert mx.get_peak_memory() - before < store.nbytes // 16


def test_chunk_can_step_while_its_bank_loses_another_row() -> None:
    """Run two batches in one step, of which the second takes a row out of the first one's bank."""
    store = store_of()
    for sequence in range(6):
        store.open(sequence, 4000)
    append(store, {sequence: [sequence] for sequence in range(6)})
    append(store, {0: range(1500)})
    append(store, {sequence: [7] for sequence in (5, 2, 0)})
    append(store, {4: range(60), 1: [8], 5: [8], 3: [8]})
    assert content(store, 0)[-1] == 7.0
    assert content(store, 5) == [5.0, 7.0, 8.0]
    assert content(store, 1) == [1.0, 8.0]


def test_rows_that_decode_together_share_a_pass() -> None:
    store = store_of()
    for sequence in range(3):
        store.open(sequence, 1000)
        append(store, {sequence: range(20 + sequence)})
    (batch,) = append(store, {0: [1], 1: [1], 2: [1]})
    assert sorted(batch.rows) == [0, 1, 2]
    assert batch.counts == (1, 1, 1)


def test_without_ragged_rows_only_rows_of_one_length_share_a_pass() -> None:
    store = store_of(ragged=False)
    for sequence, count in enumerate((5, 5, 9)):
        store.open(sequence, 100)
        append(store, {sequence: range(count)})
    batches = append(store, {0: [1], 1: [1], 2: [1]})
    assert sorted(sorted(batch.rows) for batch in batches) == [[0, 1], [2]]
    assert all(isinstance(batch.offset, int) for batch in batches)


def test_sliding_layers_hold_a_window_and_some_slack() -> None:
    store = store_of(RotatingKVCache(16), slack=32)
    store.open(1, 100_000)
    for _ in range(6):
        append(store, {1: range(500)})
        append(store, {1: [1]})
    assert store.nbytes <= (16 + 32 + 64) * TOKEN_BYTES
    store.trim(1, store.length(1) - 32)
    with pytest.raises(StepFailed, match="window of 16 holds tokens from"):
        store.trim(1, 1000)


def test_leftovers_of_a_row_do_not_affect_the_next_one_in_its_slot() -> None:
    store = store_of()
    for sequence in range(4):
        store.open(sequence, 400)
    append(store, {sequence: [1, 2, 3, 4] for sequence in range(4)})
    append(store, {0: [float("nan")] * 5, 1: [1], 2: [1], 3: [1]})  # pyright: ignore[reportArgumentType] - a NaN for a token
    store.free(0)
    store.open(9, 400)
    append(store, {9: [1]})
    (batch,) = store.batches([(1, 9), (9, 1), (2, 1), (3, 1)])
    ((keys, _),) = feed(batch, [[1] * 9, [1], [1], [1]])
    assert not mx.isnan(keys).any().item()


ERRORS: dict[str, tuple[Callable[[KVStore], object], type[RingError], str]] = {
    "unknown sequence": (lambda store: store.length(9), ProtocolError, "Sequence 9 is not open"),
    "double open": (lambda store: store.open(1, 5), ProtocolError, "Sequence 1 is open already"),
    "no room": (lambda store: store.open(3, 0), ProtocolError, "room for 0 tokens"),
    "unknown free": (lambda store: store.free(9), ProtocolError, "Sequence 9 is not open"),
    "trim beyond": (lambda store: store.trim(1, 6), ProtocolError, "has 5 tokens; it cannot be cut to 6"),
    "fork beyond": (
        lambda store: store.fork(1, 2, 6),
        ProtocolError,
        "has 5 tokens and 2 takes 20; 6 cannot",
    ),
    "fork onto tokens": (lambda store: store.fork(2, 1, 0), ProtocolError, "only an empty one takes a fork"),
    "fork from nowhere": (lambda store: store.fork(9, 2, 0), ProtocolError, "Sequence 9 is not open"),
    "too many tokens": (
        lambda store: store.batches([(1, 16)]),
        ProtocolError,
        "opened for 20; 16 more do not fit",
    ),
    "sequence named twice": (
        lambda store: store.batches([(1, 1), (1, 1)]),
        ProtocolError,
        "names a sequence twice",
    ),
    "no tokens": (lambda store: store.batches([(1, 0)]), ProtocolError, "has 0 tokens"),
}


@pytest.mark.parametrize("name", sorted(ERRORS))
def test_invalid_operation_is_refused_and_changes_nothing(name: str) -> None:
    operation, kind, message = ERRORS[name]
    store = store_of()
    store.open(1, 20)
    store.open(2, 20)
    append(store, {1: [1, 2, 3, 4, 5]})
    with pytest.raises(kind, match=message):
        operation(store)
    assert content(store, 1) == [1, 2, 3, 4, 5]
    assert store.length(2) == 0


def test_batch_is_committed_once_and_only_while_it_is_the_last() -> None:
    store = store_of()
    store.open(1, 20)
    (batch,) = append(store, {1: [1]})
    with pytest.raises(StepFailed, match="not the last one asked for"):
        store.commit(batch)
    assert store.length(1) == 1


def test_keys_of_another_shape_than_the_batch_are_refused() -> None:
    store = store_of()
    store.open(1, 20)
    (batch,) = store.batches([(1, 2)])
    wrong = mx.zeros((1, HEADS, 3, WIDTH))
    with pytest.raises(StepFailed, match="1 rows of 2 tokens"):
        batch.caches[0].update_and_fetch(wrong, wrong)


def test_rows_that_lost_their_kv_in_a_failed_evaluation_are_refused() -> None:
    store = store_of()
    for sequence in (1, 2):
        store.open(sequence, 20)
    append(store, {1: [1], 2: [2]})
    (batch,) = store.batches([(1, 1)])
    broken = unevaluable(1, HEADS, 1, WIDTH)
    batch.caches[0].update_and_fetch(broken, broken)
    store.open(3, 20)
    with pytest.raises(StepFailed, match=r"Sequence 2 lost its KV in a step that failed"):
        store.batches([(2, 1)])
    append(store, {3: [3]})
    store.free(1)
    store.trim(2, 0)
    append(store, {2: [5]})
    assert content(store, 2) == [5.0]


def unevaluable(*shape: int) -> mx.array:
    """Return an array that only fails when it is evaluated, because zero has no inverse."""
    inverse = mx.linalg.inv(mx.zeros((2, 2)), stream=mx.cpu)
    return mx.broadcast_to(inverse[0, 0], shape)


def test_unknown_caches_stay_separate_objects() -> None:
    store = store_of(ConcatenateKVCache(), KVCache())
    for sequence in (1, 2):
        store.open(sequence, 20)
    batches = append(store, {1: [1, 2, 3], 2: [4]})
    assert [batch.rows for batch in batches] == [(0,), (1,)]
    with pytest.raises(StepFailed, match="a ConcatenateKVCache cannot go back"):
        store.trim(1, 2)


def test_cache_object_changed_by_a_failed_step_is_lost() -> None:
    store = store_of(ConcatenateKVCache())
    for sequence in (1, 2):
        store.open(sequence, 20)
    append(store, {1: [1, 2, 3], 2: [4]})
    (batch,) = store.batches([(1, 1)])
    feed(batch, [[9]])
    append(store, {2: [5]})
    with pytest.raises(StepFailed, match="Sequence 1 lost its KV"):
        append(store, {1: [6]})
    store.trim(1, 0)
    append(store, {1: [7]})
    assert (store.length(1), store.length(2)) == (1, 2)
