"""Saved windows and states: where a sequence can continue after saved blocks, under any split of the layers."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import ArraysCache, KVCache, RotatingKVCache
from tests.worker.kv.passes import ModelRun, difference, feed
from tests.worker.kv.small_models import small_model, tokens

from mlx_ring.core.errors import StepFailed
from mlx_ring.core.types import BLOCK_TOKENS, LayerRange
from mlx_ring.rpc.protos import step_pb2, worker_pb2
from mlx_ring.worker.kv import KVStore
from mlx_ring.worker.kv.block_files import Kind, fingerprint, kinds_of, to_host
from mlx_ring.worker.kv.disk import KvDisk

SIZE = 16
END = 3 * SIZE
DIGESTS = [bytes([number]) * 16 for number in range(8)]
NAME = fingerprint("this model")


def blocks(count: int) -> step_pb2.KvBlocks:
    return step_pb2.KvBlocks(block_tokens=SIZE, digests=DIGESTS[:count])


def layers_of(run: ModelRun) -> int:
    return len(run.own_caches())


def store_of(run: ModelRun, layers: tuple[int, int]) -> Any:
    """Return an empty store of some layers that has seen a first pass, as those of workers."""
    store: Any = KVStore(run.own_caches()[slice(*layers)], mx.float32)
    theirs: Any = run.store
    for mine, other in zip(store._layout.layers, theirs._layout.layers[slice(*layers)], strict=True):
        for part, known in zip(mine.parts, other.parts, strict=True):
            if hasattr(part, "planes"):
                part.planes, part.group_size = known.planes, known.group_size
    return store


def part_of(run: ModelRun, layers: tuple[int, int]) -> Any:
    """Return a store of some layers with what the run's store has of sequence 1, as a rank that computed it."""
    part, whole = store_of(run, layers), run.store
    part.open(1, 4096)
    for window in whole.windows:
        content = whole.content(1, (0, whole.length(1)), window)[slice(*layers)]
        for layer, arrays in enumerate(content):
            if arrays:
                part.fill(1, layer, (0, whole.length(1)), [*map(to_host, arrays)], window)
    if part.layers_with_states:
        part.fill_states(1, dict(enumerate(whole.states(1)[slice(*layers)])))
    part.adopt(1, whole.length(1))
    return part


def open_disk(folder: Path, store: Any, layers: tuple[int, int]) -> Any:
    return KvDisk(folder, 1 << 30, NAME, range(*layers), kinds_of(store, range(*layers)))


def save(disk: Any, store: Any, sequence: int, count: int) -> None:
    """Save blocks, and what layers that forget need at their end."""
    for end in (True, False):
        disk.save(store, step_pb2.Save(sequence=sequence, blocks=blocks(count), end=end))
    disk.settle()


def ask(disk: Any, count: int, *, only_looks: bool = False) -> tuple[int, list[int]]:
    """Return a fetch's answer."""
    answers: list[tuple[int, list[int]]] = []
    answered = threading.Event()

    def answer(fetched: worker_pb2.KvFetched) -> None:
        answers.append((fetched.blocks, list(fetched.ends)))
        answered.set()

    disk.fetch(worker_pb2.FetchKv(id=1, blocks=blocks(count), only_looks=only_looks), answer)
    assert answered.wait(60)
    return answers[0]


def restore(disk: Any, store: Any, sequence: int, count: int) -> None:
    assert ask(disk, count)[0] == count
    store.open(sequence, 4096)
    disk.adopt(store, step_pb2.Adopt(sequence=sequence, fetch=1, length=count * SIZE))
    assert store.length(sequence) == count * SIZE


def filled(family: str, *chunks: int) -> ModelRun:
    """Return a model with chunks of so many tokens in sequence 1."""
    run = ModelRun(small_model(family))
    run.open(1)
    for place, count in enumerate(chunks):
        run.step({1: tokens(count, place)})
    return run


