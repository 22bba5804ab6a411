"""A cluster's authority, machines with its certificates, and a head that listens on loopback."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import grpc
from cryptography.hazmat.primitives.serialization import Encoding
from tests.ports import free_ports

from mlx_ring.agent.enrolment import join
from mlx_ring.cluster.security.authority import Authority
from mlx_ring.cluster.security.enrolment import (
    EnrolmentProxy,
    EnrolmentService,
    TryLimit,
    start_enrolment_server,
)
from mlx_ring.cluster.security.records import Members, TokenStore
from mlx_ring.core.errors import AddressInUse
from mlx_ring.host.addresses import HeadAddress
from mlx_ring.rpc.channels import add_secure_port, make_aio_server
from mlx_ring.rpc.methods import AGENT_SERVICE, STOP, service_handler
from mlx_ring.rpc.protos import agent_pb2
from mlx_ring.rpc.tls.caller_checks import AioPeerGuard
from mlx_ring.rpc.tls.certificates import key_to_pem, make_key, make_signing_request
from mlx_ring.rpc.tls.credentials import Credentials
from mlx_ring.rpc.tls.peers import Revoked, node_name

NOW = datetime.now(UTC)
ANSWER = 42


def node_credentials(authority: Authority, node: str, now: datetime = NOW) -> Credentials:
    """Return a node's credentials, signed at this time."""
    key = make_key()
    certificate = authority.sign(make_signing_request(key, node_name(node)), node, now)
    return Credentials(authority.pem, certificate.public_bytes(Encoding.PEM), key_to_pem(key))


async def answer(
    _request: agent_pb2.StopRequest, _context: grpc.aio.ServicerContext[object, object]
) -> agent_pb2.StopReply:
    return agent_pb2.StopReply(stopped=ANSWER)


@asynccontextmanager
async def listening(
    credentials: Credentials, guard: AioPeerGuard | None = None, *more: grpc.GenericRpcHandler
) -> AsyncGenerator[str]:
    """Run a server that answers `STOP` with `ANSWER`, and yield its address."""
    server = make_aio_server(interceptors=[guard or AioPeerGuard(Revoked().refusal)])
    server.add_generic_rpc_handlers((service_handler(AGENT_SERVICE, ((STOP, answer),)), *more))
    port = add_secure_port(server, "127.0.0.1:0", credentials.for_server())
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


@dataclass(slots=True)
class Head:
    """A head's enrolment and cluster ports, with everything behind them."""

    authority: Authority
    tokens: TokenStore
    members: Members
    address: HeadAddress

    def token(self, *, life_s: float = 3600.0, uses: int | None = None) -> str:
        return str(self.tokens.create(self.authority.fingerprint, life_s=life_s, uses=uses))

    async def join(self, folder: Path, token: str) -> Credentials:
        """Join as a machine whose state lies in `folder`."""
        return await asyncio.to_thread(join, str(self.address), token, folder)


@asynccontextmanager
async def running_head(folder: Path, tries: TryLimit | None = None) -> AsyncGenerator[Head]:
    """Run a head whose state lies in `folder`."""
    authority, tokens, members = Authority.open(folder), TokenStore(folder), Members(folder)
    front = EnrolmentService(authority, tokens, members, tries=tries)
    cluster = make_aio_server(interceptors=[AioPeerGuard(members.refusal)])
    cluster.add_generic_rpc_handlers(
        (front.renewal_handler(), service_handler(AGENT_SERVICE, ((STOP, answer),)))
    )
    enrolment, port = await _two_ports(front, authority, cluster)
    await cluster.start()
    try:
        yield Head(authority, tokens, members, HeadAddress("127.0.0.1", port))
    finally:
        await asyncio.gather(enrolment.stop(None), cluster.stop(None))


def free_pair_of_ports() -> int:
    """Return the first of two consecutive free ports on loopback."""
    return free_ports(2)[0]


async def _two_ports(
    front: EnrolmentService, authority: Authority, cluster: grpc.aio.Server
) -> tuple[EnrolmentProxy, int]:
    """Listen on two consecutive ports: on a free one and the one before, or on another pair if that is taken."""
    while True:
        enrolment, port = await start_enrolment_server(front, authority, "127.0.0.1:0")
        try:
            credentials = authority.head_credentials().for_server()
            return enrolment, add_secure_port(cluster, f"127.0.0.1:{port - 1}", credentials)
        except AddressInUse:
            await enrolment.stop(None)
