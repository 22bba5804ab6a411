"""The head's ports for its nodes: enrolment, and membership over mutual TLS."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Container, Coroutine, Generator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import grpc

from mlx_ring.cluster.agent_link import first_message, messages_until_end, report_of
from mlx_ring.cluster.membership import (
    SILENCE_S,
    Drained,
    Event,
    Joined,
    Member,
    Membership,
    SessionEnded,
)
from mlx_ring.cluster.security.authority import Authority
from mlx_ring.cluster.security.enrolment import EnrolmentService, admit_own_machine, start_enrolment_server
from mlx_ring.cluster.security.records import Members, TokenStore
from mlx_ring.core.errors import PeerRefused, ProtocolError, RingError, shown_text, without_number
from mlx_ring.core.folders import authority_folder, node_folder
from mlx_ring.host.addresses import HeadAddress
from mlx_ring.host.machine_profile import MachineProfile
from mlx_ring.host.private_files import sole_holder
from mlx_ring.rpc.channels import Silence, add_secure_port, make_aio_server
from mlx_ring.rpc.failures import error_to_failure
from mlx_ring.rpc.hello import check_hello, hello_versions, make_hello
from mlx_ring.rpc.link_probe import LinkResponder
from mlx_ring.rpc.methods import ATTEND, CLUSTER_SERVICE, service_handler
from mlx_ring.rpc.protos import cluster_pb2
from mlx_ring.rpc.tls.caller_checks import AioPeerGuard
from mlx_ring.rpc.tls.credentials import Credentials, serve_renewed
from mlx_ring.rpc.tls.peers import Peer, host_of_call, open_identity, peer_of_call

log = logging.getLogger(__name__)

_SETTLED_WITHIN_S = 1.5
"""Silence after which a plan waits until the node speaks or is disconnected."""
_RETURNS_WITHIN_S = 1.5
"""Silence within which a node whose connection broke may be back, for example because it missed the head's messages."""
_PROOF_S = 1.0
"""Time after which a report proves that a node runs; earlier ones may have waited to be read."""
_REFUSED_S = 30.0
_LOOK_S = 0.25
"""Interval of the check for removed nodes, which only looks whether a file has changed."""
_HEAD_LOCK = "head.lock"
_MESSAGE_BYTES = 2 << 20
"""Limit of a message, which may hold a part of weights of 1 MiB."""

Context = grpc.aio.ServicerContext[object, object]


@dataclass(slots=True)
class _LettingGo:
    """A node's request to leave, and the move of its layers."""

    request: int
    moving: asyncio.Task[None]

    @property
    def refusal(self) -> BaseException | None:
        return self.moving.exception() if self.moving.done() and not self.moving.cancelled() else None


