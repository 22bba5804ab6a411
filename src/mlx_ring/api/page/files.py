"""The page's files, as they lie in the package: HTML, modules, styles, and the libraries that came with them.

Nothing is built, and nothing comes from elsewhere. All but the HTML lie under a folder named by a digest of them all,
so that a browser keeps them for as long as they are the same, and modules that import each other are of one version.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable

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
