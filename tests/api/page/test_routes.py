"""The page at `/` over HTTP: its files and their headers."""

from __future__ import annotations

import itertools
import math
import re
from importlib.resources import files

import pytest
from tests.api.clients import Api, refusal
from tests.default_settings import make_api_settings

from mlx_ring.api.page.routes import load_page

BROWSER = "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"
KEYED = make_api_settings(api_keys=("key",))


@pytest.mark.parametrize("accept", [BROWSER, "text/html", "application/json;q=0.5, text/html"])
def test_client_that_prefers_html_gets_the_page(api: Api, accept: str) -> None:
    response = api.get("/", accept=accept)
    assert response.status_code == 200
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    assert response.headers["vary"] == "accept"
    assert "<title>mlx-ring</title>" in response.text


@pytest.mark.parametrize(
    "accept",
    ["*/*", "application/json", "application/json, text/html;q=0.9", "text/html;q=0", "text/html;q=x"],
)
def test_client_that_does_not_prefer_html_gets_json(api: Api, accept: str) -> None:
    response = api.get("/", accept=accept)
    assert response.json()["service"] == "mlx-ring"
    assert response.headers["vary"] == "accept"


def test_linked_files_exist_and_are_immutable(api: Api) -> None:
    html = api.get("/", accept=BROWSER).text
    named = re.findall(r'(?:src|href)="([^"]+)"', html)
    assert len(named) >= 5
    for path in named:
        response = api.get(f"/{path}")
        assert response.status_code == 200, path
        assert "immutable" in response.headers["cache-control"]


def test_every_module_imports_existing_files() -> None:
    page = load_page()
    for path, file in page.files.items():
        folder = path.rpartition("/")[0]
        for name in re.findall(
            r'^(?!\s*/?\*).*(?: from "|\bimport\(")(\.[^"]+)"', file.data.decode(), re.MULTILINE
        ):
            parts: list[str] = []
            for step in f"{folder}/{name}".split("/"):
                if step == "..":
                    parts.pop()
                elif step not in (".", ""):
                    parts.append(step)
            assert "/".join(parts) in page.files, (path, name)


def test_no_line_is_wider_than_120_columns() -> None:
    for path, file in load_page().files.items():
        if path.endswith((".js", ".css", ".html")) and not path.startswith("vendor/"):
            assert max(map(len, file.data.decode().splitlines())) <= 120, path


LEGENDS = (
    ("weights", "kv", "working", "room"),
    ("compute", "link", "sunken"),
    ("others", "sunken", "stage-0", "stage-1"),
)
"""Colours that appear side by side, by their custom properties."""
MIN_DIFFERENCE = 20
"""Smallest distance of two such colours in CIELAB. About 2 is just visible."""


def lab_of(colour: str) -> tuple[float, float, float]:
    """Return a colour in CIELAB, for the white point D65."""
    channels = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    r, g, b = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels)
    xyz = (
        (0.4124 * r + 0.3576 * g + 0.1805 * b) / 0.9505,
        0.2126 * r + 0.7152 * g + 0.0722 * b,
        (0.0193 * r + 0.1192 * g + 0.9505 * b) / 1.089,
    )
    x, y, z = (c ** (1 / 3) if c > 0.008856 else 7.787 * c + 16 / 116 for c in xyz)
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


def test_colours_of_a_legend_differ_visibly_in_both_themes() -> None:
    css = load_page().files["styles/tokens.css"].data.decode()
    light, dark = (dict(re.findall(r"--([\w-]+): (#\w{6});", block)) for block in css.split(":root[", 1))
    for colours in (light, light | dark):
        for legend in LEGENDS:
            for one, two in itertools.combinations(legend, 2):
                difference = math.dist(lab_of(colours[one]), lab_of(colours[two]))
                assert difference >= MIN_DIFFERENCE, (one, two, difference)


def test_unchanged_page_is_not_sent_again(api: Api) -> None:
    first = api.get("/", accept=BROWSER)
    assert first.headers["cache-control"] == "no-cache"
    again = api.request("GET", "/", headers={"accept": BROWSER, "if-none-match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")


def test_only_scripts_of_this_server_can_run(api: Api) -> None:
    response = api.get("/", accept=BROWSER)
    policy = response.headers["content-security-policy"]
    assert "default-src 'self'" in policy
    assert "frame-ancestors 'none'" in policy
    assert "unsafe" not in policy
    assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\son\w+=|style=", response.text)


@pytest.mark.parametrize(
    "path",
    [
        *("/page/0123456789abcdef/main.js", "/page/{digest}/index.html", "/page/{digest}/../routes.py"),
        *("/page/{digest}/%2e%2e/files.py", "/page/{digest}/chat", "/page/{digest}/", "/page/"),
    ],
)
def test_no_other_file_is_served(api: Api, path: str) -> None:
    refusal(api.get(path.format(digest=load_page().digest)), 404)


def test_page_needs_no_key_but_its_data_does() -> None:
    api = Api(settings=KEYED)
    digest = load_page().digest
    assert api.get("/", accept=BROWSER).status_code == 200
    assert api.get(f"/page/{digest}/main.js").status_code == 200
    assert api.get("/favicon.ico").headers["content-type"] == "image/svg+xml"
    for path in ("/", "/cluster/events", "/cluster/status", "/v1/models", "/pages", "/page.js"):
        refusal(api.get(path), 401)
    assert "--allowed-hosts" in api.get("/", accept=BROWSER, host="evil.example").text


def test_vendored_libraries_match_their_published_checksums() -> None:
    """Compare the files with the checksums beside them."""
    import hashlib  # used only here

    folder = files("mlx_ring.api.page") / "web" / "vendor"
    published = (folder / "README.txt").read_text()
    for file in (each for each in folder.iterdir() if each.name.endswith((".js", ".css"))):
        assert hashlib.sha256(file.read_bytes()).hexdigest() in published, file.name