class Control:
    """The nodes that attend, that is, are connected to this head; created by `open_control`."""

    def __init__(self, authority: Authority, tokens: TokenStore, members: Members, node: str) -> None:
        self.node = node
        """Node ID of the head's own machine."""
        self.membership = Membership()
        self.counted: set[str] = set()
        """Nodes that count where several are waited for; empty for all."""
        self._authority, self._tokens, self.members = authority, tokens, members
        self._serial = count(1)
        self._changed = asyncio.Condition()
        self._watchers: list[Callable[[Event], None]] = []
        self._revocations: set[asyncio.Event] = set()
        """Events that announce revoked certificates, one for each connected node."""
        self._silences: dict[int, tuple[str, Silence]] = {}
        """Node and silence of each session."""
        self._returning: dict[str, Silence] = {}
        """Silence of each node whose connection broke a moment ago."""
        self.let_go: Callable[[str], Coroutine[None, None, None]] = _let_go_at_once
        """Moves all layers away from a node that wants to leave."""
        self._letting_go: dict[str, _LettingGo] = {}

    @property
    def credentials(self) -> Credentials:
        """The head's credentials."""
        return self._authority.head_credentials()

    @property
    def fingerprint(self) -> bytes:
        """Fingerprint of the cluster's CA."""
        return self._authority.fingerprint

    def make_token(self, *, life_s: float, uses: int | None = None) -> str:
        """Create a token with which machines can join, `uses` at most."""
        return str(self._tokens.create(self._authority.fingerprint, name="serve", life_s=life_s, uses=uses))

    @contextlib.contextmanager
    def watching(self, watcher: Callable[[Event], None]) -> Generator[None]:
        """Call `watcher` after each event that changes the membership, for as long as the context is open."""
        self._watchers.append(watcher)
        try:
            yield
        finally:
            self._watchers.remove(watcher)

    async def _until(self, holds: Callable[[], bool]) -> None:
        async with self._changed:
            await self._changed.wait_for(holds)

    async def wait_for(self, nodes: int, including: str = "") -> Membership:
        """Wait while nodes are lacking; return all that are usable."""
        await self._until(lambda: not self.lacks(nodes, including))
        return self.membership.usable

    def lacks(self, nodes: int, including: str = "") -> bool:
        """Report whether fewer usable nodes are connected, or the given one is not."""
        usable = self.membership.usable.members
        counts = len(usable.keys() & self.counted) if self.counted and nodes > 1 else len(usable)
        return counts < nodes or bool(including and including not in self.membership.members)

    async def wait_until_lacking(self, nodes: int) -> None:
        """Wait until fewer usable nodes are connected."""
        await self._until(lambda: self.lacks(nodes))

    async def wait_until_undrained(self, node: str) -> None:
        """Wait until the node is not drained, because it was readmitted or has left for good."""
        await self._until(lambda: node not in self.membership.drained)

    async def settle(self, besides: Container[str] = ()) -> None:
        """Wait while a connected node is silent, except for some, until it speaks or is disconnected.

        A node whose connection broke a moment ago gets the time to return.
        """

        def is_settled() -> bool:
            return all(node in besides for node in self._returning) and all(
                silence.seconds < _SETTLED_WITHIN_S or node in besides
                for node, silence in self._silences.values()
            )

        await self._until(is_settled)

    async def wait_for_reports(self, nodes: Container[str]) -> None:
        """Wait until each of these nodes has reported again, or is disconnected."""
        before = {node: member for node, member in self.membership.members.items() if node in nodes}

        def have_reported() -> bool:
            # A report replaces the member.
            return all(self.membership.members.get(node) is not member for node, member in before.items())

        await self._until(have_reported)

    def has_left(self, node: str) -> bool:
        """Report whether the node is not connected, and will not be back in a moment."""
        return node not in self.membership.members and node not in self._returning

    async def wait_until_left(self, node: str) -> None:
        """Wait until the node is not connected, and will not be back in a moment."""
        await self._until(lambda: self.has_left(node))

    async def wait_until_present(self, node: str) -> None:
        """Wait until the node is connected, and not silent."""

        def is_present() -> bool:
            return any(
                at == node and silence.seconds < _SETTLED_WITHIN_S for at, silence in self._silences.values()
            )

        await self._until(is_present)

    async def wait_until_absent(self, node: str) -> None:
        """Wait until the node is not connected."""
        await self._until(lambda: node not in self.membership.members)

    async def wait_for_joined(self) -> None:
        """Wait until a node connects."""
        joined = asyncio.Event()
        with self.watching(lambda event: joined.set() if isinstance(event, Joined) else None):
            await joined.wait()

    async def look(self) -> None:
        """Look at the silence of each node."""
        for _, silence in self._silences.values():
            silence.look()
        self._returning = {
            node: silence for node, silence in self._returning.items() if silence.look() < _RETURNS_WITHIN_S
        }
        async with self._changed:
            self._changed.notify_all()

    async def drain(self, node: str, *, is_drained: bool = True) -> None:
        """Let no plan use a node until it leaves; with False, let plans use it again."""
        await self._happens(Drained(node, is_drained))

    async def _happens(self, event: Event) -> None:
        async with self._changed:
            after = self.membership.apply(event)
            if after is self.membership:
                # The event belongs to a replaced session; the node is connected in a newer one.
                return
            self.membership = after
            if isinstance(event, Joined):
                self._returning.pop(event.member.node, None)
            self._changed.notify_all()
        for watcher in tuple(self._watchers):
            watcher(event)

    def send_revoked(self) -> None:
        """Send the revoked certificates to all connected nodes at once."""
        for revocations in self._revocations:
            revocations.set()

    def handler(self) -> grpc.GenericRpcHandler:
        """Return the handler by which nodes attend."""
        return service_handler(CLUSTER_SERVICE, ((ATTEND, self.attend),))

    async def attend(
        self, requests: AsyncIterator[cluster_pb2.AttendRequest], context: Context
    ) -> AsyncIterator[cluster_pb2.AttendReply]:
        """Serve a node for as long as it is connected, and answer each of its messages."""
        host = host_of_call(context)
        try:
            # Read the peer only once: gRPC may crash if it is read after the call has ended.
            peer = peer_of_call(context)
            member = self._member(await first_message(requests), peer, host)
            await self._refuse_copy(member)
        except RingError as error:
            log.warning("Refused %s: %s", host, error)
            yield cluster_pb2.AttendReply(failure=error_to_failure(error))
            return
        reason, revocations, is_final = "its connection was lost", asyncio.Event(), False
        may_return, has_left = True, False
        silence = Silence()
        self._silences[member.session] = member.node, silence
        try:
            log.info("%s (%s) is connected, at %s", member.node, member.machine, member.host)
            await self._happens(Joined(member))
            self._revocations.add(revocations)
            yield cluster_pb2.AttendReply(hello=make_hello(), revoked=self.members.revoked_serials())
            async with contextlib.aclosing(messages_until_end(requests, revocations)) as saying:
                async for said in saying:
                    if said is not None:
                        silence.end()
                        if said.leaves:
                            reason, is_final, has_left = "it left the cluster", True, True
                            break
                        await self._received(member, said)
                    yield self._reply(member.node)
        except ProtocolError as error:
            reason, is_final = str(error), True
        except TimeoutError:
            reason, may_return = f"it sent nothing for {SILENCE_S:g} s", False
        finally:
            self._revocations.discard(revocations)
            del self._silences[member.session]
            if self._was_removed(peer):
                reason, is_final = "it was removed from the cluster", True
            if may_return and not is_final and self.membership.has_session(member.node, member.session):
                self._returning.setdefault(member.node, silence)
            if has_left:
                self._letting_go.pop(member.node, None)
                log.info("%s (%s) has left the cluster", member.node, member.machine)
            else:
                log.warning("%s (%s) is disconnected: %s", member.node, member.machine, reason)
            await asyncio.shield(
                self._happens(SessionEnded(member.node, member.session, reason, time.time(), is_final))
            )

    def _was_removed(self, peer: Peer) -> bool:
        """Report whether a node was removed from the cluster; False if that cannot be read."""
        with contextlib.suppress(RingError, OSError):
            return bool(self.members.refusal(peer))
        return False

    async def _refuse_copy(self, member: Member) -> None:
        """Refuse another process with a connected node's identity, once the connected one has proved that it still runs.

        The same process that reconnects, or one that replaces an ended one, gets the session.
        """
        known, since_s = self.membership.members.get(member.node), time.monotonic()
        if known is None or known.process == member.process or known.session not in self._silences:
            return
        silence = self._silences[known.session][1]
        while time.monotonic() - since_s < _PROOF_S:
            before = self.membership.members.get(member.node)

            def is_decided(before: Member | None = before) -> bool:
                # A report replaces the member.
                spoke_or_left = self.membership.members.get(member.node) is not before
                return spoke_or_left or silence.seconds >= _SETTLED_WITHIN_S

            await self._until(is_decided)
            is_silent = self.membership.members.get(member.node) is before
            if is_silent or not self.membership.has_session(member.node, known.session):
                return
        raise PeerRefused(
            f"Another machine is connected as {member.node}, at {known.host}: this one, at {member.host}, is a copy with the same "
            "identity. Remove the folder `node` in one's state folder, and join that one again with a token."
        )

    async def _received(self, member: Member, said: cluster_pb2.AttendRequest) -> None:
        if not said.wants_to_leave:
            if self._letting_go.pop(member.node, None) is not None:
                await self.drain(member.node, is_drained=False)
        else:
            leaving = self._letting_go.get(member.node)
            if leaving is None or (leaving.refusal is not None and leaving.request != said.leave_request):
                moving = asyncio.create_task(self.let_go(member.node), name="let go")
                moving.add_done_callback(lambda done: self._ask_again_later(member.node, done))
                leaving = self._letting_go[member.node] = _LettingGo(0, moving)
            leaving.request = said.leave_request
        await self._happens(report_of(member.node, member.session, said))

    def _ask_again_later(self, node: str, done: asyncio.Task[None]) -> None:
        """Forget a refusal after a while, because a machine with room may join. Its error is retrieved in any case."""

        def forget() -> None:
            if (leaving := self._letting_go.get(node)) is not None and leaving.moving is done:
                del self._letting_go[node]

        if not done.cancelled() and done.exception() is not None:
            asyncio.get_running_loop().call_later(_REFUSED_S, forget)

    def _reply(self, node: str) -> cluster_pb2.AttendReply:
        reply = cluster_pb2.AttendReply(revoked=self.members.revoked_serials())
        leaving = self._letting_go.get(node)
        if leaving is not None and leaving.moving.done() and not leaving.moving.cancelled():
            reply.leave_request, error = leaving.request, leaving.refusal
            reply.may_leave, reply.stay_reason = error is None, "" if error is None else str(error)
        return reply

    def _member(self, first: cluster_pb2.AttendRequest, peer: Peer, host: str) -> Member:
        if peer.is_head:
            raise PeerRefused("A head cannot attend another head: only nodes can.")
        check_hello(first.hello, make_hello(), f"{peer} at {host}")
        if (
            not 0 < first.port < 1 << 16
            or first.links_port >= 1 << 16
            or not 0.0 < first.memory_utilization <= 1.0
        ):
            raise ProtocolError(
                f"{peer} reports port {first.port}, links port {first.links_port} and memory utilization "
                f"{first.memory_utilization:g}: ports must be below 65536, and utilization within 0 and 1."
            )
        member = Member(
            node=peer.node,
            machine=shown_text(first.machine),
            host=host,
            port=first.port,
            head_host=first.head_host,
            profile=MachineProfile.from_json(first.profile),
            memory_utilization=first.memory_utilization,
            session=next(self._serial),
            links_port=first.links_port,
            since_s=time.time(),
            versions=hello_versions(first.hello),
            process=first.process[:80],
        )
        return member.after(report_of(member.node, member.session, first))


