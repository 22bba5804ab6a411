"""Files of saved KV: the names that say what they hold, and their content.

A file holds one kind of content of some layers for one block: all their KV heads, or the share of one rank. A name
such as `0-5.heads-0-2-of-8.window-1024` says so. Files of any ranks are joined, so a reader need not know who wrote them.

The number of a layer is here that of its cache in the model's list, which may have several for a layer, or none.

A file begins with a header that gives the place, type, shape and checksums of each array. There is a checksum for each
entry of an array's first axis, which are heads. So a rank reads its own heads from a file that has more.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import re
import struct
import zlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, cast

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from mlx_ring.core.types import LayerRange, MemberRange
from mlx_ring.rpc.protos import hello_pb2, worker_pb2
from mlx_ring.worker.kv.content import as_device_array
from mlx_ring.worker.kv.kv_store import KVStore

Content = tuple[NDArray[Any], ...]
"""Arrays of one layer and kind: of keys and values `(heads, tokens, width)` each, of states `(1, ...)`.

Those of bfloat16 have the type `V2` here. An array that a state does not have yet is `ABSENT`."""
ABSENT: NDArray[Any] = np.zeros(0, np.uint8)
MOST_DAMAGED = 4096
"""Number of damaged files that are remembered, here and of other machines."""

_MAGIC = b"mlx-ring KV 2\n"
_LENGTH = struct.Struct("<I")
_LONGEST_HEADER = 1 << 26
_FILE = re.compile(r"(\d+)-(\d+)(?:\.heads-(\d+)-(\d+)-of-(\d+))?(?:\.(window-\d+|states))?")

Header = list[tuple[int, list[tuple[str, list[int], list[int]]]]]
"""By layer, the place of its arrays behind the header, and each one's type, shape and checksums."""


def fingerprint(*parts: object) -> str:
    """Return the name of the folder for blocks that are only equal if all these parts are."""
    return hashlib.sha256("\0".join(map(str, parts)).encode()).hexdigest()[:32]


def content_name(hello: hello_pb2.Hello, dtype: str, kv_bits: int) -> str:
    """Return the name of the folder for KV of a head's model and versions, in a type and perhaps quantized."""
    return fingerprint(hello.model_digest, hello.mlx, hello.mlx_lm, hello.mlx_ring, dtype, kv_bits)


@dataclass(frozen=True, slots=True)
class HeadShare:
    """KV heads of one rank of a tensor-parallel group."""

    own: MemberRange
    total: int
    """Number of KV heads of the model."""

    def __str__(self) -> str:
        return f".heads-{self.own.start}-{self.own.end}-of-{self.total}"