@pytest.mark.parametrize(
    "family", ["gemma3_text", "gpt_oss", "llama4", "qwen3_next", "falcon_h1", "mamba2", "deepseek_v32"]
)
def test_layers_of_any_kind_continue_under_any_split_with_the_same_logits(
    tmp_path: Path, family: str
) -> None:
    run = filled(family, END)
    count = layers_of(run)
    for layers in ((0, 1), (1, count)):
        part = part_of(run, layers)
        save(open_disk(tmp_path, part, layers), part, 1, 3)
    for layers in ((0, 2), (count - 1, count)):
        other = store_of(run, layers)
        restore(open_disk(tmp_path, other, layers), other, 5, 3)
    target = ModelRun(run.model)
    target.store = store_of(run, (0, count))
    restore(open_disk(tmp_path, target.store, (0, count)), target.store, 7, 3)
    for place, size in enumerate((5, *[1] * 30, 40)):
        work = tokens(size, place)
        assert difference(run.step({1: work})[1], target.step({7: work})[7]) == 0.0


def test_window_that_spans_blocks_is_joined_from_them(tmp_path: Path) -> None:
    run = filled("gemma3_text", END)
    disk = open_disk(tmp_path, run.store, (0, 4))
    save(disk, run.store, 1, 3)
    have = [
        sorted(path.name for path in (tmp_path / NAME / digest.hex()).iterdir()) for digest in DIGESTS[:3]
    ]
    assert have == [["0-4"], ["0-4", "0-4.window-24"], ["0-4", "0-4.window-24"]]


@pytest.mark.parametrize(("moved", "ends"), [((SIZE,), [2, 3]), ((SIZE, 200), [2])], ids=["within", "beyond"])
def test_window_is_saved_while_it_is_in_memory(
    tmp_path: Path, moved: tuple[int, ...], ends: list[int]
) -> None:
    run = filled("gpt_oss", 2 * SIZE)
    disk = open_disk(tmp_path, run.store, (0, 4))
    save(disk, run.store, 1, 2)
    for place, count in enumerate(moved):
        run.step({1: tokens(count, place + 1)})
    save(disk, run.store, 1, 3)
    assert ask(disk, 3, only_looks=True) == (max(ends), ends)
    assert ask(disk, 3) == ((3, [3]) if 3 in ends else (0, []))
    assert disk._fetches.keys() == ({1} if 3 in ends else set())


def test_state_is_saved_only_where_the_sequence_stands(tmp_path: Path) -> None:
    run = filled("qwen3_next", SIZE)
    disk = open_disk(tmp_path, run.store, (0, 4))
    save(disk, run.store, 1, 1)
    run.step({1: tokens(SIZE + 1, 1)})
    save(disk, run.store, 1, 2)
    assert ask(disk, 2, only_looks=True) == (1, [1])
    store = store_of(run, (0, 4))
    restore(disk, store, 3, 1)
    with pytest.raises(StepFailed, match="cannot be cut from 16 to 8"):
        store.trim(3, 8)


def test_layers_without_any_other_content_need_the_state_alone(tmp_path: Path) -> None:
    run = filled("mamba2", END)
    disk = open_disk(tmp_path, run.store, (0, 2))
    save(disk, run.store, 1, 3)
    assert [path.name for path in tmp_path.glob("*/*/*")] == ["0-2.states"]
    assert ask(disk, 4, only_looks=True) == (3, [3])


def test_damaged_state_is_a_miss(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = filled("mamba2", END)
    disk = open_disk(tmp_path, run.store, (0, 2))
    save(disk, run.store, 1, 3)
    (file,) = tmp_path.glob("*/*/*")
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert ask(disk, 3) == (0, [])
    assert f"A block of KV is removed, {file}: layer 1 is damaged" in caplog.text
    assert not file.exists()


def test_fetch_for_one_length_is_adopted_at_no_other(tmp_path: Path) -> None:
    run = filled("gpt_oss", END)
    disk = open_disk(tmp_path, run.store, (0, 4))
    save(disk, run.store, 1, 3)
    ask(disk, 3)
    run.open(7)
    with pytest.raises(StepFailed, match="is for 48 tokens, not 32"):
        disk.adopt(run.store, step_pb2.Adopt(sequence=7, fetch=1, length=32))


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16, mx.float32])
def test_states_and_windows_of_any_type_are_restored_bit_for_bit(tmp_path: Path, dtype: mx.Dtype) -> None:
    stores: list[Any] = [KVStore([ArraysCache(3), RotatingKVCache(8), KVCache()], dtype) for _ in range(2)]
    for sequence, store in enumerate(stores, 1):
        store.open(sequence, 100)
        (batch,) = store.batches([(sequence, SIZE)])
        batch.caches[0][0] = mx.random.normal((1, 3, 5)).astype(dtype)
        batch.caches[0][2] = mx.random.normal((1, 4, 2, 2))
        for cache in batch.caches[1:]:
            keys = mx.random.normal((1, 2, SIZE, 8)).astype(dtype)
            mx.eval(cache.update_and_fetch(keys, -keys), *batch.arrays)
        store.commit(batch)
    first, second = stores
    disk = open_disk(tmp_path, first, (0, 3))
    save(disk, first, 1, 1)
    restore(disk, second, 9, 1)
    saved, (nothing, *_) = first.states(1), first.states(1)[1:]
    assert saved[0][1] is None
    assert nothing == ()
    pairs = [(saved[0][place], second.states(9)[0][place]) for place in (0, 2)]
    pairs += zip(first.content(1, (9, SIZE), 8)[1], second.content(9, (9, SIZE), 8)[1], strict=True)
    pairs += zip(first.content(1, (0, SIZE))[2], second.content(9, (0, SIZE))[2], strict=True)
    assert len(pairs) == 6
    for one, other in pairs:
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert mx.array_equal(one, other)
    assert second.states(9)[0][1] is None


