"""Service that sends other nodes pieces of local models, and saved KV.

Pieces and the manifest of a model come from its whole folder, or from the store. Files of saved KV come from the folder of
`--kv-disk`. They are requested by digests and names, of which none can lead out of that folder.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import ParamSpec, TypeVar

import grpc

from mlx_ring.agent.weights.store import WeightStore
from mlx_ring.core.errors import ModelNotFound, ProtocolError, RingError, WeightsMissing
from mlx_ring.models.weights_manifest import WeightsManifest, pack_indexes
from mlx_ring.rpc.failures import error_to_failure
from mlx_ring.rpc.hello import check_hello, make_hello
from mlx_ring.rpc.methods import (
    FETCH,
    HAVE,
    LIST_BLOCKS,
    MANIFEST,
    READ_BLOCK,
    WEIGHTS_SERVICE,
    service_handler,
)
from mlx_ring.rpc.protos import hello_pb2, weights_pb2

log = logging.getLogger(__name__)

MESSAGE_BYTES = 1 << 20
MAX_RANGES = 4096
"""Maximum number of ranges in one request."""
MAX_BLOCKS = 1 << 16
"""Maximum number of blocks of saved KV in one request."""
_CONTENT, _BLOCK_FILE = re.compile(r"[0-9a-f]{32}"), re.compile(r"block|\d+-\d+[.a-z0-9-]{0,100}")
_DIGEST_BYTES = (16, 32)
"""Lengths of a block's digest: without and with an owner."""
MAX_KV_CALLS, _KV_THREADS = 64, 4
"""Maximum number of calls that read saved KV or wait for that, and the threads that do it."""
_Context = grpc.aio.ServicerContext[object, object]
_Given = ParamSpec("_Given")
_Result = TypeVar("_Result")
_Read = Callable[[Path, int, int], Awaitable[bytes]]
"""Function that reads at most so many bytes of a file from an offset on, as `_read`."""


@dataclass(frozen=True, slots=True)
class _Source:
    """Folder from which a model's bytes are read, and its present pieces."""

    folder: Path
    manifest: WeightsManifest
    have: frozenset[int]


