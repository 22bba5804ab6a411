"""Writing of saved KV in the background: blocks, lists of blocks, and the room and bytes that they may take.

The last block of a text may have fewer tokens. It is listed: a file has its digest and its tokens, in a folder that is
named by its place in the text. So a text finds it that shares only some of its tokens.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import re
import shutil
import tempfile
import threading
import time
import zlib
from array import array as number_array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

from mlx_ring.host.private_files import DailyBytes
from mlx_ring.rpc.protos import step_pb2
from mlx_ring.worker.kv.block_files import BlockFile, Content, Kind, to_host, write_layers
from mlx_ring.worker.kv.kv_store import KVStore

log = logging.getLogger(__name__)

_MOST_PENDING = 1 << 29
"""Bytes that may wait to be written."""
_SLOW_S = 1.0
"""Time for which a save that may wait does so. Afterwards, blocks without room are not saved."""
_RETRY_S = 60.0
"""Time after a failed write in which no block is saved for further texts."""
_SCAN_SHARE = 0.02
"""Share of the limit after whose writing the folder is measured again: other workers write there too."""
_DAILY_SHARE = 5
"""Bytes that may be written in a day, as a multiple of the limit."""
_MOST_LISTED = 4096
"""Places whose last short block is remembered."""
LISTED = "block"
"""Name of the file of a listed block."""
_LIST_MAGIC = b"mlx-ring KV list 2\n"
_CHECKSUM_BYTES = 4
_FOLDER, _BLOCK_FOLDER = re.compile(r"[0-9a-f]{32}"), re.compile(r"[0-9a-f]{32}(?P<owner>[0-9a-f]{32})?")
_LEAVE = 0.9
"""Share of the limit that eviction leaves."""
_CLOCK_S = 60.0
"""Time by which a block's last use may lie ahead of the clock."""


