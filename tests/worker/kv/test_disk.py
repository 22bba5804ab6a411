"""Saved KV: written by ranks of one split, read by ranks of another; damaged, missing and unwritable files."""

from __future__ import annotations

import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any, BinaryIO, cast

import mlx.core as mx
import pytest
from mlx_lm.models.cache import ArraysCache, KVCache, RotatingKVCache
from tests.eventually import eventually
from tests.worker.kv.passes import ModelRun, difference
from tests.worker.kv.small_models import small_model, tokens

from mlx_ring.core.errors import StepFailed
from mlx_ring.rpc.protos import step_pb2, worker_pb2
from mlx_ring.worker.kv import KVStore, block_writer
from mlx_ring.worker.kv import disk as kv_disk
from mlx_ring.worker.kv.block_files import fingerprint
from mlx_ring.worker.kv.block_writer import make_room
from mlx_ring.worker.kv.disk import KvDisk
from mlx_ring.worker.sequences import SequenceTable

SIZE = 16
DIGESTS = [bytes([number]) * 16 for number in range(4)]
PLACE = b"p" * 16
LAYERS = 4
NAME = fingerprint("this model")


def blocks(count: int = len(DIGESTS)) -> step_pb2.KvBlocks:
    return step_pb2.KvBlocks(block_tokens=SIZE, digests=DIGESTS[:count])


def open_disk(folder: Path, layers: tuple[int, int] = (0, LAYERS), limit: int = 1 << 30) -> Any:
    return KvDisk(folder, limit, NAME, range(*layers))


def store_of(run: ModelRun, layers: tuple[int, int] = (0, LAYERS), **options: Any) -> KVStore:
    """Return an empty store of some layers that has seen a first pass, as those of workers."""
    store = KVStore(run.own_caches()[slice(*layers)], mx.float32, **options)
    for mine, theirs in zip(row_parts_of(store), row_parts_of(run.store)[slice(*layers)], strict=True):
        mine.planes, mine.group_size = theirs.planes, theirs.group_size
    return store


def row_parts_of(store: Any) -> Any:
    return store._layout.row_parts


def fetch(disk: Any, count: int = len(DIGESTS), number: int = 1) -> int:
    """Return how many blocks a fetch has found."""
    return fetch_next(disk, None, count, number)[0]


def fetch_next(
    disk: Any, text: Sequence[int] | None, count: int = len(DIGESTS), number: int = 1
) -> tuple[int, int]:
    """Return how many blocks a fetch has found, and how many tokens of the text after them."""
    answers: list[tuple[int, int]] = []
    answered = threading.Event()

    def answer(fetched: worker_pb2.KvFetched) -> None:
        answers.append((fetched.blocks, fetched.next_tokens))
        answered.set()

    following = None if text is None else step_pb2.ListedBlock(place=PLACE, tokens=text)
    disk.fetch(worker_pb2.FetchKv(id=number, blocks=blocks(count), next=following), answer)
    assert answered.wait(60)
    return answers[0]


def filled(family: str = "qwen3", **options: Any) -> ModelRun:
    """Return a model with 70 tokens of KV in sequence 1."""
    run = ModelRun(small_model(family), **options)
    run.open(1)
    run.step({1: tokens(70)})
    return run


def save_by(run: ModelRun, folder: Path, ranges: Sequence[tuple[int, int]]) -> None:
    """Save four blocks as ranks with these layers would, each with a store of its own."""
    for layers in ranges:
        store = store_of(run, layers)
        store.open(1, 70)
        for number, layer in enumerate(range(*layers)):
            heads = (0, heads_of(run, layer))
            store.write(1, number, heads, (0, 70), run.store.read(1, layer, heads, (0, 70)))
        store.adopt(1, 70)
        disk = open_disk(folder, layers)
        disk.save(store, step_pb2.Save(sequence=1, blocks=blocks()))
        disk.settle()


def heads_of(run: ModelRun, layer: int) -> int:
    return row_parts_of(run.store)[layer].planes[0].heads


