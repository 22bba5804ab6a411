"""What the person who runs the server decides about its HTTP side."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class ApiSettings:
    """Filled in by the composition root from the one settings model."""

    host: str = "127.0.0.1"
    """The address that the server is bound to; requests may name it in `Host` and `Origin`."""
    allowed_hosts: tuple[str, ...] = ()
    """More names that `Host` may carry, without port; `*` allows all."""
    allowed_origins: tuple[str, ...] = ()
    """More origins: `https://app.example`, a bare host, `null`, or `*`."""
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    """One of them must come with each request but those for health; none: nobody is asked."""
    default_max_tokens: int | None = None
    """Of a chat answer whose request sets no limit; None: to the end of the context."""
    max_body_bytes: int = 16 * 2**20
    max_bodies_bytes: int = 256 * 2**20
    """Of all requests that are under way."""
    client_timeout_s: float = 60.0
    """For how long a client may stall while it sends its request."""
    access_log: bool = True
    """Whether each request is a line of log."""
    keep_alive_s: float = 10.0
    """Silence after which a stream sends a comment, so that nothing in between takes it for dead."""
