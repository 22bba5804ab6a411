"""The page at `/docs` and its two files: `/openapi.json` for people, without network and without build."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from importlib import resources

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Router

from mlx_ring.api.context import ApiContext
from mlx_ring.api.openapi import ApiRoute, RouteDoc, documented_get

_HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}
_FILES = {
    "/docs": ("page.html", "text/html"),
    "/docs/page.js": ("page.js", "text/javascript"),
    "/docs/page.css": ("page.css", "text/css"),
}

_DOC: RouteDoc[Response] = RouteDoc(
    "Show this API's documentation as a page", None, {"text/html": None}, open=True
)


def routes(_: ApiContext) -> Router:
    router = Router()
    for path, (name, media_type) in _FILES.items():
        page = _endpoint(resources.files("mlx_ring.api.docs").joinpath(name).read_bytes(), media_type)
        if path == "/docs":
            documented_get(router, path, _without_slash(page), _DOC)
        else:
            router.routes.append(ApiRoute(path, page))
    return router


def _endpoint(content: bytes, media_type: str) -> Callable[[Request], Awaitable[Response]]:
    """Return an endpoint that answers with a file."""

    async def page(_: Request) -> Response:
        return Response(content, media_type=media_type, headers=_HEADERS)

    return page


def _without_slash(
    page: Callable[[Request], Awaitable[Response]],
) -> Callable[[Request], Awaitable[Response]]:
    """Return an endpoint that redirects addresses ending with slashes, with which the page's relative links would fail.

    The redirect is relative too, because a proxy may serve these routes under a prefix.
    """

    async def without_slash(request: Request) -> Response:
        address: bytes = request.scope.get("raw_path") or b""
        slashes = len(address) - len(address.rstrip(b"/"))
        return RedirectResponse(f"{'../' * slashes}docs") if slashes else await page(request)

    return without_slash