async def _let_go_at_once(_node: str) -> None:
    """Do nothing: nothing is loaded yet."""


@asynccontextmanager
async def open_control(
    state: Path, address: HeadAddress, *handlers: grpc.GenericRpcHandler
) -> AsyncGenerator[Control]:
    """Listen for nodes, and admit this machine's own node.

    Args:
        state: the state folder; the first start creates the cluster's authority in it.
        address: the address to listen on; the enrolment port is the next one.
        handlers: Handlers of other RPCs of nodes.

    Raises:
        AddressInUse: a port that another process uses.
        ConfigError: another head has the same state, or an agent here is a member of another cluster.
    """
    refusal = (
        f"Another head with the state in {state} already runs on this machine: stop it first with `mlx-ring stop`, or "
        "give --state-dir."
    )
    with sole_holder(authority_folder(state) / _HEAD_LOCK, refusal):
        async with _listening(state, address, *handlers) as control:
            yield control


@asynccontextmanager
async def _listening(
    state: Path, address: HeadAddress, *handlers: grpc.GenericRpcHandler
) -> AsyncGenerator[Control]:
    authority = Authority.open(authority_folder(state))
    tokens, members = TokenStore(authority_folder(state)), Members(authority_folder(state))
    admit_own_machine(authority, members, node_folder(state))
    control = Control(authority, tokens, members, open_identity(node_folder(state)).node)
    service = EnrolmentService(authority, tokens, members)
    guard = AioPeerGuard(members.refusal)
    server = make_aio_server(interceptors=[guard], max_message_bytes=_MESSAGE_BYTES)
    probes = LinkResponder(make_hello(node=control.node)).aio_handler()
    server.add_generic_rpc_handlers((service.renewal_handler(), control.handler(), probes, *handlers))
    add_secure_port(server, address.cluster, serve_renewed(authority.head_credentials))
    enrolment, _ = await start_enrolment_server(service, authority, address.enrolment)
    await server.start()
    sweeping = asyncio.create_task(_end_removed(guard, control, members), name="removed nodes")
    try:
        yield control
    finally:
        sweeping.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await sweeping
        await asyncio.gather(enrolment.stop(None), server.stop(None))


async def _end_removed(guard: AioPeerGuard, control: Control, members: Members) -> None:
    """End the calls of removed nodes, here and on the other nodes, which get the revoked certificates."""
    revoked, is_readable = members.revoked_serials(), True
    while True:
        await asyncio.sleep(_LOOK_S)
        await control.look()
        try:
            members.check_readable()
            guard.end_refused()
            if (now := members.revoked_serials()) != revoked:
                revoked = now
                control.send_revoked()
        except (RingError, OSError) as error:
            if is_readable:
                log.warning(
                    "Removed machines stay connected until this is mended: %s", without_number(str(error))
                )
            is_readable = False
        else:
            is_readable = True
