"""How a node stays with its head: one call that is open for as long as both are there, and again whenever it ends."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

import grpc
import psutil

from mlx_ring.agent.trust import Trust
from mlx_ring.core.addresses import HeadAddress
from mlx_ring.core.errors import PeerRefused, RingError, VersionMismatch
from mlx_ring.core.machine import node_name
from mlx_ring.core.machine_profile import MachineProfile
from mlx_ring.core.process_limits import usable_memory
from mlx_ring.rpc.channels import AGENT_MESSAGE_BYTES, open_aio_channel
from mlx_ring.rpc.failures import channel_error, failure_to_error
from mlx_ring.rpc.hello import make_hello
from mlx_ring.rpc.methods import ATTEND
from mlx_ring.rpc.protos import cluster_pb2
from mlx_ring.rpc.tls.credentials import Credentials
from mlx_ring.rpc.tls.handshakes import handshake_error
from mlx_ring.rpc.tls.names import HEAD_NAME

log = logging.getLogger(__name__)

_BEAT_S = 1.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 1.0
_SILENCE_S = 5.0
"""A head that does not answer for so long is gone."""

Revoke = Callable[[tuple[str, ...]], None]


@dataclass(frozen=True, slots=True)
class Attendant:
    """What a node says of itself."""

    node: str
    port: int
    """Where its agent listens."""
    profile: MachineProfile
    memory_utilization: float
    links_port: int = 0
    """Where it answers probes of links; 0: nowhere."""
    trust: Trust = field(default_factory=Trust)
    """Where collectives may go to other machines."""


async def attend_for_ever(
    head: HeadAddress, credentials: Callable[[], Credentials], who: Attendant, revoke: Revoke
) -> None:
    """Attend, and begin again whenever the head is lost; workers stay where they are meanwhile.

    Args:
        head: where it listens.
        credentials: gives this node's, asked before each call: they may have been renewed.
        who: this node.
        revoke: told which certificates are refused, whenever the head tells.

    Raises:
        PeerRefused: the head does not take this node any more.
        VersionMismatch: the head has other versions.
    """
    pause_s = _FIRST_PAUSE_S
    while True:
        try:
            async for revoked in _attendance(head, credentials(), who):
                pause_s = _FIRST_PAUSE_S
                revoke(revoked)
            log.warning("the head at %s ended; asking again", head)
        except (PeerRefused, VersionMismatch):
            raise
        except RingError as error:
            log.warning("the head at %s cannot be reached, asking again in %g s: %s", head, pause_s, error)
        _heed_cancellation()
        await asyncio.sleep(pause_s)
        pause_s = min(_LONGEST_PAUSE_S, 2 * pause_s)


def _heed_cancellation() -> None:
    """A task that is cancelled while its call breaks hears of the call alone: gRPC keeps the rest."""
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


async def _attendance(
    head: HeadAddress, credentials: Credentials, who: Attendant
) -> AsyncIterator[tuple[str, ...]]:
    """One call: what is revoked, at each answer."""
    peer = f"The head at {head}"
    channel = open_aio_channel(head.cluster, credentials, HEAD_NAME, max_message_bytes=AGENT_MESSAGE_BYTES)
    try:
        call = ATTEND.aio_stream_stream(channel)(_messages(head, who))
        while True:
            try:
                async with asyncio.timeout(_SILENCE_S):
                    reply = await call.read()
            except TimeoutError:
                log.warning("%s has said nothing for %g s", peer, _SILENCE_S)
                return
            if not isinstance(reply, cluster_pb2.AttendReply):
                return
            if reply.HasField("failure"):
                raise failure_to_error(reply.failure)
            if reply.HasField("hello"):
                log.info("attending the head at %s as %s", head, who.node)
            yield tuple(reply.revoked)
    except grpc.RpcError as error:
        raise (handshake_error(error, peer) or channel_error(error, peer)) from error
    finally:
        await channel.close()


async def _messages(head: HeadAddress, who: Attendant) -> AsyncIterator[cluster_pb2.AttendRequest]:
    first = cluster_pb2.AttendRequest(
        hello=make_hello(node=who.node),
        machine=node_name(),
        port=who.port,
        head_host=head.host,
        profile=who.profile.model_dump_json(),
        memory_utilization=who.memory_utilization,
        links_port=who.links_port,
    )
    first.MergeFrom(_now(who))
    yield first
    while True:
        await asyncio.sleep(_BEAT_S)
        yield _now(who)


def _now(who: Attendant) -> cluster_pb2.AttendRequest:
    """What may be another at each message."""
    trusted, problem = who.trust.now()
    return cluster_pb2.AttendRequest(
        memory_free_bytes=usable_memory().available_bytes,
        agent_bytes=_own_bytes(),
        trusted=[
            cluster_pb2.TrustedInterface(name=one.name, address=one.address, network=one.network)
            for one in trusted
        ],
        trusted_problem=problem,
    )


def _own_bytes() -> int:
    """Resident memory of this process."""
    return psutil.Process().memory_info().rss
