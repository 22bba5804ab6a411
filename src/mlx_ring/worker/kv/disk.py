"""Keys, values and states on this machine's disk, for restarts and for other splits of the layers and heads.

A block is the content of some tokens. A digest of all tokens up to its end is the name of its folder, whose files have
layers and heads of ranks (`block_files.py`). It lies in a folder for one model, one type of keys and values, and the same
versions of MLX. A rank joins its own layers and heads from the files of any ranks.

Layers that keep every token need every block. Those with a window need the blocks of its tokens, and recurrent ones their
states at the end of the last block. So a text can be restored only where all this was saved in time.

Nothing here fails a step: a block that is missing, damaged or for other layers counts as not saved.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, cast

from numpy.typing import NDArray

from mlx_ring.core.errors import StepFailed
from mlx_ring.rpc.protos import step_pb2, worker_pb2
from mlx_ring.worker.kv.block_files import (
    BlockFile,
    Content,
    DailyBytes,
    HeadShare,
    Kind,
    Rows,
    concatenate_heads,
    concatenate_tokens,
    every_token,
    files_in,
    find_sources,
    from_host,
    make_room,
    read_layers,
    remove_others,
    to_host,
    write_layers,
)
from mlx_ring.worker.kv.kv_store import KVStore

log = logging.getLogger(__name__)

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
_DAILY_SHARE = 5
"""Bytes that may be written in a day, as a multiple of the limit."""

Block = dict[Kind, dict[int, Content]]
"""Content of a block by kind and layer."""
Answer = Callable[[int, Sequence[int]], None]
"""Function that receives the number of blocks after which a sequence can continue at most.

