"""Banks grow and shrink in parts."""

from __future__ import annotations

import itertools

import mlx.core as mx
import pytest
from mlx_lm.models.cache import KVCache
from tests.worker.kv.test_store import TOKEN_BYTES, append, content

from mlx_ring.worker.kv import KVStore
from mlx_ring.worker.kv.bank import Bank
from mlx_ring.worker.kv.grouping import GROWS_AHEAD

LAYERS = 6


def slow_store() -> KVStore:
    """Let every step resize one array, whatever its size."""
    return KVStore([KVCache() for _ in range(LAYERS)], mx.float32, step_bytes=1)


def bytes_of(tokens: int) -> int:
    return tokens * LAYERS * TOKEN_BYTES


def running(store: KVStore, rows: int, tokens: int) -> None:
    """Place rows together, in slots of `tokens` and a block."""
    for sequence in range(rows):
        store.open(sequence, 4 * tokens)
    append(store, {sequence: range(tokens) for sequence in range(rows)})


def test_a_row_joins_once_there_is_a_slot_and_steps_apart_until_then() -> None:
    store = slow_store()
    running(store, 4, 300)
    store.open(9, 1200)
    append(store, {9: range(280)})
    together = [len(append(store, {key: [7] for key in [0, 1, 2, 3, 9]})) == 1 for _ in range(2 * LAYERS + 1)]
    assert together.index(True) >= LAYERS
    assert all(together[together.index(True) :])
    assert content(store, 9) == [*range(280), *[7] * len(together)]
    assert content(store, 3) == [*range(300), *[7] * len(together)]


def test_a_join_copies_no_more_than_a_part_of_the_others() -> None:
    store = slow_store()
    running(store, 4, 4000)
    store.open(9, 8000)
    append(store, {9: range(3900)})
    for _ in range(2 * LAYERS + 1):
        mx.clear_cache()
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        append(store, {key: [7] for key in [0, 1, 2, 3, 9]})
        grown = bytes_of(6 * 4096 + 4096) // (2 * LAYERS)
        assert mx.get_peak_memory() - before < 2 * grown + bytes_of(4096)


def test_capacity_grows_in_parts_before_it_is_needed() -> None:
    store = slow_store()
    running(store, 2, 256 - GROWS_AHEAD)
    held = [store.nbytes]
    for _ in range(GROWS_AHEAD + 1):
        append(store, {0: [7], 1: [7]})
        held.append(store.nbytes)
    steps = [later - earlier for earlier, later in itertools.pairwise(held) if later != earlier]
    assert len(steps) == 2 * LAYERS
    assert sum(steps) == 2 * bytes_of(256)


def test_tokens_without_a_place_do_not_wait() -> None:
    store = slow_store()
    running(store, 2, 250)
    append(store, {0: range(600), 1: [7]})
    assert content(store, 0) == [*range(250), *range(600)]
    assert content(store, 1) == [*range(250), 7]


def test_no_row_grows_beyond_its_longest() -> None:
    store = slow_store()
    store.open(1, 260)
    append(store, {1: range(250)})
    for _ in range(10):
        append(store, {1: [7]})
    assert store.nbytes == bytes_of(260)


def test_slots_that_are_given_back_and_taken_again_hold_nothing_of_before() -> None:
    store = slow_store()
    running(store, 4, 300)
    for sequence in (1, 2, 3):
        store.free(sequence)
    append(store, {0: [7]})
    for sequence in (4, 5, 6):
        store.open(sequence, 1200)
        append(store, {sequence: [sequence]})
    for _ in range(4 * LAYERS):
        append(store, {0: [7], 4: [7] * 200, 5: [8], 6: [9]} if store.length(4) < 200 else {0: [7], 4: [7]})
    for sequence in (4, 5, 6):
        assert content(store, sequence)[0] == sequence
    assert content(store, 0) == [*range(300), *[7] * (4 * LAYERS + 1)]
    store.free(0)
    for sequence in (4, 5, 6):
        store.free(sequence)
    assert store.nbytes == 0


def test_a_longer_row_joins_too() -> None:
    store = slow_store()
    running(store, 4, 300)
    store.open(9, 4000)
    append(store, {9: range(590)})
    together = [len(append(store, {row: [7] for row in (0, 1, 2, 3, 9)})) == 1 for _ in range(60)]
    assert together.index(True) <= 4 * LAYERS
    assert all(together[together.index(True) :])
    assert content(store, 9) == [*range(590), *[7] * 60]


def test_a_fork_that_finds_no_memory_leaves_an_empty_row(monkeypatch: pytest.MonkeyPatch) -> None:
    store = slow_store()
    running(store, 1, 300)
    store.open(5, 1200)

    def no_memory(*_: object) -> None:
        raise MemoryError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(Bank, "take_copy", no_memory)
        with pytest.raises(MemoryError):
            store.fork(0, 5, 200)
    assert store.length(5) == 0
    store.fork(0, 5, 200)
    assert content(store, 5) == list(range(200))


def test_bytes_are_counted_as_they_come_and_go() -> None:
    store = slow_store()
    running(store, 3, 300)
    for step in range(80):
        append(store, {row: [7] for row in range(3)})
        if step == 20:
            store.open(7, 900)
            append(store, {7: range(100)})
        arrays = {id(plane): plane.nbytes for bank in store_banks(store) for plane in bank.arrays()}
        assert store.nbytes == sum(arrays.values())


def store_banks(store: KVStore) -> list[Bank]:
    return store._banks._banks  # pyright: ignore[reportPrivateUsage] - what it holds shows nowhere else


def test_room_ahead_of_need_is_made_within_the_limit_only() -> None:
    store = slow_store()
    store.limit(bytes_of(4 * 1280))
    running(store, 4, 1100)
    for _ in range(4 * LAYERS):
        append(store, {sequence: [7] for sequence in range(4)})
    assert store.nbytes == bytes_of(4 * 1280), "neither half as many slots again, nor a quarter of capacity"
    store.limit(bytes_of(4 * 1536))
    for _ in range(200):
        append(store, {sequence: [7] for sequence in range(4)})
    assert store.nbytes == bytes_of(4 * 1536)
    store.limit(bytes_of(5 * 1536))
    store.open(9, 4400)
    append(store, {9: range(1100)})
    for _ in range(4 * LAYERS):
        append(store, {sequence: [7] for sequence in (0, 1, 2, 3, 9)})
    assert store.nbytes == bytes_of(5 * 1536)
    assert content(store, 3) == [*range(1100), *[7] * (8 * LAYERS + 200)]


def test_a_row_joins_though_drafts_of_another_are_rejected_all_the_time() -> None:
    store = slow_store()
    running(store, 1, 300)
    store.open(9, 1200)
    append(store, {9: range(280)})
    together: list[bool] = []
    for step in range(4 * LAYERS):
        together.append(len(append(store, {0: [7, 8], 9: [7]})) == 1)
        store.trim(0, 301 + step)
    assert any(together)
    assert all(together[together.index(True) :])


def test_capacity_is_there_in_time_for_rows_that_take_many_tokens_a_step() -> None:
    store = slow_store()
    running(store, 2, 256 - GROWS_AHEAD)
    changes: list[int] = []
    for _ in range(8):
        before = store.nbytes
        append(store, {0: [7] * 9, 1: [7] * 9})
        changes.append(store.nbytes - before)
    assert sum(changes) == 2 * bytes_of(256)
    assert max(changes) <= bytes_of(256), "half of all in one step would be a step that waits for it"