class BlockWriter:
    """Thread that writes the blocks of one rank. No problem is more than a log line."""

    def __init__(self, folder: Path, name: str, limit_bytes: int) -> None:
        """Write into the folder `name` of `folder`, which several workers may share."""
        self.folder, self._blocks, self._limit = folder, folder / name, limit_bytes
        self._today = DailyBytes(folder, _DAILY_SHARE * limit_bytes)
        self._thread = ThreadPoolExecutor(1, "kv-disk-writer")
        self._thread.submit(self._begin)
        self._written = threading.Condition()
        self._pending_bytes = 0
        self._unmeasured = math.inf
        """Bytes that this worker has written since it measured the folder."""
        self._listed: dict[bytes, bytes] = {}
        """Short blocks that were listed last, by their place."""
        self._retries_at = 0.0
        """Time from which it is tried again to write, after the disk has refused that."""
        self._complaint = ""
        """Last problem, which is not repeated."""

    def _begin(self) -> None:
        """Make room, because the limit may be lower than at the last start, and log what is of no use to this model."""
        sizes = make_room(self.folder, self._limit)
        if others := sizes.total() - sizes[self._blocks.name]:
            log.info(
                "%.1f MB of the %.1f MB in %s are KV of other models, types or versions: it is removed when room is needed",
                *(others / 1e6, sizes.total() / 1e6, self.folder),
            )

    def path(self, digest: bytes) -> Path:
        """Return the folder of a block."""
        return self._blocks / digest.hex()

    @property
    def can_write(self) -> bool:
        """False if the day's bytes are written, if the disk has just refused some, or if no block fits."""
        return not self._today.is_spent and time.monotonic() >= self._retries_at

    def has_room(self, *, may_wait: bool) -> bool:
        """Report whether another block may be written today, and soon; wait a little for that if it may."""
        if self._today.is_spent:
            return False
        with self._written:
            room = self._written.wait_for(
                lambda: self._pending_bytes <= _MOST_PENDING, _SLOW_S if may_wait else 0.0
            )
        if not room:
            self.complain(f"{self.folder} is on a slow disk, so that some KV is not saved")
        return room

    def write(self, digest: bytes, file: BlockFile, block: Sequence[Content]) -> None:
        """Write a file of a block, unless it would be removed at once because it is larger than the limit."""
        nbytes = sum(array.nbytes for arrays in block for array in arrays)
        if nbytes > self._limit:
            self._retries_at = math.inf
            self.complain(
                f"No KV is saved in {self.folder}: a block has {nbytes / 1e6:.1f} MB, and --kv-disk is "
                f"{self._limit / 1e6:.1f} MB. Give a larger --kv-disk"
            )
            return
        with self._written:
            self._pending_bytes += nbytes
        self._thread.submit(self._write, digest, file.name, block, nbytes)

    def _write(self, digest: bytes, name: str, block: Sequence[Content], nbytes: int) -> None:
        try:
            self._replace(self.path(digest), name, lambda file: write_layers(file, block), nbytes)
        finally:
            with self._written:
                self._pending_bytes -= nbytes
                self._written.notify_all()

    def _replace(self, folder: Path, name: str, write: Callable[[BinaryIO], object], nbytes: int) -> None:
        """Write a whole file in place of the one of that name, or none."""
        try:
            self.folder.parent.mkdir(parents=True, exist_ok=True)
            self.folder.mkdir(mode=0o700, exist_ok=True)
            if not self._today.take(nbytes):
                self.complain(
                    f"No more KV is saved today (UTC): {self._today.limit_bytes / 1e9:.3g} GB were written into "
                    f"{self.folder}, {_DAILY_SHARE} times the size of --kv-disk"
                )
                return
            unwritten = nbytes
            try:
                for each in (self._blocks, folder):
                    each.mkdir(mode=0o700, exist_ok=True)
                with tempfile.NamedTemporaryFile(dir=folder, prefix=".unfinished-", delete=False) as file:
                    try:
                        write(cast("BinaryIO", file))
                        file.close()
                        Path(file.name).replace(folder / name)
                    except BaseException:
                        with contextlib.suppress(OSError):
                            unwritten -= min(nbytes, Path(file.name).stat().st_size)
                        Path(file.name).unlink(missing_ok=True)
                        raise
            except OSError:
                self._today.give_back(unwritten)
                raise
            self._unmeasured += nbytes
            if self._unmeasured >= self._limit * _SCAN_SHARE:
                self._unmeasured = 0
                make_room(self.folder, self._limit)
        except OSError as error:
            self._retries_at = time.monotonic() + _RETRY_S
            reason = "it is no folder" if isinstance(error, FileExistsError) else error.strerror or error
            self.complain(f"KV cannot be saved in {self.folder}: {reason}")

    def touch(self, digests: Sequence[bytes]) -> None:
        """Record a use of blocks. Earlier ones count as newer: without them, later ones are of no use."""
        self._thread.submit(self._touch, digests)

    def _touch(self, digests: Sequence[bytes]) -> None:
        now = time.time()
        for number, digest in enumerate(digests):
            with contextlib.suppress(OSError):
                os.utime(self.path(digest), (now, now - number / 1e3))

    def remove_others(self, owners: Sequence[bytes]) -> None:
        """Remove the blocks of other owners than these."""
        self._thread.submit(remove_others, self.folder, list(owners))

    def after_writes(self, act: Callable[[], object]) -> None:
        """Call `act` in the writer's thread, once everything is written that waits now."""
        self._thread.submit(act)

    def settle(self, limit_s: float | None = None) -> None:
        """Wait until everything is written, but no longer than a limit."""
        with contextlib.suppress(TimeoutError):
            self._thread.submit(lambda: None).result(limit_s)

    def complain(self, problem: str) -> None:
        """Log a problem, unless it is the last one again."""
        if problem != self._complaint:
            self._complaint = problem
            log.warning("%s", problem)

    # ---- listed blocks

    def list_block(
        self,
        listed: step_pb2.ListedBlock,
        size: int,
        files: Sequence[BlockFile],
        is_whole: Callable[[bytes], bool],
    ) -> None:
        """List a block once it is written, in place of the one there. That is removed if it is a short one.

        Args:
            listed: the block.
            size: tokens of a full block.
            files: the files that this rank writes of each block.
            is_whole: tells by a block's digest whether it has all that this rank needs.
        """
        self._thread.submit(self._list, listed, size, files, is_whole)

    def _list(
        self,
        listed: step_pb2.ListedBlock,
        size: int,
        files: Sequence[BlockFile],
        is_whole: Callable[[bytes], bool],
    ) -> None:
        if not is_whole(listed.digest):
            return
        before, mine = self.read_listed(listed.place), self._listed.pop(listed.place, None)
        if before is None or before.digest != listed.digest:
            content = ListedTokens(listed.digest, tuple(listed.tokens)).encode()
            self._replace(self.path(listed.place), LISTED, lambda file: file.write(content), len(content))
        if len(listed.tokens) < size:
            self._listed[listed.place] = listed.digest
            if len(self._listed) > _MOST_LISTED:
                del self._listed[next(iter(self._listed))]
        # Another rank of this folder may have listed the block, and removed only its own files of the one before.
        is_short = before is not None and len(before.tokens) < size
        for digest in {mine, before.digest if before is not None and is_short else None}:
            if digest is not None and digest != listed.digest:
                self._remove(digest, files)

    def _remove(self, digest: bytes, files: Sequence[BlockFile]) -> None:
        """Remove these files of a block, and its folder after the last rank did so."""
        with contextlib.suppress(OSError):
            for file in files:
                (self.path(digest) / file.name).unlink(missing_ok=True)
            self.path(digest).rmdir()

    def read_listed(self, place: bytes) -> ListedTokens | None:
        """Return the block that is listed at a place; None if there is none, or the file is damaged."""
        try:
            data = (self.path(place) / LISTED).read_bytes()
        except OSError:
            return None
        return ListedTokens.decode(data)


