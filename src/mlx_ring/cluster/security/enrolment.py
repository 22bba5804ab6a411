"""The head's side of `Enrol` and `Renew`, by which a machine becomes and stays a member.

A token bucket for each address limits wrong join requests. No address alone can keep others from enrolling.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeVar

import grpc
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from mlx_ring.cluster.security.authority import Authority
from mlx_ring.cluster.security.records import Members, TokenStore
from mlx_ring.core.errors import ConfigError, RingError, TokenRefused
from mlx_ring.core.folders import AGENT_LOCK
from mlx_ring.host.addresses import bracketed, listening_sockets
from mlx_ring.host.machine import descriptor_limit
from mlx_ring.host.private_files import is_held
from mlx_ring.rpc.channels import FOR_STRANGERS, add_secure_port, address_in_use, make_aio_server
from mlx_ring.rpc.failures import error_to_failure
from mlx_ring.rpc.hello import check_hello, greeting_handler, make_hello
from mlx_ring.rpc.methods import ENROL, ENROLMENT_SERVICE, RENEW, RENEWAL_SERVICE, service_handler
from mlx_ring.rpc.protos import enrol_pb2
from mlx_ring.rpc.tls.certificates import key_to_pem, make_signing_request, needs_renewal
from mlx_ring.rpc.tls.credentials import Credentials, load_credentials, serve_renewed
from mlx_ring.rpc.tls.peers import (
    address_of_call,
    check_node_id,
    node_name,
    open_identity,
    peer_of_call,
    peer_of_certificate,
)

_IPV6_SUBNET = 64
"""Prefix length in bits; a single machine can choose any address within such a subnet."""


@dataclass(slots=True)
class _Bucket:
    tries: float
    at_s: float


class TryLimit:
    """A limit on wrong tries: call `has_try` before each try and `charge` after a wrong one, one try at a time."""

    def __init__(self, *, burst: int = 5, per_second: float = 0.5, addresses: int = 4096) -> None:
        """Set the limits.

        Args:
            burst: the number of tries at once.
            per_second: the rate at which tries are refilled.
            addresses: the number of addresses to remember; beyond that, the least recently seen one is dropped.
        """
        self._burst, self._per_second, self._addresses = burst, per_second, addresses
        self._buckets: dict[str, _Bucket] = {}

    def has_try(self, host: str, now_s: float) -> bool:
        """Return True if this host has a try left."""
        return self._bucket(host, now_s).tries >= 1

    def charge(self, host: str, now_s: float) -> None:
        """Use up one try of this host."""
        self._bucket(host, now_s).tries -= 1

    def _bucket(self, host: str, now_s: float) -> _Bucket:
        """Return the host's tries, refilled until now."""
        key = address_group(host)
        bucket = self._buckets.pop(key, None) or _Bucket(self._burst, now_s)
        self._buckets[key] = bucket
        if len(self._buckets) > self._addresses:
            del self._buckets[next(iter(self._buckets))]
        bucket.tries = min(self._burst, bucket.tries + (now_s - bucket.at_s) * self._per_second)
        bucket.at_s = now_s
        return bucket