If it cannot continue after each block before, all numbers after which it can follow."""


@dataclass(slots=True)
class _Fetch:
    """Blocks that were requested, and what has come of them."""

    answer: Answer
    size: int
    """Tokens of a block."""
    wanted: int
    """Number of blocks."""
    only_looks: bool = False
    """True if blocks are only counted; then they have no content here."""
    counted: list[frozenset[Kind]] = field(default_factory=list["frozenset[Kind]"])
    """Kinds that are there, by block."""
    blocks: list[Block] = field(default_factory=list[Block])
    is_answered: bool = False
    read_s: float = 0.0
    """Time of the reading."""


class KvDisk:
    """Blocks of one rank's layers and heads. Its own threads read and write files."""

    def __init__(
        self,
        folder: Path,
        limit_bytes: int,
        name: str,
        layers: Sequence[int],
        kinds: Sequence[Kind] | None = None,
        share: HeadShare | None = None,
    ) -> None:
        """Use `folder`, which several workers may share.

        Args:
            folder: folder of all models' blocks.
            limit_bytes: size to which the folder is kept; the blocks that were used least recently are removed.
            name: the fingerprint of this rank's content.
            layers: the numbers of this rank's layers.
            kinds: the kinds of content that they have; None: all of them keep every token.
            share: the KV heads of this rank; None: all.
        """
        self._folder, self._blocks = folder, folder / name
        self._limit = limit_bytes
        self._places = {layer: place for place, layer in enumerate(layers)}
        """Places of this rank's layers in its store."""
        self._share = share
        self._kinds = every_token(layers) if kinds is None else tuple(kinds)
        self._forgets = any(kind.name for kind in self._kinds)
        self._today = DailyBytes(folder, _DAILY_SHARE * limit_bytes)
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
        limit_s = _SLOW_S if save.may_wait else 0.0
        missing = self._missing_end(kv, save) if save.end else self._missing_blocks(save)
        for kind, number in [] if self._today.is_spent else missing:
            with self._lock:
                has_room = self._written.wait_for(lambda: self._pending_bytes <= _MOST_PENDING, limit_s)
            if not has_room:
                self._complain(f"{self._folder} is on a slow disk, so that some KV is not saved")
                break
            if kind.name == "states":
                content = kv.states(save.sequence)
            else:
                content = kv.content(save.sequence, kind.tokens(number, size), kind.window)
            layers = range(kind.extent.start, kind.extent.end)
            block = [tuple(map(to_host, content[self._places[layer]])) for layer in layers]
            nbytes = sum(array.nbytes for arrays in block for array in arrays)
            with self._lock:
                self._pending_bytes += nbytes
            self._writer.submit(self._write, digests[number], kind, block, nbytes)
        self._writer.submit(self._touch, digests)

    def _missing_blocks(self, save: step_pb2.Save) -> list[tuple[Kind, int]]:
        """Return the blocks of layers that keep every token which are to be copied now."""
        missing = [
            (kind, number)
            for kind in self._kinds
            if not kind.name
            for number, digest in enumerate(save.blocks.digests)
            if number >= save.first and not self._is_saved(digest, kind)
        ]
        return missing[: save.most or None]

    def _missing_end(self, kv: KVStore, save: step_pb2.Save) -> list[tuple[Kind, int]]:
        """Return what the other layers lack for the end of the last block, as far as it is still in memory."""
        size, digests = save.blocks.block_tokens, save.blocks.digests

        def is_held(kind: Kind, number: int) -> bool:
            if kind.window is None:
                return kv.length(save.sequence) == size * len(digests)
            return kv.holds(save.sequence, kind.window, kind.tokens(number, size))

        return [
            (kind, number)
            for kind in self._kinds
            if kind.name
            for number in kind.blocks(len(digests), size)
            if not self._is_saved(digests[number], kind) and is_held(kind, number)
        ]

    def _is_saved(self, digest: bytes, kind: Kind) -> bool:
        """Report whether a block's files have all that this rank has of a kind."""
        path = self._path(digest)
        if os.path.exists(path / self._own(kind).name):  # noqa: PTH110 - it does not raise
            return True
        return find_sources(files_in(path), self._own(kind), kind) is not None

    def _write(self, digest: bytes, kind: Kind, block: Sequence[Content], nbytes: int) -> None:
        try:
            folder = self._path(digest)
            self._folder.parent.mkdir(parents=True, exist_ok=True)
            self._folder.mkdir(mode=0o700, exist_ok=True)
            if not self._today.take(nbytes):
                self._complain(
                    f"No more KV is saved today (UTC): {self._today.limit_bytes / 1e9:.1f} GB were written into "
                    f"{self._folder}, {_DAILY_SHARE} times the size of --kv-disk"
                )
                return
            for each in (self._blocks, folder):
                each.mkdir(mode=0o700, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=folder, prefix=".unfinished-", delete=False) as file:
                try:
                    write_layers(cast("BinaryIO", file), block)
                    file.close()
                    Path(file.name).replace(folder / self._own(kind).name)
                except BaseException:
                    Path(file.name).unlink(missing_ok=True)
                    raise
            self._make_room(nbytes)
        except OSError as error:
            self._complain(f"KV cannot be saved in {self._folder}: {error.strerror or error}")
        finally:
            with self._lock:
                self._pending_bytes -= nbytes
                self._written.notify_all()

    def _touch(self, digests: Sequence[bytes]) -> None:
        """Record a use of blocks. Earlier ones count as newer: without them, later ones are of no use."""
        now = time.time()
        for number, digest in enumerate(digests):
            with contextlib.suppress(OSError):
                os.utime(self._path(digest), (now, now - number / 1e3))

    def _make_room(self, written: int) -> None:
        """Remove the blocks that were used least recently, if the folder is larger than its limit."""
        self._unmeasured += written
        if self._unmeasured >= self._limit * _SCAN_SHARE:
            self._unmeasured = 0
            make_room(self._folder, self._limit)

    # ---- fetch

    def fetch(self, wanted: worker_pb2.FetchKv, answer: Answer) -> None:
        """Read or count blocks in the background, and answer with how many there are without a gap. Any thread may call it."""
        if wanted.owners:
            self._writer.submit(remove_others, self._folder, list(wanted.owners))
        fetch = _Fetch(answer, wanted.blocks.block_tokens, len(wanted.blocks.digests), wanted.only_looks)
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
        digests, began = list(wanted.blocks.digests), time.monotonic()
        try:
            (self._count if fetch.only_looks else self._read_all)(fetch, digests)
        except Exception:
            log.exception("KV cannot be read from %s", self._folder)
        timer.cancel()
        fetch.read_s = time.monotonic() - began
        read = len(fetch.blocks)
        self._answer(wanted.id, fetch)
        if not fetch.only_looks:
            self._writer.submit(self._touch, digests[:read])

    def _count(self, fetch: _Fetch, digests: Sequence[bytes]) -> None:
        needed = {kind for kind in self._kinds if not kind.name}
        for digest in digests:
            kinds = self._find_block(digest)
            if fetch.is_answered or not needed <= kinds:
                return
            fetch.counted.append(kinds)

    def _read_all(self, fetch: _Fetch, digests: Sequence[bytes]) -> None:
        for number, digest in enumerate(digests):
            kinds = [kind for kind in self._kinds if number in kind.blocks(fetch.wanted, fetch.size)]
            block = self._read_block(digest, kinds)
            with self._lock:
                if block is None or fetch.is_answered:
                    return
                fetch.blocks.append(block)

    def _give_up(self, id_: int, fetch: _Fetch) -> None:
        self._answer(id_, fetch, f"Reading KV from {self._folder} takes longer than {_FETCH_LIMIT_S:g} s")

    def _answer(self, id_: int, fetch: _Fetch, problem: str = "") -> None:
        """Answer with the blocks that were read, unless that was done before, and log why there are no more."""
        with self._lock:
            late, fetch.is_answered = fetch.is_answered, True
            found, ends = self._result(fetch)
            if (fetch.only_looks or not found) and self._fetches.get(id_) is fetch:
                del self._fetches[id_]
        if not late:
            if problem:
                self._complain(problem)
            fetch.answer(found, ends)

    def _result(self, fetch: _Fetch) -> tuple[int, Sequence[int]]:
        """Return the arguments of a fetch's answer."""
        if not self._forgets:
            return len(fetch.counted if fetch.only_looks else fetch.blocks), ()
        if not fetch.only_looks:
            found = fetch.wanted if len(fetch.blocks) == fetch.wanted else 0
            return found, [found] if found else ()
        ends = [
            end
            for end in range(1, len(fetch.counted) + 1)
            if all(
                kind in fetch.counted[number]
                for kind in self._kinds
                if kind.name
                for number in kind.blocks(end, fetch.size)
            )
        ]
        return max(ends, default=0), ends

    def _find_block(self, digest: bytes) -> frozenset[Kind]:
        """Return the kinds of content of which a block has all that this rank needs."""
        files = files_in(self._path(digest))
        return frozenset(
            kind for kind in self._kinds if find_sources(files, self._own(kind), kind) is not None
        )

    def _read_block(self, digest: bytes, kinds: Sequence[Kind]) -> Block | None:
        """Return a block's content of some kinds, or None if a layer or head is missing or damaged."""
        folder = self._path(digest)
        files = files_in(folder) if kinds else []
        block: Block = {}
        for kind in kinds:
            content = self._read_kind(folder, files, kind)
            if content is None:
                return None
            block[kind] = content
        return block

    def _read_kind(self, folder: Path, files: list[BlockFile], kind: Kind) -> dict[int, Content] | None:
        """Read what this rank needs of a kind. If a file cannot be read, the others may have all of it too."""
        while (sources := find_sources(files, self._own(kind), kind)) is not None:
            wanted: dict[BlockFile, dict[int, Rows | None]] = {}
            for layer, joined in sources.items():
                for file, rows in joined:
                    wanted.setdefault(file, {})[layer] = rows
            parts: dict[BlockFile, dict[int, Content]] = {}
            for file, layers in wanted.items():
                content = self._read_file(folder / file.name, file, layers)
                if content is None:
                    files.remove(file)
                    break
                parts[file] = content
            else:
                return {
                    layer: concatenate_heads([parts[file][layer] for file, _ in joined])
                    for layer, joined in sources.items()
                }
        return None

    def _read_file(self, path: Path, file: BlockFile, wanted: dict[int, Rows | None]) -> Any:
        """Return the wanted rows by layer, or None if the file cannot be read. A damaged one is removed."""
        try:
            with path.open("rb") as opened:
                return read_layers(opened, file.layers, wanted)
        except OSError as error:
            self._complain(f"KV cannot be read from {path}: {error.strerror or error}")
        except ValueError as error:
            self._complain(f"A block of KV is removed, {path}: {error}")
            path.unlink(missing_ok=True)
        return None

    def adopt(self, kv: KVStore, adopt: step_pb2.Adopt) -> None:
        """Fill a sequence with the first tokens of a fetch, and forget it. Runs on the compute thread.

        Raises:
            StepFailed: it is not there any more, or a sequence cannot continue after these tokens.
        """
        with self._lock:
            fetch = self._fetches.pop(adopt.fetch, None)
            if fetch is not None:
                fetch.is_answered = True
        if not adopt.length:
            return
        if fetch is None:
            raise StepFailed(f"No KV of fetch {adopt.fetch} is there.")
        if self._forgets and adopt.length != fetch.wanted * fetch.size:
            raise StepFailed(
                f"The KV of fetch {adopt.fetch} is for {fetch.wanted * fetch.size} tokens, not {adopt.length}."
            )
        began = time.monotonic()
        for kind in self._kinds:
            if kind.name != "states":
                self._fill(kv, adopt, fetch, kind)
        if states := {
            self._places[layer]: [from_host(array) for array in arrays]
            for kind in self._kinds
            if kind.name == "states"
            for layer, arrays in fetch.blocks[-1][kind].items()
        }:
            kv.fill_states(adopt.sequence, states)
        kv.adopt(adopt.sequence, adopt.length)
        copied_s = time.monotonic() - began
        log.info("Restored %d tokens: read in %.2f s, copied in %.2f s", adopt.length, fetch.read_s, copied_s)

    def _fill(self, kv: KVStore, adopt: step_pb2.Adopt, fetch: _Fetch, kind: Kind) -> None:
        """Fill a sequence with the content of one kind."""
        sequence, length = adopt.sequence, adopt.length
        blocks = [fetch.blocks[number][kind] for number in kind.blocks(-(-length // fetch.size), fetch.size)]
        begin = kind.begin(length)
        joined: dict[int, NDArray[Any]] = {}
        for layer in kind.layers:
            contents = [block.pop(layer) for block in blocks]
            arrays = [
                concatenate_tokens(parts, joined, place)
                for place, parts in enumerate(zip(*contents, strict=True))
            ]
            # A window's blocks may have more tokens before it, and other layers' more behind `length`.
            given = [
                array[:, : length - begin] if kind.window is None else array[:, begin - length :]
                for array in arrays
            ]
            kv.fill(sequence, self._places[layer], (begin, length), given, kind.window)

    def reset(self) -> None:
        """Forget every fetch, and answer those that are not answered."""
        with self._lock:
            fetches, self._fetches = self._fetches, {}
            unanswered = [fetch for fetch in fetches.values() if not fetch.is_answered]
            for fetch in unanswered:
                fetch.is_answered = True
        for fetch in unanswered:
            fetch.answer(0, ())

    def settle(self, limit_s: float | None = None) -> None:
        """Wait until everything is written, but no longer than a limit."""
        with contextlib.suppress(TimeoutError):
            self._writer.submit(lambda: None).result(limit_s)

    def _own(self, kind: Kind) -> BlockFile:
        """Return the file that this rank writes."""
        return BlockFile(kind.extent, kind.name, self._share)

    def _path(self, digest: bytes) -> Path:
        return self._blocks / digest.hex()

    def _complain(self, problem: str) -> None:
        if problem != self._complaint:
            self._complaint = problem
            log.warning("%s", problem)
