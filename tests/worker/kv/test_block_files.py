"""Files of saved KV: heads of any shares joined from the files of others, and the bytes written in a day."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from io import BytesIO
from itertools import pairwise
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.models.cache import KVCache
from tests.examples import examples

from mlx_ring.core.types import LayerRange, MemberRange
from mlx_ring.host import private_files
from mlx_ring.rpc.protos import step_pb2, worker_pb2
from mlx_ring.worker.kv import KVStore, block_writer
from mlx_ring.worker.kv.block_files import BlockFile, HeadShare, fingerprint, join_heads, read_header
from mlx_ring.worker.kv.disk import KvDisk

HEADS, LAYERS, SIZE, LENGTH = 8, 3, 16, 48
DIGESTS = [bytes([number]) * 16 for number in range(3)]
BLOCKS = step_pb2.KvBlocks(block_tokens=SIZE, digests=DIGESTS)
NAME = fingerprint("this model")
Split = list[tuple[LayerRange, HeadShare | None]]
"""Layers and heads of every rank."""


def split(shares: Sequence[int], layers: Sequence[int] = (LAYERS,)) -> Split:
    """Return ranks with shares of the heads, in stages of so many layers. One share is a rank without a group."""
    ends = [sum(shares[:place]) for place in range(len(shares) + 1)]
    scale = HEADS // ends[-1]
    heads = [HeadShare(MemberRange(a * scale, b * scale), HEADS) for a, b in pairwise(ends)]
    starts = [sum(layers[:place]) for place in range(len(layers) + 1)]
    return [
        (LayerRange(start, end), None if len(shares) == 1 else share)
        for start, end in pairwise(starts)
        for share in heads
    ]


def make_store(heads: int, layers: int, bits: int | None = None) -> Any:
    """Return an empty store that has seen a first pass."""
    store = KVStore([KVCache() for _ in range(layers)], mx.float32, kv_bits=bits)
    append(store, 0, 1, heads)
    store.free(0)
    return store


def append(store: Any, sequence: int, count: int, heads: int) -> None:
    store.open(sequence, 100)
    (batch,) = store.batches([(sequence, count)])
    for cache in batch.caches:
        keys = mx.random.normal((1, heads, count, 64))
        cache.update_and_fetch(keys, -keys)
    store.commit(batch)


def own_content(store: Any, layers: LayerRange, share: HeadShare | None) -> list[list[np.ndarray[Any, Any]]]:
    """Return what a rank has of the whole model's content."""
    first, end = (0, HEADS) if share is None else (share.own.start, share.own.end)
    content = store.content(1, (0, LENGTH))[layers.start : layers.end]
    return [[np.asarray(array)[first:end] for array in arrays] for arrays in content]


def save_by(folder: Path, whole: Any, ranks: Split, bits: int | None = None) -> list[Any]:
    """Save three blocks as ranks with these layers and heads; return their disks."""
    disks: list[Any] = []
    for layers, share in ranks:
        count = layers.end - layers.start
        store = make_store(HEADS if share is None else len(share.own), count, bits)
        store.open(1, 100)
        for layer, arrays in enumerate(own_content(whole, layers, share)):
            store.fill(1, layer, (0, LENGTH), arrays)
        store.adopt(1, LENGTH)
        disks.append(KvDisk(folder, 1 << 30, NAME, range(layers.start, layers.end), share=share))
        disks[-1].save(store, step_pb2.Save(sequence=1, blocks=BLOCKS))
        disks[-1].settle()
    return disks


def fetch(disk: Any) -> int:
    answers: list[int] = []
    answered = threading.Event()

    def answer(fetched: worker_pb2.KvFetched) -> None:
        answers.append(fetched.blocks)
        answered.set()

    disk.fetch(worker_pb2.FetchKv(id=1, blocks=BLOCKS), answer)
    assert answered.wait(60)
    return answers[0]


def check_restored(folder: Path, whole: Any, ranks: Split, bits: int | None = None) -> None:
    """Restore by ranks with these layers and heads, and compare every bit."""
    for layers, share in ranks:
        heads = HEADS if share is None else len(share.own)
        store = make_store(heads, layers.end - layers.start, bits)
        disk: Any = KvDisk(folder, 1 << 30, NAME, range(layers.start, layers.end), share=share)
        assert fetch(disk) == len(DIGESTS)
        store.open(7, 100)
        disk.adopt(store, step_pb2.Adopt(sequence=7, fetch=1, length=LENGTH))
        restored = store.content(7, (0, LENGTH))
        for mine, wanted in zip(restored, own_content(whole, layers, share), strict=True):
            assert all(np.array_equal(np.asarray(a), b) for a, b in zip(mine, wanted, strict=True))