class BlockSaver:
    """Saves of a rank's sequences. It copies on the compute thread, and leaves the writing to a `BlockWriter`."""

    def __init__(
        self,
        writer: BlockWriter,
        kinds: Sequence[Kind],
        places: Mapping[int, int],
        has: Callable[[bytes, Kind], bool],
        own: Callable[[Kind], BlockFile],
    ) -> None:
        """Save the content of some layers.

        Args:
            writer: writes the blocks.
            kinds: the kinds of content that the layers have.
            places: their places in the rank's store.
            has: tells whether a block of this digest has a kind.
            own: returns the file that this rank writes for a kind.
        """
        self._writer, self._kinds, self._places = writer, kinds, places
        self._has, self._own = has, own

    def save(self, kv: KVStore, save: step_pb2.Save) -> None:
        """Copy blocks that are not saved yet, and write them in the background. Runs on the compute thread."""
        size, digests = save.blocks.block_tokens, list(save.blocks.digests)
        missing = self._missing_end(kv, save) if save.end else self._missing_blocks(save)
        for kind, number in missing:
            if not self._writer.has_room(may_wait=save.may_wait):
                break
            if kind.name == "states":
                content = kv.states(save.sequence)
            else:
                begin, end = kind.tokens(number, size)
                if number == len(digests) - 1 and save.blocks.last_tokens:
                    end = begin + save.blocks.last_tokens
                content = kv.content(save.sequence, (begin, end), kind.window)
            layers = range(kind.extent.start, kind.extent.end)
            block = [tuple(map(to_host, content[self._places[layer]])) for layer in layers]
            self._writer.write(digests[number], self._own(kind), block)
        for listed in save.listed:
            self._writer.list_block(listed, size, [self._own(kind) for kind in self._kinds], self._is_whole)
        self._writer.touch([*digests, *(listed.place for listed in save.listed)])

    def _missing_blocks(self, save: step_pb2.Save) -> list[tuple[Kind, int]]:
        """Return the blocks of layers that keep every token which are to be copied now."""
        missing = [
            (kind, number)
            for kind in self._kinds
            if not kind.name
            for number, digest in enumerate(save.blocks.digests)
            if number >= save.first and not self._has(digest, kind)
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
            if not self._has(digests[number], kind) and is_held(kind, number)
        ]

    def _is_whole(self, digest: bytes) -> bool:
        """Report whether a block's files have all that this rank needs."""
        return all(self._has(digest, kind) for kind in self._kinds)


