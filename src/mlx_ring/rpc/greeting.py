"""A head tells its versions and its clock to whoever asks, so that a machine that cannot join finds out why."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import grpc

from mlx_ring.rpc.channels import open_channel
from mlx_ring.rpc.failures import channel_error
from mlx_ring.rpc.hello import make_hello
from mlx_ring.rpc.methods import GREET, GREETING_SERVICE, service_handler
from mlx_ring.rpc.protos import hello_pb2
from mlx_ring.rpc.tls.credentials import ChannelTrust
from mlx_ring.rpc.tls.handshakes import handshake_error
from mlx_ring.rpc.tls.names import HEAD_NAME

_WAIT_S = 10.0


@dataclass(frozen=True, slots=True)
class Greeted:
    """What a head has said, and when."""

    hello: hello_pb2.Hello
    skew_s: float
    """How far its clock is ahead of ours."""
    uncertain_s: float
    """How much of that may be the way there and back."""


def greeting_handler(
    hello: Callable[[], hello_pb2.Hello] = make_hello, clock: Callable[[], float] = time.time
) -> grpc.GenericRpcHandler:
    """For the enrolment port, where anybody may ask."""

    async def greet(
        _request: hello_pb2.Hello, _context: grpc.aio.ServicerContext[object, object]
    ) -> hello_pb2.Greeting:
        return hello_pb2.Greeting(hello=hello(), unix_time_s=clock())

    return service_handler(GREETING_SERVICE, ((GREET, greet),))


def ask_greeting(address: str, trust: ChannelTrust) -> Greeted:
    """Ask the head at this enrolment address.

    Raises:
        PeerRefused: it is not the head of the cluster that `trust` is of.
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
