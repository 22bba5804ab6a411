"""Fixtures of tests of a whole instance."""

from __future__ import annotations

from collections.abc import Generator

import pytest
from playwright.sync_api import Browser, expect
from tests.browser import running_browser
from tests.end_to_end.page_windows import WAIT_MS


@pytest.fixture(scope="module")
def browser() -> Generator[Browser]:
    """Run one browser for a file. Its loop in this thread would stop tests that run a loop of their own."""
    with running_browser() as browser:
        expect.set_options(timeout=WAIT_MS)
        yield browser
