"""Guard of every route: allowed hosts and origins, API keys, request ids, draining, memory, and unexpected errors.

A page in a browser can send requests to a server on the same machine. By rebinding its own name to 127.0.0.1 it can even
read the answers. Such requests carry the page's `Origin`, or its name in `Host`, so foreign values of both are refused.

A body counts from its arrival until its request is answered. A client may hold no more than it leaves free. A single client
gets half, so there is always room for the next one.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import html
import ipaddress
import re
from collections import Counter
from collections.abc import Generator, Iterable
from dataclasses import dataclass, field
from itertools import takewhile
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.responses import HTMLResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mlx_ring.api.dialect import dialect_of
from mlx_ring.api.errors import error_response, log_failure
from mlx_ring.api.middleware.access_log import request_notes
from mlx_ring.api.page.routes import wants_page
from mlx_ring.api.settings import ApiSettings
from mlx_ring.api.streaming import PLAYBACK
from mlx_ring.core.errors import BodiesFull, Draining, Refused, RingError, Unauthenticated
from mlx_ring.core.traces import CLIENT, REQUEST_ID, REQUEST_TASK, TRACEPARENT, client_at, new_request_id

_READING = frozenset({"GET", "HEAD", "OPTIONS"})
"""Methods that use no model. Draining neither refuses nor awaits them, because a page's request may last forever."""


class Admission:
    """Admission of requests to a server. After it is closed, open requests finish and new ones are refused."""

    def __init__(self) -> None:
        self._open = 0
        self._is_closed = False
        self._is_idle = asyncio.Event()
        self._is_idle.set()

    @property
    def is_draining(self) -> bool:
        return self._is_closed

    @property
    def open(self) -> int:
        """Number of requests in progress that use models or load them."""
        return self._open

    @contextlib.contextmanager
    def admit(self, method: str) -> Generator[None]:
        """Count a request as open within the context.

        Raises:
            Draining: the server accepts no new requests.
        """
        if method in _READING:
            yield
            return
        if self._is_closed:
            raise Draining(
                "The server is shutting down: it finishes running requests and accepts no new ones."
            )
        self._open += 1
        self._is_idle.clear()
        try:
            yield
        finally:
            self._open -= 1
            if not self._open:
                self._is_idle.set()

    def close(self) -> None:
        """Refuse new requests from now on."""
        self._is_closed = True

    async def drained(self) -> None:
        """Wait until no request is open."""
        await self._is_idle.wait()


_LOCAL = frozenset({"localhost", "127.0.0.1", "::1"})
_OF_CONTAINERS = frozenset({"host.docker.internal", "host.containers.internal"})
"""Names by which containers reach this machine. No website can have one: `internal` is no domain of the public DNS."""
_APP_SCHEMES = frozenset({"app", "tauri", "vscode-file", "vscode-webview"})
"""Schemes of desktop apps' own pages. Browsers load no website under them, and Ollama allows the same ones."""
_EVERY_ADDRESS = frozenset({"0.0.0.0", "::", ""})  # noqa: S104 - recognized here, bound elsewhere
_SANE_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")
"""Client's id of a request that is safe in a log."""
_OPEN = ("/health", "/docs", "/page", "/favicon.ico")
"""Paths without authentication: health checks have no key, and the page must load before a user can enter one."""
_REFUSAL = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>mlx-ring: not allowed</title>
<body style="font: 1rem/1.5 system-ui, sans-serif; max-width: 40rem; margin: 4rem auto; padding: 0 1rem">
<h1>mlx-ring did not answer this request</h1>
<p>{reason}</p>
<p>A web page could otherwise use this server through a name of its own. Restart <code>mlx-ring serve</code> with the flag,
or open the page by an address that the server printed when it started.</p>
</html>
"""
_EXPOSED = "x-request-id, request-id, retry-after, x-should-retry, x-mlx-ring-resumed"
"""Headers that SDKs read in pages of other origins."""


class _HeadSent(Exception):
    """Signal that an answer's head was sent and its body is not needed."""


