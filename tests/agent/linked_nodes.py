"""Nodes that measure links and answer probes, over mutual TLS on loopback."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
from tests.machines import node_credentials

from mlx_ring.agent.link_measurements import LinkService, LinkStore, make_responder
from mlx_ring.cluster.security.authority import Authority
from mlx_ring.rpc.channels import add_secure_port, make_aio_server
from mlx_ring.rpc.link_probe import ProbeBounds
from mlx_ring.rpc.methods import AGENT_SERVICE
from mlx_ring.rpc.tls.caller_checks import AioPeerGuard, PeerGuard
from mlx_ring.rpc.tls.peers import Revoked

SHORT = ProbeBounds(round_trips_s=0.02, throughput_s=0.05, most_bytes=16 << 20, answer_s=2.0)


@dataclass(frozen=True, slots=True)
class LinkedNode:
    """A running node."""

    name: str
    agent: str
    """Address at which the head asks it to measure."""
    links_port: int
    """Port at which it answers probes."""
    revoked: Revoked
    """Certificates that its responder refuses."""
    guard: PeerGuard
    """Guard of its responder."""


@asynccontextmanager
async def linked_node(
    authority: Authority,
    name: str,
    folder: Path,
    *,
    bounds: ProbeBounds = SHORT,
    clock: Callable[[], float] | None = None,
) -> AsyncGenerator[LinkedNode]:
    """Run a node that stores its measurements in `folder`."""
    credentials = node_credentials(authority, name)
    store = LinkStore(folder) if clock is None else LinkStore(folder, clock)
    server = make_aio_server(
        interceptors=[AioPeerGuard(Revoked().refusal, head_only=(f"/{AGENT_SERVICE}/",))]
    )
    server.add_generic_rpc_handlers((LinkService(name, lambda: credentials, store, bounds).handler(),))
    port = add_secure_port(server, "127.0.0.1:0", credentials.for_server())
    revoked = Revoked()
    guard = PeerGuard(revoked.refusal)
    responder = make_responder(name, guard)
    links_port = add_secure_port(responder, "[::]:0", credentials.for_server())
    await server.start()
    responder.start()
    try:
        yield LinkedNode(name, f"127.0.0.1:{port}", links_port, revoked, guard)
    finally:
        await server.stop(None)
        await asyncio.to_thread(_stop, responder)


def _stop(responder: grpc.Server) -> None:
    responder.stop(None).wait()
