"""What stands before every route: who may ask, a request id, and a last net for what nobody expected.

A page in a browser can make requests to a server on the same machine, and by rebinding a
name of its own to 127.0.0.1 it can read the answers. Such requests carry the page's `Origin`
or its name in `Host`; both are refused unless they are ours.

Which requests are under way, and whether the server takes new ones.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import ipaddress
import re
from collections.abc import Generator, Iterable
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mlx_ring.api.dialect import dialect_of
from mlx_ring.api.errors import error_response, log_failure
from mlx_ring.api.page.routes import wants_page
from mlx_ring.api.settings import ApiSettings
from mlx_ring.core.errors import Draining, Refused, Unauthenticated
from mlx_ring.core.traces import CLIENT, REQUEST_ID, new_request_id
from mlx_ring.host.addresses import whose

_READING = frozenset({"GET", "HEAD", "OPTIONS"})
"""These ask no model: they are answered to the end, and nobody waits for one that lasts, as a page's does."""


class Admission:
    """One for a whole server. Once it is closed, what has begun goes on, and nothing new begins."""

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
        """Requests that a model answers, or that change what is loaded."""
        return self._open

    @contextlib.contextmanager
    def admit(self, method: str) -> Generator[None]:
        """Meanwhile a request is under way.

        Raises:
            Draining: nothing new is taken.
        """
        if method in _READING:
            yield
            return
        if self._is_closed:
            raise Draining("The server is shutting down: it finishes what it has, and takes nothing new.")
        self._open += 1
        self._is_idle.clear()
        try:
            yield
        finally:
            self._open -= 1
            if not self._open:
                self._is_idle.set()

    def close(self) -> None:
        """From now on nothing new is taken."""
        self._is_closed = True

    async def drained(self) -> None:
        """Until nothing is under way."""
        await self._is_idle.wait()


_LOCAL = frozenset({"localhost", "127.0.0.1", "::1"})
_EVERY_ADDRESS = frozenset({"0.0.0.0", "::", ""})  # noqa: S104 - recognised here, bound elsewhere
_SANE_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")
"""A client's own name for its request that may stand in a log."""
_OPEN = ("/health", "/docs", "/page", "/favicon.ico")
"""Need no key: who asks whether we live has none, and a page must be there before a key can be typed into it."""
_EXPOSED = "x-request-id, request-id, retry-after, x-should-retry"
"""Headers that SDKs in a page of another origin read."""


class _HeadSent(Exception):
    """The head of an answer is out, and no more is wanted of it."""