class _KvThreads:
    """Threads of their own for the folder of saved KV: its disk may hang, and all else must not wait for it."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(_KV_THREADS, "kv-files")
        self._places = threading.BoundedSemaphore(MAX_KV_CALLS)

    async def run(
        self, function: Callable[_Given, _Result], *args: _Given.args, **kwargs: _Given.kwargs
    ) -> _Result:
        """Call a function in a thread.

        Raises:
            WeightsMissing: too many calls wait for the disk.
        """
        if not self._places.acquire(blocking=False):
            raise WeightsMissing(f"{MAX_KV_CALLS} others wait for the disk with saved KV.")
        future = self._threads.submit(function, *args, **kwargs)
        future.add_done_callback(lambda _: self._places.release())
        return await asyncio.wrap_future(future)

    async def read(self, path: Path, nbytes: int, offset: int) -> bytes:
        """Read a part of a file, as `_read`."""
        return await self.run(_read, path, nbytes, offset)


class WeightsService:
    """Service that gives weights to other nodes.

    Args:
        node: this node's name, for greetings.
        store: what it has fetched itself, to be given on.
        kv: the folder of saved KV; None: none is given.
    """

    def __init__(self, node: str, store: WeightStore | None, kv: Path | None = None) -> None:
        self._node = node
        self._store = store
        self._kv = kv
        self._kv_threads = _KvThreads()
        self._offered: dict[str, _Source] = {}

    def offer(self, folder: Path, manifest: WeightsManifest) -> None:
        """Give out a whole model from its own folder."""
        every = frozenset(range(len(manifest.pieces)))
        self._offered[manifest.digest] = _Source(folder, manifest, every)

    def withdraw(self, digest: str) -> None:
        """Give out a model's own folder no more."""
        self._offered.pop(digest, None)

    def handler(self) -> grpc.GenericRpcHandler:
        return service_handler(
            WEIGHTS_SERVICE,
            (
                *((MANIFEST, self.manifest), (HAVE, self.have), (FETCH, self.fetch)),
                *((LIST_BLOCKS, self.list_blocks), (READ_BLOCK, self.read_block)),
            ),
        )

    async def manifest(
        self, request: weights_pb2.ManifestRequest, _context: _Context
    ) -> AsyncIterator[weights_pb2.ManifestPart]:
        """Yield the bytes of a manifest, in order."""
        try:
            source = await self._source(request.hello, request.model)
        except RingError as error:
            yield weights_pb2.ManifestPart(failure=error_to_failure(error))
            return
        data = source.manifest.encoded
        for start in range(0, len(data), MESSAGE_BYTES):
            yield weights_pb2.ManifestPart(data=data[start : start + MESSAGE_BYTES])

    async def have(self, request: weights_pb2.HaveRequest, _context: _Context) -> weights_pb2.HaveReply:
        """Return the pieces that are here and have been checked."""
        try:
            source = await self._source(request.hello, request.model)
        except RingError as error:
            return weights_pb2.HaveReply(failure=error_to_failure(error))
        return weights_pb2.HaveReply(pieces=pack_indexes(source.have, len(source.manifest.pieces)))

    async def fetch(
        self, request: weights_pb2.FetchRequest, _context: _Context
    ) -> AsyncIterator[weights_pb2.FetchPart]:
        """Yield the bytes of the ranges, one after the other, after all of them have been checked."""
        try:
            source = await self._source(request.hello, request.model)
            _check_ranges(source, request)
            async for part in _read_ranges(source.folder / request.file, request.ranges, _read_in_thread):
                yield part
        except RingError as error:
            log.warning("Did not give weights of %s: %s", request.model[:16], error)
            yield weights_pb2.FetchPart(failure=error_to_failure(error))

    # ---- saved KV

    async def list_blocks(
        self, request: weights_pb2.ListBlocksRequest, _context: _Context
    ) -> weights_pb2.ListBlocksReply:
        """Return the names and sizes of the files of those blocks that are here, in the order of a text."""
        try:
            check_hello(request.hello, make_hello(node=self._node), "the peer")
            if len(request.digests) > MAX_BLOCKS:
                raise ProtocolError(
                    f"{len(request.digests)} blocks were requested at once; {MAX_BLOCKS} are allowed."
                )
            folders = {digest: self._block_folder(request.content, digest) for digest in request.digests}
            found = await self._kv_threads.run(_list_files, folders)
        except RingError as error:
            return weights_pb2.ListBlocksReply(failure=error_to_failure(error))
        return weights_pb2.ListBlocksReply(blocks=found)

    async def read_block(
        self, request: weights_pb2.ReadBlockRequest, _context: _Context
    ) -> AsyncIterator[weights_pb2.FetchPart]:
        """Yield the bytes of the ranges of a file of saved KV, one after the other."""
        try:
            check_hello(request.hello, make_hello(node=self._node), "the peer")
            folder = self._block_folder(request.content, request.digest)
            if not _BLOCK_FILE.fullmatch(request.file):
                raise ProtocolError(f"A block of KV has no file {request.file[:255]!r}.")
            if not 1 <= len(request.ranges) <= MAX_RANGES:
                raise ProtocolError(
                    f"{len(request.ranges)} ranges were requested at once; 1 to {MAX_RANGES} are allowed."
                )
            async for part in _read_ranges(folder / request.file, request.ranges, self._kv_threads.read):
                yield part
        except RingError as error:
            log.info("Did not give KV of block %s: %s", request.digest.hex()[:16], error)
            yield weights_pb2.FetchPart(failure=error_to_failure(error))

    def _block_folder(self, content: str, digest: bytes) -> Path:
        """Return the folder of a block, without looking for it.

        Raises:
            WeightsMissing: this node saves no KV.
            ProtocolError: a name that no folder has.
        """
        if self._kv is None:
            raise WeightsMissing(f"{self._node} saves no KV: start it with --kv-disk.")
        if not _CONTENT.fullmatch(content) or len(digest) not in _DIGEST_BYTES:
            raise ProtocolError(f"No KV has the name {content[:255]!r}, {digest.hex()[:64]}.")
        return self._kv / content / digest.hex()

    # ---- models

    async def _source(self, hello: hello_pb2.Hello, model: str) -> _Source:
        check_hello(hello, make_hello(node=self._node), "the peer")
        if (offered := self._offered.get(model)) is not None:
            return offered
        stored = None if self._store is None else await asyncio.to_thread(self._store.find, model)
        if stored is None:
            raise ModelNotFound(f"{self._node} has no model {model[:16]!r}: ask a node that has it.")
        return _Source(stored.folder, stored.manifest, stored.have)


