"""A browser for tests: the machine's own Chromium, or the one that `scripts/setup_chromium` has unpacked."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Generator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, sync_playwright

from mlx_ring.core.environment import inherited_environment

_UNPACKED = Path(__file__).parent.parent / ".debian" / "root"
_NAMES = ("chromium", "chromium-browser", "google-chrome")
_FLAGS = (
    *("--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-quic", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update"),
)
"""They stop requests that no page has made, and let it run as root in a container."""


@contextlib.contextmanager
def running_browser() -> Generator[Browser]:
    """Run a headless browser. Skip the test where none is installed."""
    program, libraries = _find()
    variables = {"LD_LIBRARY_PATH": ":".join(map(str, libraries))} if libraries else {}
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=program, args=list(_FLAGS), env={**inherited_environment(variables)}
        )
        yield browser
        browser.close()


def _find() -> tuple[Path, list[Path]]:
    """Return the program, and the folders of libraries that the system lacks."""
    unpacked = _UNPACKED / "usr" / "lib" / "chromium" / "chromium-headless-shell"
    if unpacked.exists():
        libraries = sorted((_UNPACKED / "usr" / "lib").glob("*-linux-gnu"))
        return unpacked, [*libraries, *(folder / "pulseaudio" for folder in libraries)]
    for name in _NAMES:
        if found := shutil.which(name):
            return Path(found), []
    pytest.skip("Chromium is not installed here: see scripts/setup_chromium")
