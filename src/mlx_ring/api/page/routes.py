"""The page at `/`, its files, and the choice between the page and JSON.

The page holds no secrets, so it needs no API key; the data that it shows does. Its files are served from the package
unchanged. All but the HTML have URLs with a digest of all files. So browsers cache them until one changes, and modules that
import each other always have the same version.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Router

from mlx_ring.api.openapi import ApiRoute

_TYPES: Mapping[str, str] = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
}
"""Media types of the page's files, by suffix. Other files in the folder are not served."""
_INDEX = "index.html"
_DIGEST = b"DIGEST"
"""Placeholder of the digest in the HTML."""


@dataclass(frozen=True, slots=True)
class File:
    kind: str
    """Media type of the file."""
    data: bytes


@dataclass(frozen=True, slots=True)
class Page:
    """All files that a browser loads."""

    digest: str
    html: bytes
    files: Mapping[str, File]
    """Files by their paths below the digest."""


@cache
def load_page() -> Page:
    """Read the page's files, once."""
    found = dict(sorted(_walk(files("mlx_ring.api.page") / "web", "")))
    html = found.pop(_INDEX).data
    whole = hashlib.sha256(html)
    for path, file in found.items():
        whole.update(b"%s\0%d\0%s" % (path.encode(), len(file.data), file.data))
    digest = whole.hexdigest()[:16]
    return Page(digest, html.replace(_DIGEST, digest.encode()), found)


def _walk(folder: Traversable, path: str) -> list[tuple[str, File]]:
    found: list[tuple[str, File]] = []
    for entry in folder.iterdir():
        if entry.is_dir():
            found += _walk(entry, f"{path}{entry.name}/")
        elif (kind := _TYPES.get(entry.name[entry.name.rfind(".") :])) is not None:
            found.append((path + entry.name, File(kind, entry.read_bytes())))
    return found


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
"""Headers that allow only this server's scripts, styles and connections, no inline code, and no frames around the page."""


def routes() -> Router:
    router = Router()

    async def file(request: Request) -> Response:
        page, wanted = load_page(), request.path_params
        found = page.files.get(wanted["path"]) if wanted["digest"] == page.digest else None
        if found is None:
            raise HTTPException(_NOT_FOUND)
        return Response(found.data, media_type=found.kind, headers=_SAFE | {"cache-control": _KEPT})

    async def icon(request: Request) -> Response:
        """Answer browsers that show another file of this server."""
        page = load_page()
        image = page.files["favicon.svg"]
        return _tagged(request, page.digest, Response(image.data, media_type=image.kind, headers=_SAFE))

    router.routes.extend((ApiRoute("/page/{digest}/{path:path}", file), ApiRoute("/favicon.ico", icon)))
    return router


def page_response(request: Request, *, wants_key: bool) -> Response:
    """Return the HTML. It contains a mark if the page needs an API key."""
    page = load_page()
    html = page.html.replace(_PLAIN, _KEYED, 1) if wants_key else page.html
    response = Response(html, media_type="text/html; charset=utf-8", headers=_SAFE)
    return _tagged(request, f"{page.digest}-key" if wants_key else page.digest, response)


def _tagged(request: Request, name: str, response: Response) -> Response:
    """Return the response, or 304 if the browser's copy is current."""
    tag = f'"{name}"'
    response.headers.update({"etag": tag, "cache-control": _ASKED_AGAIN, "vary": "accept"})
    if tag not in request.headers.get("if-none-match", ""):
        return response
    kept = {name: value for name, value in response.headers.items() if not name.startswith("content-")}
    return Response(status_code=_NOT_MODIFIED, headers=kept)


_HTML, _JSON = "text/html", "application/json"


def wants_page(accept: str | None) -> bool:
    """Return True if a client accepts HTML by name and does not prefer JSON. `*/*` alone, which curl sends, is not enough."""
    weights = dict(_read(accept or ""))
    html = weights.get(_HTML, 0.0)
    return html > 0 and html >= weights.get(_JSON, 0.0)


def _read(accept: str) -> list[tuple[str, float]]:
    """Return each media type with its weight."""
    return [_weighed(part) for part in accept.split(",")]


def _weighed(part: str) -> tuple[str, float]:
    kind, *parameters = (piece.strip().lower() for piece in part.split(";"))
    weights = [
        value for name, _, value in (each.partition("=") for each in parameters) if name.strip() == "q"
    ]
    return kind, _number(weights[0]) if weights else 1.0


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0