def address_group(host: str) -> str:
    """Return what a single machine cannot choose of its address: all of IPv4, the subnet of IPv6."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host
    if isinstance(address, ipaddress.IPv4Address):
        return host
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.IPv6Network((int(address), _IPV6_SUBNET), strict=False))


log = logging.getLogger(__name__)

MAX_MESSAGE_BYTES = 64 << 10
_MOST_WAITING = 64
"""Join requests of one address that may wait at once: a hall of machines behind one router, and no flood."""
_MOST_CONNECTIONS = 128
_PART = 1 / 16
"""Part of the descriptors that connections of strangers may be. Each takes three: its own, and both ends to gRPC."""
_FIRST_BYTE_S = 10.0
"""Time after which a connection without a byte is closed."""
_LONGEST_S = 45.0
"""Longest time of a connection. gRPC ends its own, but not one whose client does not read."""
_END_S = 3.0
"""Longest time that the rest of a connection may take."""
_BLOCK = 64 << 10
_BACKLOG = 256
"""Connections that wait to be accepted. All of them may be accepted at once, before older ones are closed."""

Request = TypeVar("Request")
Context = grpc.aio.ServicerContext[object, object]


class EnrolmentService:
    """The service that issues certificates, to machines with a join token and to members that renew theirs."""

    def __init__(
        self,
        authority: Authority,
        tokens: TokenStore,
        members: Members,
        *,
        tries: TryLimit | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._authority, self._tokens, self._members = authority, tokens, members
        self._tries = tries or TryLimit()
        self._clock = clock
        self.callers: dict[str, str] = {}
        """Addresses of the machines behind the connections that an `EnrolmentProxy` forwards, by their own."""
        self._waiting = Counter[str]()
        """Join requests that wait or are handled, by address."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="enrolment")

    def enrolment_handler(self) -> grpc.GenericRpcHandler:
        """Return the handler for the enrolment port, where clients have no certificate."""
        return service_handler(ENROLMENT_SERVICE, ((ENROL, self.enrol),))

    def renewal_handler(self) -> grpc.GenericRpcHandler:
        """Return the handler for the head's port, behind a guard that calls `Members.refusal`."""
        return service_handler(RENEWAL_SERVICE, ((RENEW, self.renew),))

    async def enrol(self, request: enrol_pb2.EnrolRequest, context: Context) -> enrol_pb2.EnrolReply:
        """Sign a request with a valid token; log a refusal with the peer's address."""
        address = self.callers.get(address_of_call(context), "")
        if not address:
            # Its client has left, or is on this machine and knows the port behind the proxy.
            ended = TokenRefused("The connection has ended: connect to the enrolment port.")
            return enrol_pb2.EnrolReply(failure=error_to_failure(ended))
        group = address_group(_host_of(address))
        if self._waiting[group] >= _MOST_WAITING:
            return _refuse(
                address,
                TokenRefused("Too many join requests from this address at once: try again in a minute."),
            )
        self._waiting[group] += 1
        try:
            certificate = await self._apart(self._enrol_limited, request, address)
        except RingError as error:
            return _refuse(address, error)
        finally:
            self._waiting[group] -= 1
            if not self._waiting[group]:
                del self._waiting[group]
        return self._reply(certificate)

    def _enrol_limited(self, request: enrol_pb2.EnrolRequest, address: str) -> x509.Certificate:
        """Enrol, unless this address was wrong too often. As one request is handled at a time, guesses cannot race."""
        host = _host_of(address)
        if not self._tries.has_try(host, self._clock()):
            raise TokenRefused("Too many wrong join requests from this address: wait a minute.")
        try:
            return self._enrol(request, address)
        except RingError:
            self._tries.charge(host, self._clock())
            raise

    def _enrol(self, request: enrol_pb2.EnrolRequest, address: str) -> x509.Certificate:
        check_hello(request.hello, make_hello(), f"The machine at {address}")
        node = check_node_id(request.node)
        certificate = self._authority.sign(request.signing_request, node)
        # A refused key must not use up the token, nor may a full disk.
        is_member = self._members.check_key(certificate)
        given = request.token_id, request.secret, request.nonce
        self._tokens.check(*given, is_member=is_member)
        self._members.admit(certificate)
        try:
            token = self._tokens.redeem(*given, is_member=is_member)
        except RingError:
            if not is_member:
                with contextlib.suppress(RingError):
                    self._members.remove(node)
            raise
        log.info("%s joined from %s with token %s", node, address, token.name or token.id)
        return certificate

    async def renew(self, request: enrol_pb2.RenewRequest, context: Context) -> enrol_pb2.EnrolReply:
        """Return a new certificate for the caller's own name and key."""
        try:
            certificate = await self._apart(self._renew, request, peer_of_call(context).node)
        except RingError as error:
            return _refuse(address_of_call(context), error)
        return self._reply(certificate)

    def _renew(self, request: enrol_pb2.RenewRequest, node: str) -> x509.Certificate:
        certificate = self._authority.sign(request.signing_request, node)
        self._members.renew(certificate)
        log.info("Renewed the certificate of %s", node)
        return certificate

    async def _apart(
        self, sign: Callable[[Request, str], x509.Certificate], request: Request, who: str
    ) -> x509.Certificate:
        """Sign in a thread, one request at a time, because files are locked and synced."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, sign, request, who)

    def _reply(self, certificate: x509.Certificate) -> enrol_pb2.EnrolReply:
        return enrol_pb2.EnrolReply(
            certificate=certificate.public_bytes(Encoding.PEM), authority=self._authority.pem
        )


def _host_of(address: str) -> str:
    return address.rpartition(":")[0].strip("[]")


def _refuse(address: str, error: RingError) -> enrol_pb2.EnrolReply:
    log.warning("Refused to enrol %s: %s", address, error)
    return enrol_pb2.EnrolReply(failure=error_to_failure(error))


def admit_own_machine(authority: Authority, members: Members, folder: Path) -> Credentials:
    """Return credentials for the node on the head's machine, which needs no token, and save them in `folder`.

    Existing credentials are reused unless they belong to another cluster, are revoked or expire soon.

    Raises:
        ConfigError: an agent of this machine runs as a member of another cluster.
    """
    kept = load_credentials(folder)
    if kept is not None and kept.authority != authority.pem and is_held(folder / AGENT_LOCK):
        raise ConfigError(
            f"An agent with the state in {folder.parent} already runs here, as a member of another cluster: stop it first, "
            "or give this head another --state-dir."
        )
    if kept is not None and kept.authority == authority.pem:
        certificate = x509.load_pem_x509_certificate(kept.certificate)
        soon = needs_renewal(certificate, datetime.now(UTC))
        if not soon and not members.refusal(peer_of_certificate(certificate)):
            return kept
    identity = open_identity(folder)
    request = make_signing_request(identity.key, node_name(identity.node))
    certificate = authority.sign(request, identity.node)
    members.admit(certificate)
    credentials = Credentials(authority.pem, certificate.public_bytes(Encoding.PEM), key_to_pem(identity.key))
    credentials.save(folder)
    return credentials


class EnrolmentProxy:
    """Port for machines without a certificate. It forwards connections to a gRPC server, which only this machine reaches.

    gRPC limits the connections of a server, but one address could hold all of them. Here, the oldest connection of the
    address that has most of them makes room for a new one.
    """

    def __init__(self, server: grpc.aio.Server, port: int, callers: dict[str, str]) -> None:
        """Prepare to forward to a server that listens on a port of loopback, and to record in `callers` for whom."""
        self._server, self._port, self._callers = server, port, callers
        self._most = min(_MOST_CONNECTIONS, int(descriptor_limit() * _PART))
        self._open: dict[asyncio.Task[None], str] = {}
        """Owner of each connection's address, the oldest connection first. It has closed its descriptors before it goes."""
        self._listening: list[asyncio.Server] = []
        self._has_ended = False

    async def listen(self, address: str) -> int:
        """Listen, and return the port. Raises `AddressInUse`."""
        try:
            sockets = listening_sockets(address, _BACKLOG)
        except OSError as error:
            raise address_in_use(address) from error
        for each in sockets:
            server = await asyncio.start_server(self._accept, sock=each, backlog=_BACKLOG)
            self._listening.append(server)
        return sockets[0].getsockname()[1]

    async def stop(self, grace: float | None) -> None:
        """Close the port and all connections, those that are just being accepted included."""
        self._has_ended = True
        for server in self._listening:
            server.close()
        tasks = list(self._open)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._server.stop(grace)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._has_ended:
            writer.transport.abort()
            return
        host, port, *_ = writer.get_extra_info("peername") or ("", 0)
        host = host.removeprefix("::ffff:")
        if len(self._open) >= self._most:
            counts = Counter(self._open.values())
            oldest = max(self._open, key=lambda each: counts[self._open[each]])
            oldest.cancel()
            del self._open[oldest]
        task = asyncio.create_task(self._serve(reader, writer, bracketed(host) + f":{port}"))
        self._open[task] = address_group(host)

        def forget(_: object) -> None:
            self._open.pop(task, None)
            writer.transport.abort()  # of a task that was cancelled before it began, too

        task.add_done_callback(forget)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, address: str) -> None:
        async with _ended(writer):
            try:
                async with asyncio.timeout(_FIRST_BYTE_S):
                    first = await reader.read(_BLOCK)
                if first:
                    async with asyncio.timeout(_LONGEST_S):
                        await self._forward(first, reader, writer, address)
            except OSError as error:
                log.debug("A connection from %s ended: %s", address, error)

    async def _forward(
        self, first: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, address: str
    ) -> None:
        answers, requests = await asyncio.open_connection("127.0.0.1", self._port)
        async with _ended(requests):
            own = "{}:{}".format(*requests.get_extra_info("sockname"))
            self._callers[own] = address
            requests.write(first)
            copies = [asyncio.ensure_future(_copy(*each)) for each in ((reader, requests), (answers, writer))]
            try:
                await asyncio.wait(copies, return_when=asyncio.FIRST_COMPLETED)
            finally:
                del self._callers[own]
                for copy in copies:
                    copy.cancel()
                await asyncio.gather(*copies, return_exceptions=True)


@contextlib.asynccontextmanager
async def _ended(writer: asyncio.StreamWriter) -> AsyncGenerator[None]:
    """Close a connection at the end, at once if the task is cancelled or its peer does not read the rest."""
    try:
        yield
        writer.close()
        with contextlib.suppress(OSError):
            async with asyncio.timeout(_END_S):
                await writer.wait_closed()
    finally:
        writer.transport.abort()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(_BLOCK):
        writer.write(data)
        await writer.drain()


async def start_enrolment_server(
    service: EnrolmentService, authority: Authority, address: str
) -> tuple[EnrolmentProxy, int]:
    """Listen for machines that want to join, on `HeadAddress.enrolment`; return the server and its port."""
    server = make_aio_server(max_message_bytes=MAX_MESSAGE_BYTES, more=FOR_STRANGERS)
    server.add_generic_rpc_handlers((service.enrolment_handler(), greeting_handler()))
    shown = serve_renewed(authority.head_credentials, admits_strangers=True)
    proxy = EnrolmentProxy(server, add_secure_port(server, "127.0.0.1:0", shown), service.callers)
    listened = await proxy.listen(address)
    await server.start()
    return proxy, listened
