"""The page at `/docs` in a real browser: its routes, its form for the API key, and requests sent from it."""

from __future__ import annotations

from tests.api.clients import serving
from tests.api.twins import ANSWER_TEXT, TwinService
from tests.browser import running_browser
from tests.default_settings import make_api_settings


def test_user_enters_a_key_and_tries_a_route() -> None:
    with (
        serving(TwinService(), make_api_settings(api_keys=("house-key",))) as url,
        running_browser() as browser,
    ):
        page = browser.new_page(viewport={"width": 400, "height": 800})
        errors: list[str] = []
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(f"{url}/docs")
        page.get_by_label("API key").fill("house-key")
        page.get_by_role("button", name="Use it").click()
        page.locator("summary", has_text="/v1/chat/completions").first.click()
        seed = page.locator("li", has_text="seed").first
        assert str(seed.text_content()).startswith("seed integer -2^63…2^64 - 1")
        page.get_by_role("button", name="Send").click()
        answer = page.locator("pre", has_text="200")
        answer.filter(has_text=ANSWER_TEXT).wait_for()
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        assert "house-key" not in page.url
        assert not errors
