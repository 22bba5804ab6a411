"""A node's links to other nodes: it answers their probes, and probes others when the head asks.

Measurements of the routes to other nodes are kept between runs, in a file in the node's state folder.

A measurement is valid for two addresses: the peer's, and the local one on the route to it.
Another cable or network changes one of them, and the node measures the route again.
An unreadable measurement counts as missing.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import grpc
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from mlx_ring.agent.loading import as_failure
from mlx_ring.core.environment import package_version
from mlx_ring.core.errors import ConfigError, RingError
from mlx_ring.host.private_files import write_private
from mlx_ring.host.process import release_freed_memory
from mlx_ring.rpc.channels import PROBE_MESSAGE_BYTES, make_server, open_channel
from mlx_ring.rpc.hello import check_hello, make_hello
from mlx_ring.rpc.link_probe import LinkMeasure, LinkResponder, ProbeBounds, probe_link
from mlx_ring.rpc.methods import AGENT_SERVICE, MEASURE_LINK, service_handler
from mlx_ring.rpc.protos import agent_pb2
from mlx_ring.rpc.tls.caller_checks import PeerGuard
from mlx_ring.rpc.tls.credentials import ChannelTrust
from mlx_ring.rpc.tls.peers import node_name

log = logging.getLogger(__name__)

LINKS_FILE = "links.json"
_VERSION = 1
"""Version of the measurement; a change invalidates what was kept."""
_MOST_KEPT = 64
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


@dataclass(frozen=True, slots=True)
class RouteKey:
    """Route that a measurement is of."""

    node: str
    host: str
    """The peer's host, without a port: the port changes with each start."""
    source: str
    """The local address on the route."""

    @classmethod
    def to(cls, node: str, address: str) -> RouteKey:
        """Return the key of the route to a node at a gRPC address."""
        host = address.rpartition(":")[0].strip("[]")
        return cls(node, host, _source_towards(host))


@dataclass(frozen=True, slots=True)
class KeptLink:
    """A measurement with its age."""

    round_trip_s: float
    bytes_per_s: float
    age_s: float


class _Entry(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    node: str
    host: str
    source: str
    round_trip_s: Positive
    bytes_per_s: Positive
    unix_time_s: Positive

    @property
    def key(self) -> RouteKey:
        return RouteKey(self.node, self.host, self.source)


class _File(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    version: int
    mlx_ring: str
    links: Annotated[tuple[_Entry, ...], Field(strict=False)]


class LinkStore:
    """One node's measurements, the last of each route."""

    def __init__(self, folder: Path, clock: Callable[[], float] = time.time) -> None:
        """Open the store; `clock` returns Unix seconds."""
        self._file = folder / LINKS_FILE
        self._clock = clock

    def load(self, key: RouteKey, max_age_s: float) -> KeptLink | None:
        """Return the kept measurement of a route; None if there is none or it is too old."""
        for entry in self._entries():
            age_s = self._clock() - entry.unix_time_s
            if entry.key == key and 0 <= age_s <= max_age_s:
                return KeptLink(entry.round_trip_s, entry.bytes_per_s, age_s)
        return None

    def save(self, key: RouteKey, measure: LinkMeasure) -> None:
        """Replace the kept measurement; log an unwritable folder, which is no error."""
        entry = _Entry(
            node=key.node,
            host=key.host,
            source=key.source,
            round_trip_s=measure.round_trip_s,
            bytes_per_s=measure.bandwidth,
            unix_time_s=self._clock(),
        )
        others = [kept for kept in self._entries() if kept.key != key]
        kept = _File(
            version=_VERSION,
            mlx_ring=package_version("mlx-ring"),
            links=(entry, *others[: _MOST_KEPT - 1]),
        )
        try:
            write_private(self._file, kept.model_dump_json(indent=1).encode())
        except (OSError, ConfigError) as error:
            log.warning(
                "The measurement of the link to %s is not kept, and is repeated next time: %s",
                key.node,
                error,
            )

    def _entries(self) -> tuple[_Entry, ...]:
        try:
            kept = _File.model_validate_json(self._file.read_bytes())
        except (OSError, ValidationError):
            return ()
        if (kept.version, kept.mlx_ring) != (_VERSION, package_version("mlx-ring")):
            return ()
        return kept.links


def _source_towards(host: str) -> str:
    """Return the own address from which packets to a host leave; empty without a route. Nothing is sent."""
    with contextlib.suppress(OSError):
        family, kind, protocol, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    return ""


BOUNDS = ProbeBounds(round_trips_s=0.15, throughput_s=0.35, answer_s=3.0, greeting_s=2.0)
"""Limits of one probe: half a second on most links, and a few seconds on slow or broken ones."""
_RESPONDER_THREADS = 4


class LinkService:
    """Service that measures a node's links, one probe at a time because two would disturb each other."""

    def __init__(
        self, node: str, trust: Callable[[], ChannelTrust], store: LinkStore, bounds: ProbeBounds = BOUNDS
    ) -> None:
        """Prepare the service; `trust` returns this node's credentials before each probe, because they may be renewed."""
        self._node = node
        self._trust = trust
        self._store = store
        self._bounds = bounds
        self._alone = asyncio.Lock()

    def handler(self) -> grpc.GenericRpcHandler:
        """Return the handler for the agent's server, which only the head may call."""
        return service_handler(AGENT_SERVICE, ((MEASURE_LINK, self.measure),))

    async def measure(
        self, request: agent_pb2.MeasureLinkRequest, _context: grpc.aio.ServicerContext[object, object]
    ) -> agent_pb2.MeasureLinkReply:
        """Return the kept measurement of the route to a node, or measure it."""
        try:
            check_hello(request.hello, make_hello(node=self._node), "the head")
            found = await self._recall_or_measure(request)
        except RingError as error:
            return agent_pb2.MeasureLinkReply(failure=as_failure(error))
        return agent_pb2.MeasureLinkReply(
            round_trip_s=found.round_trip_s, bytes_per_s=found.bytes_per_s, age_s=found.age_s
        )

    async def _recall_or_measure(self, request: agent_pb2.MeasureLinkRequest) -> KeptLink:
        async with self._alone:
            key = await asyncio.to_thread(RouteKey.to, request.node, request.address)
            kept = self._store.load(key, request.max_age_s)
            if kept is not None:
                return kept
            measure = await asyncio.to_thread(self._probe, request.node, request.address)
            self._store.save(key, measure)
        log.info(
            "The link to %s at %s: %.2f ms there and back, %.1f MB/s",
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
            release_freed_memory()


def make_responder(node: str, guard: PeerGuard) -> grpc.Server:
    """Return a threaded server, like a worker's, that only answers probes; the caller adds its port."""
    server = make_server(_RESPONDER_THREADS, interceptors=[guard], max_message_bytes=PROBE_MESSAGE_BYTES)
    server.add_generic_rpc_handlers((LinkResponder(make_hello(node=node)).handler(),))
    return server
