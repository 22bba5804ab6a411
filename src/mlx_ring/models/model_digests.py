"""Manifest of a model folder: reads every byte once, and keeps the result beside the state.

Reading 8 GB takes a while, so an unchanged folder is read once. Sizes and modification times show
changes.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from mlx_ring.core.errors import ModelCorrupt, ProtocolError
from mlx_ring.core.types import ByteProgress
from mlx_ring.host.private_files import read_private, write_private
from mlx_ring.models.model_folder import ModelFolder
from mlx_ring.models.stage_folder import require_whole, small_files
from mlx_ring.models.weights_manifest import Piece, WeightsManifest, decode_manifest, make_manifest

_READ_BYTES = 4 << 20


def manifest_of_folder(folder: ModelFolder, cache: Path, progress: ByteProgress) -> WeightsManifest:
    """Return the manifest, which is kept in `cache`. The first call blocks while it reads: call it in a thread.

    Raises:
        ModelCorrupt: a file cannot be read, or changed meanwhile; or the folder is of one stage only.
    """
    require_whole(folder.path)
    before = _marks(folder)
    kept = cache / f"{hashlib.sha256(json.dumps(before).encode()).hexdigest()[:32]}.json"
    manifest = _read_kept(kept)
    if manifest is not None:
        total = manifest.nbytes(range(len(manifest.pieces)))
        progress(total, total)
        return manifest
    sizes = {name: size for name, size, _ in before[1]}
    spans = list(_spans(folder, sizes))
    manifest = make_manifest(sizes, _hash(folder.path, spans, progress))
    if _marks(folder) != before:
        raise ModelCorrupt(f"{folder.path} changed while its weights were read: wait until it is complete.")
    write_private(kept, f"{manifest.digest}\n".encode() + manifest.encoded)
    return manifest


class _Cancelled(Exception):
    """The caller no longer waits for the manifest."""


async def manifest_beside(folder: ModelFolder, cache: Path) -> WeightsManifest:
    """Return the manifest, read in a separate thread.

    Cancelling ends the reading, which takes minutes for a large model.

    Raises:
        ModelCorrupt: the same errors as in `manifest_of_folder`.
    """
    left = threading.Event()

    def go_on(_done: int, _total: int) -> None:
        if left.is_set():
            raise _Cancelled

    try:
        return await asyncio.to_thread(manifest_of_folder, folder, cache, go_on)
    finally:
        left.set()


def hash_range(stream: BinaryIO, offset: int, nbytes: int, progress: Callable[[int], None]) -> str:
    """Return the SHA-256 of a range of a file, or of fewer bytes if it ends before."""
    sha = hashlib.sha256()
    stream.seek(offset)
    while nbytes and (data := stream.read(min(nbytes, _READ_BYTES))):
        sha.update(data)
        nbytes -= len(data)
        progress(len(data))
    return sha.hexdigest()


_Marks = tuple[str, list[tuple[str, int, int]]]
_Span = tuple[str, str, int, int]
"""Tensor, file, offset, bytes."""


def _marks(folder: ModelFolder) -> _Marks:
    """Return the folder, and name, size and modification time of each file. Links are followed for the hub's cache."""
    try:
        found = [
            (name, status.st_size, status.st_mtime_ns)
            for name in (*small_files(folder.path), *(file.name for file in folder.weight_files))
            for status in [(folder.path / name).stat()]
        ]
    except OSError as error:
        raise ModelCorrupt(f"{folder.path} cannot be read: {error.strerror}. Fetch it again.") from error
    return str(folder.path.resolve()), found


def _read_kept(path: Path) -> WeightsManifest | None:
    """Read a kept manifest; None if there is none, or it is incomplete."""
    digest, _, data = (read_private(path) or b"").partition(b"\n")
    try:
        return decode_manifest(data, digest.decode("ascii", "replace"))
    except ProtocolError:
        return None


def _spans(folder: ModelFolder, sizes: dict[str, int]) -> Iterator[_Span]:
    headers = {file.name: file.header_bytes for file in folder.weight_files}
    for name, size in sizes.items():
        yield "", name, 0, headers.get(name, size)
    for entry in folder.tensors:
        yield entry.name, entry.file, entry.offset, entry.nbytes


def _hash(folder: Path, spans: list[_Span], progress: ByteProgress) -> Iterator[Piece]:
    """Hash file by file, each from start to end."""
    total, done = sum(nbytes for *_, nbytes in spans), 0
    progress(done, total)

    def add(count: int) -> None:
        nonlocal done
        done += count
        progress(done, total)

    by_file: dict[str, list[_Span]] = {}
    for span in spans:
        by_file.setdefault(span[1], []).append(span)
    for name, parts in by_file.items():
        try:
            with (folder / name).open("rb", buffering=0) as stream:
                for tensor, file, offset, nbytes in sorted(parts, key=lambda part: part[2]):
                    yield Piece(tensor, file, offset, nbytes, hash_range(stream, offset, nbytes, add))
        except OSError as error:
            raise ModelCorrupt(
                f"{folder / name} cannot be read: {error.strerror}. Fetch it again."
            ) from error
