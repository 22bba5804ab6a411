"""Channels and servers with the same limits everywhere, plain or over TLS.

Addresses are gRPC targets: `unix:/path` on one machine, `host:port` between machines. A Unix
socket stays plain whatever is given: its folder says who may use it.

What comes one by one, each within its time.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import grpc
from google.protobuf.message import DecodeError

from mlx_ring.core.errors import AddressInUse, ProtocolError
from mlx_ring.rpc.tls.credentials import ChannelTrust

MAX_MESSAGE_BYTES = 1 << 30
"""A chunk's activations fit: 8,192 tokens of a hidden size of 16,384 in float32 are 512 MiB."""
WEIGHTS_MESSAGE_BYTES = 4 << 20
"""For channels that weights come over: parts of a megabyte, and the bits of a million pieces."""
AGENT_MESSAGE_BYTES = 4 << 20
"""For agents and those who speak with them: plans, reports, and weights by the megabyte."""
PROBE_MESSAGE_BYTES = 65 << 20
"""For probes of links, whose largest frame has 64 MiB."""
_HANDSHAKE_MS = 10_000
"""A peer that connects and says nothing holds a descriptor for so long."""
_READERS = ("grpc._cython.cygrpc", "grpc._common")
"""Loggers of what turns bytes into messages."""
_TRY_AGAIN_MS = 100
"""Between attempts to reach a process of this machine, which is starting. By itself gRPC waits a second, and then longer."""

Options = list[tuple[str, Any]]


def _options(max_message_bytes: int) -> Options:
    return [
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.enable_http_proxy", 0),
        ("grpc.so_reuseport", 0),
        ("grpc.server_handshake_timeout_ms", _HANDSHAKE_MS),
    ]


def _plain(address: str, max_message_bytes: int) -> Options:
    options = _options(max_message_bytes)
    if address.startswith("unix:"):
        backoffs = ("grpc.initial_reconnect_backoff_ms", "grpc.max_reconnect_backoff_ms")
        options += [(name, _TRY_AGAIN_MS) for name in backoffs]
    return options


def _named(name: str, max_message_bytes: int) -> Options:
    """The peer's certificate must be for this name, whatever its address."""
    return [*_options(max_message_bytes), ("grpc.ssl_target_name_override", name)]


def open_channel(
    address: str,
    trust: ChannelTrust | None = None,
    name: str = "",
    *,
    max_message_bytes: int = MAX_MESSAGE_BYTES,
) -> grpc.Channel:
    """A channel for threads.

    Args:
        trust: credentials for TLS; without them, and over a Unix socket, the channel is plain.
        name: whom the peer's certificate must name: `names.HEAD_NAME`, or `names.node_name(id)`.
        max_message_bytes: of one message, either way.
    """
    if trust is None or address.startswith("unix:"):
        return grpc.insecure_channel(address, options=_plain(address, max_message_bytes))
    return grpc.secure_channel(address, trust.for_channel(), options=_named(name, max_message_bytes))


def open_aio_channel(
    address: str,
    trust: ChannelTrust | None = None,
    name: str = "",
    *,
    max_message_bytes: int = MAX_MESSAGE_BYTES,
) -> grpc.aio.Channel:
    """A channel for an event loop; the first arguments are those of `open_channel`."""
    if trust is None or address.startswith("unix:"):
        return grpc.aio.insecure_channel(address, options=_plain(address, max_message_bytes))
    return grpc.aio.secure_channel(address, trust.for_channel(), options=_named(name, max_message_bytes))


def make_server(
    threads: int,
    *,
    interceptors: Sequence[grpc.ServerInterceptor] = (),
    max_message_bytes: int = MAX_MESSAGE_BYTES,
) -> grpc.Server:
    """A server whose calls run on `threads` threads; a stream holds one for as long as it lives."""
    _shorten_decode_errors()
    return grpc.server(
        ThreadPoolExecutor(threads, thread_name_prefix="grpc"),
        interceptors=list(interceptors),
        options=_options(max_message_bytes),
    )


def make_aio_server(
    *,
    interceptors: Sequence[grpc.aio.ServerInterceptor] = (),
    max_message_bytes: int = MAX_MESSAGE_BYTES,
) -> grpc.aio.Server:
    """A server inside the running event loop."""
    _shorten_decode_errors()
    return grpc.aio.server(interceptors=interceptors, options=_options(max_message_bytes))


def add_secure_port(
    server: grpc.Server | grpc.aio.Server, address: str, credentials: grpc.ServerCredentials
) -> int:
    """Listen with TLS; returns the port.

    Raises:
        AddressInUse: another process has the address, or it is not this machine's.
    """
    try:
        return server.add_secure_port(address, credentials)
    except RuntimeError as error:
        raise AddressInUse(
            f"{address} cannot be listened on: another process holds it, or it is no address of this machine."
        ) from error


def _shorten_decode_errors() -> None:
    """A peer whose messages are none is answered with an error; where it broke inside says nothing to anybody."""
    for name in _READERS:
        logging.getLogger(name).addFilter(_in_a_line)


def _in_a_line(record: logging.LogRecord) -> bool:
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, DecodeError | ProtocolError):
        record.msg, record.args, record.exc_info = "refused a message that is none: %s", (error,), None
        record.levelno, record.levelname = logging.WARNING, "WARNING"
    return True


T = TypeVar("T")


async def limit_silence(coming: AsyncIterator[T], silence_s: float) -> AsyncIterator[T]:
    """All that comes, until it ends.

    Raises:
        TimeoutError: nothing came for `silence_s` seconds.
    """
    while True:
        try:
            async with asyncio.timeout(silence_s):
                one = await anext(coming)
        except StopAsyncIteration:
            return
        yield one