def make_whole(bits: int | None = None) -> Any:
    mx.random.seed(3)
    whole = make_store(HEADS, LAYERS, bits)
    append(whole, 1, LENGTH, HEADS)
    return whole


@pytest.mark.parametrize(
    ("saved", "restored"),
    [
        (split((1,)), split((1, 1))),
        (split((1,)), split((3, 1), (1, 2))),
        (split((1, 1)), split((3, 1))),
        (split((2, 1, 1)), split((1, 3))),
        (split((1, 1)), split((1,))),
        (split((3, 1), (2, 1)), split((1,), (1, 2))),
        (split((1, 1), (1, 2)), split((1, 2, 1), (2, 1))),
        ([*split((1, 1), (1, 2))[:2], *split((1,), (1, 2))[1:]], split((5, 3))),
    ],
    ids=[
        "one_to_even",
        "stages_to_uneven",
        "even_to_uneven",
        "three_to_two",
        "two_to_one",
        "two_to_two_stages",
        "stages_and_shares",
        "group_and_single_rank",
    ],
)
@pytest.mark.parametrize("bits", [None, 8])
def test_heads_of_other_shares_are_restored_bit_for_bit(
    tmp_path: Path, saved: Split, restored: Split, bits: int | None
) -> None:
    whole = make_whole(bits)
    save_by(tmp_path, whole, saved, bits)
    check_restored(tmp_path, whole, restored, bits)


def file_names(folder: Path) -> set[str]:
    return {path.name for path in folder.glob("*/*/*")}


def test_content_that_all_ranks_have_is_stored_once(tmp_path: Path) -> None:
    whole, copies = make_whole(), [*split((1, 3)), split((1, 3))[1]]
    save_by(tmp_path, whole, copies)
    assert file_names(tmp_path) == {"0-3.heads-0-2-of-8", "0-3.heads-2-8-of-8"}
    save_by(tmp_path, whole, [*split((1,)), *split((1, 1), (1, 2))])
    assert file_names(tmp_path) == {"0-3.heads-0-2-of-8", "0-3.heads-2-8-of-8"}


def test_head_that_nobody_saved_counts_as_missing(tmp_path: Path) -> None:
    whole, (first, second) = make_whole(), split((3, 1))
    save_by(tmp_path, whole, [first])
    check_restored(tmp_path, whole, [first, split((1, 2, 1))[0]])
    for layers, share in (second, split((1, 1))[1], split((1,))[0]):
        assert fetch(KvDisk(tmp_path, 1 << 30, NAME, range(layers.start, layers.end), share=share)) == 0


def test_damaged_share_is_read_from_another_file_that_has_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole, (first, second) = make_whole(), split((1, 1))
    save_by(tmp_path, whole, [second, *split((1, 3))])
    file = tmp_path / NAME / DIGESTS[1].hex() / f"0-3{second[1]}"
    file.write_bytes(file.read_bytes()[:-9])
    check_restored(tmp_path, whole, [second, first])
    assert f"A block of KV is removed, {file}: layer 2 is damaged" in caplog.text


def test_damage_to_heads_that_are_not_read_is_not_noticed(tmp_path: Path) -> None:
    whole = make_whole()
    save_by(tmp_path, whole, split((1,)))
    file = tmp_path / NAME / DIGESTS[1].hex() / "0-3"
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    first, second = split((1, 1))
    check_restored(tmp_path, whole, [first])
    assert fetch(KvDisk(tmp_path, 1 << 30, NAME, range(LAYERS), share=second[1])) == 1


RANGES = st.tuples(st.integers(0, 7), st.integers(1, 8)).filter(lambda ends: ends[0] < ends[1])


