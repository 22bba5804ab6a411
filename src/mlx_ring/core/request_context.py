"""Which request the running code works for: log lines and traces tell it, and nobody has to hand it on.

Whoever takes a request in sets all of them; tasks that are made for it have them too.
"""

from __future__ import annotations

import secrets
from contextvars import ContextVar

REQUEST_ID: ContextVar[str] = ContextVar("request_id", default="")
"""As clients read it in `x-request-id`; empty outside of requests."""
TRACEPARENT: ContextVar[str] = ContextVar("traceparent", default="")
"""W3C's, of the span that is open for the request; empty where it is not traced."""


CLIENT: ContextVar[str] = ContextVar("client", default="")
"""Who asks, as shares go: by an API key, or by an address. Never told; empty outside of requests."""


def new_request_id() -> str:
    """Of a request that brings none of its own."""
    return f"req_{secrets.token_hex(12)}"