@dataclass(frozen=True, slots=True)
class ListedTokens:
    """A block that texts can use which share only the first of its tokens."""

    digest: bytes
    tokens: tuple[int, ...]

    def shared(self, text: Sequence[int]) -> int:
        """Return the number of first tokens that a text shares."""
        differs = (
            place for place, pair in enumerate(zip(self.tokens, text, strict=False)) if pair[0] != pair[1]
        )
        return next(differs, min(len(self.tokens), len(text)))

    def encode(self) -> bytes:
        """Return the content of its file, with a checksum."""
        content = bytes([len(self.digest)]) + self.digest + number_array("I", self.tokens).tobytes()
        return _LIST_MAGIC + zlib.crc32(content).to_bytes(_CHECKSUM_BYTES) + content

    @classmethod
    def decode(cls, data: bytes) -> ListedTokens | None:
        """Return what `encode` encoded; None if it is damaged."""
        begin = len(_LIST_MAGIC) + _CHECKSUM_BYTES
        content, tokens = data[begin:], number_array("I")
        is_whole = _LIST_MAGIC + zlib.crc32(content).to_bytes(_CHECKSUM_BYTES) == data[:begin]
        if not content or not is_whole:
            return None
        end = 1 + content[0]
        if (len(content) - end) % tokens.itemsize:
            return None
        tokens.frombytes(content[end:])
        return cls(content[1:end], tuple(tokens))


# ---- room


def make_room(folder: Path, limit_bytes: int) -> Counter[str]:
    """Remove the blocks that were used least recently, if all of them are larger than a limit.

    Those that were used while the clock was ahead go first. Otherwise each new block would, for as long as it was wrong.

    Returns:
        The bytes that are left, by the name of their model's folder.
    """
    latest = time.time() + _CLOCK_S
    blocks = sorted(_sizes(folder), key=lambda block: (block[0] <= latest, *block))
    left = Counter[str]()
    for _, nbytes, path in blocks:
        left[path.parent.name] += nbytes
    for _, nbytes, path in blocks if left.total() > limit_bytes else ():
        if left.total() <= limit_bytes * _LEAVE:
            break
        shutil.rmtree(path, ignore_errors=True)
        left[path.parent.name] -= 0 if path.exists() else nbytes
    return left


def _sizes(folder: Path) -> Iterator[tuple[float, int, Path]]:
    """Yield the time of the last use, the size and the folder of every block. Others' files are not looked at."""
    for path, _ in _block_folders(folder):
        with contextlib.suppress(OSError):
            sizes = [each.stat().st_size for each in path.iterdir()]
            yield path.stat().st_mtime, sum(sizes), path


def _block_folders(folder: Path) -> Iterator[tuple[Path, str | None]]:
    """Yield every block's folder, and the block's owner, if it has one."""
    for path in folder.glob("*/*"):
        block = _BLOCK_FOLDER.fullmatch(path.name)
        if block is not None and _FOLDER.fullmatch(path.parent.name):
            yield path, block["owner"]


def remove_others(folder: Path, owners: Iterable[bytes]) -> None:
    """Remove the blocks of all owners but these. Blocks without an owner stay."""
    known = {None, *(owner.hex() for owner in owners)}
    for path, owner in _block_folders(folder):
        if owner not in known:
            shutil.rmtree(path, ignore_errors=True)
