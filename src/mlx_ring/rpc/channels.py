"""Channels and servers with the same limits everywhere, plain or over TLS.

Addresses are gRPC targets: `unix:/path` on one machine, `host:port` between machines. A Unix
socket always stays plain, because its folder's permissions decide who may use it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import grpc
from google.protobuf.message import DecodeError

from mlx_ring.core.errors import AddressInUse, ProtocolError
from mlx_ring.host.machine import descriptor_limit
from mlx_ring.rpc.tls.credentials import ChannelTrust

MAX_MESSAGE_BYTES = 1 << 30
"""Size of the largest message: 8,192 tokens of a hidden size of 16,384 in float32 take 512 MiB."""
WEIGHTS_MESSAGE_BYTES = 4 << 20
"""Limit for channels that carry weights: parts of a megabyte, and the bits of a million pieces."""
AGENT_MESSAGE_BYTES = 4 << 20
"""Limit for agents and their peers: plans, reports, and weights by the megabyte."""
PROBE_MESSAGE_BYTES = 65 << 20
"""Limit for probes of links, whose largest frame has 64 MiB."""
_HANDSHAKE_MS = 10_000
"""Time after which a peer that connects and says nothing is dropped, because it holds a descriptor."""
_CONNECTIONS_PART = 5 / 8
"""Part of the process's descriptors that connections of a server may be, those in their handshake included."""
_READERS = ("grpc._cython.cygrpc", "grpc._common")
"""Loggers of the code that decodes messages."""
_TRY_AGAIN_MS = 100
"""Time between attempts to reach a starting process of this machine. gRPC's default waits a second, and then longer."""
_PING_EVERY_MS = 1000
_UNACKNOWLEDGED_MS = 3500
"""Time without an acknowledgement of packets. TCP survives interruptions of 3 s with it, after which it sends again."""
_PING_ANSWER_MS, _MOST_PING_ANSWER_MS = 8000, 60_000
_MOST_ON_THE_WAY_BYTES = 16 << 20
"""Data that may be on the way before a ping, in buffers of both machines and between them."""

Options = list[tuple[str, Any]]


def _options(max_message_bytes: int) -> Options:
    return [
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.enable_http_proxy", 0),
        ("grpc.so_reuseport", 0),
        ("grpc.server_handshake_timeout_ms", _HANDSHAKE_MS),
    ]