@pytest.mark.parametrize("family", ["qwen3", "deepseek_v3"])
@pytest.mark.parametrize("ranges", [[(0, 4)], [(0, 1), (1, 3), (3, 4)], [(2, 4), (0, 2)]])
def test_kv_of_any_split_continues_with_the_same_logits(
    tmp_path: Path, family: str, ranges: list[tuple[int, int]]
) -> None:
    run = filled(family)
    save_by(run, tmp_path, ranges)
    disk = open_disk(tmp_path)
    assert fetch(disk) == len(DIGESTS)
    target = ModelRun(run.model)
    target.store = store_of(run)
    target.open(7)
    disk.adopt(target.store, step_pb2.Adopt(sequence=7, fetch=1, length=48))
    assert target.store.length(7) == 48
    run.store.trim(1, 48)
    for place in range(3):
        assert difference(run.step({1: [place]})[1], target.step({7: [place]})[7]) == 0.0


@pytest.mark.parametrize(("dtype", "bits"), [("bfloat16", None), ("float16", None), ("float32", 8)])
def test_types_and_quantized_kv_are_restored_bit_for_bit(
    tmp_path: Path, dtype: str, bits: int | None
) -> None:
    kind = getattr(mx, dtype)
    store, other = (KVStore([KVCache()], kind, kv_bits=bits) for _ in range(2))
    for each, sequence in ((store, 1), (other, 2)):
        each.open(sequence, 100)
        (batch,) = each.batches([(sequence, 70)])
        keys = mx.random.normal((1, 2, 70, 64)).astype(kind)
        mx.eval(batch.caches[0].update_and_fetch(keys, -keys), *batch.arrays)
        each.commit(batch)
    disk = open_disk(tmp_path, (0, 1))
    disk.save(store, step_pb2.Save(sequence=1, blocks=blocks()))
    disk.settle()
    assert fetch(disk) == len(DIGESTS)
    other.open(3, 100)
    disk.adopt(other, step_pb2.Adopt(sequence=3, fetch=1, length=64))
    for one, two in zip(store.read(1, 0, (0, 2), (0, 64)), other.read(3, 0, (0, 2), (0, 64)), strict=True):
        assert one.dtype == two.dtype
        assert mx.array_equal(one, two)


@pytest.mark.parametrize("parts", [1, 3, 7])
def test_rest_behind_the_full_blocks_continues_with_the_same_logits(tmp_path: Path, parts: int) -> None:
    run = filled()
    save_rest(run, tmp_path)
    disk = open_disk(tmp_path)
    assert fetch_next(disk, tokens(70)[64:]) == (4, 6)
    target = ModelRun(run.model)
    target.store = store_of(run)
    target.open(7)
    target.open(8)
    for part in range(parts):
        assert target.store.length(7) == 0
        adopt = step_pb2.Adopt(sequence=7, fetch=1, length=69, part=part, parts=parts)
        disk.adopt(target.store, adopt)
        target.step({8: [part]})  # others continue
    target.store.retain(7)
    target.open(9)
    target.store.fork(7, 9, 69)
    run.store.trim(1, 69)
    for place in range(3):
        assert difference(run.step({1: [place]})[1], target.step({9: [place]})[9]) == 0.0
    assert not disk._fetches


def save_rest(run: ModelRun, folder: Path, length: int = 70, layers: tuple[int, int] = (0, LAYERS)) -> bytes:
    """Save the four blocks and the rest of a text, and list that; return its digest."""
    digest = bytes([length]) * 16
    saved = step_pb2.KvBlocks(block_tokens=SIZE, digests=[*DIGESTS, digest], last_tokens=length - 64)
    listed = step_pb2.ListedBlock(place=PLACE, digest=digest, tokens=tokens(length)[64:])
    disk = open_disk(folder, layers)
    disk.save(run.store, step_pb2.Save(sequence=1, blocks=saved, listed=[listed]))
    disk.settle()
    return digest


