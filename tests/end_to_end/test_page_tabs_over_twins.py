"""The page's Cluster and Models tabs in Chromium, over servers of twins."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Generator
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, expect
from tests.api.clients import serving
from tests.api.twins import ANSWER_TEXT, JOIN_TOKEN, TwinCatalog, TwinService
from tests.default_settings import make_api_settings
from tests.end_to_end.page_windows import ask, open_page

from mlx_ring.api.page.routes import load_page


@pytest.fixture(scope="module")
def twin_url() -> Generator[str]:
    """Serve a twin that answers briefly, and yield its URL."""
    with serving(TwinService()) as url:
        yield url


FILLS_THE_STORAGE = """() => {
    let count = 0;
    for (let size = 1 << 20; size; size >>= 1) {
        try {
            for (;;) localStorage.setItem(`full-${count}`, "x".repeat(size)), (count += 1);
        } catch {}
    }
}"""


EMPTIES_IT = """() => {
    for (const name of Object.keys(localStorage)) if (name.startsWith("full-")) localStorage.removeItem(name);
}"""


STATUS = """async ([base, state]) => {
    const { describeStatus } = await import(new URL("status.js", base));
    return describeStatus({ connection: "open", state }).notices.map((notice) => notice.text);
}"""


def test_lost_machine_is_named_by_id_if_two_have_its_name(browser: Browser, twin_url: str) -> None:
    nodes = [
        {"id": "mini-1", "name": "mini", "state": "attending", "reason": None},
        {"id": "mini-2", "name": "mini", "state": "gone", "reason": "it was cut off"},
    ]
    state = {"draining": False, "time": 1, "cluster": {"nodes": nodes, "models": [], "instances": []}}
    with open_page(browser, twin_url) as (page, _):
        texts = page.evaluate(STATUS, [f"{twin_url}/page/{load_page().digest}/", state])
    assert texts == ["mini-2 is disconnected: it was cut off"]


def test_back_and_forward_follow_chats_and_tabs(browser: Browser, twin_url: str) -> None:
    with open_page(browser, twin_url) as (page, events):
        questions, heading = page.get_by_role("article", name="You"), page.get_by_role("heading", level=1)
        expect(page).to_have_url(f"{twin_url}/#chat")
        ask(page, "One.")
        expect(page.get_by_role("button", name="Retry")).to_be_visible()
        one = page.url
        assert re.fullmatch(r".*/#chat/[0-9a-f]{16}", one)
        page.get_by_role("button", name="New chat").click()
        expect(questions).to_have_count(0)
        ask(page, "Two.")
        expect(page.get_by_role("button", name="Retry")).to_be_visible()
        two = page.url
        page.get_by_role("link", name="Models").click()
        expect(page.get_by_role("region", name="Add a model")).to_be_visible()
        page.get_by_role("link", name="Chat", exact=True).click()
        expect(heading).to_have_text("Two.")
        page.get_by_label("Conversations").get_by_role("link", name="One.").click()
        expect(heading).to_have_text("One.")
        visited = [two, f"{twin_url}/#models", two, one]
        for address in visited:
            page.go_back()
            expect(page).to_have_url(address)
            if address != visited[1]:
                title = "Two." if address == two else "One."
                expect(heading).to_have_text(title)
                expect(page).to_have_title(f"{title} · org/twin · mlx-ring")
            else:
                expect(page).to_have_title("org/twin · mlx-ring")
        for address in [*reversed(visited[:-1]), one]:
            page.go_forward()
            expect(page).to_have_url(address)
        expect(heading).to_have_text("One.")
        page.get_by_role("button", name="Delete One.").click()
        expect(page).to_have_url(two)
        page.go_back()
        page.go_forward()
        expect(heading).to_have_text("Two.")
        assert events.problems == []


def test_link_to_a_chat_opens_it_in_another_tab_and_an_unknown_one_says_so(
    browser: Browser, twin_url: str
) -> None:
    with open_page(browser, twin_url) as (page, events):
        for text in ("One.", "Two."):
            page.get_by_role("button", name="New chat").click()
            ask(page, text)
            expect(page.get_by_role("button", name="Retry")).to_be_visible()
        one = page.get_by_label("Conversations").get_by_role("link", name="One.")
        with page.context.expect_page() as opened:
            one.click(modifiers=["ControlOrMeta"])
        expect(opened.value.get_by_role("heading", level=1)).to_have_text("One.")
        expect(page.get_by_role("heading", level=1)).to_have_text("Two.")
        other = opened.value
        other.reload()
        expect(other.get_by_role("heading", level=1)).to_have_text("One.")
        other.goto(f"{twin_url}/#chat/0123456789abcdef")
        expect(other.get_by_role("alert")).to_contain_text("This browser has no chat 0123456789abcdef.")
        expect(other.get_by_role("article", name="You")).to_have_count(0)
        ask(other, "Three.")
        expect(other.get_by_role("button", name="Retry")).to_be_visible()
        expect(other.get_by_role("alert")).to_have_count(0)
        expect(other).not_to_have_url(re.compile("0123456789abcdef"))
        page.get_by_label("Conversations").get_by_role("link", name="One.").click()
        address = page.url
        page.get_by_role("button", name="Delete One.").click()
        other.goto(address)
        expect(other.get_by_role("alert")).to_contain_text("This browser has no chat")
        other.get_by_label("Your question").fill("A draft")
        page.get_by_role("button", name="Undo").click()
        other.get_by_label("Conversations").get_by_role("link", name="One.").click()
        expect(other.get_by_role("heading", level=1)).to_have_text("One.")
        expect(other.get_by_role("alert")).to_have_count(0)
        expect(other).to_have_url(address)
        assert events.problems == []


def test_retry_keeps_the_earlier_answers_which_can_be_shown_by_key(browser: Browser, twin_url: str) -> None:
    with open_page(browser, twin_url) as (page, events):
        answer, retry = page.get_by_role("article", name="Answer"), page.get_by_role("button", name="Retry")
        versions = answer.get_by_role("group", name="Versions of this answer")
        ask(page, "Which?")
        expect(retry).to_be_visible()
        expect(versions).to_have_count(0)
        page.get_by_role("button", name="Parameters").click()
        page.get_by_label("Max tokens").fill("1")
        retry.click()
        expect(versions).to_contain_text("2/2")
        expect(answer).to_contain_text("token limit")
        versions.get_by_role("button", name="Earlier version").press("Enter")
        expect(versions).to_contain_text("1/2")
        expect(answer).to_contain_text(ANSWER_TEXT)
        expect(versions.get_by_role("button", name="Earlier version")).to_be_focused()
        page.keyboard.press("Enter")
        expect(versions).to_contain_text("1/2")
        page.reload()
        expect(versions).to_contain_text("1/2")
        with page.expect_download() as saved:
            page.get_by_role("button", name="Export as Markdown").click()
        text = saved.value.path().read_text()
        assert text.index("(version 2 of 2, token limit reached)") < text.index("(version 1 of 2)")
        assert events.problems == []


def test_retry_without_an_answer_says_why_and_leaves_the_former_one_as_it_was(
    browser: Browser, twin_url: str
) -> None:
    with open_page(browser, twin_url) as (page, _):
        answer, retry = page.get_by_role("article", name="Answer"), page.get_by_role("button", name="Retry")
        ask(page, "Which?")
        retry.click()
        expect(answer).to_contain_text("2/2")
        path = re.compile("chat/completions")
        page.route(path, lambda route: route.abort())
        retry.click()
        expect(answer.get_by_role("alert")).to_contain_text(
            "The server could not be reached, so there is no other"
        )
        page.get_by_role("button", name="Earlier version").click()
        expect(answer).to_contain_text("1/2")
        expect(answer.get_by_role("alert")).to_have_count(0)
        page.unroute_all()
        page.route(path, lambda _: None)
        retry.click()
        other = page.context.new_page()
        other.goto(page.url)
        later = other.get_by_role("button", name="Later version")
        expect(later).to_have_attribute("title", re.compile("Another tab of this browser receives"))
        page.close()
        expect(later).to_have_attribute("title", "Later version")
        expect(other.get_by_role("article", name="Answer")).not_to_contain_text("incomplete")


def test_chat_without_room_in_the_browser_says_so_until_there_is_room(
    browser: Browser, twin_url: str
) -> None:
    with open_page(browser, twin_url) as (page, events):
        notice = page.get_by_role("status").filter(
            has_text="The browser has no room to store this conversation."
        )
        retry = page.get_by_role("button", name="Retry")
        page.evaluate(FILLS_THE_STORAGE)
        ask(page, "One.")
        expect(retry).to_be_visible()
        expect(notice).to_be_visible()
        page.evaluate(EMPTIES_IT)
        ask(page, "Two.")
        expect(retry).to_be_visible()
        expect(notice).to_have_count(0)
        page.evaluate(FILLS_THE_STORAGE)
        page.get_by_role("button", name="New chat").click()
        ask(page, "Three.")
        expect(retry).to_be_visible()
        older = page.get_by_role("status").filter(has_text="1 older chat cannot be stored")
        expect(older).to_be_visible()
        listed = page.get_by_label("Conversations").get_by_role("link")
        expect(listed).to_have_text(["Three.", "One."])
        page.reload()
        expect(listed).to_have_text(["Three."])
        assert events.problems == []


def test_page_says_nothing_of_models_while_the_server_does_not_answer(browser: Browser) -> None:
    service = TwinService()
    with contextlib.ExitStack() as cleanup:
        with serving(service) as url:
            page, _ = cleanup.enter_context(open_page(browser, url))
            chosen = page.get_by_label("Model").locator("option:checked")
            service.is_loaded = False
            expect(chosen).to_have_text("org/twin (not loaded)")
        expect(page.get_by_role("button", name="Reconnect")).to_be_visible()
        expect(chosen).to_have_text("org/twin")


def test_what_if_panel_compares_an_added_machine_for_the_asked_request(
    browser: Browser, twin_url: str
) -> None:
    with open_page(browser, twin_url, view="cluster") as (page, events):
        panel = page.locator("section.what-if")
        panel.locator("summary").click()
        expect(panel.get_by_label("Link to the others")).to_have_text(re.compile("^1 Gbit/s Ethernet"))
        panel.get_by_label("Add a machine").select_option("m3-ultra-512")
        panel.get_by_label("Link to the others").select_option("tb5")
        panel.get_by_label("Optimize for").select_option("first-token")
        panel.get_by_label("Prompt").fill("500")
        panel.get_by_label("Answer").fill("40")
        panel.get_by_role("button", name="Compare").press("Enter")
        expect(panel.get_by_role("button", name="Compare")).to_be_focused()
        rows = panel.get_by_role("row")
        expect(rows).to_have_count(3)
        expect(rows.nth(0)).to_contain_text("request, s")
        expect(rows.nth(1)).to_contain_text("now")
        expect(rows.nth(2)).to_contain_text("with m3-ultra-512 over tb5")
        expect(panel).to_contain_text("org/twin")
        expect(panel).to_contain_text("Without layers: m4-mac-mini-16: no plan with it")
        expect(panel).to_contain_text("a prompt of 500 tokens and an answer of 40.")
        panel.get_by_label("KV cache").select_option("16,8,4")
        panel.get_by_label("Plot").select_option("on")
        panel.get_by_role("button", name="Compare").click()
        expect(rows).to_have_count(7)
        expect(panel.locator("svg polyline")).to_have_count(2)
        panel.get_by_label("Context of each user").fill("300")
        panel.get_by_role("button", name="Compare").click()
        expect(panel.get_by_role("alert")).to_contain_text("an answer of 40 need a context of 540")
        assert [each for each in events.problems if "400" not in each] == []


def test_models_are_unloaded_loaded_and_downloaded(browser: Browser) -> None:
    catalog = TwinCatalog(TwinService(), TwinService(names=("other",)))
    with (
        serving(catalog.models[0], catalog=catalog) as url,
        open_page(browser, url, view="models") as (page, events),
    ):
        other = page.get_by_role("article", name="other")
        expect(other).to_contain_text("ready")
        other.get_by_role("button", name="Unload other").click()
        expect(other.get_by_role("status").first).to_contain_text("other is unloaded.")
        # The focus is not lost with the button, and a second Enter does not undo the first.
        expect(other.get_by_role("button", name="Dismiss")).to_be_focused()
        page.keyboard.press("Shift+Tab")
        expect(other.get_by_role("button", name="Undo")).to_be_focused()
        page.keyboard.press("Enter")
        expect(other.get_by_role("status").first).to_contain_text(
            re.compile(r"other is loaded, on .+ It took [\d.]+ m?s\.")
        )
        # By key: a pointer that is pressed and released misses a button that moves between the two.
        other.get_by_role("button", name="Chat with it").press("Enter")
        expect(page.get_by_role("heading", name="Ask other")).to_be_visible()
        expect(page.get_by_label("Model")).to_have_value("other")
        page.get_by_role("link", name="Models").click()
        other.get_by_role("button", name="Unload other").click()
        expect(other).to_contain_text("not loaded")
        other.get_by_role("button", name="Predict").click()
        expect(other).to_contain_text(
            re.compile(r"Predicted: [\d.]+ GB of memory, [\d.]+ to [\d.]+ tokens/s")
        )
        other.get_by_role("button", name="Load other").click()
        expect(other).to_contain_text("ready")
        other.get_by_role("button", name="Chat with other").click()
        expect(page.get_by_role("heading", name="Ask other")).to_be_visible()
        expect(page.get_by_label("Model")).to_have_value("other")
        page.get_by_label("Model").select_option("More models…")
        expect(other).to_be_visible()
        assert events.problems == []
        add = page.get_by_role("region", name="Add a model")
        name = add.get_by_label("Name")
        name.fill("missing")
        page.keyboard.press("Enter")
        expect(add.get_by_role("alert")).to_contain_text("There is no model 'missing'.")
        page.get_by_role("link", name="Chat").click()
        page.get_by_role("link", name="Models").click()
        add.get_by_role("button", name="Dismiss").click()
        expect(add.get_by_role("alert")).to_have_count(0)
        name.fill("missing")
        page.keyboard.press("Enter")
        expect(add.get_by_role("alert")).to_have_count(1)
        name.fill("org/new")
        add.get_by_role("button", name="Download", exact=True).click()
        expect(add).to_contain_text("org/new is downloaded.")
        expect(add.get_by_role("alert")).to_have_count(0)
        recommend = add.get_by_role("button", name="Which models run well here?")
        recommend.press("Enter")
        expect(recommend).to_be_focused()
        expect(add.get_by_role("listitem").filter(has_text="Qwen3-0.6B 4-bit")).to_contain_text(
            "runs well here"
        )


def test_load_that_waits_for_two_others_can_be_cancelled_and_holds_the_page_open(browser: Browser) -> None:
    catalog = TwinCatalog(TwinService())
    with (
        serving(catalog.models[0], catalog=catalog) as url,
        open_page(browser, url, view="models") as (page, _),
    ):
        page.route("**/models/load", lambda _: None)
        add = page.get_by_role("region", name="Add a model")
        for name in ("org/a", "org/b", "org/c"):
            add.get_by_label("Name").fill(name)
            page.keyboard.press("Enter")
            expect(add.get_by_role("status").filter(has_text=name).first).to_contain_text(
                re.compile("Loading|waits for")
            )
        expect(add).to_contain_text("org/c waits for the load of org/a or org/b")
        with page.expect_event("dialog") as asked:
            page.close(run_before_unload=True)
        assert asked.value.type == "beforeunload"
        asked.value.dismiss()
        add.get_by_role("button", name="Cancel the load of org/c").click()
        expect(add.get_by_role("status").filter(has_text="org/c")).to_have_count(0)
        expect(add.get_by_role("status").filter(has_text="Loading org/")).to_have_count(2)


def test_download_that_is_refused_because_of_the_memory_can_be_forced(browser: Browser) -> None:
    catalog = TwinCatalog(TwinService())
    with (
        serving(catalog.models[0], catalog=catalog) as url,
        open_page(browser, url, view="models") as (page, _),
    ):
        add = page.get_by_role("region", name="Add a model")
        add.get_by_label("Name").fill("org/large")
        page.keyboard.press("Enter")
        expect(add.get_by_role("alert")).to_contain_text("It needs more memory than the machines here have.")
        add.get_by_role("button", name="Download all the same").click()
        expect(add).to_contain_text("org/large is downloaded.")
        expect(add.get_by_role("alert")).to_have_count(0)


def test_models_on_the_disk_are_listed_and_downloads_in_progress_are_followed(browser: Browser) -> None:
    catalog = TwinCatalog(TwinService())
    with (
        serving(catalog.models[0], catalog=catalog) as url,
        open_page(browser, url, view="models", width=390) as (page, events),
    ):
        add = page.get_by_role("region", name="Add a model")
        expect(add).to_contain_text(re.compile(r"Downloading org/other.*50\s?%, 1 B of 2 B", re.DOTALL))
        assert not any(request.url.endswith("/models/pull") for request in events.requests)
        disk = page.get_by_role("region", name="On the disk")
        expect(disk).to_contain_text(re.compile(r"demo.*built-in"))
        disk.get_by_role("button", name="Load demo").click()
        expect(page.get_by_role("alert")).to_contain_text("There is no model 'demo'.")
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        expect(disk).to_contain_text(re.compile(r"org/half.*incomplete, 5(\.0)? GB so far"))
        disk.get_by_role("button", name="Continue the download of org/half").click()
        expect(add).to_contain_text("org/half is downloaded.")


def test_machine_is_invited_by_a_command_and_its_code(browser: Browser) -> None:
    with (
        serving(TwinService(), make_api_settings(join_refusal="")) as url,
        open_page(browser, url, view="cluster", width=390) as (page, events),
    ):
        card = page.get_by_role("region", name="Add a machine")
        assert not any(request.url.endswith("/cluster/invite") for request in events.requests)
        card.get_by_role("button", name="Make a join command").press("Enter")
        expect(card.get_by_role("button", name="Make another command")).to_be_focused()
        expect(card).to_contain_text(f"mlx-ring join 10.0.0.7:50051 --token {JOIN_TOKEN}")
        assert (card.locator("code").first.bounding_box() or {})["width"] > 150
        expect(card).to_contain_text("It works once, within")
        picture = card.get_by_role("img", name="QR code of the command")
        first = picture.locator("path").get_attribute("d")
        card.get_by_role("radio", name="Show the code of command 2").check()
        expect(picture.locator("path")).not_to_have_attribute("d", first or "")
        card.get_by_role("button", name="Copy command 1").click()
        expect(card.get_by_role("button", name="Copied")).to_be_visible()
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        assert JOIN_TOKEN not in str(page.evaluate("JSON.stringify([localStorage, sessionStorage])"))
        assert events.problems == []


def test_phone_is_invited_by_an_address_and_its_code(browser: Browser) -> None:
    urls = ("http://mini.local:8100", "http://192.168.1.7:8100")
    with (
        serving(TwinService(), make_api_settings(urls=lambda: urls)) as url,
        open_page(browser, url, view="cluster", width=390) as (page, events),
    ):
        card = page.get_by_role("region", name="Use it from a phone")
        expect(card).to_contain_text(urls[0])
        picture = card.get_by_role("img", name="QR code of the address")
        first = picture.locator("path").get_attribute("d")
        card.get_by_role("radio", name="Show the code of address 2").check()
        expect(picture.locator("path")).not_to_have_attribute("d", first or "")
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        assert events.problems == []


def test_server_of_one_machine_says_so_instead_of_inviting_others(browser: Browser, twin_url: str) -> None:
    with open_page(browser, twin_url, view="cluster") as (page, _):
        card = page.get_by_role("region", name="Add a machine")
        expect(card).to_contain_text("one machine alone")
        port = urlsplit(twin_url).port
        expect(card.locator("code")).to_have_text(f"mlx-ring serve org/twin --nodes 2 --port {port}")
        expect(card.get_by_role("button")).to_have_text("Copy")