@dataclass(frozen=True, slots=True)
class Kind:
    """Content of one kind in a rank's layers: every token's, the last tokens' of a window, or states at the end of a block."""

    name: str
    """Part of file names; empty for layers that keep every token."""
    extent: LayerRange
    """Neighbouring layers of a rank, which share a file."""
    layers: tuple[int, ...]
    """Those of them that have such content."""
    window: int | None = None

    def begin(self, length: int) -> int:
        """Return the first token that is needed to continue after the first `length` ones: a window without the next one."""
        return 0 if self.window is None else max(0, length - max(1, self.window - 1))

    def blocks(self, end: int, size: int) -> range:
        """Return the blocks of `size` tokens whose files are needed to continue after the first `end` blocks."""
        is_state = bool(self.name) and self.window is None
        return range(end - 1 if is_state else self.begin(end * size) // size, end)

    def tokens(self, block: int, size: int) -> tuple[int, int]:
        """Return the range of tokens that a block's file has."""
        end = (block + 1) * size
        return max(block * size, self.begin(end)), end


def every_token(layers: Sequence[int]) -> tuple[Kind, ...]:
    """Return the kinds of layers that keep every token."""
    return tuple(Kind("", extent, tuple(range(extent.start, extent.end))) for extent in _runs(layers))


def kinds_of(kv: KVStore, layers: Sequence[int]) -> tuple[Kind, ...]:
    """Return the kinds of content that a stage's layers have, in their order in its store."""
    having: list[tuple[str, int | None, list[int]]] = [
        ("" if window is None else f"window-{window}", window, kv.layers_with(window))
        for window in kv.windows
    ]
    having.append(("states", None, kv.layers_with_states))
    kinds: list[Kind] = []
    for name, window, places in having:
        numbers = [layers[place] for place in places]
        for extent in _runs(layers):
            own = tuple(number for number in numbers if extent.start <= number < extent.end)
            if own:
                kinds.append(Kind(name, extent, own, window))
    return tuple(kinds)


def _runs(layers: Sequence[int]) -> list[LayerRange]:
    """Return the ranges of neighbouring layers."""
    starts = [layer for layer in layers if layer - 1 not in layers]
    ends = [layer + 1 for layer in layers if layer + 1 not in layers]
    return list(map(LayerRange, sorted(starts), sorted(ends)))


@dataclass(frozen=True, slots=True)
class BlockFile:
    """Content of a file, as its name says."""

    layers: LayerRange
    kind: str = ""
    share: HeadShare | None = None
    """Heads that it has; None: all."""

    @classmethod
    def parse(cls, name: str) -> BlockFile | None:
        """Read a name; return None for a file of another kind."""
        found = _FILE.fullmatch(name)
        if found is None:
            return None
        start, end, first, last, total, kind = found.groups()
        share = None if first is None else HeadShare(MemberRange(int(first), int(last)), int(total))
        return cls(LayerRange(int(start), int(end)), kind or "", share)

    @property
    def name(self) -> str:
        share = "" if self.share is None else str(self.share)
        return f"{self.layers.start}-{self.layers.end}{share}" + (f".{self.kind}" if self.kind else "")

    def has(self, layer: int) -> bool:
        return self.layers.start <= layer < self.layers.end


Rows = tuple[int, int]
"""Half-open range of an array's first axis."""


def join_heads(
    files: Iterable[BlockFile], layer: int, wanted: HeadShare | None
) -> list[tuple[BlockFile, Rows | None]] | None:
    """Return which files have the heads of a layer, in order, and which rows of their arrays; None if some are missing.

    Args:
        files: files of one kind, the preferred ones first.
        layer: the layer.
        wanted: heads of the reader; None: all. The rows None are all of a file's.
    """
    having = [file for file in files if file.has(layer)]
    for file in having:
        if file.share == wanted:
            return [(file, None)]
        if file.share is None and wanted is not None:
            return [(file, (wanted.own.start, wanted.own.end))]
    shares = [(file, file.share) for file in having if file.share is not None]
    if not shares:
        return None
    total = shares[0][1].total if wanted is None else wanted.total
    position, end = (0, total) if wanted is None else (wanted.own.start, wanted.own.end)
    joined: list[tuple[BlockFile, Rows | None]] = []
    while position < end:
        fitting = [
            (share.own.end, file, share.own)
            for file, share in shares
            if share.total == total and share.own.start <= position < share.own.end
        ]
        if not fitting:
            return None
        reach, file, own = max(fitting, key=lambda each: each[0])
        joined.append((file, (position - own.start, min(reach, end) - own.start)))
        position = min(reach, end)
    return joined


def find_sources(
    files: Sequence[BlockFile], own: BlockFile, kind: Kind
) -> dict[int, list[tuple[BlockFile, Rows | None]]] | None:
    """Return the files, in the order of their heads, that have each layer of a kind; None if a layer is missing.

    Args:
        files: the files of a block.
        own: the file that the reader would write.
        kind: the kind of content, and the reader's layers that have it.
    """
    if own in files:
        return {layer: [(own, None)] for layer in kind.layers}
    of_kind = [file for file in files if file.kind == kind.name]
    sources: dict[int, list[tuple[BlockFile, Rows | None]]] = {}
    for layer in kind.layers:
        joined = join_heads(of_kind, layer, own.share)
        if joined is None:
            return None
        sources[layer] = joined
    return sources


def part_of(file: BlockFile, rows: Rows | None, share: HeadShare | None) -> float:
    """Return the part of a file's heads that are read."""
    if rows is None:
        return 1.0
    if file.share is not None:
        heads = file.share.own.end - file.share.own.start
    else:
        heads = rows[1] if share is None else share.total
    return (rows[1] - rows[0]) / heads


def files_in(folder: Path) -> list[BlockFile]:
    """Return the files of a block's folder; none if it is missing."""
    try:
        names = os.listdir(folder)  # noqa: PTH208 - faster
    except OSError:
        return []
    return [file for name in names if (file := BlockFile.parse(name)) is not None]


class DamagedFiles:
    """Damaged files that cannot be removed, each until it is replaced. Several threads may use it."""

    def __init__(self) -> None:
        self._versions: dict[Path, tuple[int, int]] = {}

    def remove(self, path: Path, opened: BinaryIO) -> str:
        """Remove a file, or else remember what was opened. Return words for what was done."""
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            self._add(path, opened)
            return f"damaged and cannot be removed ({error.strerror or error})"
        return "removed"

    def _add(self, path: Path, opened: BinaryIO) -> None:
        self._versions[path] = _version(os.fstat(opened.fileno()))
        while len(self._versions) > MOST_DAMAGED:
            self._versions.pop(next(iter(self._versions)), None)

    def __contains__(self, path: Path) -> bool:
        version = self._versions.get(path)
        if version is None:
            return False
        with contextlib.suppress(OSError):
            if _version(path.stat()) == version:
                return True
        self._versions.pop(path, None)
        return False


def _version(status: os.stat_result) -> tuple[int, int]:
    return status.st_ino, status.st_mtime_ns


Source = tuple[worker_pb2.KvPeer, int]
"""A machine that has a file, and the file's size there."""


@dataclass(slots=True)
class RemoteBlocks:
    """Files of blocks on other machines, and the bytes that came from each of these."""

    files: dict[bytes, dict[BlockFile, list[Source]]] = field(
        default_factory=dict[bytes, "dict[BlockFile, list[Source]]"]
    )
    """Sources by digest and file, the fastest ones first."""
    lists: dict[bytes, list[Source]] = field(default_factory=dict[bytes, "list[Source]"])
    """Sources of the lists of short blocks, by place."""
    received: Counter[str] = field(default_factory=Counter[str])
    """Bytes by machine."""

    def forget(self, peer: worker_pb2.KvPeer) -> None:
        """Forget the files of a machine."""
        for files in self.files.values():
            for sources in files.values():
                sources[:] = [source for source in sources if source[0] is not peer]


# ---- content


def write_layers(file: BinaryIO, block: Sequence[Content]) -> None:
    """Write a header and the content of every layer of a file's range; a layer without any has an empty tuple."""
    header: Header = []
    place, payload = 0, list[memoryview]()
    for arrays in block:
        kinds: list[tuple[str, list[int], list[int]]] = []
        begin = place
        for array in map(np.ascontiguousarray, arrays):
            content = array.view(np.uint8).reshape(-1).data if array.size else memoryview(b"")
            rows = len(array) if array.size else 1
            size = content.nbytes // rows
            sums = [zlib.crc32(content[row * size : (row + 1) * size]) for row in range(rows)]
            kinds.append((array.dtype.str, list(array.shape), sums))
            payload.append(content)
            place += content.nbytes
        header.append((begin, kinds))
    text = json.dumps(header, separators=(",", ":")).encode()
    file.write(_MAGIC + _LENGTH.pack(len(text)) + _LENGTH.pack(zlib.crc32(text)) + text)
    file.writelines(payload)


def read_layers(file: BinaryIO, layers: LayerRange, wanted: Mapping[int, Rows | None]) -> dict[int, Content]:
    """Read rows of some layers of a file. Raises ValueError if it is damaged."""
    header = read_header(file, layers)
    begin = file.tell()
    found: dict[int, Content] = {}
    for layer, rows in wanted.items():
        place, kinds = header[layer - layers.start]
        file.seek(begin + place)
        found[layer] = tuple(_read_array(file, kind, shape, sums, rows, layer) for kind, shape, sums in kinds)
    return found


def read_header(file: BinaryIO, layers: LayerRange) -> Header:
    """Read the header of a file, and go to its end. Raises ValueError if it is damaged."""
    if (begin := file.read(len(_MAGIC))) != _MAGIC:
        raise ValueError("it has another format" if len(begin) == len(_MAGIC) else "it is cut off")
    lengths = file.read(2 * _LENGTH.size)
    if len(lengths) < 2 * _LENGTH.size:
        raise ValueError("it is cut off")
    length, checksum = (number for (number,) in _LENGTH.iter_unpack(lengths))
    text = file.read(min(length, _LONGEST_HEADER))
    if len(text) != length or zlib.crc32(text) != checksum:
        raise ValueError("its header is damaged")
    header: Header = json.loads(text)
    if len(header) != layers.end - layers.start:
        raise ValueError("it has other layers than its name says")
    return header


def header_end(content: bytes) -> int:
    """Return where a file's header ends, by the first bytes. Raises ValueError if there are too few."""
    begin = len(_MAGIC) + 2 * _LENGTH.size
    if len(content) < begin:
        raise ValueError("it is cut off")
    return begin + min(_LENGTH.unpack_from(content, len(_MAGIC))[0], _LONGEST_HEADER)


def ranges_of(
    header: Header, begin: int, layers: LayerRange, wanted: Mapping[int, Rows | None]
) -> list[tuple[int, int]]:
    """Return the ranges of bytes, half-open and in order, that have rows of some layers of a file.

    Args:
        header: the file's header.
        begin: its end.
        layers: the layers of the file.
        wanted: rows by layer, as of `read_layers`.
    """
    ranges: list[tuple[int, int]] = []
    for layer, rows in sorted(wanted.items()):
        place, kinds = header[layer - layers.start]
        place += begin
        for kind, shape, sums in kinds:
            row_bytes = math.prod(shape) * np.dtype(kind).itemsize // len(sums)
            first, last = rows or (0, len(sums))
            start, end = place + first * row_bytes, place + last * row_bytes
            if ranges and ranges[-1][1] == start:
                start = ranges.pop()[0]
            if end > start:
                ranges.append((start, end))
            place += len(sums) * row_bytes
    return ranges


def _read_array(
    file: BinaryIO, kind: str, shape: Sequence[int], sums: Sequence[int], rows: Rows | None, layer: int
) -> NDArray[Any]:
    """Read rows of an array that begins here, and go to the end of it."""
    row_bytes = math.prod(shape) * np.dtype(kind).itemsize // len(sums)
    first, last = rows or (0, len(sums))
    if not first < last <= len(sums):
        raise ValueError(f"layer {layer} has {len(sums)} heads, not those that its name says")
    file.seek(first * row_bytes, os.SEEK_CUR)
    content = file.read((last - first) * row_bytes)
    file.seek((len(sums) - last) * row_bytes, os.SEEK_CUR)
    view = memoryview(content)
    for row in range(last - first):
        part = view[row * row_bytes : (row + 1) * row_bytes]
        if len(part) != row_bytes or zlib.crc32(part) != sums[first + row]:
            raise ValueError(f"layer {layer} is damaged")
    shape = [last - first, *shape[1:]] if row_bytes else shape
    return np.frombuffer(content, kind).reshape(shape)


def to_host(array: mx.array | None) -> NDArray[Any]:
    """Return an evaluated array's memory, without a copy."""
    if array is None:
        return ABSENT
    if array.dtype == mx.bfloat16:
        return np.asarray(array.view(mx.uint16)).view("V2")
    return cast("NDArray[Any]", np.asarray(array))


def from_host(array: NDArray[Any]) -> mx.array | None:
    """Return an array of a state; None for one that it does not have yet."""
    return as_device_array(array) if array.size else None


def concatenate_heads(parts: Sequence[Content]) -> Content:
    """Return a layer's arrays with the heads of several files."""
    return parts[0] if len(parts) == 1 else tuple(map(np.concatenate, zip(*parts, strict=True)))


def concatenate_tokens(
    parts: Sequence[NDArray[Any]], joined: dict[int, NDArray[Any]], place: int
) -> NDArray[Any]:
    """Return the parts one after the other, in the array that was used at this place before, if it fits.

    New memory costs a system more than the copy.
    """
    shape = (parts[0].shape[0], sum(part.shape[1] for part in parts), parts[0].shape[2])
    into = joined.get(place)
    if into is None or (into.shape, into.dtype) != (shape, parts[0].dtype):
        into = joined[place] = np.empty(shape, parts[0].dtype)
    return np.concatenate(parts, axis=1, out=into)
