"""Models that an agent fetched for the instances on its machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path

from mlx_ring.agent.weights.stages import fetch_stages
from mlx_ring.agent.weights.store import WeightStore
from mlx_ring.agent.weights.transfer import PeerChannel
from mlx_ring.core.types import LayerRange
from mlx_ring.host.process import release_freed_memory
from mlx_ring.rpc.channels import WEIGHTS_MESSAGE_BYTES, open_aio_channel
from mlx_ring.rpc.protos import agent_pb2
from mlx_ring.rpc.tls.credentials import Credentials
from mlx_ring.rpc.tls.peers import HEAD_NAME, node_name


class FetchedModels:
    """Folders that workers load from, kept for as long as their instance runs."""

    def __init__(self, node: str, store: WeightStore, credentials: Callable[[], Credentials]) -> None:
        self._node = node
        self._store = store
        self._credentials = credentials
        self._holds: dict[str, ExitStack] = {}
        """By instance."""

    async def fetch(
        self, instance: str, request: agent_pb2.LoadStagesRequest, progress: Callable[[int, int], None]
    ) -> Path:
        """Have what the request's stages need here.

        Raises:
            WeightsMissing: no node has it.
            RingError: it cannot be kept, or is no model.
        """
        credentials = self._credentials()
        stages = [
            LayerRange(assignment.first_layer, assignment.end_layer) for assignment in request.assignments
        ]
        hold = self._holds.setdefault(instance, ExitStack())
        async with AsyncExitStack() as channels:
            peers = [await channels.enter_async_context(_Asked(peer, credentials)) for peer in request.peers]
            folder = await fetch_stages(
                self._store, request.weights, stages, peers, self._node, progress, hold
            )
        release_freed_memory()
        return folder

    def release(self, running: Sequence[str]) -> None:
        """Release the models of all instances but these."""
        for instance in [instance for instance in self._holds if instance not in running]:
            self._holds.pop(instance).close()


class _Asked:
    """A peer with a separate channel for the time of a fetch."""

    def __init__(self, peer: agent_pb2.WeightsPeer, credentials: Credentials) -> None:
        self._name = peer.node or "the head"
        name = node_name(peer.node) if peer.node else HEAD_NAME
        self._channel = open_aio_channel(
            peer.address, credentials, name, max_message_bytes=WEIGHTS_MESSAGE_BYTES
        )

    async def __aenter__(self) -> PeerChannel:
        return PeerChannel(self._name, self._channel)

    async def __aexit__(self, *_: object) -> None:
        await self._channel.close()