def _check_ranges(source: _Source, request: weights_pb2.FetchRequest) -> None:
    size = source.manifest.files.get(request.file)
    if size is None:
        raise ProtocolError(f"The model has no file {request.file[:255]!r}.")
    if not 1 <= len(request.ranges) <= MAX_RANGES:
        raise ProtocolError(
            f"{len(request.ranges)} ranges were requested at once; 1 to {MAX_RANGES} are allowed."
        )
    for wanted in request.ranges:
        end = wanted.offset + wanted.length
        if not wanted.length or end > size:
            raise ProtocolError(
                f"Bytes [{wanted.offset}, {end}) of {request.file} were requested; it has {size}."
            )
        if not source.manifest.covers(source.have, request.file, wanted.offset, end):
            raise WeightsMissing(
                f"Bytes [{wanted.offset}, {end}) of {request.file} are not here, or not all."
            )


def _list_files(folders: Mapping[bytes, Path]) -> list[weights_pb2.BlockFiles]:
    """Return the files of blocks by digest; those of missing folders, or that go meanwhile, are left out.

    These blocks are used, so that they stay longer, and the first ones longest: later ones are of no use without them.
    """
    found: list[weights_pb2.BlockFiles] = []
    now = time.time()
    for number, (digest, folder) in enumerate(folders.items()):
        sizes: dict[str, int] = {}
        with contextlib.suppress(OSError), os.scandir(folder) as files:
            for file in files:
                if _BLOCK_FILE.fullmatch(file.name):
                    sizes[file.name] = file.stat(follow_symlinks=False).st_size
        if sizes:
            with contextlib.suppress(OSError):
                os.utime(folder, (now, now - number / 1e3))
            found.append(weights_pb2.BlockFiles(digest=digest, names=sizes, sizes=sizes.values()))
    return found


async def _read_ranges(
    path: Path, ranges: Iterable[weights_pb2.ByteRange], read: _Read
) -> AsyncIterator[weights_pb2.FetchPart]:
    for wanted in ranges:
        offset, end = wanted.offset, wanted.offset + wanted.length
        while offset < end:
            data = await read(path, min(MESSAGE_BYTES, end - offset), offset)
            yield weights_pb2.FetchPart(offset=offset, data=data)
            offset += len(data)


async def _read_in_thread(path: Path, nbytes: int, offset: int) -> bytes:
    return await asyncio.to_thread(_read, path, nbytes, offset)


def _read(path: Path, nbytes: int, offset: int) -> bytes:
    """Read a part of a file. It is opened for each part, so that no call which is given up leaves it open."""
    try:
        with path.open("rb", buffering=0) as file:
            data = os.pread(file.fileno(), nbytes, offset)
    except OSError as error:
        raise WeightsMissing(f"{path.name} can no longer be read: {error.strerror}.") from error
    if not data:
        raise WeightsMissing(f"{path.name} ends before byte {offset + nbytes}: it was changed.")
    return data
