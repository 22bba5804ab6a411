"""Keys and values on this machine's disk, for restarts and for other splits of the layers.

A block is the content of some tokens. A digest of all tokens up to its end is the name of its folder. There is a file
for each range of layers that a rank has saved. The folder lies in a folder for blocks of one model, of one type of keys and values,
and of the same versions of MLX. A rank reads its own layers from the files of any ranks.

The last block of a text may have fewer tokens. It is listed: a file has its digest and its tokens, in a folder that is
named by its place in the text. So a text finds it that shares only some of its tokens.

Nothing here fails a step: a block that is missing, damaged or for other layers counts as not saved.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import math
import os
import re
import shutil
import struct
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, cast

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from mlx_ring.core.errors import StepFailed
from mlx_ring.core.types import LayerRange
from mlx_ring.rpc.protos import step_pb2, worker_pb2
from mlx_ring.worker.kv.content import ListedTokens, read_listed
from mlx_ring.worker.kv.kv_store import KVStore

log = logging.getLogger(__name__)

_MAGIC = b"mlx-ring KV 1\n"
_LENGTH = struct.Struct("<I")
_LONGEST_HEADER = 1 << 24
_LISTED = "block"
"""Name of the file of a listed block."""
_MOST_PENDING = 1 << 29
"""Bytes that may wait to be written."""
_SLOW_S = 1.0
"""Time for which a save that may wait does so. Afterwards, blocks without room are not saved."""
_FETCH_LIMIT_S = 10.0
"""Time after which a fetch is answered with the blocks that were read, because a disk may hang."""
_MOST_FETCHES = 4
"""Fetches that may be read or wait for that. Others find nothing."""
_SCAN_SHARE = 0.02
"""Share of the limit after whose writing the folder is measured again: other workers write there too."""
_NAME = re.compile(r"[0-9a-f]{32}")
_LEAVE = 0.9
"""Share of the limit that eviction leaves."""

Content = tuple[NDArray[Any], ...]
"""Arrays of one layer, `(heads, tokens, width)` each. Those of bfloat16 are here as uint16."""


def fingerprint(*parts: object) -> str:
    """Return the name of the folder for blocks that are only equal if all these parts are."""
    return hashlib.sha256("\0".join(map(str, parts)).encode()).hexdigest()[:32]


@dataclass(slots=True)
class _Fetch:
    """Blocks that were requested, and what has come of them."""

    answer: Callable[[int, int], None]
    """Function that receives the number of blocks, and of tokens of the listed one after them."""
    only_looks: bool = False
    """True if blocks are only counted; then they have no content here."""
    blocks: list[list[Content]] = field(default_factory=list["list[Content]"])
    """Content by block and layer."""
    next_tokens: int = 0
    """Tokens of the last one, if it is a listed one; 0 if it is not."""
    is_answered: bool = False
    read_s: float = 0.0
    """Time of the reading."""
    copied_s: float = 0.0
    """Time of the copying so far."""
    joined: dict[int, NDArray[Any]] = field(default_factory=dict[int, "NDArray[Any]"])
    """Memory for the copies."""


class KvDisk:
    """Blocks of one rank's layers. Its own threads read and write files."""

    def __init__(self, folder: Path, limit_bytes: int, name: str, layers: LayerRange) -> None:
        """Use `folder`, which several workers may share.

        Args:
            folder: folder of all models' blocks.
            limit_bytes: size to which the folder is kept; the blocks that were used least recently are removed.
            name: the fingerprint of this rank's content.
            layers: the layers of this rank.
        """
        self._folder, self._blocks = folder, folder / name
        self._limit = limit_bytes
        self._layers = range(layers.start, layers.end)
        self._file = f"{layers.start}-{layers.end}"
        self._writer = ThreadPoolExecutor(1, "kv-disk-writer")
        self._reader = ThreadPoolExecutor(1, "kv-disk-reader")
        self._lock = threading.Lock()
        self._written = threading.Condition(self._lock)
        self._pending_bytes = 0
        self._fetches: dict[int, _Fetch] = {}
        self._unmeasured = math.inf
        """Bytes that this worker has written since it measured the folder."""
        self._complaint = ""
        """Last problem, which is not repeated."""

    # ---- save

    def save(self, kv: KVStore, save: step_pb2.Save) -> None:
        """Copy blocks that are not saved yet, and write them in the background. Runs on the compute thread."""
        size, digests = save.blocks.block_tokens, list(save.blocks.digests)
        missing = [
            number
            for number, digest in enumerate(digests)
            if number >= save.first and not os.path.exists(self._path(digest) / self._file)  # noqa: PTH110 - it does not raise
        ]
        for number in missing[: save.most or None]:
            with self._lock:
                limit_s = _SLOW_S if save.may_wait else 0.0
                has_room = self._written.wait_for(lambda: self._pending_bytes <= _MOST_PENDING, limit_s)
            if not has_room:
                self._complain(f"{self._folder} is on a slow disk, so that some KV is not saved")
                break
            tokens = (number == len(digests) - 1 and save.blocks.last_tokens) or size
            content = kv.content(save.sequence, (number * size, number * size + tokens))
            block = [tuple(map(_to_host, arrays)) for arrays in content]
            nbytes = sum(array.nbytes for arrays in block for array in arrays)
            with self._lock:
                self._pending_bytes += nbytes
            self._writer.submit(self._write, digests[number], block, nbytes)
        for listed in save.listed:
            self._writer.submit(self._list, listed, size)
        self._writer.submit(self._touch, [*digests, *(listed.place for listed in save.listed)])

    def _list(self, listed: step_pb2.ListedBlock, size: int) -> None:
        """List a block that is written, in place of the one there. That is removed if it is a short one."""
        if not (self._path(listed.digest) / self._file).exists():
            return
        before = read_listed(self._path(listed.place) / _LISTED)
        if before is None or before.digest != listed.digest:
            content = ListedTokens(listed.digest, tuple(listed.tokens)).encode()
            self._replace(self._path(listed.place), _LISTED, lambda file: file.write(content))
            if before is not None and len(before.tokens) < size:
                self._remove_own(before.digest)

    def _remove_own(self, digest: bytes) -> None:
        """Remove what this rank's layers have of a block, and its folder after the last rank did so."""
        with contextlib.suppress(OSError):
            for path in self._path(digest).iterdir():
                layers = _parse_range(path.name)
                if layers is not None and not set(layers).isdisjoint(self._layers):
                    path.unlink(missing_ok=True)
            self._path(digest).rmdir()

    def _write(self, digest: bytes, block: Sequence[Content], nbytes: int) -> None:
        try:
            self._replace(self._path(digest), self._file, lambda file: _write_layers(file, block), nbytes)
        finally:
            with self._lock:
                self._pending_bytes -= nbytes
                self._written.notify_all()

    def _replace(self, folder: Path, name: str, write: Callable[[BinaryIO], object], nbytes: int = 0) -> None:
        """Write a whole file in place of the one of that name, or none."""
        try:
            self._folder.parent.mkdir(parents=True, exist_ok=True)
            for each in (self._folder, self._blocks, folder):
                each.mkdir(mode=0o700, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=folder, prefix=".unfinished-", delete=False) as file:
                try:
                    write(cast("BinaryIO", file))
                    file.close()
                    Path(file.name).replace(folder / name)
                except BaseException:
                    Path(file.name).unlink(missing_ok=True)
                    raise
            self._make_room(nbytes)
        except OSError as error:
            self._complain(f"KV cannot be saved in {self._folder}: {error.strerror or error}")

    def _touch(self, digests: Sequence[bytes]) -> None:
        """Record a use of blocks. Earlier ones count as newer: without them, later ones are of no use."""
        now = time.time()
        for number, digest in enumerate(digests):
            with contextlib.suppress(OSError):
                os.utime(self._path(digest), (now, now - number / 1e3))

    def _make_room(self, written: int) -> None:
        """Remove the blocks that were used least recently, if the folder is larger than its limit."""
        self._unmeasured += written
        if self._unmeasured < self._limit * _SCAN_SHARE:
            return
        self._unmeasured = 0
        blocks = sorted(_sizes(self._folder))
        size = sum(nbytes for _, nbytes, _ in blocks)
        for _, nbytes, path in blocks if size > self._limit else ():
            if size <= self._limit * _LEAVE:
                break
            shutil.rmtree(path, ignore_errors=True)
            size -= 0 if path.exists() else nbytes

    # ---- fetch

    def fetch(self, wanted: worker_pb2.FetchKv, answer: Callable[[int, int], None]) -> None:
        """Read or count blocks in the background, and answer with how many there are without a gap. Any thread may call it."""
        fetch = _Fetch(answer, wanted.only_looks)
        with self._lock:
            reads = sum(not (each.is_answered or each.only_looks) for each in self._fetches.values())
            self._fetches[wanted.id] = fetch
        if reads >= _MOST_FETCHES and not wanted.only_looks:
            self._answer(wanted.id, fetch)
        else:
            self._reader.submit(self._read, wanted, fetch)

    def _read(self, wanted: worker_pb2.FetchKv, fetch: _Fetch) -> None:
        timer = threading.Timer(_FETCH_LIMIT_S, self._give_up, (wanted.id, fetch))
        timer.daemon = True
        timer.start()
        digests, found, began = list(wanted.blocks.digests), 0, time.monotonic()
        read = self._find_block if fetch.only_looks else self._read_block
        try:
            while found < len(digests) and (block := read(digests[found])) is not None:
                with self._lock:
                    if fetch.is_answered:
                        break
                    fetch.blocks.append(block)
                found += 1
            if found == len(digests) and wanted.HasField("next"):
                digests += self._read_next(wanted.next, fetch)
                found = len(digests)
        except Exception:
            log.exception("KV cannot be read from %s", self._folder)
        timer.cancel()
        fetch.read_s = time.monotonic() - began
        self._answer(wanted.id, fetch)
        if not fetch.only_looks:
            self._writer.submit(self._touch, digests[:found])

    def _read_next(self, wanted: step_pb2.ListedBlock, fetch: _Fetch) -> list[bytes]:
        """Read the listed block after the others, if it begins with tokens of the text; return the folders used."""
        listed = read_listed(self._path(wanted.place) / _LISTED)
        shared = 0 if listed is None else listed.shared(wanted.tokens)
        if listed is None or not shared or (block := self._read_block(listed.digest)) is None:
            return []
        with self._lock:
            if not fetch.is_answered:
                fetch.blocks.append(block)
                fetch.next_tokens = shared
        return [listed.digest, wanted.place]

    def _give_up(self, id_: int, fetch: _Fetch) -> None:
        self._answer(id_, fetch, f"Reading KV from {self._folder} takes longer than {_FETCH_LIMIT_S:g} s")

    def _answer(self, id_: int, fetch: _Fetch, problem: str = "") -> None:
        """Answer with the blocks that were read, unless that was done before, and log why there are no more."""
        with self._lock:
            late, fetch.is_answered = fetch.is_answered, True
            if (fetch.only_looks or not fetch.blocks) and self._fetches.get(id_) is fetch:
                del self._fetches[id_]
        if not late:
            if problem:
                self._complain(problem)
            fetch.answer(len(fetch.blocks) - bool(fetch.next_tokens), fetch.next_tokens)

    def _find_block(self, digest: bytes) -> list[Content] | None:
        """Return a block without its content, or None if a layer is missing."""
        try:
            ranges = [_parse_range(name) for name in os.listdir(self._path(digest))]  # noqa: PTH208 - faster
        except OSError:
            return None
        missing = set(self._layers).difference(*filter(None, ranges))
        return None if missing else []

    def _read_block(self, digest: bytes) -> list[Content] | None:
        """Return a block's content by layer, or None if a layer is missing or damaged."""
        found: dict[int, Content] = {}
        try:
            files = sorted(self._path(digest).iterdir(), key=lambda file: file.name != self._file)
        except OSError:
            return None
        for path in files:
            layers = _parse_range(path.name)
            wanted = [] if layers is None else [layer for layer in self._layers if layer not in found]
            if layers is None or not any(layer in layers for layer in wanted):
                continue
            try:
                with path.open("rb") as file:
                    found |= _read_layers(file, layers, wanted)
            except OSError as error:
                self._complain(f"KV cannot be read from {path}: {error.strerror or error}")
            except ValueError as error:
                self._complain(f"A block of KV is removed, {path}: {error}")
                path.unlink(missing_ok=True)
        return [found[layer] for layer in self._layers] if len(found) == len(self._layers) else None

    def adopt(self, kv: KVStore, adopt: step_pb2.Adopt) -> None:
        """Fill a sequence with the first tokens of a fetch, and forget it. Runs on the compute thread.

        Raises:
            StepFailed: it is not there any more.
        """
        parts = max(1, adopt.parts)
        is_last = adopt.part + 1 == parts
        with self._lock:
            fetch = self._fetches.get(adopt.fetch)
            if fetch is not None:
                fetch.is_answered = True
            if is_last or not adopt.length:
                self._fetches.pop(adopt.fetch, None)
        if not adopt.length:
            return
        if fetch is None:
            raise StepFailed(f"No KV of fetch {adopt.fetch} is there.")
        began = time.monotonic()
        layers = len(self._layers)
        for layer in range(layers * adopt.part // parts, layers * (adopt.part + 1) // parts):
            blocks = [block[layer] for block in fetch.blocks]
            for block in fetch.blocks:
                block[layer] = ()
            content = enumerate(zip(*blocks, strict=True))
            arrays = [_join(part, fetch.joined, place) for place, part in content]
            kv.fill(adopt.sequence, layer, adopt.length, [array[:, : adopt.length] for array in arrays])
        fetch.copied_s += time.monotonic() - began
        if is_last:
            kv.adopt(adopt.sequence, adopt.length)
            times = (fetch.read_s, fetch.copied_s, parts)
            log.info("Restored %d tokens: read in %.2f s, copied in %.2f s, %d steps", adopt.length, *times)

    def reset(self) -> None:
        """Forget every fetch, and answer those that are not answered."""
        with self._lock:
            fetches, self._fetches = self._fetches, {}
            unanswered = [fetch for fetch in fetches.values() if not fetch.is_answered]
            for fetch in unanswered:
                fetch.is_answered = True
        for fetch in unanswered:
            fetch.answer(0, 0)

    def settle(self, limit_s: float | None = None) -> None:
        """Wait until everything is written, but no longer than a limit."""
        with contextlib.suppress(TimeoutError):
            self._writer.submit(lambda: None).result(limit_s)

    def _path(self, digest: bytes) -> Path:
        return self._blocks / digest.hex()

    def _complain(self, problem: str) -> None:
        if problem != self._complaint:
            self._complaint = problem
            log.warning("%s", problem)


def _to_host(array: mx.array) -> NDArray[Any]:
    """Return an evaluated array's memory, without a copy."""
    return cast("NDArray[Any]", np.asarray(array.view(mx.uint16) if array.dtype == mx.bfloat16 else array))


def _join(parts: Sequence[NDArray[Any]], joined: dict[int, NDArray[Any]], place: int) -> NDArray[Any]:
    """Return the parts one after the other, in the array that was used at this place before, if it fits.

    New memory costs a system more than the copy.
    """
    shape = (parts[0].shape[0], sum(part.shape[1] for part in parts), parts[0].shape[2])
    into = joined.get(place)
    if into is None or (into.shape, into.dtype) != (shape, parts[0].dtype):
        into = joined[place] = np.empty(shape, parts[0].dtype)
    return np.concatenate(parts, axis=1, out=into)


def _parse_range(name: str) -> range | None:
    start, dash, end = name.partition("-")
    return range(int(start), int(end)) if dash and start.isdecimal() and end.isdecimal() else None


def _sizes(folder: Path) -> Iterator[tuple[float, int, Path]]:
    """Yield the time of the last use, the size and the folder of every block. Others' files are not looked at."""
    for path in folder.glob("*/*"):
        if not _NAME.fullmatch(path.name) or not _NAME.fullmatch(path.parent.name):
            continue
        with contextlib.suppress(OSError):
            sizes = [each.stat().st_size for each in path.iterdir()]
            yield path.stat().st_mtime, sum(sizes), path


def _write_layers(file: BinaryIO, block: Sequence[Content]) -> None:
    """Write a header, with each layer's place, checksum, types and shapes, and the content."""
    header: list[tuple[int, int, list[tuple[str, list[int]]]]] = []
    place, payload = 0, list[memoryview]()
    for arrays in block:
        content = [np.ascontiguousarray(array).data.cast("B") for array in arrays]
        checksum = 0
        for part in content:
            checksum = zlib.crc32(part, checksum)
        header.append((place, checksum, [(array.dtype.str, list(array.shape)) for array in arrays]))
        place += sum(part.nbytes for part in content)
        payload += content
    text = json.dumps(header).encode()
    file.write(_MAGIC + _LENGTH.pack(len(text)) + _LENGTH.pack(zlib.crc32(text)) + text)
    file.writelines(payload)


def _read_layers(file: BinaryIO, layers: range, wanted: Sequence[int]) -> dict[int, Content]:
    """Read the wanted layers of a file. Raises ValueError if it is damaged."""
    if file.read(len(_MAGIC)) != _MAGIC:
        raise ValueError("it has another format")
    lengths = file.read(2 * _LENGTH.size)
    if len(lengths) < 2 * _LENGTH.size:
        raise ValueError("it is cut off")
    length, checksum = (number for (number,) in _LENGTH.iter_unpack(lengths))
    text = file.read(min(length, _LONGEST_HEADER))
    if len(text) != length or zlib.crc32(text) != checksum:
        raise ValueError("its header is damaged")
    begin, header = file.tell(), cast("list[tuple[int, int, list[tuple[str, list[int]]]]]", json.loads(text))
    if len(header) != len(layers):
        raise ValueError("it has other layers than its name says")
    found: dict[int, Content] = {}
    for layer in wanted:
        if layer in layers:
            place, checksum, kinds = header[layer - layers.start]
            file.seek(begin + place)
            sizes = [math.prod(shape) * np.dtype(kind).itemsize for kind, shape in kinds]
            content = file.read(sum(sizes))
            if len(content) != sum(sizes) or zlib.crc32(content) != checksum:
                raise ValueError(f"layer {layer} is damaged")
            found[layer] = tuple(_cut(content, kinds, sizes))
    return found


def _cut(
    content: bytes, kinds: Sequence[tuple[str, list[int]]], sizes: Sequence[int]
) -> Iterator[NDArray[Any]]:
    place = 0
    for (kind, shape), size in zip(kinds, sizes, strict=True):
        yield np.frombuffer(content, kind, math.prod(shape), place).reshape(shape)
        place += size
