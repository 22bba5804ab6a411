"""Windows of a browser that show the page at `/`, and record its requests and console messages."""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from playwright.sync_api import Browser, ConsoleMessage, Page, Request

WAIT_MS = 30_000.0
"""Time limit of an awaited change. It comes in a moment, except on the slowest machines."""


@dataclass
class PageEvents:
    """Requests of a page, and its errors and warnings."""

    requests: list[Request] = field(default_factory=list[Request])
    problems: list[str] = field(default_factory=list[str])

    def to_other_servers(self, url: str) -> list[str]:
        """Return the URLs of requests to other servers."""
        own = urlsplit(url).netloc
        return [request.url for request in self.requests if urlsplit(request.url).netloc != own]


@contextlib.contextmanager
def open_page(
    browser: Browser, url: str, *, width: int = 1280, scheme: str = "light", view: str = "chat"
) -> Generator[tuple[Page, PageEvents]]:
    """Open the page in a new window with empty storage. A failed assertion says what the page shows."""
    context = browser.new_context(
        viewport={"width": width, "height": 800},
        color_scheme="dark" if scheme == "dark" else "light",
        locale="en-GB",
    )
    page, events = context.new_page(), PageEvents()

    def record_message(message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            events.problems.append(message.text)

    def record_request(request: Request) -> None:
        events.requests.append(request)

    page.set_default_timeout(WAIT_MS)
    page.on("console", record_message)
    page.on("pageerror", lambda error: events.problems.append(str(error)))
    page.on("request", record_request)
    page.goto(f"{url}/#{view}")
    try:
        yield page, events
    except AssertionError as error:
        error.add_note(f"The page at {page.url} shows:\n{page.locator('body').inner_text()}")
        error.add_note(f"Its problems: {events.problems}")
        raise
    finally:
        context.close()


def ask(page: Page, text: str) -> None:
    page.get_by_label("Your question").fill(text)
    page.keyboard.press("Enter")
