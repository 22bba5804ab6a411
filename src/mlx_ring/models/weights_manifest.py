"""Manifest of a model's folder: its pieces, each with its SHA-256.

A piece is a whole small file, the header of a safetensors file, or a tensor. The manifest's own digest
names the model's content: equal for equal bytes in any folder.

To make it, every byte is read once, and the result is kept beside the state: reading 8 GB takes a while. Sizes and
modification times show changes.
"""

from __future__ import annotations

import asyncio
import bisect
import hashlib
import itertools
import json
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO, cast

from mlx_ring.core.errors import ModelCorrupt, ProtocolError
from mlx_ring.core.types import ByteProgress
from mlx_ring.host.private_files import read_private, write_private
from mlx_ring.models.layer_tensors import is_whole, require_whole, small_files
from mlx_ring.models.model_folder import ModelFolder, TensorEntry

MAX_MANIFEST_BYTES = 256 << 20
"""Size for a million tensors."""
_VERSION = 1
_DIGEST = re.compile(r"[0-9a-f]{64}")
_MOST_SAMPLED, _MOST_EXPERTS, _SAMPLE_BYTES = 4096, 1024, 4096
"""Tensors that a sample has at most, except for those of experts, and of these; and bytes of each."""
_EXPERT = re.compile(r"(?:^|\.)(?:experts|switch_mlp|switch_glu)\.")
"""Names of tensors of experts, of which a model may have very many."""
_FILE_NAME = re.compile(r"[^./\\\0][^/\\\0]{0,254}")
"""File of the folder itself: no path, nothing hidden."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes `[offset, offset + nbytes)` of a file. `tensor` is empty for a small file and for a header."""

    tensor: str
    file: str
    offset: int
    nbytes: int
    digest: str

    @property
    def end(self) -> int:
        return self.offset + self.nbytes

    def __str__(self) -> str:
        return f"tensor {self.tensor}" if self.tensor else f"the beginning of {self.file}"


@dataclass(frozen=True)
class WeightsManifest:
    """Files of a model, with their sizes in bytes, and their pieces by file and offset, which never overlap."""

    files: Mapping[str, int]
    pieces: tuple[Piece, ...]

    @cached_property
    def encoded(self) -> bytes:
        """Encoding, with the same bytes for the same content."""
        rows = [[piece.tensor, piece.file, piece.offset, piece.nbytes, piece.digest] for piece in self.pieces]
        content = {"version": _VERSION, "files": self.files, "pieces": rows}
        return json.dumps(content, sort_keys=True, separators=(",", ":")).encode()

    @cached_property
    def digest(self) -> str:
        return hashlib.sha256(self.encoded).hexdigest()

    @cached_property
    def base(self) -> tuple[int, ...]:
        """Indexes of the pieces that every stage needs: small files and headers."""
        return tuple(index for index, piece in enumerate(self.pieces) if not piece.tensor)

    @cached_property
    def _by_tensor(self) -> dict[tuple[str, str, int, int], int]:
        return {
            (piece.tensor, piece.file, piece.offset, piece.nbytes): index
            for index, piece in enumerate(self.pieces)
        }

    @cached_property
    def _starts(self) -> list[tuple[str, int]]:
        return [(piece.file, piece.offset) for piece in self.pieces]

    def indexes_of(self, tensors: Iterable[TensorEntry]) -> tuple[int, ...]:
        """Return the indexes of these tensors' pieces.

        Raises:
            ModelCorrupt: headers and manifest contradict each other.
        """
        try:
            return tuple(
                sorted(
                    self._by_tensor[entry.name, entry.file, entry.offset, entry.nbytes] for entry in tensors
                )
            )
        except KeyError as error:
            raise ModelCorrupt(
                f"The manifest has no tensor {error.args[0][0]!r} as its file's header describes it: "
                "create the manifest again on the machine that has the model."
            ) from None

    def overlapping(self, file: str, start: int, end: int) -> Iterator[int]:
        """Yield the indexes of the pieces with bytes in `[start, end)` of a file, in order."""
        first = max(bisect.bisect_right(self._starts, (file, start)) - 1, 0)
        for index in range(first, len(self.pieces)):
            piece = self.pieces[index]
            if (piece.file, piece.offset) >= (file, end):
                return
            if piece.file == file and piece.end > start:
                yield index

    def covers(self, have: frozenset[int], file: str, start: int, end: int) -> bool:
        """Report whether every byte of `[start, end)` belongs to a piece of `have`."""
        reached = start
        for index in self.overlapping(file, start, end):
            if self.pieces[index].offset > reached or index not in have:
                return False
            reached = self.pieces[index].end
        return reached >= end

    def nbytes(self, indexes: Iterable[int]) -> int:
        return sum(self.pieces[index].nbytes for index in indexes)


def make_manifest(files: Mapping[str, int], pieces: Iterable[Piece]) -> WeightsManifest:
    """Put pieces in order. Raises `ModelCorrupt` if two of them overlap or one exceeds its file."""
    manifest = WeightsManifest(
        dict(files), tuple(sorted(pieces, key=lambda piece: (piece.file, piece.offset, piece.end)))
    )
    if problem := _problem(manifest):
        raise ModelCorrupt(f"The weights cannot be sent to other nodes: {problem}.")
    return manifest


