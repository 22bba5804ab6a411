"""Has what a node's stages need on its disk, before their workers are started.

Fetches pieces of a model from every peer that has them, into the store.

Each peer has a few streams. A stream takes the next wanted ranges, writes what comes, and has every piece hashed
as it lies on disk. A peer that leaves has its rest fetched from the others. One that gives wrong bytes is used no more.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path

import grpc

from mlx_ring.agent.weights.store import StoredModel, WeightStore, missing_bytes
from mlx_ring.agent.weights.transfer import Fetched, FetchLimits, PeerChannel, Transfer, broken, short
from mlx_ring.core.errors import ProtocolError, RingError, WeightsMissing
from mlx_ring.core.types import ByteProgress, LayerRange
from mlx_ring.models.layer_tensors import tensors_of_stage
from mlx_ring.models.model_folder import read_model_folder
from mlx_ring.models.weights_manifest import MAX_MANIFEST_BYTES, WeightsManifest, decode_manifest
from mlx_ring.rpc.failures import failure_to_error
from mlx_ring.rpc.hello import make_hello
from mlx_ring.rpc.methods import MANIFEST
from mlx_ring.rpc.protos import weights_pb2

log = logging.getLogger(__name__)

_LOCK_WAIT_S = 0.2
_PATIENCE = FetchLimits()


async def fetch_manifest(
    digest: str, peers: Sequence[PeerChannel], node: str, patience: FetchLimits = _PATIENCE
) -> WeightsManifest:
    """Return the manifest of this digest, from the first peer that has it.

    Raises:
        WeightsMissing: none has it; the message has each one's reason.
    """
    reasons: list[str] = []
    for peer in peers:
        try:
            data = await _manifest_bytes(digest, peer, node, patience)
            return await asyncio.to_thread(decode_manifest, data, digest)
        except RingError as error:
            log.info("%s sent no manifest %s: %s", peer.name, digest[:16], short(error))
            reasons.append(f"{peer.name}: {short(error)}")
    raise WeightsMissing(
        f"No node has the manifest of model {digest[:16]} ({' '.join(reasons) or 'no other node is known'}); "
        "start a node that has the model."
    )


async def fetch(
    model: StoredModel,
    wanted: Iterable[int],
    peers: Sequence[PeerChannel],
    node: str,
    progress: ByteProgress,
    patience: FetchLimits = _PATIENCE,
) -> Fetched:
    """Fetch and check the wanted pieces. Pieces that are there are not fetched again.

    Raises:
        WeightsMissing: no peer is left with the missing pieces. Correct pieces are kept.
    """
    async with _writing(model):
        await asyncio.to_thread(model.recheck)
        transfer = Transfer(model, frozenset(wanted), node, progress, patience)
        try:
            await transfer.run(peers)
        finally:
            await asyncio.to_thread(model.sync)
    return transfer.fetched


@asynccontextmanager
async def _writing(model: StoredModel) -> AsyncGenerator[None]:
    """Wait for another process that fetches into the same folder: afterwards there is less to do."""
    while (descriptor := model.lock_for_writing()) is None:  # noqa: ASYNC110 - the other one is another process
        await asyncio.sleep(_LOCK_WAIT_S)
    try:
        yield
    finally:
        os.close(descriptor)


async def _manifest_bytes(digest: str, peer: PeerChannel, node: str, patience: FetchLimits) -> bytes:
    call = MANIFEST.aio_unary_stream(peer.channel)(
        weights_pb2.ManifestRequest(hello=make_hello(node=node), model=digest)
    )
    data = bytearray()
    try:
        while True:
            async with asyncio.timeout(patience.silence_s):
                part = await call.read()
            if not isinstance(part, weights_pb2.ManifestPart):
                return bytes(data)
            if part.HasField("failure"):
                raise failure_to_error(part.failure)
            data += part.data
            if len(data) > MAX_MANIFEST_BYTES or not part.data:
                raise ProtocolError(f"{peer.name} sends a manifest that does not end.")
    except (grpc.RpcError, TimeoutError) as error:
        raise broken(error, peer.name) from error
    finally:
        call.cancel()


async def fetch_stages(
    store: WeightStore,
    digest: str,
    stages: Sequence[LayerRange],
    peers: Sequence[PeerChannel],
    node: str,
    progress: ByteProgress,
    hold: ExitStack,
    patience: FetchLimits | None = None,
) -> Path:
    """Return a folder from which workers can load these stages of the model with the manifest's digest.

    Args:
        peers: nodes to ask, the likeliest first; not asked at all where everything is here.
        progress: called often, with the bytes here and the bytes needed.
        hold: until it is closed, the folder is not removed to make room. Close it when the workers have ended.

    Raises:
        WeightsMissing: no peer has the missing pieces; received ones are kept for the next try.
        PlanError: it fits neither the store's limit nor the disk.
        ModelCorrupt, ModelUnsafe: what the peers have is no model that can be loaded.
    """
    patience = patience or FetchLimits()
    model = await asyncio.to_thread(store.hold, digest, hold)
    if model is None:
        manifest = await fetch_manifest(digest, peers, node, patience)
        await asyncio.to_thread(store.make_room, manifest.nbytes(manifest.base))
        model = await asyncio.to_thread(store.create, manifest, hold)
    await _fetch(store, model, model.manifest.base, peers, node, lambda _done, _total: None, patience)
    wanted = await asyncio.to_thread(_pieces_of, model, stages)
    await _fetch(store, model, wanted, peers, node, progress, patience)
    return model.folder


async def _fetch(
    store: WeightStore,
    model: StoredModel,
    wanted: Iterable[int],
    peers: Sequence[PeerChannel],
    node: str,
    progress: ByteProgress,
    patience: FetchLimits,
) -> None:
    pieces = frozenset(wanted)
    await asyncio.to_thread(store.make_room, missing_bytes(model, pieces), model)
    await fetch(model, pieces, peers, node, progress, patience)


def _pieces_of(model: StoredModel, stages: Iterable[LayerRange]) -> frozenset[int]:
    """Return the pieces that the stages need, headers and small files included; the headers must be there already."""
    folder = read_model_folder(model.folder)
    tensors = (entry for layers in stages for entry in tensors_of_stage(folder, layers))
    return frozenset((*model.manifest.base, *model.manifest.indexes_of(tensors)))