@examples(0.5)
@given(have=st.lists(RANGES, max_size=5), wanted=st.none() | RANGES, whole=st.booleans())
def test_joined_heads_are_those_wanted_in_order(
    have: list[tuple[int, int]],
    wanted: tuple[int, int] | None,
    whole: bool,  # noqa: FBT001 - hypothesis passes by name
) -> None:
    layers = LayerRange(0, 1)
    files = [BlockFile(layers, "", HeadShare(MemberRange(*own), HEADS)) for own in have]
    files += [BlockFile(layers)] if whole else []
    share = None if wanted is None else HeadShare(MemberRange(*wanted), HEADS)
    joined = join_heads(files, 0, share)
    heads = set(range(*(wanted or (0, HEADS))))
    known = whole or heads <= {head for own in have for head in range(*own)}
    assert (joined is not None) == known
    read: list[int] = []
    for file, rows in joined or ():
        own = (0, HEADS) if file.share is None else (file.share.own.start, file.share.own.end)
        first, last = rows or (0, own[1] - own[0])
        assert 0 <= first < last <= own[1] - own[0]
        read += range(own[0] + first, own[0] + last)
    assert read == (sorted(heads) if known else [])


@pytest.mark.parametrize(
    "file",
    [
        BlockFile(LayerRange(0, 12)),
        BlockFile(LayerRange(3, 4), "states"),
        BlockFile(LayerRange(3, 4), "window-128", HeadShare(MemberRange(1, 3), 8)),
    ],
)
def test_name_says_what_a_file_has(file: BlockFile) -> None:
    assert BlockFile.parse(file.name) == file


@pytest.mark.parametrize("name", [".unfinished-x1", "0-5.old", "0-5.heads-0-2", "a-b", "written-today"])
def test_other_names_are_not_files_of_blocks(name: str) -> None:
    assert BlockFile.parse(name) is None


# ---- bytes in a day


def test_nothing_is_saved_beyond_the_bytes_of_a_day(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    today = [100]
    monkeypatch.setattr(private_files, "_today", lambda: today[0])
    whole = make_whole()
    one = sum(array.nbytes for arrays in whole.content(1, (0, SIZE)) for array in arrays)
    monkeypatch.setattr(block_writer, "_DAILY_SHARE", 2)
    disk: Any = KvDisk(tmp_path, one, NAME, range(LAYERS))

    def saved() -> int:
        disk.save(whole, step_pb2.Save(sequence=1, blocks=BLOCKS))
        disk.settle()
        return len([*tmp_path.glob("*/*/*")])

    monkeypatch.setattr("mlx_ring.worker.kv.block_writer.make_room", print)
    assert [saved(), saved()] == [2, 2]
    assert caplog.text.count("No more KV is saved today (UTC)") == 1
    assert disk._writer._pending_bytes == 0
    today[0] = 101
    assert saved() == 3


def test_block_that_is_larger_than_the_limit_is_not_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole = make_whole()
    one = sum(array.nbytes for arrays in whole.content(1, (0, SIZE)) for array in arrays)
    disk: Any = KvDisk(tmp_path, one - 1, NAME, range(LAYERS))
    for _ in range(2):
        disk.save(whole, step_pb2.Save(sequence=1, blocks=BLOCKS))
        disk.settle()
    assert [*tmp_path.iterdir()] == []
    assert caplog.text.count(f"No KV is saved in {tmp_path}: a block has ") == 1
    assert not disk._writer.can_write


def test_folder_is_kept_to_a_limit_that_is_lower_than_at_the_last_start(tmp_path: Path) -> None:
    whole = make_whole()
    disk = KvDisk(tmp_path, 1 << 30, NAME, range(LAYERS))
    disk.save(whole, step_pb2.Save(sequence=1, blocks=BLOCKS))
    disk.settle()
    sizes = [file.stat().st_size for file in tmp_path.glob("*/*/*")]
    KvDisk(tmp_path, sum(sizes) - 1, NAME, range(LAYERS)).settle()
    assert 0 < len([*tmp_path.glob("*/*/*")]) < len(sizes)


@pytest.mark.parametrize(
    ("content", "problem"), [(b"", "it is cut off"), (b"x" * 99, "it has another format")]
)
def test_damage_is_named(content: bytes, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        read_header(BytesIO(content), LayerRange(0, LAYERS))


def test_folder_that_is_a_file_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "kv").write_text("")
    disk = KvDisk(tmp_path / "kv", 1 << 30, NAME, range(LAYERS))
    disk.save(make_whole(), step_pb2.Save(sequence=1, blocks=BLOCKS))
    disk.settle()
    assert f"KV cannot be saved in {tmp_path / 'kv'}: it is no folder" in caplog.text
