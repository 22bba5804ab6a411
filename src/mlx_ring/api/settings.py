"""Settings of the HTTP server."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiSettings:
    """Settings of the HTTP server. The head fills them in from `Settings`, which has their defaults."""

    host: str
    """Address that the server listens on. Requests may name it in `Host` and `Origin`."""
    own_names: Callable[[], Sequence[str]]
    """Return the present names of this machine on its network, also allowed in `Host` where others can reach it."""
    allowed_hosts: tuple[str, ...]
    """Further names allowed in `Host`, without port; `*` allows all."""
    allowed_origins: tuple[str, ...]
    """Further allowed origins: `https://app.example`, a bare host, `null`, or `*`."""
    api_keys: tuple[str, ...] = field(repr=False)
    """Accepted API keys; without any, no authentication. Health checks need none."""
    default_max_tokens: int | None
    """Limit of a chat answer whose request sets none; None: the end of the context."""
    max_body_bytes: int
    max_bodies_bytes: int
    """Limit of the bodies of all requests in progress together."""
    client_timeout_s: float
    """Longest pause of a client that sends its request."""
    open_schemas: bool
    """True if objects of answers may have properties that their schema does not name, unless it forbids them."""
    escapes_special_tokens: bool
    """True if special tokens that the messages of a chat spell stay text."""
    access_log: bool
    """True if each request is logged."""
    urls: Callable[[], Sequence[str]]
    """Return the present URLs by which other machines reach the server; empty if they cannot."""
    join_refusal: str
    """Reason why no other machine can join; empty if others can."""
    profile_command: str
    """Command that measures the head's machine as its workers use it."""
    keep_alive_s: float = 10.0
    """Silence after which a stream sends a comment, so that proxies keep the connection."""
