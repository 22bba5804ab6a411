"""Peers from which weights are fetched, limits of a fetch, and errors of broken connections."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass

import grpc

from mlx_ring.core.errors import RingError, WorkerLost
from mlx_ring.rpc.failures import channel_error
from mlx_ring.rpc.tls.handshakes import handshake_error

_FINAL = (
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.UNIMPLEMENTED,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
)


@dataclass(frozen=True, slots=True)
class PeerChannel:
    """A node that may have weights. Its channel is the caller's to close; `WEIGHTS_MESSAGE_BYTES` is its limit."""

    name: str
    channel: grpc.aio.Channel


@dataclass(frozen=True, slots=True)
class FetchLimits:
    """Limits of a fetch from peers."""

    streams: int = 3
    """Concurrent streams to each peer."""
    silence_s: float = 20.0
    """Seconds without a byte after which a stream counts as broken."""
    tries: int = 8
    """Consecutive broken streams without a byte in between, after which a peer counts as lost."""
    pause_s: float = 0.25
    """Pause after the first broken stream, doubled after each further one up to `longest_pause_s`."""
    longest_pause_s: float = 4.0


def broken(error: grpc.RpcError | TimeoutError, peer: str) -> RingError:
    """Return the error that the end of a call means."""
    if isinstance(error, TimeoutError):
        return WorkerLost(f"{peer} stopped sending.")
    return handshake_error(error, peer) or channel_error(error, peer)


def is_final(error: grpc.RpcError | TimeoutError) -> bool:
    """Return True if a retry would not help."""
    return isinstance(error, grpc.aio.AioRpcError) and error.code() in _FINAL


def short(reason: object) -> str:
    """Shorten a peer's text, which may have any length."""
    return textwrap.shorten(str(reason), 300, placeholder=" ...")