class Guard:
    """ASGI middleware that checks requests before any route."""

    def __init__(self, app: ASGIApp, settings: ApiSettings, admission: Admission) -> None:
        self._app = app
        self._settings = settings
        self._admission = admission
        self._given_hosts = _LOCAL | set(map(_bare, (settings.host, *settings.allowed_hosts)))
        self._keys = tuple((form, key) for key in settings.api_keys for form in _forms(key))
        self._origins = {origin.rstrip("/").lower() for origin in settings.allowed_origins}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        scope["path"] = _plain_path(scope["path"])
        request_id = scope["request_id"] = _given_id(headers) or new_request_id()
        REQUEST_ID.set(request_id)
        TRACEPARENT.set("")
        request_notes()  # the tasks of this request share them
        origin = headers.get("origin")
        started = False

        async def send_named(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                self._add_headers(MutableHeaders(scope=message), scope, origin)
            await send(message)

        try:
            self._check(headers)
            await self._take(scope, headers, receive, send_named)
        except ClientDisconnect:
            pass
        except asyncio.CancelledError:
            # Only the server cancels requests, when it stops.
            if started or not self._admission.is_draining:
                raise
            await error_response(Draining("The server is shutting down."), scope)(scope, receive, send_named)
        except (Unauthenticated, Draining, Refused) as error:
            is_refused = isinstance(error, Refused)
            origin = None if is_refused else origin
            shows_page = is_refused and wants_page(headers.get("accept"))
            answer = _refusal_page(error) if shows_page else error_response(error, scope)
            await answer(scope, receive, send_named)
        except Exception as error:
            log_failure(error, request_id)
            if started:
                raise
            await error_response(error, scope)(scope, receive, send_named)

    async def _take(self, scope: Scope, headers: Headers, receive: Receive, send: Send) -> None:
        """Authenticate the client, and answer."""
        if "origin" in headers and _is_preflight(scope, headers):
            await _preflight_response(headers)(scope, receive, send)
            return
        CLIENT.set(self._authenticate(scope, headers))
        # The tasks of a connection's later requests may inherit this context.
        PLAYBACK.set(None)
        REQUEST_TASK.set(asyncio.current_task())
        with self._admission.admit(scope["method"]):
            await self._route(scope, receive, send)

    async def _route(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer HEAD as GET, without the body: a body that never ends would keep the connection."""
        if scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return

        async def send_head(message: Message) -> None:
            await send(message)
            await send({"type": "http.response.body", "body": b""})
            raise _HeadSent

        asked = {**scope, "method": "GET"}
        try:
            await self._app(asked, receive, send_head)
        except _HeadSent:
            # The metrics read the route from the original scope.
            scope["route"] = asked.get("route")

    def _check(self, headers: Headers) -> None:
        host, origin = headers.get("host"), headers.get("origin")
        if host is not None and not self._is_ours(name := _hostname(f"//{host}")):
            raise Refused(
                f"Host '{host}' is not a name of this server. Use one of {_listed(self._hosts())}. If that name is this "
                f"machine's, start it again with `mlx-ring serve MODEL --allowed-hosts {_as_argument(name)}`."
            )
        if origin is not None and not self._is_allowed_origin(origin, host):
            if origin == "null":
                raise Refused(
                    "Origin 'null' is that of a file or a closed-off frame, and names no site to trust."
                )
            raise Refused(
                f"Origin '{origin}' may not use this server. If you trust that site, start it again with "
                f"`mlx-ring serve MODEL --allowed-origins {_as_argument(origin)}`."
            )

    def _authenticate(self, scope: Scope, headers: Headers) -> str:
        """Return the client's identity. Every key is compared in constant time, so the duration reveals nothing."""
        path, client = scope["path"], scope.get("client")
        if not self._keys or is_open(path) or (path == "/" and wants_page(headers.get("accept"))):
            return "" if client is None else client_at(client[0])
        given = _given_key(headers)
        if given is None:
            raise Unauthenticated(
                "This server requires an API key: send it as `Authorization: Bearer KEY` or `x-api-key: KEY`."
            )
        equal = [key for form, key in self._keys if hmac.compare_digest(given.encode("latin-1"), form)]
        if not equal:
            raise Unauthenticated("Incorrect API key provided: it is not one of this server's.")
        return f"key {equal[0]}"

    def _is_allowed_origin(self, origin: str, asked: str | None) -> bool:
        """Return True for an origin whose name is configured, or equal to the requested host.

        Pages of desktop apps are allowed too. On a server that accepts any address, an address as origin proves nothing,
        because other servers have addresses too.
        """
        host = _hostname(origin)
        return (
            "*" in self._origins
            or origin.rstrip("/").lower() in self._origins
            or (host is not None and origin.partition("://")[0].lower() in _APP_SCHEMES)
            or (host is not None and (host in self._origins or self._is_known(host)))
            or (host is not None and asked is not None and host == _hostname(f"//{asked}"))
        )

    def _is_ours(self, host: str | None) -> bool:
        if host is None:
            return False
        if "*" in self._given_hosts or self._is_known(host) or host in _OF_CONTAINERS:
            return True
        return _bare(self._settings.host) in _EVERY_ADDRESS and _is_address(host)

    def _is_known(self, host: str) -> bool:
        return host in self._given_hosts or host in self._hosts()

    def _hosts(self) -> frozenset[str]:
        """Return the allowed names. The machine's own may change, and another machine may get a former one."""
        return self._given_hosts | set(map(_bare, self._settings.own_names()))

    def _add_headers(self, headers: MutableHeaders, scope: Scope, origin: str | None) -> None:
        headers["x-request-id"] = scope["request_id"]
        second_header = dialect_of(scope).request_id_header
        if second_header is not None:
            headers[second_header] = scope["request_id"]
        if request_notes().was_resumed:
            headers["x-mlx-ring-resumed"] = "true"
        if self._admission.is_draining:
            headers["connection"] = "close"
        if origin is not None:
            headers["access-control-allow-origin"] = origin
            headers["access-control-expose-headers"] = _EXPOSED
            headers.add_vary_header("origin")


def _refusal_page(error: RingError) -> Response:
    """Return the refusal for a person in a browser. The sentence names the flag that would allow the request."""
    return HTMLResponse(_REFUSAL.format(reason=html.escape(str(error))), 403)


def _plain_path(path: str) -> str:
    """Return a path without empty parts and with one `/v1` at most, because base URLs often end with `/` or `/v1`."""
    parts = list(filter(None, path.split("/")))
    return "/" + "/".join(parts[max(len(list(takewhile("v1".__eq__, parts))) - 1, 0) :])


def is_open(path: str) -> bool:
    """Return True if a path needs no API key."""
    return any(path == each or path.startswith(f"{each}/") for each in _OPEN)


def _given_id(headers: Headers) -> str | None:
    """Return the client's id of its request; None if it has none that is safe in a log."""
    all_given = (headers.get(name, "") for name in ("x-request-id", "x-client-request-id"))
    return next(filter(_SANE_ID.fullmatch, all_given), None)


def _given_key(headers: Headers) -> str | None:
    scheme, _, token = headers.get("authorization", "").partition(" ")
    token = token.strip(" ")
    return token if scheme.lower() == "bearer" and token else headers.get("x-api-key")


def _forms(key: str) -> set[bytes]:
    """Return the encodings of a key in a header: programs send UTF-8, and browsers Latin-1 where possible."""
    forms = {key.encode()}
    with contextlib.suppress(UnicodeEncodeError):
        forms.add(key.encode("latin-1"))
    return forms


def _is_preflight(scope: Scope, headers: Headers) -> bool:
    return scope["method"] == "OPTIONS" and "access-control-request-method" in headers


def _preflight_response(headers: Headers) -> Response:
    allowed = {
        "access-control-allow-methods": "GET, POST, DELETE",
        "access-control-allow-headers": headers.get("access-control-request-headers", "content-type"),
        "access-control-max-age": "600",
    }
    if "access-control-request-private-network" in headers:
        # A public page requests a server on a private network. Its origin was allowed by name.
        allowed["access-control-allow-private-network"] = "true"
    return Response(status_code=204, headers=allowed)


def _hostname(url: str) -> str | None:
    """Return the host in lower case, without port and brackets; None if there is none."""
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError:
        return None
    return None if "@" in parts.netloc or parts.hostname is None else _bare(parts.hostname)


def _as_argument(text: str | None) -> str:
    """Return a client's text for a command to copy, or a placeholder for one that a shell might read otherwise."""
    return text if text is not None and re.fullmatch(r"[\w.:/-]+", text, re.ASCII) else "NAME"


def _bare(host: str) -> str:
    """Return a host in lower case without brackets, and without a scope, which clients leave out or write differently."""
    return host.strip().strip("[]").partition("%")[0].rstrip(".").lower()


def _is_address(host: str) -> bool:
    """Return True for an IP address. It cannot be rebound, because it is no name."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _listed(hosts: Iterable[str]) -> str:
    return ", ".join(sorted(hosts))


# ---- memory of request bodies

_DRAIN = 4
"""Limit for a refused body, which is read and dropped, as a multiple of the longest body.

A client that is still sending would not see the answer.
"""


@dataclass(slots=True)
class RequestBodyMemory:
    """Accounting of the bytes that request bodies hold, by client."""

    most_bytes: int
    _held: Counter[str] = field(default_factory=Counter[str])

    @property
    def held_bytes(self) -> int:
        return self._held.total()

    def reserve(self, client: str, size: int) -> bool:
        """Reserve bytes for a client. Return False if it would hold more than it leaves free."""
        left = self.most_bytes - self.held_bytes - size
        if self._held[client] + size > left:
            return False
        self._held[client] += size
        return True

    def release(self, client: str, size: int) -> None:
        self._held[client] -= size
        if not self._held[client]:
            del self._held[client]


class BodyMemoryMiddleware:
    """ASGI middleware that refuses bodies beyond the memory limit. The guard, which identifies the client, runs before it."""

    def __init__(self, app: ASGIApp, settings: ApiSettings, memory: RequestBodyMemory) -> None:
        self._app = app
        self._longest = settings.max_body_bytes
        self._memory = memory

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        body = _Body(self._memory, CLIENT.get(), self._longest, receive)
        try:
            await self._app(scope, body.receive, send)
        finally:
            body.release_all()


@dataclass(slots=True)
class _Body:
    memory: RequestBodyMemory
    client: str
    longest: int
    """Limit of a body. The reader drops what exceeds it."""
    source: Receive
    held: int = 0

    async def receive(self) -> Message:
        message = await self.source()
        size = min(len(message.get("body", b"")), self.longest - self.held)
        if size and not self.memory.reserve(self.client, size):
            self.release_all()
            await self._drop(message)
            raise BodiesFull(
                f"The memory for request bodies is full, {self.memory.most_bytes >> 20} MiB in all, or this client "
                f"uses its whole share; try again in {BodiesFull.retry_after_s:g} s."
            )
        self.held += size
        return message

    def release_all(self) -> None:
        if self.held:
            self.memory.release(self.client, self.held)
        self.held = 0

    async def _drop(self, message: Message) -> None:
        left = self.longest * _DRAIN
        while message.get("more_body", False) and left > 0:
            message = await self.source()
            left -= len(message.get("body", b""))
