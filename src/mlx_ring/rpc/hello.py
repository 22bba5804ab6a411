"""First message on every channel: the sender's identity, and proof that both sides use the same versions.

A head reports its versions and its clock to anyone, so that a machine that cannot join can say why.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import grpc

from mlx_ring.core.environment import package_version
from mlx_ring.core.errors import StaleMessage, VersionMismatch, shown_text
from mlx_ring.rpc.channels import open_channel
from mlx_ring.rpc.failures import channel_error
from mlx_ring.rpc.methods import GREET, GREETING_SERVICE, service_handler
from mlx_ring.rpc.protos import hello_pb2
from mlx_ring.rpc.tls.credentials import ChannelTrust
from mlx_ring.rpc.tls.handshakes import handshake_error
from mlx_ring.rpc.tls.peers import HEAD_NAME

PROTOCOL = 4


def make_hello(
    *,
    instance: str = "",
    epoch: int = 0,
    model_digest: str = "",
    plan_digest: str = "",
    node: str = "",
    stage: int = 0,
    rank: int = 0,
    last_step: int = 0,
    fencing_id: int = 0,
) -> hello_pb2.Hello:
    """Make this process's greeting."""
    return hello_pb2.Hello(
        protocol=PROTOCOL,
        mlx_ring=package_version("mlx-ring"),
        mlx=package_version("mlx"),
        mlx_lm=package_version("mlx-lm"),
        model_digest=model_digest,
        plan_digest=plan_digest,
        instance=instance,
        epoch=epoch,
        last_step=last_step,
        fencing_id=fencing_id,
        stage=stage,
        rank=rank,
        node=node,
    )


def check_hello(theirs: hello_pb2.Hello, ours: hello_pb2.Hello, peer: str) -> None:
    """Refuse a peer for which the same bytes would have another meaning.

    Versions must be equal, because mlx and mlx-lm decide what a layer computes. Digests are
    compared if both sides have one.

    Raises:
        VersionMismatch: names what differs, both values, and the remedy.
        StaleMessage: the peer belongs to an older epoch, another instance, or a replaced head.
    """
    if theirs.protocol != ours.protocol:
        raise VersionMismatch(
            f"{peer} speaks protocol {theirs.protocol}, this side {ours.protocol}: "
            "install the same mlx-ring on both."
        )
    for name in ("mlx_ring", "mlx", "mlx_lm"):
        their_version, our_version = getattr(theirs, name), getattr(ours, name)
        if their_version != our_version:
            package = name.replace("_", "-")
            raise VersionMismatch(
                f"{peer} has {package} {shown_text(their_version)}, this side {our_version}: "
                f"install {package} {our_version} on both."
            )
    for name in ("model_digest", "plan_digest"):
        their_digest, our_digest = getattr(theirs, name), getattr(ours, name)
        if their_digest and our_digest and their_digest != our_digest:
            what = name.replace("_", " ")
            raise VersionMismatch(
                f"{peer} has {what} {shown_text(their_digest)}, this side {our_digest}: load the same model and plan on both."
            )
    if theirs.instance and ours.instance and theirs.instance != ours.instance:
        raise StaleMessage(
            f"{peer} greets for instance {shown_text(theirs.instance)}, but this side serves {ours.instance}."
        )
    if theirs.epoch and ours.epoch and theirs.epoch < ours.epoch:
        raise StaleMessage(f"{peer} greets for epoch {theirs.epoch}, but epoch {ours.epoch} is in force.")
    if theirs.fencing_id and ours.fencing_id and theirs.fencing_id < ours.fencing_id:
        raise StaleMessage(f"{peer} is head {theirs.fencing_id}; head {ours.fencing_id} has taken over.")


def hello_versions(hello: hello_pb2.Hello) -> tuple[tuple[str, str], ...]:
    """Return the peer's installed versions, by package."""
    return (("mlx-ring", hello.mlx_ring), ("mlx", hello.mlx), ("mlx-lm", hello.mlx_lm))


_WAIT_S = 10.0


@dataclass(frozen=True, slots=True)
class Greeted:
    """Greeting of a head, and its time."""

    hello: hello_pb2.Hello
    skew_s: float
    """Seconds by which its clock is ahead of ours."""
    uncertain_s: float
    """Seconds of error, from the round trip."""


def greeting_handler(
    hello: Callable[[], hello_pb2.Hello] = make_hello, clock: Callable[[], float] = time.time
) -> grpc.GenericRpcHandler:
    """Return a handler for the enrolment port, where anyone may ask."""

    async def greet(
        _request: hello_pb2.Hello, _context: grpc.aio.ServicerContext[object, object]
    ) -> hello_pb2.Greeting:
        return hello_pb2.Greeting(hello=hello(), unix_time_s=clock())

    return service_handler(GREETING_SERVICE, ((GREET, greet),))


def ask_greeting(address: str, trust: ChannelTrust) -> Greeted:
    """Ask the head at this enrolment address for its greeting.

    Raises:
        PeerRefused: it is not the head of the cluster that `trust` belongs to.
        WorkerLost: it does not answer.
    """
    try:
        with open_channel(address, trust, HEAD_NAME) as channel:
            ask = GREET.unary_unary(channel)
            # The first call pays for the handshake, which would make the clocks seem apart.
            ask(make_hello(), timeout=_WAIT_S)
            before_s = time.time()
            said = ask(make_hello(), timeout=_WAIT_S)
            after_s = time.time()
    except grpc.RpcError as error:
        who = f"the head at {address}"
        raise (handshake_error(error, who) or channel_error(error, who)) from error
    middle_s, half_s = (before_s + after_s) / 2, abs(after_s - before_s) / 2
    return Greeted(said.hello, said.unix_time_s - middle_s, half_s)
