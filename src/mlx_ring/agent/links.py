"""A node's links to other nodes: it answers their probes, and probes others when the head asks."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import grpc

from mlx_ring.agent.link_store import KeptLink, LinkStore, WayKey
from mlx_ring.agent.loading import told_failure
from mlx_ring.core.errors import RingError
from mlx_ring.core.heap import give_back_freed_memory
from mlx_ring.rpc.channels import PROBE_MESSAGE_BYTES, make_server, open_channel
from mlx_ring.rpc.hello import check_hello, make_hello
from mlx_ring.rpc.link_probe import LinkMeasure, LinkResponder, ProbeBounds, probe_link
from mlx_ring.rpc.methods import AGENT_SERVICE, MEASURE_LINK, service_handler
from mlx_ring.rpc.protos import agent_pb2
from mlx_ring.rpc.tls.credentials import ChannelTrust
from mlx_ring.rpc.tls.guard import PeerGuard
from mlx_ring.rpc.tls.names import node_name

log = logging.getLogger(__name__)

BOUNDS = ProbeBounds(round_trips_s=0.15, throughput_s=0.35, answer_s=3.0)
"""Of one probe: half a second over most links, and no more than some however slow or broken one is."""
_RESPONDER_THREADS = 4


class LinkFront:
    """What a node answers about its links. One probe goes on at a time: two would measure each other."""

    def __init__(
        self, node: str, trust: Callable[[], ChannelTrust], store: LinkStore, bounds: ProbeBounds = BOUNDS
    ) -> None:
        """`trust` gives this node's credentials, asked before each probe: they may have been renewed."""
        self._node = node
        self._trust = trust
        self._store = store
        self._bounds = bounds
        self._alone = asyncio.Lock()

    def handler(self) -> grpc.GenericRpcHandler:
        """For the agent's server, where only the head may ask."""
        return service_handler(AGENT_SERVICE, ((MEASURE_LINK, self.measure),))

    async def measure(
        self, request: agent_pb2.MeasureLinkRequest, _context: grpc.aio.ServicerContext[object, object]
    ) -> agent_pb2.MeasureLinkReply:
        """What is known of the way to a node, and measured where nothing is."""
        try:
            check_hello(request.hello, make_hello(node=self._node), "the head")
            found = await self._recall_or_measure(request)
        except RingError as error:
            return agent_pb2.MeasureLinkReply(failure=told_failure(error))
        return agent_pb2.MeasureLinkReply(
            round_trip_s=found.round_trip_s, bytes_per_s=found.bytes_per_s, age_s=found.age_s
        )

    async def _recall_or_measure(self, request: agent_pb2.MeasureLinkRequest) -> KeptLink:
        async with self._alone:
            key = await asyncio.to_thread(WayKey.to, request.node, request.address)
            kept = self._store.load(key, request.max_age_s)
            if kept is not None:
                return kept
            measure = await asyncio.to_thread(self._probe, request.node, request.address)
            self._store.save(key, measure)
        log.info(
            "the link to %s at %s: %.2f ms there and back, %.1f MB/s",
            request.node,
            request.address,
            1e3 * measure.round_trip_s,
            measure.bandwidth / 1e6,
        )
        return KeptLink(measure.round_trip_s, measure.bandwidth, 0.0)

    def _probe(self, node: str, address: str) -> LinkMeasure:
        try:
            with open_channel(address, self._trust(), node_name(node)) as channel:
                return probe_link(channel, make_hello(node=self._node), f"{node} at {address}", self._bounds)
        finally:
            give_back_freed_memory()


def make_responder(node: str, guard: PeerGuard) -> grpc.Server:
    """A server of threads, as workers have, that does nothing but answer probes; its port is still to be added."""
    server = make_server(_RESPONDER_THREADS, interceptors=[guard], max_message_bytes=PROBE_MESSAGE_BYTES)
    server.add_generic_rpc_handlers((LinkResponder(make_hello(node=node)).handler(),))
    return server
