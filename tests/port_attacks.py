"""Attacks on a port: bytes without TLS, foreign certificates, and within TLS malformed, unfinished and giant messages.

They use plain sockets, because no library would send such input. Each function connects, attacks, waits until the other
side ends the connection or the call, and returns how it did so.
"""

from __future__ import annotations

import socket
import ssl
import struct
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from mlx_ring.rpc.tls.credentials import Credentials

Address = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Frame:
    """A frame of HTTP/2."""

    kind: int
    flags: int
    stream: int
    payload: bytes


WAIT_S = 60.0
"""Limit for the other side's answers: a handshake may take ten seconds."""
GIANT = 0x7FFFFFFF
"""Bytes of the longest message that a frame of gRPC can announce as a positive number."""
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _RESET, _SETTINGS, _GOAWAY, _WINDOW = 0, 1, 3, 4, 7, 8
_END_STREAM, _END_HEADERS, _ACKNOWLEDGED = 1, 4, 1
_BLOCK = 16 << 10
_FIRST_WINDOW, _INITIAL_WINDOW = 65_535, 4
"""Bytes of the first window, and the setting that changes them."""


def send_plain(address: Address, data: bytes) -> str:
    """Send bytes without TLS."""
    with socket.create_connection(address, WAIT_S) as connection:
        connection.sendall(data)
        return _end_of(connection)


def shake_hands(address: Address, context: ssl.SSLContext) -> str:
    """Do no more than a handshake. A server refuses a client's certificate after it."""
    try:
        with _trusted(address, context) as connection:
            return _end_of(connection)
    except (ssl.SSLError, ConnectionResetError) as error:
        return type(error).__name__


def send_in_tls(address: Address, context: ssl.SSLContext, data: bytes) -> str:
    """Send other bytes than HTTP/2 within TLS."""
    with _trusted(address, context) as connection:
        connection.sendall(data)
        return _end_of(connection)


def call(address: Address, context: ssl.SSLContext, path: str, message: bytes, *, ends: bool = True) -> str:
    """Call a method of gRPC with these bytes in place of frames of messages."""
    with _trusted(address, context) as connection:
        connection.sendall(_opening(path) + _frame(_DATA, _END_STREAM if ends else 0, 1, message))
        return _end_of_stream(connection)


def abandon_call(address: Address, context: ssl.SSLContext, path: str) -> str:
    """Announce a message, send half of it, and disconnect."""
    with _trusted(address, context) as connection:
        connection.sendall(_opening(path) + _frame(_DATA, 0, 1, announced(100, b"x" * 50)))
    return "left"


def flood(address: Address, context: ssl.SSLContext, path: str, announcing: int = GIANT) -> tuple[str, int]:
    """Announce a giant message, and send as much of it as the other side accepts. Return the end and the bytes sent."""
    with _trusted(address, context) as connection:
        connection.sendall(_opening(path) + _frame(_DATA, 0, 1, announced(announcing, b"")))
        return _flood(connection, announcing)


def announced(length: int, data: bytes) -> bytes:
    """Return a message's frame that announces this length, whatever the length of the data."""
    return struct.pack(">BI", 0, length) + data


def message(data: bytes) -> bytes:
    """Return a valid frame of gRPC."""
    return announced(len(data), data)


def without_certificate(authority: bytes) -> ssl.SSLContext:
    """Return the context of a client without a certificate; `authority` is the cluster's CA, PEM."""
    context = ssl.create_default_context(cadata=authority.decode())
    return _for_http2(context)


def with_certificate(credentials: Credentials) -> ssl.SSLContext:
    context = ssl.create_default_context(cadata=credentials.authority.decode())
    with TemporaryDirectory() as folder:
        certificate, key = Path(folder, "certificate.pem"), Path(folder, "key.pem")
        certificate.write_bytes(credentials.certificate)
        key.write_bytes(credentials.key)
        context.load_cert_chain(certificate, key)
    return _for_http2(context)


def _for_http2(context: ssl.SSLContext) -> ssl.SSLContext:
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    return context