def _server_options(max_message_bytes: int) -> Options:
    """Return options that bound connections, and permit pings.

    gRPC ends a connection by default when pings are frequent or come in a burst.
    """
    pings = [
        ("grpc.http2.min_ping_interval_without_data_ms", _PING_EVERY_MS // 2),
        ("grpc.http2.max_ping_strikes", 0),
    ]
    return [
        *_options(max_message_bytes),
        *pings,
        ("grpc.max_allowed_incoming_connections", int(descriptor_limit() * _CONNECTIONS_PART)),
    ]


FOR_STRANGERS: Sequence[tuple[str, Any]] = (
    ("grpc.max_connection_idle_ms", 10_000),
    ("grpc.max_connection_age_ms", 30_000),
    ("grpc.max_connection_age_grace_ms", 15_000),
)
"""Options of a server that asks for no certificate: otherwise anyone could take all descriptors of its process."""


def keep_alive(bytes_per_s: float = 0.0) -> Options:
    """Return options by which a channel to another machine ends some seconds after packets no longer arrive.

    Pings make an idle connection send packets. On Linux, the system ends the connection if they are not acknowledged,
    which happens whatever the processes do. Elsewhere a missing answer ends it.

    Args:
        bytes_per_s: bandwidth of the link, because an answer also waits for data on the way; 0: unknown.
    """
    options: Options = [
        ("grpc.keepalive_time_ms", _PING_EVERY_MS),
        ("grpc.keepalive_timeout_ms", _UNACKNOWLEDGED_MS),
        ("grpc.http2.max_pings_without_data", 0),
    ]
    if bytes_per_s > 0:
        waits_ms = _PING_ANSWER_MS + int(1e3 * _MOST_ON_THE_WAY_BYTES / bytes_per_s)
        options.append(("grpc.http2.ping_timeout_ms", min(waits_ms, _MOST_PING_ANSWER_MS)))
    return options


def _plain(address: str, max_message_bytes: int) -> Options:
    options = _options(max_message_bytes)
    if address.startswith("unix:"):
        backoffs = ("grpc.initial_reconnect_backoff_ms", "grpc.max_reconnect_backoff_ms")
        options += [(name, _TRY_AGAIN_MS) for name in backoffs]
    return options


def _named(name: str, max_message_bytes: int) -> Options:
    """Return options that require this name in the peer's certificate, whatever its address."""
    return [*_options(max_message_bytes), ("grpc.ssl_target_name_override", name)]


def _target(address: str) -> str:
    """Return an address as gRPC takes it, which decodes it as a part of a URL: fe80::1%fast0 would lose its `%fa`."""
    return address if address.startswith("unix:") else address.replace("%", "%25")


def open_channel(
    address: str,
    trust: ChannelTrust | None = None,
    name: str = "",
    *,
    max_message_bytes: int = MAX_MESSAGE_BYTES,
    more: Sequence[tuple[str, Any]] = (),
) -> grpc.Channel:
    """Open a channel for threads.

    Args:
        trust: credentials for TLS; without them, and over a Unix socket, the channel is plain.
        name: required name in the peer's certificate: `names.HEAD_NAME`, or `names.node_name(id)`.
        max_message_bytes: of one message, either way.
        more: options of a channel over a network, such as `keep_alive`.
    """
    if address.startswith("unix:"):
        return grpc.insecure_channel(address, options=_plain(address, max_message_bytes))
    if trust is None:
        return grpc.insecure_channel(_target(address), options=[*_plain(address, max_message_bytes), *more])
    return grpc.secure_channel(
        _target(address), trust.for_channel(), options=[*_named(name, max_message_bytes), *more]
    )


def open_aio_channel(
    address: str,
    trust: ChannelTrust | None = None,
    name: str = "",
    *,
    max_message_bytes: int = MAX_MESSAGE_BYTES,
    more: Sequence[tuple[str, Any]] = (),
) -> grpc.aio.Channel:
    """Open a channel for an event loop; the arguments are those of `open_channel`."""
    if address.startswith("unix:"):
        return grpc.aio.insecure_channel(address, options=_plain(address, max_message_bytes))
    if trust is None:
        return grpc.aio.insecure_channel(
            _target(address), options=[*_plain(address, max_message_bytes), *more]
        )
    options = [*_named(name, max_message_bytes), *more]
    return grpc.aio.secure_channel(_target(address), trust.for_channel(), options=options)


def make_server(
    threads: int,
    *,
    interceptors: Sequence[grpc.ServerInterceptor] = (),
    max_message_bytes: int = MAX_MESSAGE_BYTES,
) -> grpc.Server:
    """Make a server whose calls run on `threads` threads. A stream occupies one as long as it lives."""
    _shorten_decode_errors()
    return grpc.server(
        ThreadPoolExecutor(threads, thread_name_prefix="grpc"),
        interceptors=list(interceptors),
        options=_server_options(max_message_bytes),
    )


def make_aio_server(
    *,
    interceptors: Sequence[grpc.aio.ServerInterceptor] = (),
    max_message_bytes: int = MAX_MESSAGE_BYTES,
    more: Sequence[tuple[str, Any]] = (),
) -> grpc.aio.Server:
    """Make a server inside the running event loop, with more options such as `FOR_STRANGERS`."""
    _shorten_decode_errors()
    return grpc.aio.server(interceptors=interceptors, options=[*_server_options(max_message_bytes), *more])


def add_secure_port(
    server: grpc.Server | grpc.aio.Server, address: str, credentials: grpc.ServerCredentials
) -> int:
    """Listen with TLS; return the port.

    Raises:
        AddressInUse: another process has the address, or it is not this machine's.
    """
    try:
        return server.add_secure_port(_target(address), credentials)
    except RuntimeError as error:
        raise address_in_use(address) from error


def address_in_use(address: str) -> AddressInUse:
    return AddressInUse(
        f"{address} cannot be used: another process listens there, or this machine has no such address."
    )


def _shorten_decode_errors() -> None:
    """Log a message that cannot be decoded in one line.

    The peer gets an error; the stack inside gRPC is of no use.
    """
    for name in _READERS:
        logging.getLogger(name).addFilter(_in_a_line)


def _in_a_line(record: logging.LogRecord) -> bool:
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, DecodeError | ProtocolError):
        record.msg, record.args, record.exc_info = (
            "Refused a message that cannot be decoded: %s",
            (error,),
            None,
        )
        record.levelno, record.levelname = logging.WARNING, "WARNING"
    return True