@pytest.mark.parametrize(
    ("window", "needed", "held"),
    [
        (None, range(5), (64, 80)),
        (8, range(4, 5), (73, 80)),
        (17, range(4, 5), (64, 80)),
        (34, range(2, 5), (64, 80)),
    ],
)
def test_blocks_of_a_window(window: int | None, needed: range, held: tuple[int, int]) -> None:
    kind = Kind("" if window is None else "window", LayerRange(0, 1), (0,), window)
    assert (kind.blocks(5, SIZE), kind.tokens(4, SIZE)) == (needed, held)
    assert Kind("states", LayerRange(0, 1), (0,)).blocks(5, SIZE) == range(4, 5)


def test_layers_that_are_no_neighbours_have_files_of_their_own(tmp_path: Path) -> None:
    run = filled("qwen3_next", END)
    numbers = (0, 1, 5, 9)
    disk: Any = KvDisk(tmp_path, 1 << 30, NAME, numbers, kinds_of(run.store, numbers))
    save(disk, run.store, 1, 3)
    names = {path.name for path in (tmp_path / NAME / DIGESTS[2].hex()).iterdir()}
    assert names == {"0-2", "0-2.states", "5-6.states", "9-10"}
    part: Any = store_of(run, (2, 4))
    restore(KvDisk(tmp_path, 1 << 30, NAME, (5, 9), kinds_of(part, (5, 9))), part, 2, 3)
    assert ask(KvDisk(tmp_path, 1 << 30, NAME, (4, 5), kinds_of(part, (4, 5))), 3) == (0, [])


@pytest.mark.parametrize("window", [2, 128, 257, 300, 320, 448, 512, 600, 700, 1024])
def test_window_of_any_size_is_restored_at_the_end_of_a_block(tmp_path: Path, window: int) -> None:
    """Save a few tokens after the end, as the head learns of them late."""
    store: Any = KVStore([RotatingKVCache(window)], mx.float32)
    store.open(1, 4096)
    digests, end = [bytes([number]) * 16 for number in range(5)], 5 * BLOCK_TOKENS
    for count in (1100, 180, 8):
        (batch,) = store.batches([(1, count)])
        feed(batch, [tokens(count)])
        store.commit(batch)
    disk = open_disk(tmp_path, store, (0, 1))
    known = step_pb2.KvBlocks(block_tokens=BLOCK_TOKENS, digests=digests)
    disk.save(store, step_pb2.Save(sequence=1, blocks=known, end=True))
    disk.settle()
    answered, answers = threading.Event(), list[int]()

    def answer(fetched: worker_pb2.KvFetched) -> None:
        answers.append(fetched.blocks)
        answered.set()

    disk.fetch(worker_pb2.FetchKv(id=1, blocks=known), answer)
    assert answered.wait(60)
    assert answers == [5]
    store.open(2, 4096)
    disk.adopt(store, step_pb2.Adopt(sequence=2, fetch=1, length=end))
    needed = (end - max(1, window - 1), end)
    (mine,), (theirs,) = (store.content(number, needed, window) for number in (1, 2))
    assert all(mx.array_equal(*pair) for pair in zip(mine, theirs, strict=True))
