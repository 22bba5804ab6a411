"""Errors of failed TLS handshakes, on either side.

A client gets an exception. A server gets nothing: gRPC drops the connection inside its C library,
which only writes a line to stderr at level INFO. `log_refused_handshakes` reads
those lines and makes log lines of them; the peer's address is not in them.
"""

from __future__ import annotations

import logging
import os
import re
import ssl
import sys
import threading
from functools import cache

import grpc

from mlx_ring.core.errors import HandshakeFailed, PeerRefused, in_sentence
from mlx_ring.core.logs import write_to_stderr

log = logging.getLogger(__name__)

_REASONS = (
    ("PEER_DID_NOT_RETURN_A_CERTIFICATE", "it showed no certificate"),
    ("WRONG_VERSION_NUMBER", "it did not speak TLS"),
    ("HTTP_REQUEST", "it spoke plain HTTP"),
    ("UNSUPPORTED_PROTOCOL", "it speaks only TLS older than 1.2"),
    ("certificate has expired", "its certificate has expired, or this clock is ahead: compare the clocks"),
    ("certificate is not yet valid", "its certificate is not valid yet; compare the clocks"),
    ("Hostname", "its certificate is for another name"),
    ("certificate signature failure", "its certificate belongs to another cluster"),
    ("self-signed", "its certificate belongs to another cluster"),
    ("self signed", "its certificate belongs to another cluster"),
    ("unable to get local issuer", "its certificate belongs to another cluster"),
    ("CERTIFICATE_VERIFY_FAILED", "its certificate does not belong to this cluster"),
    ("alert", "it refused this machine's certificate"),
)
"""Parts of what TLS says of a refusal, and what they mean. A peer that only closes its connection may have ended."""
_SERVER_LINE = re.compile(r"\] Handshake failed with error (.*)")
_GRPC_LINE = re.compile(r"(?:[IWEF]\d{4} \d\d:\d\d:|WARNING: All log messages before absl)")


def handshake_error(error: Exception, peer: str) -> PeerRefused | None:
    """Return the error for a connection to `peer` that either side refused for certain.

    None if the error is about something else, such as a connection that was closed: `failures.channel_error` then
    explains it.
    """
    if isinstance(error, grpc.Call | grpc.aio.AioRpcError):
        if error.code() in (grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNAUTHENTICATED):
            return PeerRefused(f"{peer} refused this machine: {error.details()}")
        text = error.details() or ""
        # A peer that ends after the handshake is lost; it has not refused the connection.
        if error.code() is not grpc.StatusCode.UNAVAILABLE or "failed to connect" not in text:
            return None
    elif isinstance(error, ssl.SSLError):
        text = f"{type(error).__name__} {error}"
    else:
        return None
    reason = _reason(text)
    return (
        HandshakeFailed(f"There is no trusted connection to {in_sentence(peer)}: {reason}.")
        if reason
        else None
    )


def _reason(text: str) -> str:
    return next((words for part, words in _REASONS if part.lower() in text.lower()), "")


def refused_handshake(line: str) -> str:
    """Return a sentence for a line of gRPC's C library about a refused connection; empty for any other line."""
    found = _SERVER_LINE.search(line)
    if found is None:
        return ""
    reason = _reason(found[1]) or found[1]
    return f"Refused a connection: {reason}"


def loggable_line(line: str) -> str:
    """Return the log line for a child's output with gRPC's lines in it; empty for the library's other output."""
    return refused_handshake(line) or ("" if _GRPC_LINE.match(line) else line)


@cache
def log_refused_handshakes() -> None:
    """Log every connection that a server of this process refuses. Call it once, after `enable_grpc_logs`.

    Descriptor 2 becomes a pipe to a thread. gRPC's lines are read there, and all others
    are written to the original stderr. It is not for processes that compute: their last lines, when
    native code aborts, must not wait for a thread. Their parent reads their lines: `loggable_line`.
    """
    original = os.dup(2)
    reading, writing = os.pipe()
    sys.stderr = os.fdopen(original, "w", buffering=1, encoding="utf-8", errors="backslashreplace")
    os.dup2(writing, 2)
    os.close(writing)
    threading.Thread(target=_sort, args=(reading,), name="refused handshakes", daemon=True).start()


def _sort(reading: int) -> None:
    with os.fdopen(reading, "rb") as lines:
        for raw in lines:
            line = raw.decode(errors="replace")
            if sentence := refused_handshake(line):
                log.warning("%s", sentence)
            elif not _GRPC_LINE.match(line):
                write_to_stderr(line.removesuffix("\n"))
