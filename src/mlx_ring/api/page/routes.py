"""The page over HTTP. It holds nothing secret, so it needs no key; what it shows does.

The page's files, as they lie in the package: HTML, modules, styles, and the libraries that came with them.

Nothing is built, and nothing comes from elsewhere. All but the HTML lie under a folder named by a digest of them all,
so that a browser keeps them for as long as they are the same, and modules that import each other are of one version.

Who gets the page, and who gets JSON: both live at `/`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable

from fastapi import APIRouter, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response

_TYPES: Mapping[str, str] = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
}
"""What is served; another file in the folder is none of the page's."""
_INDEX = "index.html"
_DIGEST = b"DIGEST"
"""What stands for the folder's name in the HTML."""


@dataclass(frozen=True, slots=True)
class File:
    kind: str
    """Its media type."""
    data: bytes


@dataclass(frozen=True, slots=True)
class Page:
    """All that a browser loads."""

    digest: str
    html: bytes
    files: Mapping[str, File]
    """By their paths under the digest's folder."""


@cache
def load_page() -> Page:
    """Read once, when a browser first asks."""
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


_HTML, _JSON = "text/html", "application/json"


def wants_page(accept: str | None) -> bool:
    """Whether a client asks for HTML by name, and does not like JSON better. `*/*` alone, as curl sends, does not."""
    liking = dict(_read(accept or ""))
    html = liking.get(_HTML, 0.0)
    return html > 0 and html >= liking.get(_JSON, 0.0)


def _read(accept: str) -> list[tuple[str, float]]:
    """Each kind with its weight."""
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
