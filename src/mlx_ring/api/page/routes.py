"""The page over HTTP. It holds nothing secret, so it needs no key; what it shows does."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response

from mlx_ring.api.page.files import load_page

_NOT_FOUND, _NOT_MODIFIED = 404, 304
_KEPT = "public, max-age=31536000, immutable"
_ASKED_AGAIN = "no-cache"
_PLAIN, _KEYED = b"<html ", b'<html data-asks="key" '

_SAFE = {
    "content-security-policy": (
        "default-src 'self'; base-uri 'none'; object-src 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}
"""Scripts, styles and connections are this server's alone, none stands in the HTML, and nobody frames the page."""


def routes() -> APIRouter:
    router = APIRouter(include_in_schema=False)

    async def file(digest: str, path: str) -> Response:
        page = load_page()
        found = page.files.get(path) if digest == page.digest else None
        if found is None:
            raise HTTPException(_NOT_FOUND)
        return Response(found.data, media_type=found.kind, headers=_SAFE | {"cache-control": _KEPT})

    async def icon(request: Request) -> Response:
        """For browsers that show something else of this server."""
        page = load_page()
        image = page.files["favicon.svg"]
        return _tagged(request, page.digest, Response(image.data, media_type=image.kind, headers=_SAFE))

    router.add_api_route("/page/{digest}/{path:path}", file, methods=["GET"], include_in_schema=False)
    router.add_api_route("/favicon.ico", icon, methods=["GET"], include_in_schema=False)
    return router


def page_response(request: Request, *, wants_key: bool) -> Response:
    """The HTML. It says whether a key is wanted, so that a page without one need not be refused to learn it."""
    page = load_page()
    html = page.html.replace(_PLAIN, _KEYED, 1) if wants_key else page.html
    response = Response(html, media_type="text/html; charset=utf-8", headers=_SAFE)
    return _tagged(request, f"{page.digest}-key" if wants_key else page.digest, response)


def _tagged(request: Request, name: str, response: Response) -> Response:
    """The response, or word that what the browser has is still right."""
    tag = f'"{name}"'
    response.headers.update({"etag": tag, "cache-control": _ASKED_AGAIN, "vary": "accept"})
    if tag not in request.headers.get("if-none-match", ""):
        return response
    kept = {name: value for name, value in response.headers.items() if not name.startswith("content-")}
    return Response(status_code=_NOT_MODIFIED, headers=kept)
