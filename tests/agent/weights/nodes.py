"""Nodes that serve weights over loopback, each from its own folder, and fetches from them."""

from __future__ import annotations

import contextlib
import hashlib
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import numpy as np
import pytest

from mlx_ring.agent.weights.serving import WeightsService
from mlx_ring.agent.weights.stages import fetch
from mlx_ring.agent.weights.store import StoredModel, WeightStore
from mlx_ring.agent.weights.transfer import Fetched, FetchLimits, PeerChannel
from mlx_ring.models.model_folder import read_model_folder
from mlx_ring.models.weights_manifest import Piece, WeightsManifest, make_manifest, manifest_of_folder
from mlx_ring.rpc.channels import WEIGHTS_MESSAGE_BYTES, make_aio_server, open_aio_channel
from mlx_ring.rpc.methods import FETCH, HAVE, MANIFEST, WEIGHTS_SERVICE, service_handler
from mlx_ring.rpc.protos import weights_pb2

QUICK = FetchLimits(silence_s=10.0, tries=2, pause_s=0.01)
Tamper = Callable[[weights_pb2.FetchPart], AsyncIterator[weights_pb2.FetchPart]]


def ignore_progress(_done: int, _total: int) -> None:
    """Ignore progress."""


@dataclass(slots=True)
class RecordedProgress:
    """Recorder of progress."""

    steps: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])

    def __call__(self, done: int, total: int) -> None:
        self.steps.append((done, total))


def manifest_in(folder: Path, cache: Path) -> WeightsManifest:
    return manifest_of_folder(read_model_folder(folder), cache, ignore_progress)


def write_pieces(folder: Path, sizes: list[int], seed: int = 0) -> WeightsManifest:
    """Write a folder of one file with pieces of these sizes, because a fetch needs no real model."""
    folder.mkdir(parents=True, exist_ok=True)
    data = np.random.default_rng(seed).bytes(sum(sizes))
    (folder / "model.safetensors").write_bytes(data)
    pieces: list[Piece] = []
    for number, size in enumerate(sizes):
        start = sum(sizes[:number])
        digest = hashlib.sha256(data[start : start + size]).hexdigest()
        pieces.append(Piece(f"tensor.{number}", "model.safetensors", start, size, digest))
    return make_manifest({"model.safetensors": len(data)}, pieces)


class TamperingService(WeightsService):
    """A server of weights that passes each part through `tamper`."""

    tamper: Tamper | None = None
    served_model: str = ""
    """Model whose manifest is sent, whichever is requested; empty for the requested one."""

    async def manifest(
        self, request: weights_pb2.ManifestRequest, _context: grpc.aio.ServicerContext[object, object]
    ) -> AsyncIterator[weights_pb2.ManifestPart]:
        changed = weights_pb2.ManifestRequest(hello=request.hello, model=self.served_model or request.model)
        async for part in super().manifest(changed, _context):
            yield part

    def handler(self) -> grpc.GenericRpcHandler:
        behaviours = ((MANIFEST, self.manifest), (HAVE, self.have), (FETCH, self._tampered))
        return service_handler(WEIGHTS_SERVICE, behaviours)

    async def _tampered(
        self, request: weights_pb2.FetchRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> AsyncIterator[weights_pb2.FetchPart]:
        async for part in self.fetch(request, context):
            if self.tamper is None:
                yield part
                continue
            async for changed in self.tamper(part):
                yield changed


@dataclass(slots=True)
class Node:
    """A node that serves weights."""

    peer: PeerChannel
    address: str
    server: grpc.aio.Server
    service: TamperingService


@contextlib.asynccontextmanager
async def node(
    name: str,
    manifest: WeightsManifest | None = None,
    folder: Path | None = None,
    *,
    store: WeightStore | None = None,
    tamper: Tamper | None = None,
) -> AsyncGenerator[Node]:
    """Run a node on loopback, with a model in a folder, or with a store."""
    service = TamperingService(name, store)
    service.tamper = tamper
    if manifest is not None and folder is not None:
        service.offer(folder, manifest)
    server = make_aio_server()
    server.add_generic_rpc_handlers((service.handler(),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    address = f"127.0.0.1:{port}"
    async with open_aio_channel(address, max_message_bytes=WEIGHTS_MESSAGE_BYTES) as channel:
        try:
            yield Node(PeerChannel(name, channel), address, server, service)
        finally:
            await server.stop(None)


def flip(part: weights_pb2.FetchPart) -> weights_pb2.FetchPart:
    """Return the part with one bit of its first byte changed."""
    return weights_pb2.FetchPart(offset=part.offset, data=bytes([part.data[0] ^ 1]) + part.data[1:])


async def flipping(part: weights_pb2.FetchPart) -> AsyncIterator[weights_pb2.FetchPart]:
    """Yield the part with a wrong bit."""
    yield flip(part)


def all_pieces(manifest: WeightsManifest) -> range:
    return range(len(manifest.pieces))


def bytes_of(model: StoredModel) -> dict[str, bytes]:
    return {name: (model.folder / name).read_bytes() for name in model.manifest.files}


async def fetch_all(model: StoredModel, *nodes: Node) -> Fetched:
    """Fetch all of a model."""
    peers = [each.peer for each in nodes]
    return await fetch(model, all_pieces(model.manifest), peers, "mini", ignore_progress, QUICK)


def is_like(model: StoredModel, folder: Path) -> bool:
    return bytes_of(model) == {name: (folder / name).read_bytes() for name in model.manifest.files}


def warnings_of(caplog: pytest.LogCaptureFixture) -> str:
    return "\n".join(record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING)


FETCH_PROGRAM = """
import asyncio, sys
from pathlib import Path
from mlx_ring.agent.weights.stages import fetch, fetch_manifest
from mlx_ring.agent.weights.transfer import PeerChannel
from mlx_ring.agent.weights.store import WeightStore
from mlx_ring.rpc.channels import open_aio_channel

async def main(address, digest, store):
    async with open_aio_channel(address) as channel:
        peer = PeerChannel("big", channel)
        manifest = await fetch_manifest(digest, [peer], "mini")
        model = WeightStore(Path(store)).create(manifest)
        report = lambda done, total: print(done, flush=True)
        await fetch(model, range(len(manifest.pieces)), [peer], "mini", report)

asyncio.run(main(*sys.argv[1:]))
"""
"""Program that fetches a model; its arguments are an address, a digest and the folder of a store."""
