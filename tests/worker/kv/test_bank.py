"""Growth and shrinkage of banks in parts."""

from __future__ import annotations

import itertools

import mlx.core as mx
import pytest
from mlx_lm.models.cache import KVCache
from tests.worker.kv.test_kv_store import TOKEN_BYTES, append, content

from mlx_ring.worker.kv import KVStore
from mlx_ring.worker.kv.bank import Bank
from mlx_ring.worker.kv.bank_memory import GROWS_AHEAD
from mlx_ring.worker.kv.layers import resized

pytestmark = pytest.mark.usefixtures("writing")

LAYERS = 6


def slow_store() -> KVStore:
    """Return a store in which every step resizes one array, whatever its size."""
    return KVStore([KVCache() for _ in range(LAYERS)], mx.float32, step_bytes=1)


def bytes_of(tokens: int) -> int:
    return tokens * LAYERS * TOKEN_BYTES


def start_rows(store: KVStore, rows: int, tokens: int) -> None:
    """Open rows and append `tokens` tokens to each, all in one bank."""
    for sequence in range(rows):
        store.open(sequence, 4 * tokens)
    append(store, {sequence: range(tokens) for sequence in range(rows)})


def copied_bytes(monkeypatch: pytest.MonkeyPatch, tokens: int, fill_length: int, chunk: int = 512) -> int:
    """Return the bytes that are copied to make room while a prompt is prefilled in chunks."""
    store, copied, resize = KVStore([KVCache() for _ in range(2)], mx.float32), 0, resized

    def count(plane: mx.array, axis: int, size: int) -> mx.array:
        nonlocal copied
        copied += plane.nbytes if size != plane.shape[axis] else 0
        return resize(plane, axis, size)

    monkeypatch.setattr("mlx_ring.worker.kv.bank_memory.resized", count)
    store.open(1, tokens + 100, fill_length)
    for begin in range(0, tokens, chunk):
        append(store, {1: range(begin, begin + chunk)})
    assert content(store, 1) == [*range(tokens)]
    assert store.nbytes <= 2 * TOKEN_BYTES * (tokens + 256)
    return copied


def test_room_for_a_prompt_is_made_with_its_first_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = 16 * 1024
    assert copied_bytes(monkeypatch, tokens, 0) > 3 * 2 * TOKEN_BYTES * tokens
    assert copied_bytes(monkeypatch, tokens, tokens) == 0


def test_room_for_a_prompt_stays_within_the_limit_of_memory() -> None:
    store = KVStore([KVCache()], mx.float32)
    store.open(1, 10)
    append(store, {1: [1, 2]})  # from then on the size of a token is known
    store.limit(1000 * TOKEN_BYTES)
    store.open(2, 3000, 2000)
    append(store, {2: range(100)})
    assert store.nbytes <= 1000 * TOKEN_BYTES
    store.open(3, 3000, 600)
    append(store, {3: range(100)})
    assert content(store, 3) == [*range(100)]


def test_rows_that_share_a_bank_have_no_room_for_the_prompt_of_one() -> None:
    store = KVStore([KVCache()], mx.float32)
    for sequence in range(2):
        store.open(sequence, 4000, 3000)
    append(store, {0: range(20), 1: range(20)})
    assert store.nbytes <= 2 * 512 * TOKEN_BYTES


def test_row_steps_alone_until_there_is_a_slot_and_then_joins() -> None:
    store = slow_store()
    start_rows(store, 4, 300)
    store.open(9, 1200)
    append(store, {9: range(280)})
    together = [len(append(store, {key: [7] for key in [0, 1, 2, 3, 9]})) == 1 for _ in range(2 * LAYERS + 1)]
    assert together.index(True) >= LAYERS
    assert all(together[together.index(True) :])
    assert content(store, 9) == [*range(280), *[7] * len(together)]
    assert content(store, 3) == [*range(300), *[7] * len(together)]


def test_join_copies_only_a_part_of_the_other_rows() -> None:
    store = slow_store()
    start_rows(store, 4, 4000)
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
    start_rows(store, 2, 256 - GROWS_AHEAD)
    held = [store.nbytes]
    for _ in range(GROWS_AHEAD + 1):
        append(store, {0: [7], 1: [7]})
        held.append(store.nbytes)
    steps = [later - earlier for earlier, later in itertools.pairwise(held) if later != earlier]
    assert len(steps) == 2 * LAYERS
    assert sum(steps) == 2 * bytes_of(256)


def test_tokens_beyond_the_capacity_do_not_wait() -> None:
    store = slow_store()
    start_rows(store, 2, 250)
    append(store, {0: range(600), 1: [7]})
    assert content(store, 0) == [*range(250), *range(600)]
    assert content(store, 1) == [*range(250), 7]


def test_no_row_grows_beyond_its_maximum_length() -> None:
    store = slow_store()
    store.open(1, 260)
    append(store, {1: range(250)})
    for _ in range(10):
        append(store, {1: [7]})
    assert store.nbytes == bytes_of(260)


def test_reused_slots_hold_nothing_of_earlier_rows() -> None:
    store = slow_store()
    start_rows(store, 4, 300)
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


def test_longer_row_joins_too() -> None:
    store = slow_store()
    start_rows(store, 4, 300)
    store.open(9, 4000)
    append(store, {9: range(590)})
    together = [len(append(store, {row: [7] for row in (0, 1, 2, 3, 9)})) == 1 for _ in range(60)]
    assert together.index(True) <= 4 * LAYERS
    assert all(together[together.index(True) :])
    assert content(store, 9) == [*range(590), *[7] * 60]


def test_fork_without_memory_leaves_an_empty_row(monkeypatch: pytest.MonkeyPatch) -> None:
    store = slow_store()
    start_rows(store, 1, 300)
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


def test_counted_bytes_equal_those_of_the_arrays_at_every_step() -> None:
    store = slow_store()
    start_rows(store, 3, 300)
    for step in range(80):
        append(store, {row: [7] for row in range(3)})
        if step == 20:
            store.open(7, 900)
            append(store, {7: range(100)})
        arrays = {id(plane): plane.nbytes for bank in store_banks(store) for plane in bank.arrays()}
        assert store.nbytes == sum(arrays.values())


def store_banks(store: KVStore) -> list[Bank]:
    return store._banks._banks  # pyright: ignore[reportPrivateUsage] - nothing else shows its banks


def test_room_ahead_of_need_stays_within_the_limit() -> None:
    store = slow_store()
    store.limit(bytes_of(4 * 1280))
    start_rows(store, 4, 1100)
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


def test_row_joins_although_drafts_of_another_are_always_rejected() -> None:
    store = slow_store()
    start_rows(store, 1, 300)
    store.open(9, 1200)
    append(store, {9: range(280)})
    together: list[bool] = []
    for step in range(4 * LAYERS):
        together.append(len(append(store, {0: [7, 8], 9: [7]})) == 1)
        store.trim(0, 301 + step)
    assert any(together)
    assert all(together[together.index(True) :])


def test_capacity_grows_in_time_for_rows_with_many_tokens_a_step() -> None:
    store = slow_store()
    start_rows(store, 2, 256 - GROWS_AHEAD)
    changes: list[int] = []
    for _ in range(8):
        before = store.nbytes
        append(store, {0: [7] * 9, 1: [7] * 9})
        changes.append(store.nbytes - before)
    assert sum(changes) == 2 * bytes_of(256)
    assert max(changes) <= bytes_of(256), "half of all in one step would delay that step"
