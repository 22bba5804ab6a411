"""Conversion of errors to gRPC messages and back, in this module alone."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

import grpc

from mlx_ring.core import errors
from mlx_ring.core.errors import LinkLost, RingError, ServingError, StepFailed, WorkerLost, in_sentence
from mlx_ring.host.addresses import LOCAL_NETWORK_DENIED, is_denied_by_macos
from mlx_ring.rpc.protos import step_pb2


def _tree(root: type[RingError]) -> Iterator[type[RingError]]:
    yield root
    for child in root.__subclasses__():
        yield from _tree(child)


def _plain(kind: type[RingError]) -> bool:
    """Report whether the class is made from its message alone."""
    return kind.__init__ is RingError.__init__ or issubclass(kind, errors.RequestError)


_BY_NAME = {kind.__name__: kind for kind in _tree(RingError) if _plain(kind)}


def error_to_failure(error: BaseException, sequences: Iterable[int] = ()) -> step_pb2.Failure:
    """Convert an error to a message. An error outside our tree becomes a `StepFailed` that names its class."""
    if isinstance(error, RingError):
        kind, message = type(error).__name__, str(error)
    else:
        kind, message = StepFailed.__name__, f"{type(error).__name__}: {error}"
    ends = error.ends if isinstance(error, LinkLost) else ()
    return step_pb2.Failure(kind=kind, message=message, sequences=list(sequences), ends=ends)


def failure_to_error(failure: step_pb2.Failure) -> RingError:
    """Convert a message to an error. A kind that this version does not know becomes a `ServingError`."""
    kind = _BY_NAME.get(failure.kind, ServingError)
    if kind in (errors.ContextExceeded, errors.Overloaded):
        kind = errors.RequestError
    error = kind(failure.message)
    return error.between(*failure.ends) if isinstance(error, LinkLost) else error


_CONNECTS = "failed to connect"
_CLOSED_EARLY = "it closed the connection during the handshake: it has just stopped, or may not accept this machine's certificate"
_HANDSHAKE_CAUSES = (
    ("socket closed", _CLOSED_EARLY),
    ("connection reset", _CLOSED_EARLY),
    ("broken pipe", _CLOSED_EARLY),
    ("recvmsg", _CLOSED_EARLY),
    ("handshake read failed", "it closed the connection during the handshake, or does not speak TLS"),
)
"""As `_CAUSES`, while the connection is made. TLS itself does not tell a peer that ends from one that refuses."""
_CAUSES = (
    ("connection refused", "no process listens there, so it has stopped or was killed"),
    ("socket closed", "it closed the connection, so it has stopped or was killed"),
    ("connection reset", "it closed the connection, so it has stopped or was killed"),
    ("broken pipe", "it closed the connection, so it has stopped or was killed"),
    ("recvmsg", "it closed the connection, so it has stopped or was killed"),
    ("goaway", "it is shutting down"),
    ("ping timeout", "it does not answer; it may sleep, or its network is down"),
    ("keepalive", "it does not answer; it may sleep, or its network is down"),
    ("timed out", "it does not answer; it may sleep, or its network is down"),
    ("timeout", "it does not answer; it may sleep, or its network is down"),
    ("no route to host", "no network leads there; check that both machines are in one"),
    ("network is unreachable", "no network leads there; check that both machines are in one"),
    ("host is down", "it does not answer; it may sleep, or its network is down"),
)
"""Parts of what gRPC's C library says of an unavailable peer, and what they mean. The first match counts."""


_NO_ROUTE = re.compile(
    r"ipv[46]:(?:%5B)?(?P<address>[\w.:%]+?)(?:%5D)?:\d+:.*no route to host \((?P<number>\d+)\)",
    re.IGNORECASE,
)
"""Address and error number, in gRPC's text for a peer without a route."""


def channel_error(error: grpc.RpcError, peer: str) -> WorkerLost:
    """Return the error for a broken channel to `peer`. The error that was converted keeps gRPC's own text."""
    details, code = None, None
    if isinstance(error, grpc.Call | grpc.aio.AioRpcError):
        details, code = error.details(), error.code()
    cause = details or type(error).__name__
    if code is grpc.StatusCode.UNAVAILABLE:
        denied = _NO_ROUTE.search(cause)
        if denied is not None and is_denied_by_macos(int(denied["number"]), denied["address"]):
            cause = LOCAL_NETWORK_DENIED
        else:
            text = cause.lower()
            causes = (*(_HANDSHAKE_CAUSES if _CONNECTS in text else ()), *_CAUSES)
            cause = next((meaning for part, meaning in causes if part in text), cause)
    return WorkerLost(f"The connection to {in_sentence(peer)} broke: {cause}.")