@contextmanager
def _trusted(address: Address, context: ssl.SSLContext) -> Generator[ssl.SSLSocket]:
    with (
        socket.create_connection(address, WAIT_S) as plain,
        context.wrap_socket(plain) as connection,
    ):
        yield connection


def _end_of(connection: socket.socket) -> str:
    """Read until the other side ends the connection. Raise TimeoutError if it does not."""
    try:
        while connection.recv(_BLOCK):
            pass
    except (ssl.SSLError, ConnectionResetError) as error:
        return type(error).__name__
    return "closed"


def _opening(path: str) -> bytes:
    fields = {
        ":method": "POST",
        ":scheme": "https",
        ":path": path,
        ":authority": "intruder",
        "te": "trailers",
        "content-type": "application/grpc",
    }
    # Each as a literal that is not indexed, with a new name (RFC 7541, 6.2.2).
    block = b"".join(b"\0" + _text(name) + _text(value) for name, value in fields.items())
    return _PREFACE + _frame(_SETTINGS, 0, 0, b"") + _frame(_HEADERS, _END_HEADERS, 1, block)


def _text(value: str) -> bytes:
    return bytes([len(value)]) + value.encode()


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def _end_of_stream(connection: ssl.SSLSocket) -> str:
    """Read until the call ends, and return how it does."""
    return next((end for frame in _frames(connection) if (end := _end_of_frame(frame))), "closed")


def _end_of_frame(frame: Frame) -> str:
    """Return how a frame ends the call; empty if it does not."""
    if frame.kind in (_HEADERS, _DATA):
        return "answered" if frame.flags & _END_STREAM else ""
    return {_RESET: "reset", _GOAWAY: "sent away"}.get(frame.kind, "")


def _frames(connection: ssl.SSLSocket) -> Iterator[Frame]:
    """Yield the frames that arrive, and acknowledge settings."""
    while head := _read_exactly(connection, 9):
        kind, flags, stream = struct.unpack(">BBI", head[3:])
        payload = _read_exactly(connection, int.from_bytes(head[:3], "big"))
        if kind == _SETTINGS and not flags & _ACKNOWLEDGED:
            connection.sendall(_frame(_SETTINGS, _ACKNOWLEDGED, 0, b""))
        yield Frame(kind, flags, stream, payload)


def _read_exactly(connection: ssl.SSLSocket, count: int) -> bytes:
    """Read exactly this many bytes; return none if the connection ends before."""
    data = b""
    while len(data) < count:
        try:
            more = connection.recv(count - len(data))
        except (ssl.SSLError, ConnectionResetError):
            return b""
        if not more:
            return b""
        data += more
    return data


def _flood(connection: ssl.SSLSocket, announcing: int) -> tuple[str, int]:
    """Send within the windows that the other side opens for the stream and for the connection (RFC 9113, 5.2)."""
    windows, sent, frames = {0: _FIRST_WINDOW, 1: _FIRST_WINDOW}, 0, _frames(connection)
    initial = _FIRST_WINDOW
    while sent < announcing:
        while min(windows.values()) < _BLOCK:
            frame = next(frames, None)
            end = "closed" if frame is None else _end_of_frame(frame)
            if frame is None or end:
                return end, sent
            if frame.kind == _WINDOW:
                windows[frame.stream] += int.from_bytes(frame.payload, "big")
            elif (changed := _initial_window(frame)) is not None:
                windows[1] += changed - initial
                initial = changed
        try:
            connection.sendall(_frame(_DATA, 0, 1, b"x" * _BLOCK))
        except (ssl.SSLError, ConnectionResetError, BrokenPipeError):
            return "closed", sent
        sent += _BLOCK
        windows = {stream: left - _BLOCK for stream, left in windows.items()}
    return _end_of_stream(connection), sent


def _initial_window(frame: Frame) -> int | None:
    """Return the initial window of streams if the frame sets it."""
    if frame.kind != _SETTINGS:
        return None
    settings = dict(struct.iter_unpack(">HI", frame.payload))
    return settings.get(_INITIAL_WINDOW)