def decode_manifest(data: bytes, digest: str) -> WeightsManifest:
    """Decode a manifest from a peer or the disk.

    Raises:
        ProtocolError: it is not the manifest that `digest` names, or none.
    """
    found = hashlib.sha256(data).hexdigest()
    if found != digest:
        raise ProtocolError(f"A manifest has the digest {found[:16]} instead of {digest[:16]}.")
    try:
        content = json.loads(data)
        files = {str(name): _size(size) for name, size in content["files"].items()}
        manifest = WeightsManifest(files, tuple(map(_piece, content["pieces"])))
        version = content["version"]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ProtocolError(f"Manifest {digest[:16]} cannot be read: {error}.") from error
    problem = f"its version is {version}" if version != _VERSION else _problem(manifest)
    if problem or manifest.digest != digest:
        raise ProtocolError(f"Manifest {digest[:16]} is refused: {problem or 'it is not in order'}.")
    return manifest


def is_digest(text: str) -> bool:
    """Report whether a text can be the digest of a manifest, and so is safe as a folder's name."""
    return _DIGEST.fullmatch(text) is not None


def pack_indexes(indexes: Iterable[int], count: int) -> bytes:
    """Encode the present pieces of `count`, a bit for each."""
    bits = bytearray((count + 7) // 8)
    for index in indexes:
        bits[index >> 3] |= 1 << (index & 7)
    return bytes(bits)


def unpack_indexes(data: bytes, count: int) -> frozenset[int]:
    """Decode the pieces' bits. Raises `ProtocolError` if their number differs from that of the pieces."""
    if len(data) != (count + 7) // 8:
        raise ProtocolError(
            f"{len(data)} bytes say which of {count} pieces there are; it takes {-(-count // 8)}."
        )
    return frozenset(index for index in range(count) if data[index >> 3] >> (index & 7) & 1)


def _piece(row: Any) -> Piece:
    tensor, file, offset, nbytes, digest = cast("list[object]", row)
    if not (isinstance(tensor, str) and isinstance(file, str) and isinstance(digest, str)):
        raise TypeError(f"{row!r} is no piece")
    return Piece(tensor, file, _size(offset), _size(nbytes), digest)


def _size(value: object) -> int:
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise ValueError(f"{value!r} is no size")
    return value


def _problem(manifest: WeightsManifest) -> str:
    """Return the manifest's problem as text; empty if there is none."""
    for name in manifest.files:
        if not _FILE_NAME.fullmatch(name):
            return f"{name!r} is no file's name"
    for piece in manifest.pieces:
        if piece.end > manifest.files.get(piece.file, -1):
            return f"{piece} is not inside {piece.file!r}"
        if not is_digest(piece.digest):
            return f"{piece} has no digest"
    for piece, other in itertools.pairwise(manifest.pieces):
        if (piece.file, piece.end) > (other.file, other.offset):
            return f"{piece} and {other} overlap, or are out of order"
    return ""


# ---- reading of a folder

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


# ---- sample


class WeightsSample:
    """Sample of a model's weights. It tells models of one structure apart, such as a model and others trained from it."""

    def __init__(self, folder: ModelFolder) -> None:
        self._folder = folder
        self._digest, self._states = "", list[tuple[int, int, int]]()
        self._lock = threading.Lock()

    @property
    def last_digest(self) -> str:
        """Digest as it was read last; empty before."""
        return self._digest

    def digest(self) -> str:
        """Return the digest of some bytes of many tensors; equal for equal models in any folder.

        Files that have changed since are read again. If that fails, it is the one before. Several threads may ask.

        Raises:
            ModelCorrupt: a file cannot be read.
        """
        with self._lock:
            try:
                states = [_state(self._folder.path / file.name) for file in self._folder.weight_files]
                if states != self._states or not self._digest:
                    self._digest, self._states = self._read(), states
            except OSError as error:
                if not self._digest:
                    raise ModelCorrupt(
                        f"{self._folder.path} cannot be read: {error.strerror or error}. Fetch it again."
                    ) from error
            return self._digest

    def _read(self) -> str:
        chosen = sorted(_choose(self._folder.tensors), key=lambda each: (each.file, each.offset))
        sampled: list[tuple[str, str]] = []
        for file, entries in itertools.groupby(chosen, lambda each: each.file):
            with (self._folder.path / file).open("rb", buffering=0) as stream:
                for entry in entries:
                    stream.seek(entry.offset + max(0, entry.nbytes - _SAMPLE_BYTES) // 2)
                    content = stream.read(min(entry.nbytes, _SAMPLE_BYTES))
                    sampled.append((entry.name, hashlib.sha256(content).hexdigest()))
        return hashlib.sha256(json.dumps(sorted(sampled)).encode()).hexdigest()[:16]


def _choose(tensors: Iterable[TensorEntry]) -> list[TensorEntry]:
    """Choose tensors by chance, which names decide: all outside experts if they are not too many, and some of experts.

    Training often changes few tensors, but rarely those of experts alone.
    """
    by_chance = sorted(
        tensors, key=lambda each: (hashlib.sha256(each.name.encode()).digest(), each.file, each.offset)
    )
    of_experts = [each for each in by_chance if _EXPERT.search(each.name)]
    others = [each for each in by_chance if not _EXPERT.search(each.name)]
    return others[:_MOST_SAMPLED] + of_experts[:_MOST_EXPERTS]


def join_digests(structure: str, weights: str) -> str:
    """Return the digest of a model by those of its structure and of a sample of its weights."""
    return f"{structure}-{weights}"


def with_weights_of(model: str, structure: str) -> str:
    """Return the digest of a model with this structure and the weights of another digest.

    A stage's folder may lack most weights.
    """
    return "".join((structure, *model.partition("-")[1:]))


def may_have_weights_of(folder: ModelFolder, model: str) -> bool:
    """Report whether a folder has the weights of a model's digest, or lacks some, so that it cannot be compared."""
    _, _, weights = model.partition("-")
    return not weights or not is_whole(folder.path) or WeightsSample(folder).digest() == weights


def _state(path: Path) -> tuple[int, int, int]:
    status = path.stat()
    return status.st_ino, status.st_size, status.st_mtime_ns