class Guard:
    """ASGI middleware round the whole application."""

    def __init__(self, app: ASGIApp, settings: ApiSettings, admission: Admission) -> None:
        self._app = app
        self._settings = settings
        self._admission = admission
        self._hosts = _LOCAL | set(map(_bare, settings.allowed_hosts)) | {_bare(settings.host)}
        self._keys = tuple(form for key in settings.api_keys for form in _forms(key))
        self._origins = {origin.rstrip("/").lower() for origin in settings.allowed_origins}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        request_id = scope["request_id"] = _given_id(headers) or new_request_id()
        REQUEST_ID.set(request_id)
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
            # Nobody else ends requests but the server, when it ends itself.
            if started or not self._admission.is_draining:
                raise
            await error_response(Draining("The server is shutting down."), scope)(scope, receive, send_named)
        except (Unauthenticated, Draining, Refused) as error:
            origin = None if isinstance(error, Refused) else origin
            await error_response(error, scope)(scope, receive, send_named)
        except Exception as error:
            log_failure(error, request_id)
            if started:
                raise
            await error_response(error, scope)(scope, receive, send_named)

    async def _take(self, scope: Scope, headers: Headers, receive: Receive, send: Send) -> None:
        """Answer, once it is known who asks."""
        if "origin" in headers and _is_preflight(scope, headers):
            await _preflight_response(headers)(scope, receive, send)
            return
        CLIENT.set(self._authenticate(scope, headers))
        with self._admission.admit(scope["method"]):
            await self._route(scope, receive, send)

    async def _route(self, scope: Scope, receive: Receive, send: Send) -> None:
        """HEAD is answered as GET is, up to the body: one that never ends would keep the connection."""
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
            # Whoever counts requests by route asks the scope that it has.
            scope["route"] = asked.get("route")

    def _check(self, headers: Headers) -> None:
        host, origin = headers.get("host"), headers.get("origin")
        if host is not None and not self._is_ours(_hostname(f"//{host}")):
            raise Refused(
                f"Host '{host}' is not a name of this server; start it with this host allowed, "
                f"or use one of {_listed(self._hosts)}."
            )
        if origin is not None and not self._is_allowed_origin(origin, host):
            raise Refused(f"Origin '{origin}' may not use this server; start it with this origin allowed.")

    def _authenticate(self, scope: Scope, headers: Headers) -> str:
        """Who asks. Every key is compared, each in constant time: how long it takes tells nothing."""
        path, client = scope["path"], scope.get("client")
        if not self._keys or is_open(path) or (path == "/" and wants_page(headers.get("accept"))):
            return "" if client is None else whose(client[0])
        given = _given_key(headers)
        if given is None:
            raise Unauthenticated(
                "This server asks for an API key: send it as `Authorization: Bearer KEY` or `x-api-key: KEY`."
            )
        if not sum(hmac.compare_digest(given.encode("latin-1"), key) for key in self._keys):
            raise Unauthenticated("Incorrect API key provided: it is not one of this server's.")
        return f"key {given}"

    def _is_allowed_origin(self, origin: str, asked: str | None) -> bool:
        """Ours is a page from a name that was given, or from the one that it asks for.

        Where any address may be asked for, that says nothing of a page: others have addresses too.
        """
        host = _hostname(origin)
        return (
            "*" in self._origins
            or origin.rstrip("/").lower() in self._origins
            or (host is not None and (host in self._origins or host in self._hosts))
            or (host is not None and asked is not None and host == _hostname(f"//{asked}"))
        )

    def _is_ours(self, host: str | None) -> bool:
        if host is None:
            return False
        if "*" in self._hosts or host in self._hosts:
            return True
        return _bare(self._settings.host) in _EVERY_ADDRESS and _is_address(host)

    def _add_headers(self, headers: MutableHeaders, scope: Scope, origin: str | None) -> None:
        headers["x-request-id"] = scope["request_id"]
        second_header = dialect_of(scope).request_id_header
        if second_header is not None:
            headers[second_header] = scope["request_id"]
        if self._admission.is_draining:
            headers["connection"] = "close"
        if origin is not None:
            headers["access-control-allow-origin"] = origin
            headers["access-control-expose-headers"] = _EXPOSED
            headers.add_vary_header("origin")


def is_open(path: str) -> bool:
    """Whether a path needs no key."""
    return any(path == each or path.startswith(f"{each}/") for each in _OPEN)


def _given_id(headers: Headers) -> str | None:
    """What the client calls its request, as proxies and OpenAI's clients do; None where it is nothing for a log."""
    all_given = (headers.get(name, "") for name in ("x-request-id", "x-client-request-id"))
    return next(filter(_SANE_ID.fullmatch, all_given), None)


def _given_key(headers: Headers) -> str | None:
    scheme, _, token = headers.get("authorization", "").partition(" ")
    token = token.strip(" ")
    return token if scheme.lower() == "bearer" and token else headers.get("x-api-key")


def _forms(key: str) -> set[bytes]:
    """A key as it stands in a header: programs send UTF-8, and browsers Latin-1 where that has all of its letters."""
    forms = {key.encode()}
    with contextlib.suppress(UnicodeEncodeError):
        forms.add(key.encode("latin-1"))
    return forms


def _is_preflight(scope: Scope, headers: Headers) -> bool:
    return scope["method"] == "OPTIONS" and "access-control-request-method" in headers


def _preflight_response(headers: Headers) -> Response:
    allowed = {
        "access-control-allow-methods": "GET, POST",
        "access-control-allow-headers": headers.get("access-control-request-headers", "content-type"),
        "access-control-max-age": "600",
    }
    if "access-control-request-private-network" in headers:
        # A page of the web asks for a server in this house: its origin was allowed by name.
        allowed["access-control-allow-private-network"] = "true"
    return Response(status_code=204, headers=allowed)


def _hostname(url: str) -> str | None:
    """Lower case, without port and brackets; None where there is none."""
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError:
        return None
    return None if "@" in parts.netloc or parts.hostname is None else _bare(parts.hostname)


def _bare(host: str) -> str:
    return host.strip().strip("[]").rstrip(".").lower()


def _is_address(host: str) -> bool:
    """An address cannot be rebound: behind one there is no name."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _listed(hosts: Iterable[str]) -> str:
    return ", ".join(sorted(hosts))
