"""Manifests of models: their pieces, digests and cache, and the refusal of harmful ones."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from tests.worker.random_models import QWEN3, QWEN3_MOE, write_random_model

from mlx_ring.core.errors import ModelCorrupt, ProtocolError
from mlx_ring.core.types import LayerRange
from mlx_ring.models import weights_manifest
from mlx_ring.models.layer_tensors import mark_stage_folder
from mlx_ring.models.model_folder import ModelFolder, read_model_folder
from mlx_ring.models.weights_manifest import (
    Piece,
    WeightsManifest,
    WeightsSample,
    decode_manifest,
    make_manifest,
    manifest_beside,
    manifest_of_folder,
    pack_indexes,
    unpack_indexes,
)

ONE = hashlib.sha256(b"one").hexdigest()


def make(path: Path, cache: Path, reported: list[tuple[int, int]] | None = None) -> WeightsManifest:
    steps: list[tuple[int, int]] = [] if reported is None else reported
    return manifest_of_folder(read_model_folder(path), cache, lambda done, total: steps.append((done, total)))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = write_random_model(tmp_path / "model", QWEN3)
    (path / "chat_template.jinja").write_text("{{ messages }}")
    (path / "code.py").write_text("print()")
    (path / ".hidden.json").write_text("{}")
    return path


def test_every_byte_of_the_models_files_is_in_one_piece(folder: Path, tmp_path: Path) -> None:
    manifest = make(folder, tmp_path / "cache")
    assert set(manifest.files) == {"config.json", "chat_template.jinja", "model.safetensors"}
    for name, size in manifest.files.items():
        content = (folder / name).read_bytes()
        pieces = [piece for piece in manifest.pieces if piece.file == name]
        assert sum(piece.nbytes for piece in pieces) == size == len(content)
        for piece in pieces:
            assert piece.digest == hashlib.sha256(content[piece.offset : piece.end]).hexdigest()
    tensors = read_model_folder(folder).tensors
    indexes = manifest.indexes_of(tensors)
    assert {manifest.pieces[index].tensor for index in indexes} == {entry.name for entry in tensors}
    assert sorted((*indexes, *manifest.base)) == list(range(len(manifest.pieces)))


def test_equal_models_have_equal_digests_at_any_path_and_others_do_not(tmp_path: Path) -> None:
    first, second, other = (
        make(write_random_model(tmp_path / name, QWEN3, seed), tmp_path / "cache")
        for name, seed in (("first", 0), ("second", 0), ("other", 1))
    )
    assert first.digest == second.digest != other.digest


def test_digests_are_read_from_the_cache_until_the_folder_changes(folder: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    reported: list[tuple[int, int]] = []
    before = make(folder, cache, reported)
    assert reported[0][0] == 0
    assert reported[-1][0] == reported[-1][1] == sum(before.files.values())
    file = folder / "model.safetensors"
    status = file.stat()
    # With the same size and time the old digest is returned, which proves that the file was not read.
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    reported.clear()
    assert make(folder, cache, reported).digest == before.digest
    assert len(reported) == 1
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    assert make(folder, cache).digest != before.digest


def test_a_corrupt_cache_is_rebuilt(folder: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    before = make(folder, cache)
    (cached,) = cache.glob("*.json")
    for content in (b"", cached.read_bytes()[:-9], cached.read_bytes().replace(b"lm_head", b"lm_tail")):
        cached.write_bytes(content)
        assert make(folder, cache).digest == before.digest


def test_a_folder_that_changes_while_it_is_read_is_refused(folder: Path, tmp_path: Path) -> None:
    def change(_done: int, _total: int) -> None:
        (folder / "config.json").touch()

    model = read_model_folder(folder)
    with pytest.raises(ModelCorrupt, match="changed while its weights were read"):
        manifest_of_folder(model, tmp_path / "cache", change)


def test_reading_ends_when_its_caller_is_cancelled(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started, ended, released = threading.Event(), threading.Event(), threading.Event()

    def read(_folder: ModelFolder, _cache: Path, progress: Callable[[int, int], None]) -> None:
        started.set()
        try:
            while not released.wait(0.001):
                progress(0, 1)
        finally:
            ended.set()

    async def cancel() -> bool:
        reading = asyncio.create_task(manifest_beside(read_model_folder(folder), tmp_path))
        assert await asyncio.to_thread(started.wait, 20)
        reading.cancel()
        by_itself = await asyncio.to_thread(ended.wait, 20)
        released.set()
        return by_itself

    monkeypatch.setattr(weights_manifest, "manifest_of_folder", read)
    assert asyncio.run(cancel())


def test_a_stage_folder_has_no_manifest(folder: Path, tmp_path: Path) -> None:
    mark_stage_folder(folder, LayerRange(0, 2))
    with pytest.raises(ModelCorrupt, match=r"holds layers \[0, 2\) only"):
        make(folder, tmp_path / "cache")


def test_a_manifest_survives_encoding(folder: Path, tmp_path: Path) -> None:
    manifest = make(folder, tmp_path / "cache")
    assert decode_manifest(manifest.encoded, manifest.digest) == manifest


def encoded(**changes: Any) -> tuple[bytes, str]:
    content = {"version": 1, "files": {"a": 9}, "pieces": [["t", "a", 0, 9, ONE]]} | changes
    data = json.dumps(content, sort_keys=True, separators=(",", ":")).encode()
    return data, hashlib.sha256(data).hexdigest()


_WRONG_SIZES: list[Any] = [{"a": -1}, {"a": 1.5}, {"a": "9"}, {"a": 1 << 70}, [], None]
HARMFUL: list[dict[str, Any]] = [
    *({"files": {name: 9}} for name in ("../a", "a/b", "..", ".a", "", "a\0", "a" * 300)),
    *({"files": sizes} for sizes in _WRONG_SIZES),
    {"files": {"a": 8}},
    {"pieces": [["t", "b", 0, 9, ONE]]},
    {"pieces": [["t", "a", -1, 9, ONE]]},
    {"pieces": [["t", "a", 0, 9, "0"]]},
    {"pieces": [["t", "a", 0, 9]]},
    {"pieces": [["t", "a", 0, 5, ONE], ["u", "a", 4, 5, ONE]]},
    {"pieces": [["t", "a", 5, 4, ONE], ["u", "a", 0, 5, ONE]]},
    {"pieces": 7},
    {"version": 2},
    {"more": 1},
]


@pytest.mark.parametrize("changes", HARMFUL, ids=str)
def test_a_harmful_manifest_is_refused(changes: dict[str, Any]) -> None:
    data, digest = encoded(**changes)
    with pytest.raises(ProtocolError, match=f"Manifest {digest[:16]}"):
        decode_manifest(data, digest)


def test_a_manifest_under_another_digest_is_refused() -> None:
    data, digest = encoded()
    assert decode_manifest(data, digest).files == {"a": 9}
    with pytest.raises(ProtocolError, match=r"has the digest [0-9a-f]{16} instead of 0000000000000000"):
        decode_manifest(data, "0" * 64)
    with pytest.raises(ProtocolError):
        decode_manifest(b"\xff", hashlib.sha256(b"\xff").hexdigest())


def test_overlapping_pieces_are_refused() -> None:
    with pytest.raises(ModelCorrupt, match="tensor t and tensor u overlap"):
        make_manifest({"a": 9}, [Piece("u", "a", 4, 5, ONE), Piece("t", "a", 0, 5, ONE)])


@given(st.data())
def test_a_range_is_covered_if_stored_pieces_have_every_byte(
    data: st.DataObject,
) -> None:
    sizes = data.draw(st.lists(st.integers(0, 5), min_size=1, max_size=8))
    starts = [sum(sizes[:number]) for number in range(len(sizes))]
    total = sum(sizes)
    pieces = [
        Piece(f"t{at}", "a", start, size, ONE)
        for at, (start, size) in enumerate(zip(starts, sizes, strict=True))
    ]
    manifest = make_manifest({"a": total, "b": 3}, [*pieces, Piece("", "b", 0, 3, ONE)])
    empty = {at for at, piece in enumerate(manifest.pieces) if not piece.nbytes}
    have = frozenset(data.draw(st.sets(st.integers(0, len(sizes))))) | empty
    assume(total)
    start = data.draw(st.integers(0, total - 1))
    end = data.draw(st.integers(start + 1, total))
    stored = {
        byte
        for at in have
        for piece in [manifest.pieces[at]]
        if piece.file == "a"
        for byte in range(piece.offset, piece.end)
    }
    assert manifest.covers(have, "a", start, end) == (set(range(start, end)) <= stored)


@given(st.integers(0, 70), st.data())
def test_piece_indexes_survive_packing(count: int, data: st.DataObject) -> None:
    indexes = data.draw(st.frozensets(st.integers(0, max(count - 1, 0)))) if count else frozenset[int]()
    packed = pack_indexes(indexes, count)
    assert unpack_indexes(packed, count) == indexes
    with pytest.raises(ProtocolError):
        unpack_indexes(packed + b"\0", count)


def sample(folder: Path, seed: int) -> WeightsSample:
    return WeightsSample(read_model_folder(write_random_model(folder, QWEN3, seed)))


def test_samples_of_models_of_one_structure_differ_with_their_weights(tmp_path: Path) -> None:
    first, second, other = (
        sample(tmp_path / name, seed).digest() for name, seed in (("first", 0), ("second", 0), ("other", 1))
    )
    assert first == second != other


def test_a_sample_has_some_bytes_of_each_tensor(tmp_path: Path) -> None:
    folder = read_model_folder(write_random_model(tmp_path, QWEN3))
    weights = WeightsSample(folder)
    before, file = weights.digest(), tmp_path / "model.safetensors"
    content, times = (
        file.read_bytes(),
        itertools.count(file.stat().st_mtime_ns + 1_000_000_000, 1_000_000_000),
    )

    def write(changed: bytes) -> None:
        """Write the file at a time of its own, because clocks of file systems may stand still meanwhile."""
        file.write_bytes(changed)
        os.utime(file, ns=(moment := next(times), moment))

    for entry in folder.tensors:
        middle = entry.offset + entry.nbytes // 2
        write(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])
        assert weights.digest() != before, entry.name
    write(content)
    assert weights.digest() == before
    file.unlink()
    assert weights.digest() == before
    with pytest.raises(ModelCorrupt, match="cannot be read: No such file or directory"):
        _ = WeightsSample(folder).digest()


def test_a_tensor_in_two_files_is_sampled_in_both(tmp_path: Path) -> None:
    path = write_random_model(tmp_path, QWEN3)
    (path / "model.fp16.safetensors").write_bytes((path / "model.safetensors").read_bytes())
    folder = read_model_folder(path)
    assert len(folder.weight_files) == 2
    assert WeightsSample(folder).digest() != sample(tmp_path / "single", 0).digest()


def test_every_tensor_outside_experts_is_sampled_though_experts_are_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights_manifest, "_MOST_EXPERTS", 2)
    folder = read_model_folder(write_random_model(tmp_path, QWEN3_MOE))
    chosen = [entry.name for entry in weights_manifest._choose(folder.tensors)]  # pyright: ignore[reportPrivateUsage]
    experts = {
        entry.name for entry in folder.tensors if ".experts." in entry.name or "switch_mlp" in entry.name
    }
    assert len(experts) > 2
    assert {entry.name for entry in folder.tensors} - experts <= set(chosen)
    assert len(experts & set(chosen)) == 2
    monkeypatch.setattr(weights_manifest, "_MOST_SAMPLED", 3)
    fewer = [entry.name for entry in weights_manifest._choose(folder.tensors)]  # pyright: ignore[reportPrivateUsage]
    assert len(fewer) == 5
    assert set(fewer) <= set(chosen)
