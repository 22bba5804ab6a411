"""Has what a node's stages need on its disk, before their workers are started."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path

from mlx_ring.agent.weights.fetching import fetch, fetch_manifest
from mlx_ring.agent.weights.peers import Patience, Peer, Progress
from mlx_ring.agent.weights.store import StoredModel, WeightStore, missing_bytes
from mlx_ring.core.layer_tensors import tensors_of_stage
from mlx_ring.core.model_folder import read_model_folder
from mlx_ring.core.types import LayerRange


async def fetch_stages(
    store: WeightStore,
    digest: str,
    stages: Sequence[LayerRange],
    peers: Sequence[Peer],
    node: str,
    progress: Progress,
    hold: ExitStack,
    patience: Patience | None = None,
) -> Path:
    """A folder from which workers can load these stages of the model that a manifest's digest names.

    Args:
        peers: nodes to ask, the likeliest first; not asked at all where everything is here.
        progress: told (bytes here, bytes needed), often.
        hold: until it is closed, the folder is not removed to make room. Close it when the workers have ended.

    Raises:
        WeightsMissing: no peer gives what is missing; what came stays, and the next try goes on from there.
        PlanError: it fits neither the store's limit nor the disk.
        ModelCorrupt, ModelUnsafe: what the peers have is no model that can be loaded.
    """
    patience = patience or Patience()
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
    peers: Sequence[Peer],
    node: str,
    progress: Progress,
    patience: Patience,
) -> None:
    pieces = frozenset(wanted)
    await asyncio.to_thread(store.make_room, missing_bytes(model, pieces), model)
    await fetch(model, pieces, peers, node, progress, patience)


def _pieces_of(model: StoredModel, stages: Iterable[LayerRange]) -> frozenset[int]:
    """What the stages need, headers and small files among it; the headers must be there already."""
    folder = read_model_folder(model.folder)
    tensors = (entry for layers in stages for entry in tensors_of_stage(folder, layers))
    return frozenset((*model.manifest.base, *model.manifest.indexes_of(tensors)))
