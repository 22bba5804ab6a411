"""Service that sends other nodes the manifest and pieces of local models: from a whole folder, or from the store."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import grpc

from mlx_ring.agent.weights.store import WeightStore
from mlx_ring.core.errors import ModelNotFound, ProtocolError, RingError, WeightsMissing
from mlx_ring.models.weights_manifest import WeightsManifest, pack_indexes
from mlx_ring.rpc.failures import error_to_failure
from mlx_ring.rpc.hello import check_hello, make_hello
from mlx_ring.rpc.methods import FETCH, HAVE, MANIFEST, WEIGHTS_SERVICE, service_handler
from mlx_ring.rpc.protos import hello_pb2, weights_pb2

log = logging.getLogger(__name__)

MESSAGE_BYTES = 1 << 20
MAX_RANGES = 4096
"""Maximum number of ranges in one request."""
_Context = grpc.aio.ServicerContext[object, object]


@dataclass(frozen=True, slots=True)
class _Source:
    """Folder from which a model's bytes are read, and its present pieces."""

    folder: Path
    manifest: WeightsManifest
    have: frozenset[int]


class WeightsService:
    """Service that gives weights to other nodes.

    Args:
        node: this node's name, for greetings.
        store: what it has fetched itself, to be given on.
    """

    def __init__(self, node: str, store: WeightStore | None) -> None:
        self._node = node
        self._store = store
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
            WEIGHTS_SERVICE, ((MANIFEST, self.manifest), (HAVE, self.have), (FETCH, self.fetch))
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
            async for part in _read_ranges(source.folder / request.file, request):
                yield part
        except RingError as error:
            log.warning("Did not give weights of %s: %s", request.model[:16], error)
            yield weights_pb2.FetchPart(failure=error_to_failure(error))

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


async def _read_ranges(path: Path, request: weights_pb2.FetchRequest) -> AsyncIterator[weights_pb2.FetchPart]:
    descriptor = await asyncio.to_thread(_open, path)
    try:
        for wanted in request.ranges:
            offset, end = wanted.offset, wanted.offset + wanted.length
            while offset < end:
                data = await asyncio.to_thread(
                    _read, descriptor, min(MESSAGE_BYTES, end - offset), offset, path
                )
                yield weights_pb2.FetchPart(offset=offset, data=data)
                offset += len(data)
    finally:
        os.close(descriptor)


def _open(path: Path) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise WeightsMissing(f"{path.name} can no longer be read: {error.strerror}.") from error


def _read(descriptor: int, nbytes: int, offset: int, path: Path) -> bytes:
    try:
        data = os.pread(descriptor, nbytes, offset)
    except OSError as error:
        raise WeightsMissing(f"{path.name} cannot be read: {error.strerror}.") from error
    if not data:
        raise WeightsMissing(f"{path.name} ends before byte {offset + nbytes}: it was changed.")
    return data
