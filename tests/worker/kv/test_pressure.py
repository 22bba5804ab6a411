"""Memory of a KV store at its limit: no more than one layer is held twice, and no room is kept that no row needs."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence

import mlx.core as mx
import pytest
from mlx_lm.models.cache import KVCache
from tests.worker.kv.passes import feed, to_list

from mlx_ring.core.errors import StepFailed
from mlx_ring.rpc.protos import worker_pb2
from mlx_ring.worker.kv import KVStore
from mlx_ring.worker.kv.bank import Bank
from mlx_ring.worker.kv.layers import resized

pytestmark = pytest.mark.usefixtures("writing")

LAYERS, TOKENS = 12, 6000
ROUNDING = 1 << 20
"""Bytes of small arrays, and of what MLX rounds up."""


def append(store: KVStore, work: Mapping[int, Sequence[int]]) -> int:
    """Feed tokens; return the number of passes."""
    rows, batches = list(work.values()), store.batches([(key, len(row)) for key, row in work.items()])
    for batch in batches:
        feed(batch, rows)
        mx.eval(batch.arrays)
        store.commit(batch)
    return len(batches)


def store_with(rows: int, *, together: bool = True) -> KVStore:
    """Return a store whose sequences are in one bank, or each in its own; their first tokens are their ids."""
    store = KVStore([KVCache() for _ in range(LAYERS)], mx.float32)
    for sequence in range(rows):
        store.open(sequence, 2 * TOKENS)
        append(store, {sequence: [sequence, *range(1, TOKENS)]})
    while together and append(store, {sequence: [7] for sequence in range(rows)}) > 1:
        """They join as soon as there is room."""
    return store


def check_content(store: KVStore, sequence: int, length: int, first: int) -> None:
    assert store.length(sequence) == length
    for layer in range(LAYERS):
        keys, values = store.read(sequence, layer, (1, 2), (0, length))
        found = [token - 10_000 * layer for token in to_list(keys[0, :, 0])]
        assert found[:TOKENS] == [first, *range(1, TOKENS)][:length]
        assert mx.array_equal(keys, -values)


def added_bytes(store: KVStore, act: Callable[[], object]) -> int:
    """Return the most bytes that are held meanwhile beside those before."""
    gc.collect()
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    act()
    assert store.nbytes > 0
    return mx.get_peak_memory() - before


def layer_bytes(store: KVStore) -> int:
    return store.nbytes // LAYERS


def test_retaining_a_row_that_is_alone_holds_one_layer_twice() -> None:
    store = store_with(1)
    most = layer_bytes(store) + ROUNDING
    assert added_bytes(store, lambda: store.retain(0)) < most
    check_content(store, 0, store.length(0), 0)


@pytest.mark.parametrize("sequence", [0, 3])
def test_retaining_one_of_several_rows_at_the_limit_holds_one_layer_twice(sequence: int) -> None:
    store = store_with(4)
    held, most = store.nbytes, layer_bytes(store) + ROUNDING
    store.limit(held)
    assert added_bytes(store, lambda: store.retain(sequence)) < most
    assert store.nbytes <= held
    for kept in range(4):
        check_content(store, kept, store.length(kept), kept)


def test_rows_that_join_at_the_limit_are_moved_layer_by_layer() -> None:
    store = store_with(3, together=False)
    held, most = store.nbytes, layer_bytes(store) + ROUNDING
    store.limit(held)
    assert added_bytes(store, lambda: append(store, {0: [7], 1: [7], 2: [7]})) < most
    assert store.nbytes <= held
    assert append(store, {0: [7], 1: [7], 2: [7]}) == 1
    for sequence in range(3):
        check_content(store, sequence, TOKENS + 2, sequence)


def test_rows_that_are_kept_apart_are_moved_layer_by_layer() -> None:
    store = store_with(4)
    most, length = layer_bytes(store) + ROUNDING, store.length(0)
    kept = [worker_pb2.KeptSequence(sequence=each, kept_as=10 + each, length=length) for each in range(4)]
    assert added_bytes(store, lambda: store.keep(kept, moves=True)) < most
    for sequence in range(4):
        check_content(store, 10 + sequence, length, sequence)


def test_over_the_limit_a_freed_row_frees_its_bytes() -> None:
    store = store_with(8)
    held = store.nbytes
    store.limit(held * 7 // 8)
    store.free(2)
    assert store.nbytes <= held * 7 // 8
    for sequence in (0, 1, 3, 7):
        check_content(store, sequence, store.length(sequence), sequence)


def test_rows_that_are_freed_together_are_taken_out_of_a_bank_once(monkeypatch: pytest.MonkeyPatch) -> None:
    store, copied = store_with(8), list[int]()
    held = store.nbytes

    def record(plane: mx.array, axis: int, size: int) -> mx.array:
        if size != plane.shape[axis]:
            copied.append(size)
        return resized(plane, axis, size)

    monkeypatch.setattr("mlx_ring.worker.kv.bank_memory.resized", record)
    store.limit(held * 5 // 8)
    store.free(1, 4, 6)
    assert store.nbytes <= held * 5 // 8
    assert copied == [5] * 2 * LAYERS, "each array is resized once"
    for sequence in (0, 2, 3, 5, 7):
        check_content(store, sequence, store.length(sequence), sequence)


def test_a_lower_limit_frees_the_room_that_no_row_needs() -> None:
    store = store_with(1)
    needed = store.nbytes
    append(store, {0: [7] * 100})
    for _ in range(2 * LAYERS):
        append(store, {0: [7]})
    assert store.nbytes > needed, "there is room ahead"
    store.limit(needed)
    assert store.nbytes == needed
    append(store, {0: range(600)})
    check_content(store, 0, store.length(0), 0)


def test_rows_are_lost_if_a_layer_cannot_be_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    store, moved = store_with(2), 0
    copy_in = Bank.copy_in

    def fail_late(*arguments: object) -> None:
        nonlocal moved
        moved += 1
        if moved > LAYERS // 2:
            raise MemoryError("no room")
        copy_in(*arguments)  # pyright: ignore[reportArgumentType] - the same arguments

    with monkeypatch.context() as patch:
        patch.setattr(Bank, "copy_in", fail_late)
        with pytest.raises(MemoryError):
            store.retain(0)
    for sequence in range(2):
        with pytest.raises(StepFailed, match="lost its KV"):
            store.check(sequence, 1)
    store.free(0, 1)
    assert store.nbytes == 0