_SILENCE_LOOK_S = 0.25
_LONGEST_GAP_S = 0.5
"""Longest time that counts between two looks; after a longer one, this process was stopped itself."""


class Silence:
    """Time without a message from a peer, while this process could have read one.

    After a pause of this process (a laptop's sleep, for example), messages wait that it has not read. Such a pause
    counts as one look.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._looked_s = clock()
        self.seconds = 0.0
        """Silence at the last look."""

    def end(self) -> None:
        """Record a message."""
        self._looked_s, self.seconds = self._clock(), 0.0

    def look(self) -> float:
        """Return the silence until now. Call it several times a second."""
        now_s = self._clock()
        self.seconds += min(now_s - self._looked_s, _LONGEST_GAP_S)
        self._looked_s = now_s
        return self.seconds


T = TypeVar("T")


async def limit_silence(coming: AsyncIterator[T], silence_s: float) -> AsyncIterator[T]:
    """Yield the items of a stream until it ends. A pause of this process does not count as silence.

    Raises:
        TimeoutError: nothing came for `silence_s` seconds.
    """
    silence = Silence()
    look_s = min(_SILENCE_LOOK_S, silence_s)
    while True:
        arrival = asyncio.ensure_future(anext(coming))
        try:
            while not arrival.done():
                await asyncio.wait((arrival,), timeout=look_s)
                if not arrival.done() and silence.look() >= silence_s:
                    raise TimeoutError
        finally:
            arrival.cancel()
            # Retrieve the exception, because asyncio logs one that is never retrieved.
            await asyncio.gather(arrival, return_exceptions=True)
        try:
            one = arrival.result()
        except StopAsyncIteration:
            return
        silence.end()
        yield one


class FailureLog:
    """Log lines about a peer that cannot be reached: the first failures, then one at growing distances."""

    _AT_ONCE = 3
    _FIRST_S, _LONGEST_S = 10.0, 600.0
    """Time between two later lines; it doubles after each."""

    def __init__(self, logger: logging.Logger, clock: Callable[[], float] = time.monotonic) -> None:
        self._log, self._clock = logger, clock
        self.end()

    def end(self) -> None:
        """Record that the peer has answered."""
        self._failures, self._next_s, self._distance_s = 0, 0.0, self._FIRST_S

    def record(self, sentence: str) -> None:
        """Log a failure, unless one was logged a moment ago."""
        self._failures += 1
        now_s = self._clock()
        if self._failures > self._AT_ONCE and now_s < self._next_s:
            return
        if self._failures > self._AT_ONCE:
            sentence = f"{sentence} (try {self._failures})"
            self._distance_s = min(self._LONGEST_S, 2 * self._distance_s)
        self._next_s = now_s + self._distance_s
        self._log.warning("%s", sentence)