def test_text_gets_as_many_tokens_of_a_listed_block_as_it_shares(tmp_path: Path) -> None:
    save_rest(filled(), tmp_path)
    disk, rest = open_disk(tmp_path), tokens(70)[64:]
    assert fetch_next(disk, [*rest[:4], 99, *rest[5:]]) == (4, 4)
    assert fetch_next(disk, [*rest, 7, 8, 9]) == (4, 6)
    assert fetch_next(disk, [99, *rest]) == (4, 0)
    assert fetch_next(disk, None) == (4, 0)


def test_rest_of_a_text_that_has_grown_replaces_the_shorter_one(tmp_path: Path) -> None:
    run = filled()
    shorter = save_rest(run, tmp_path, 66)
    longer = save_rest(run, tmp_path, 70)
    names = {path.name for path in (tmp_path / NAME).iterdir()}
    assert (shorter.hex() in names, longer.hex() in names) == (False, True)
    assert fetch_next(open_disk(tmp_path), tokens(70)[64:]) == (4, 6)


def test_rest_that_was_not_written_replaces_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = filled()
    save_rest(run, tmp_path, 66)
    with monkeypatch.context() as patch:
        patch.setattr(block_writer, "write_layers", fail_to_write)
        save_rest(run, tmp_path, 70)
    assert fetch_next(open_disk(tmp_path), tokens(70)[64:]) == (4, 2)


def test_rest_is_not_read_without_all_blocks_before_it_or_if_it_is_damaged(tmp_path: Path) -> None:
    digest = save_rest(filled(), tmp_path)
    disk, rest, folder = open_disk(tmp_path), tokens(70)[64:], tmp_path / NAME
    listed = folder / PLACE.hex() / "block"
    content = listed.read_bytes()
    for damage in (content[:-1], content[:-1] + b"x", b"", content[:30]):
        listed.write_bytes(damage)
        assert fetch_next(disk, rest) == (4, 0)
    listed.write_bytes(content)
    shutil.rmtree(folder / DIGESTS[2].hex())
    assert fetch_next(disk, rest) == (2, 0)
    damage_byte(folder / digest.hex() / "0-4")
    assert fetch_next(disk, rest, 2) == (2, 0)


def test_layers_that_nobody_saved_count_as_missing(tmp_path: Path) -> None:
    save_by(filled(), tmp_path, [(0, 2)])
    assert fetch(open_disk(tmp_path, (0, 2))) == len(DIGESTS)
    assert fetch(open_disk(tmp_path, (1, 3))) == 0
    assert fetch(KvDisk(tmp_path, 1 << 30, fingerprint("another"), range(2))) == 0


