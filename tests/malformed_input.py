"""Input of a broken or hostile machine: valid TLS, HTTP/2 and gRPC frames up to a point, then malformed bytes."""

from __future__ import annotations

import contextlib
import random
import socket
import ssl
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from mlx_ring.rpc.tls.credentials import CERTIFICATE_FILE, KEY_FILE

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _SETTINGS = 0, 1, 4
_END_HEADERS = 4
_LARGEST_DATA = 16_384
_WINDOW = 65_535
"""Bytes that HTTP/2 lets a client send before the server's first answer."""
_WAIT_S = 20.0


@contextmanager
def open_plain(port: int) -> Generator[socket.socket]:
    """Open a connection without TLS."""
    with socket.create_connection(("127.0.0.1", port), timeout=_WAIT_S) as connection:
        yield connection


@contextmanager
def open_tls(port: int, certificate: Path | None) -> Generator[ssl.SSLSocket]:
    """Open a connection with TLS as gRPC has it, with the certificate and key of a folder, or without."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    if certificate is not None:
        context.load_cert_chain(certificate / CERTIFICATE_FILE, certificate / KEY_FILE)
    with open_plain(port) as connection, context.wrap_socket(connection) as wrapped:
        yield wrapped


def read_until_closed(connection: socket.socket) -> bytes:
    """Return the bytes that the other side sends until it closes, which it must within some seconds."""
    received = b""
    with contextlib.suppress(ConnectionError, ssl.SSLError):
        while part := connection.recv(65_536):
            received += part
    return received


def noise(count: int) -> bytes:
    return random.Random(11).randbytes(count)


def start_of_call(path: str) -> bytes:
    """Return HTTP/2 up to a call's headers. The call's first message follows it."""
    fields = {
        ":method": "POST",
        ":scheme": "https",
        ":path": path,
        ":authority": "localhost",
        "content-type": "application/grpc",
        "te": "trailers",
    }
    # Literal fields without indexing, with new names: HPACK without a table.
    packed = b"".join(
        b"\0" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()
        for name, value in fields.items()
    )
    return _PREFACE + _frame(_SETTINGS, b"") + _frame(_HEADERS, packed, flags=_END_HEADERS, stream=1)


def message(content: bytes, announced: int | None = None) -> bytes:
    """Return a message of gRPC, which may announce more than it has, within the first window of HTTP/2."""
    data = b"\0" + (len(content) if announced is None else announced).to_bytes(4, "big") + content
    if len(data) > _WINDOW:
        raise ValueError(data)
    parts = (data[begin : begin + _LARGEST_DATA] for begin in range(0, len(data), _LARGEST_DATA))
    return b"".join(_frame(_DATA, part, stream=1) for part in parts)


def _frame(kind: int, payload: bytes, *, flags: int = 0, stream: int = 0) -> bytes:
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload
