"""Channels and servers with the same limits everywhere.

Addresses are gRPC targets: `unix:/path` on one machine, `host:port` between machines.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc

MAX_MESSAGE_BYTES = 1 << 30
"""A chunk's activations fit: 8,192 tokens of a hidden size of 16,384 in float32 are 512 MiB."""

_OPTIONS: list[tuple[str, Any]] = [
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.enable_http_proxy", 0),
    ("grpc.so_reuseport", 0),
]


def open_channel(address: str) -> grpc.Channel:
    """A channel for threads."""
    return grpc.insecure_channel(address, options=_OPTIONS)


def open_aio_channel(address: str) -> grpc.aio.Channel:
    """A channel for an event loop."""
    return grpc.aio.insecure_channel(address, options=_OPTIONS)


def make_server(threads: int) -> grpc.Server:
    """A server whose calls run on `threads` threads; a stream holds one for as long as it lives."""
    return grpc.server(ThreadPoolExecutor(threads, thread_name_prefix="grpc"), options=_OPTIONS)


def make_aio_server() -> grpc.aio.Server:
    """A server inside the running event loop."""
    return grpc.aio.server(options=_OPTIONS)