def damage_byte(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(content)


def damage_header(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[40] ^= 1
    file.write_bytes(content)


def cut_off(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-100])


def empty(file: Path) -> None:
    file.write_bytes(b"")


def make_folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


@pytest.mark.parametrize("damage", [damage_byte, damage_header, cut_off, empty, make_folder, Path.unlink])
def test_damaged_or_missing_file_ends_what_is_restored_before_it(
    tmp_path: Path, damage: Any, caplog: pytest.LogCaptureFixture
) -> None:
    save_by(filled(), tmp_path, [(0, 4)])
    file = tmp_path / NAME / DIGESTS[2].hex() / "0-4"
    damage(file)
    assert fetch(open_disk(tmp_path)) == 2
    assert damage is Path.unlink or str(file) in caplog.text


def fail_to_write(*_: object) -> None:
    raise OSError(28, "No space left on device")


def test_full_disk_is_a_warning_and_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = filled()
    disk = open_disk(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(block_writer, "write_layers", fail_to_write)
        disk.save(run.store, step_pb2.Save(sequence=1, blocks=blocks()))
        disk.settle()
    assert [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING] == [
        f"KV cannot be saved in {tmp_path}: No space left on device"
    ]
    assert not [path for path in tmp_path.glob("*/*/*") if path.is_file()]
    assert disk._writer._pending_bytes == 0
    disk.save(run.store, step_pb2.Save(sequence=1, blocks=blocks()))
    disk.settle()
    assert fetch(disk) == len(DIGESTS)


@pytest.mark.parametrize("part", [0, 1000])
def test_only_bytes_that_were_written_count_for_the_day(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, part: int
) -> None:
    def fill(file: BinaryIO, _: object) -> None:
        file.write(b"." * part)
        file.flush()
        fail_to_write()

    run = filled()
    save_by(run, tmp_path / "other", [(0, LAYERS)])
    one = (tmp_path / "other" / NAME / DIGESTS[0].hex() / "0-4").stat().st_size
    # In a day, five blocks may be written.
    disk = open_disk(tmp_path / "kv", limit=one)
    with monkeypatch.context() as patch:
        patch.setattr(block_writer, "write_layers", fill)
        for _ in range(3):
            disk.save(run.store, step_pb2.Save(sequence=1, blocks=blocks()))
            disk.settle()
    assert int((tmp_path / "kv" / "written-today").read_text().split()[1]) == 3 * len(DIGESTS) * part
    assert "No more KV is saved today" not in caplog.text
    assert disk._writer.has_room(may_wait=False)
    if not part:
        disk.save(run.store, step_pb2.Save(sequence=1, blocks=blocks(1)))
        disk.settle()
        assert fetch(disk, 1) == 1


def test_blocks_used_while_a_clock_was_ahead_are_removed_first(tmp_path: Path) -> None:
    """Let the clock have been a month ahead when the first two blocks were used last."""
    run = filled()
    save_by(run, tmp_path, [(0, LAYERS)])
    saved = sum(path.stat().st_size for path in tmp_path.glob("*/*/*"))
    month = time.time() + 30 * 86400
    for number in (0, 1):
        os.utime(tmp_path / NAME / DIGESTS[number].hex(), (month, month - number))
    make_room(tmp_path, saved - 1)
    left = {path.name for path in tmp_path.glob("*/*")}
    assert left == {DIGESTS[number].hex() for number in (0, 2, 3)}


def test_damaged_file_that_cannot_be_removed_counts_as_missing_until_it_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(30, "Read-only file system")

    run = filled()
    save_by(run, tmp_path, [(0, LAYERS)])
    file = tmp_path / NAME / DIGESTS[2].hex() / "0-4"
    damage_byte(file)
    disk = open_disk(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", refuse)
        assert fetch(disk) == 2
    (kind,) = disk._kinds
    assert file.exists()
    assert not disk._blocks.has(DIGESTS[2], kind)
    assert not disk._blocks.find(DIGESTS[2], [kind])
    assert "is damaged and cannot be removed (Read-only file system)" in caplog.text
    assert "Traceback" not in caplog.text
    disk.save(run.store, step_pb2.Save(sequence=1, blocks=blocks()))
    disk.settle()
    assert fetch(disk) == len(DIGESTS)


def test_blocks_of_other_owners_are_removed(tmp_path: Path) -> None:
    """Remove those whose names end with another owner; keep those without one, and what is no block."""
    run, disk = filled(), open_disk(tmp_path)
    owners = [bytes([place]) * 16 for place in (7, 8)]
    names = [DIGESTS[0], *(DIGESTS[0] + owner for owner in owners)]
    for name in names:
        one = step_pb2.KvBlocks(block_tokens=SIZE, digests=[name])
        disk.save(run.store, step_pb2.Save(sequence=1, blocks=one))
    disk.settle()
    (tmp_path / NAME / "notes").mkdir()
    found = partial(lambda: {path.name for path in (tmp_path / NAME).iterdir()})
    assert found() == {"notes", *(name.hex() for name in names)}
    left = {(): 3, (b"", owners[0]): 2, (b"",): 1}
    for known, count in left.items():
        answered = SimpleQueue[worker_pb2.KvFetched]()
        disk.fetch(worker_pb2.FetchKv(id=9, only_looks=True, owners=known), answered.put)
        answered.get(timeout=60)
        disk.settle()
        assert found() == {"notes", *(name.hex() for name in names[:count])}
    assert fetch(disk, 1) == 1


def test_folder_that_is_removed_is_made_again(tmp_path: Path) -> None:
    run, folder = filled(), tmp_path / "kv"
    disk = open_disk(folder)
    for _ in range(2):
        disk.save(run.store, step_pb2.Save(sequence=1, blocks=blocks()))
        disk.settle()
        assert fetch(disk) == len(DIGESTS)
        assert folder.stat().st_mode & 0o777 == 0o700
        folder.rename(tmp_path / f"gone-{len([*tmp_path.iterdir()])}")
        assert fetch(disk) == 0


def test_path_that_is_no_folder_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "kv").write_text("a file")
    disk = open_disk(tmp_path / "kv")
    disk.save(filled().store, step_pb2.Save(sequence=1, blocks=blocks()))
    disk.settle()
    assert "cannot be saved" in caplog.text
    assert fetch(disk) == 0


def test_blocks_used_least_recently_are_removed_and_later_ones_of_a_text_first(tmp_path: Path) -> None:
    run = filled()
    save_by(run, tmp_path, [(0, 4)])
    one = sum(path.stat().st_size for path in (tmp_path / NAME / DIGESTS[0].hex()).iterdir())
    old, others = tmp_path / fingerprint("old") / (b"o" * 16).hex(), tmp_path / "photos" / "2019"
    others.mkdir(parents=True)
    (others / "beach.jpg").write_bytes(b"." * 10 * one)
    os.utime(others, (0, 0))
    old.mkdir(parents=True)
    (old / "0-9").write_bytes(b"." * one)
    os.utime(old, (0, 0))
    disk = open_disk(tmp_path)
    disk.settle()
    # Only the save makes room, not the start.
    disk._writer._limit = 4 * one
    extra = step_pb2.KvBlocks(block_tokens=SIZE, digests=[b"x" * 16])
    disk.save(run.store, step_pb2.Save(sequence=1, blocks=extra))
    disk.settle()
    left = sorted(path.name for path in tmp_path.glob("*/*"))
    assert left == sorted(["2019", DIGESTS[0].hex(), DIGESTS[1].hex(), (b"x" * 16).hex()])
    assert (others / "beach.jpg").exists()


def test_kv_of_other_models_or_versions_is_named_once_when_a_worker_starts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    save_by(filled(), tmp_path, [(0, LAYERS)])
    own = open_disk(tmp_path)
    own.settle()
    assert "are KV of other models" not in caplog.text
    size = sum(file.stat().st_size for file in (tmp_path / NAME).rglob("*") if file.is_file())
    other: Any = KvDisk(tmp_path, 1 << 30, fingerprint("another version"), range(LAYERS))
    other.settle()
    assert caplog.text.count("are KV of other models, types or versions") == 1
    assert f"{size / 1e6:.1f} MB of the {size / 1e6:.1f} MB in {tmp_path}" in caplog.text


def test_saved_block_is_not_copied_again_and_one_that_was_not_asked_for_is_not_saved(tmp_path: Path) -> None:
    run = filled()
    disk = open_disk(tmp_path)
    disk.save(run.store, step_pb2.Save(sequence=1, blocks=blocks(), first=2))
    disk.settle()
    assert sorted(path.name for path in (tmp_path / NAME).iterdir()) == [each.hex() for each in DIGESTS[2:]]
    run.store.free(1)
    disk.save(
        run.store, step_pb2.Save(sequence=1, blocks=blocks(), first=2)
    )  # would fail if it read anything


@pytest.mark.parametrize("may_wait", [False, True])
def test_save_gives_up_on_a_slow_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, *, may_wait: bool
) -> None:
    monkeypatch.setattr(block_writer, "_MOST_PENDING", 0)
    monkeypatch.setattr(block_writer, "_SLOW_S", 0.01 if may_wait else 3600.0)
    goes_on, kind = threading.Event(), cast("Any", block_writer.BlockWriter)
    write = kind._write

    def wait(writer: Any, *given: Any) -> None:
        goes_on.wait(60)
        write(writer, *given)

    monkeypatch.setattr(kind, "_write", wait)
    disk = open_disk(tmp_path)
    disk.save(filled().store, step_pb2.Save(sequence=1, blocks=blocks(), may_wait=may_wait))
    assert "slow disk" in caplog.text
    goes_on.set()
    disk.settle()
    assert fetch(disk) == 1


def test_save_copies_as_many_blocks_as_it_may_and_the_first_missing_ones(tmp_path: Path) -> None:
    run, disk = filled(), open_disk(tmp_path)
    for saved in (2, 4, 4):
        disk.save(run.store, step_pb2.Save(sequence=1, blocks=blocks(), most=2))
        disk.settle()
        assert fetch(disk) == saved
    shutil.rmtree(tmp_path / NAME / DIGESTS[1].hex())
    assert fetch(disk) == 1
    disk.save(run.store, step_pb2.Save(sequence=1, blocks=blocks(), most=2))
    disk.settle()
    assert fetch(disk) == 4


def count_for_save(disk: Any) -> int:
    """Return how many blocks a rank need not save."""
    answered, counts = threading.Event(), list[int]()

    def answer(fetched: worker_pb2.KvFetched) -> None:
        counts.append(fetched.blocks)
        answered.set()

    disk.fetch(worker_pb2.FetchKv(id=9, blocks=blocks(), only_looks=True, for_save=True), answer)
    assert answered.wait(60)
    return counts[0]


def test_blocks_that_need_not_be_saved_are_counted_after_those_that_are_being_written(tmp_path: Path) -> None:
    run, disk = filled(), open_disk(tmp_path)
    assert count_for_save(disk) == 0
    disk.save(run.store, step_pb2.Save(sequence=1, blocks=blocks()))
    assert count_for_save(disk) == len(DIGESTS)
    shutil.rmtree(tmp_path / NAME / DIGESTS[2].hex())
    assert count_for_save(disk) == 2
    disk.save(run.store, step_pb2.Save(sequence=1, blocks=blocks(), first=2, most=1))
    assert count_for_save(disk) == len(DIGESTS)


def test_a_rank_that_cannot_write_needs_no_block_to_be_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, disk = filled(), open_disk(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(block_writer, "write_layers", fail_to_write)
        disk.save(run.store, step_pb2.Save(sequence=1, blocks=blocks()))
        assert count_for_save(disk) == len(DIGESTS)
    monkeypatch.setattr(disk._writer, "_retries_at", 0.0)
    assert count_for_save(disk) == 0


def test_no_more_is_read_than_memory_has_room_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run, disk = filled(), open_disk(tmp_path)
    disk.save(run.store, step_pb2.Save(sequence=1, blocks=blocks()))
    disk.settle()
    size = sum(file.stat().st_size for file in (tmp_path / NAME / DIGESTS[0].hex()).iterdir())
    monkeypatch.setattr(kv_disk, "_CHECK_BYTES", 1)
    monkeypatch.setattr(kv_disk, "_SPARE_BYTES", 0)
    room = SimpleNamespace(available_bytes=2.5 * size)
    monkeypatch.setattr(kv_disk, "usable_memory", lambda: room)
    assert fetch(disk) == 2
    assert "Memory has no room for more than" in caplog.text
    room.available_bytes = 1 << 40
    assert fetch(disk, number=2) == len(DIGESTS)


def test_damaged_block_is_saved_again(tmp_path: Path) -> None:
    run = filled()
    save_by(run, tmp_path, [(0, 4)])
    damage_byte(tmp_path / NAME / DIGESTS[0].hex() / "0-4")
    disk = open_disk(tmp_path)
    assert fetch(disk) == 0
    disk.save(run.store, step_pb2.Save(sequence=1, blocks=blocks()))
    disk.settle()
    assert fetch(disk) == len(DIGESTS)


def test_failed_save_fails_no_step(caplog: pytest.LogCaptureFixture) -> None:
    def fail(*_: object) -> None:
        raise OSError(5, "Input/output error")

    table = SequenceTable(filled().store, 101, None, cast("Any", SimpleNamespace(save=fail)))
    assert table.apply([step_pb2.CacheOperation(save=step_pb2.Save(sequence=1, blocks=blocks()))]) == {}
    assert "sequence 1 is not saved: [Errno 5]" in caplog.text


class HangingDisk:
    """Disk that reads one block and no other before it is released."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        save_by(filled(), folder, [(0, 4)])
        kind: Any = KvDisk
        read = kind._read_block
        self.hangs, self.goes_on = threading.Event(), threading.Event()

        def hang(disk: Any, fetch: Any, digest: bytes, *more: Any) -> Any:
            if digest != DIGESTS[0]:
                self.hangs.set()
                self.goes_on.wait(60)
            return read(disk, fetch, digest, *more)

        monkeypatch.setattr(KvDisk, "_read_block", hang)
        self.disk = open_disk(folder)
        self.answers: list[tuple[int, int]] = []
        self.began: dict[int, bool] = {}
        """Answered fetches, and whether their reading had begun."""

    def fetch(self, number: int, *, only_looks: bool = False) -> None:
        def answer(fetched: worker_pb2.KvFetched) -> None:
            self.answers.append((number, fetched.blocks))
            self.began[number] = fetched.read_s > 0

        self.disk.fetch(worker_pb2.FetchKv(id=number, blocks=blocks(), only_looks=only_looks), answer)

    def release(self) -> None:
        self.goes_on.set()
        eventually(lambda: self.disk._reader.is_idle, bool)


@pytest.fixture
def expire(monkeypatch: pytest.MonkeyPatch) -> list[Callable[[], None]]:
    """Return functions that let the time of fetches be over, in the order of their turns."""
    expire: list[Callable[[], None]] = []

    class Timer(threading.Timer):
        def start(self) -> None:
            assert self.interval == 10
            expire.append(partial(self.function, *self.args))

    monkeypatch.setattr(threading, "Timer", Timer)
    return expire


def test_blocks_are_counted_while_others_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hanging = HangingDisk(tmp_path, monkeypatch)
    hanging.fetch(1)
    assert hanging.hangs.wait(60)
    hanging.fetch(2, only_looks=True)
    assert eventually(lambda: [*hanging.answers]) == [(2, len(DIGESTS))]
    hanging.release()


def test_time_of_a_fetch_is_counted_from_its_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, expire: list[Callable[[], None]]
) -> None:
    hanging = HangingDisk(tmp_path, monkeypatch)
    for number in (1, 2, 3):
        hanging.fetch(number)
    for number in (1, 2):
        assert hanging.hangs.wait(60)
        hanging.hangs.clear()
        assert len(expire) == number
        expire[-1]()
        assert hanging.answers[-1] == (number, 1)
    # Both of them still hang, and so does the third one.
    assert hanging.hangs.wait(60)
    hanging.release()
    assert hanging.answers == [(1, 1), (2, 1), (3, len(DIGESTS))]
    assert hanging.began == {1: True, 2: True, 3: True}


def test_a_disk_that_does_not_answer_is_not_asked_for_some_time(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    expire: list[Callable[[], None]],
) -> None:
    hanging = HangingDisk(tmp_path, monkeypatch)
    find, goes_on = hanging.disk._blocks.find, threading.Event()

    def hang(*args: Any) -> Any:
        hanging.hangs.set()
        goes_on.wait(60)
        return find(*args)

    monkeypatch.setattr(hanging.disk._blocks, "find", hang)
    for number in (1, 2):
        hanging.fetch(number, only_looks=True)
    assert hanging.hangs.wait(60)
    (over,) = expire
    over()
    hanging.fetch(3, only_looks=True)
    hanging.fetch(4)
    assert hanging.answers == [(1, 0), (2, 0), (3, 0), (4, 0)]
    assert not any(hanging.began.values())
    assert "takes longer than 10 s, so that it is not asked for 60 s" in caplog.text
    # It is not asked either while the first call has not returned.
    hanging.disk._barred_until = 0.0
    hanging.fetch(5, only_looks=True)
    assert hanging.answers[-1] == (5, 0)
    goes_on.set()
    eventually(lambda: hanging.disk._barring == 0)
    hanging.fetch(6, only_looks=True)
    assert eventually(lambda: hanging.answers[5:]) == [(6, len(DIGESTS))]


def test_count_of_blocks_that_is_given_up_finds_nothing_and_bars_no_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hanging = HangingDisk(tmp_path, monkeypatch)
    jobs: list[tuple[Any, ...]] = []

    def put(*job: Any) -> None:
        jobs.append(job)

    with monkeypatch.context() as patch:
        patch.setattr(hanging.disk._counter, "put", put)
        hanging.fetch(1, only_looks=True)
    ((_, run, _, give_up),) = jobs
    give_up()
    assert hanging.answers == [(1, 0)]
    run()
    hanging.fetch(2, only_looks=True)
    assert eventually(lambda: hanging.answers[1:]) == [(2, len(DIGESTS))]


def test_blocks_that_were_read_before_a_disk_hangs_count(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    expire: list[Callable[[], None]],
) -> None:
    hanging = HangingDisk(tmp_path, monkeypatch)
    hanging.fetch(1)
    assert hanging.hangs.wait(60)
    assert not hanging.answers
    expire[0]()
    assert hanging.answers == [(1, 1)]
    assert "takes longer than 10 s" in caplog.text
    hanging.release()
    run = filled()
    run.open(9)
    hanging.disk.adopt(run.store, step_pb2.Adopt(sequence=9, fetch=1, length=SIZE))
    assert (run.store.length(9), hanging.disk._fetches) == (SIZE, {})


def test_reset_answers_fetches_that_are_read_and_leaves_later_ones_of_the_same_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hanging = HangingDisk(tmp_path, monkeypatch)
    hanging.fetch(1)
    assert hanging.hangs.wait(60)
    hanging.disk.reset()
    assert hanging.answers == [(1, 0)]
    hanging.fetch(1)
    hanging.release()
    assert hanging.answers == [(1, 0), (1, len(DIGESTS))]
    assert len(hanging.disk._fetches[1].blocks) == len(DIGESTS)


def test_fetches_beyond_some_find_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hanging = HangingDisk(tmp_path, monkeypatch)
    for number in range(1, 7):
        hanging.fetch(number)
    assert hanging.answers == [(5, 0), (6, 0)]
    hanging.release()
    assert sorted(hanging.answers) == [*((number, len(DIGESTS)) for number in range(1, 5)), (5, 0), (6, 0)]


def test_fetch_that_was_forgotten_cannot_be_adopted(tmp_path: Path) -> None:
    run = filled()
    save_by(run, tmp_path, [(0, 4)])
    disk = open_disk(tmp_path)
    fetch(disk)
    fetch(disk, number=2)
    disk.adopt(run.store, step_pb2.Adopt(fetch=1))
    disk.reset()
    run.open(9)
    for number in (1, 2):
        with pytest.raises(StepFailed, match=f"No KV of fetch {number}"):
            disk.adopt(run.store, step_pb2.Adopt(sequence=9, fetch=number, length=16))


def test_layers_that_cannot_be_restored_are_named() -> None:
    restorable = KVStore([KVCache(), RotatingKVCache(64), ArraysCache(2)], mx.float32)
    other = KVStore([KVCache(), RotatingKVCache(64, keep=4)], mx.float32)
    assert (restorable.unsaved_layers, other.unsaved_layers) == ("", "states of type RotatingKVCache")


def test_fingerprint_differs_with_every_part() -> None:
    names = {fingerprint("m", 1, "x"), fingerprint("m", 2, "x"), fingerprint("m", 1), fingerprint("m1", "x")}
    assert len(names) == 4
    assert fingerprint("m", 1) == fingerprint("m", 1)
