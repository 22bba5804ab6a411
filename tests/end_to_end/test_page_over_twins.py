"""The page at `/` in a real browser, over twins: interrupted answers, storage, API keys and hostile content."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Generator
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, expect
from tests.api.clients import serving
from tests.api.twins import ANSWER_TEXT, JOIN_TOKEN, TwinCatalog, TwinService
from tests.default_settings import make_api_settings, make_policy
from tests.end_to_end.page_windows import ask, open_page

from mlx_ring.api.page.routes import load_page

KEY = "a key, and no other"
ALPHABET = "abcdefghijklmnopqrstuvwxyz"
CONTEXT = 10**7
LONG_ANSWER = ALPHABET * 100_000


@pytest.fixture(scope="module")
def twin_url() -> Generator[str]:
    """Serve a twin that answers briefly, and yield its URL."""
    with serving(TwinService()) as url:
        yield url


@pytest.fixture(scope="module")
def long_answers_url() -> Generator[str]:
    """Serve a twin whose answers end only when they are stopped, and yield its URL."""
    with serving(TwinService(context=CONTEXT, says=LONG_ANSWER)) as url:
        yield url


@pytest.fixture(scope="module")
def key_url() -> Generator[str]:
    """Serve a twin that needs an API key, and yield its URL."""
    with serving(TwinService(), make_api_settings(api_keys=(KEY,))) as url:
        yield url


def test_answer_is_shown_as_it_streams_until_it_is_stopped(browser: Browser, long_answers_url: str) -> None:
    with open_page(browser, long_answers_url) as (page, events):
        ask(page, "Tell me the alphabet.")
        answer = page.get_by_role("article", name="Answer")
        expect(answer).to_contain_text(ALPHABET)
        page.get_by_role("link", name="Cluster").click()
        request = page.get_by_role("region", name="Requests").get_by_role("row").nth(1)
        expect(request).to_contain_text("decode")
        page.get_by_role("link", name="Chat").click()
        page.get_by_role("button", name="Stop").click()
        expect(answer).to_contain_text("Stopped.")
        page.get_by_role("link", name="Cluster").click()
        expect(page.get_by_role("region", name="Requests")).to_contain_text("0 running")
        assert events.problems == []


def test_interrupted_answer_keeps_its_text_and_shows_the_reason(browser: Browser) -> None:
    service = TwinService(context=CONTEXT, says=LONG_ANSWER, policy=make_policy(request_timeout_s=1.0))
    with serving(service) as url, open_page(browser, url) as (page, events):
        ask(page, "Tell me the alphabet.")
        answer = page.get_by_role("article", name="Answer")
        expect(answer.get_by_role("alert")).to_contain_text("The request was not finished within 1 s")
        expect(answer).to_contain_text(ALPHABET)
        expect(answer.get_by_role("button", name="Retry")).to_be_visible()
        assert events.problems == []


def test_double_clicks_invalid_values_and_view_changes_are_harmless(
    browser: Browser, long_answers_url: str
) -> None:
    with open_page(browser, long_answers_url) as (page, events):
        answers, stop = page.get_by_role("article", name="Answer"), page.get_by_role("button", name="Stop")
        ask(page, "One.")
        expect(answers).to_contain_text(ALPHABET)
        stop.click()
        page.get_by_role("button", name="Edit").click()
        page.get_by_label("Your question").fill("Two.")
        page.get_by_role("button", name="Send").dblclick()
        expect(answers.last).to_contain_text(ALPHABET)
        expect(stop).to_be_visible()
        page.get_by_label("Edit the question").fill("Three.")
        page.get_by_role("button", name="Ask again").click()
        expect(page.get_by_role("article", name="You")).to_have_text(re.compile("Three"))
        expect(answers).to_contain_text(ALPHABET)
        stop.click()
        page.get_by_role("button", name="Delete all").dblclick()
        expect(page.get_by_role("button", name="Delete permanently")).to_be_visible()
        page.get_by_role("button", name="Parameters").click()
        page.get_by_label("Temperature").fill("warm")
        before = len(events.requests)
        page.get_by_role("button", name="Retry").click()
        expect(page.get_by_role("alert")).to_contain_text("Temperature is warm")
        assert [request.url for request in events.requests[before:]] == []
        page.get_by_label("Your question").fill("Not sent yet.")
        page.get_by_role("link", name="Cluster").click()
        page.get_by_role("link", name="Chat").click()
        expect(page.get_by_label("Your question")).to_have_value("Not sent yet.")
        assert events.problems == []


def test_partial_answer_is_stored_when_the_page_is_closed(browser: Browser) -> None:
    service = TwinService(context=CONTEXT, says="שלום עולם. " * 100_000)
    with serving(service) as url, open_page(browser, url) as (page, events):
        ask(page, "Greet me for ever.")
        answer = page.get_by_role("article", name="Answer")
        expect(answer).to_contain_text("שלום עולם")
        assert page.evaluate("getComputedStyle(document.querySelector('.markdown')).direction") == "rtl"
        page.reload()
        expect(answer).to_contain_text("שלום עולם")
        expect(answer).to_contain_text("when the page was closed")
        expect(answer.get_by_role("alert")).to_have_count(0)
        assert events.problems == []


def test_api_key_is_requested_and_sent_only_in_a_header(browser: Browser, key_url: str) -> None:
    with open_page(browser, key_url) as (page, events):
        field = page.get_by_label("API key")
        expect(field).to_be_visible()
        assert events.problems == []
        field.fill("another")
        page.keyboard.press("Enter")
        expect(page.get_by_role("alert")).to_contain_text("not one of this server's")
        watching = [request.url for request in events.requests if request.url.endswith("/cluster/events")]
        assert len(watching) == 1
        field.fill(KEY)
        page.get_by_role("button", name="Use this key").click()
        ask(page, "Hello.")
        expect(page.get_by_role("article", name="Answer")).to_contain_text(ANSWER_TEXT)
        assert page.evaluate("Object.values(sessionStorage)") == [KEY]
        assert KEY not in str(page.evaluate("JSON.stringify(localStorage)"))
        assert all("key" not in request.url for request in events.requests)
        assert f"Bearer {KEY}" in [request.headers.get("authorization") for request in events.requests]
        page.get_by_role("button", name="Forget key").click()
        expect(field).to_be_visible()
        expect(page.get_by_text(ANSWER_TEXT)).to_have_count(0)


DENY_STORAGE = """for (const name of ["localStorage", "sessionStorage"]) {
    Object.defineProperty(window, name, { get() { throw new DOMException("denied", "SecurityError"); } });
}"""


def test_page_with_a_key_works_in_a_browser_that_denies_storage(browser: Browser, key_url: str) -> None:
    with open_page(browser, key_url) as (page, _):
        page.add_init_script(DENY_STORAGE)
        page.reload()
        page.get_by_label("API key").fill(KEY)
        page.keyboard.press("Enter")
        ask(page, "Hello.")
        expect(page.get_by_role("article", name="Answer")).to_contain_text(ANSWER_TEXT)


def test_lost_server_is_reported_until_it_returns(browser: Browser) -> None:
    with contextlib.ExitStack() as cleanup:
        with serving(TwinService()) as url:
            page, _ = cleanup.enter_context(open_page(browser, url, view="cluster"))
            expect(page.get_by_label("Summary")).to_be_visible()
        expect(page.get_by_role("alert")).to_contain_text("The values shown may be stale.")
        cleanup.enter_context(serving(TwinService(), port=urlsplit(url).port or 0))
        expect(page.get_by_role("alert")).to_have_count(0)
        expect(page.get_by_role("status").filter(has_text="ready")).to_be_visible()


MARKDOWN = {
    "plain *emphasis*, **strong** and `code`": "<p>plain <em>emphasis</em>, <strong>strong</strong> and <code>code</code></p>",
    "snake_case_name and 2 * 3 * 4": "<p>snake_case_name and 2 * 3 * 4</p>",
    "1. one\n   - inner\n2. two": "<ol><li>one<ul><li>inner</li></ul></li><li>two</li></ol>",
    "- loose\n\n- list": "<ul><li>loose</li><li>list</li></ul>",
    "## Title\ntext": "<h4>Title</h4><p>text</p>",
    "> quoted\nlazily": "<blockquote><p>quoted\nlazily</p></blockquote>",
    "| a | b |\n|---|--:|\n| 1 | 2 |": (
        '<div class="scroll" tabindex="0"><table><thead><tr><th>a</th><th class="right">b</th></tr></thead>'
        '<tbody><tr><td>1</td><td class="right">2</td></tr></tbody></table></div>'
    ),
    "<img src=x onerror=alert(1)>": "<p>&lt;img src=x onerror=alert(1)&gt;</p>",
    "[x](javascript:alert(1))": "<p>[x](javascript:alert(1))</p>",
    "[x](https://a.example/?q=1)": (
        '<p><a href="https://a.example/?q=1" target="_blank" rel="noopener noreferrer nofollow">x</a></p>'
    ),
    "an **open end": "<p>an **open end</p>",
    "one *open and **strong** end": "<p>one *open and <strong>strong</strong> end</p>",
    "## C#\n### Closed ##": "<h4>C#</h4><h5>Closed</h5>",
}
RENDER = """async ([base, texts]) => {
    const { h, render } = await import(new URL("vendor/preact.js", base));
    const { Markdown } = await import(new URL("markdown/markdown.js", base));
    return texts.map((text) => {
        const place = document.createElement("div");
        render(h(Markdown, { text }), place);
        return place.firstChild.innerHTML;
    });
}"""


def test_answers_are_rendered_as_markdown_and_never_as_html(browser: Browser, twin_url: str) -> None:
    hostile = [
        "*" * 3000,
        "[" * 3000,
        "`" * 3000 + "a",
        "> " * 500,
        "- " * 500,
        "_a" * 3000,
        "|" * 2000 + "\n|-|",
        "*a _b ~~c " * 9000,
        "[" * 50_000 + "](x)",
        "# a" + " " * 20_000 + "b",
        "```" + " " * 50_000 + "`",
        "a | b\n-" + " " * 50_000 + "x",
        "$a " * 20_000,
        "\\[\n" * 5_000,
        "$$\n" + "\\frac" * 50,
        "$\\def\\a{\\a\\a}\\a$",
    ]
    with open_page(browser, twin_url) as (page, events):
        base = f"{twin_url}/page/{load_page().digest}/"
        rendered = page.evaluate(RENDER, [base, list(MARKDOWN)])
        assert dict(zip(MARKDOWN, rendered, strict=True)) == MARKDOWN
        fenced = page.evaluate(RENDER, [base, ["```js\n<b>1</b>\n```\nend"]])[0]
        assert "<code>&lt;b&gt;1&lt;/b&gt;</code>" in fenced
        assert len(page.evaluate(RENDER, [base, hostile])) == len(hostile)
        assert events.problems == []


RICH = r"""Code and a formula:

```python
def f(x):
    return "<b>" + str(x)  # half
```

The energy is $E = mc^2$, and $\\notacommand{$ is none.

$$
\fcolorbox{red}{white}{$\int_0^1 x^2\,dx = \frac{1}{3}$}
$$
"""


def test_code_is_highlighted_and_latex_becomes_mathml(browser: Browser) -> None:
    with serving(TwinService(says=RICH)) as url, open_page(browser, url) as (page, events):
        assert not any("katex" in request.url or "highlight" in request.url for request in events.requests)
        ask(page, "Show me.")
        answer = page.get_by_role("article", name="Answer")
        expect(answer.locator("pre .keyword")).to_have_text(["def", "return"])
        expect(answer.locator("pre .string")).to_have_text('"<b>"')
        expect(answer.locator("math")).to_have_count(2)
        expect(answer.locator("math mfrac")).to_have_count(1)
        expect(answer.locator("pre b")).to_have_count(0)
        assert events.to_other_servers(url) == []
        assert events.problems == []


def test_change_in_one_tab_appears_in_others_and_is_stored(browser: Browser, twin_url: str) -> None:
    with open_page(browser, twin_url) as (one, events):
        other = one.context.new_page()
        other.goto(twin_url)
        for page, question in ((one, "First."), (other, "Second.")):
            ask(page, question)
            expect(page.get_by_role("article", name="Answer")).to_contain_text(ANSWER_TEXT)
            expect(page.get_by_role("button", name="Retry")).to_be_visible()
        listed = one.get_by_label("Conversations").get_by_role("listitem")
        expect(listed).to_have_text([re.compile("Second"), re.compile("First")])
        one.get_by_role("button", name="Delete all").click()
        one.get_by_role("button", name="Delete permanently").click()
        expect(other.get_by_role("article", name="Answer")).to_have_count(0)
        other.close(run_before_unload=False)
        one.reload()
        expect(listed).to_have_count(0)
        assert events.problems == []


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


def test_data_of_another_version_does_not_break_the_page(browser: Browser, twin_url: str) -> None:
    invalid = [None, {"id": "a", "messages": [{"role": "assistant"}]}, {"id": "b", "messages": "none"}]
    message = {"role": "assistant", "content": "An earlier answer."}
    stored = json.dumps([*invalid, {"id": "c", "title": "Before", "at": 1, "messages": [message]}])
    with open_page(browser, twin_url) as (page, _):
        page.evaluate("stored => localStorage.setItem('mlx-ring.chats', stored)", stored)
        page.reload()
        expect(page.get_by_role("article", name="Answer")).to_contain_text("An earlier answer.")
        state: dict[str, object] = {
            "time": 1,
            "version": "9",
            "began": 1,
            "draining": False,
            "cluster": {"nodes": [], "models": [], "instances": []},
        }
        body = f"event: state\ndata: {json.dumps(state)}\n\n"
        page.route(
            "**/cluster/events", lambda route: route.fulfill(content_type="text/event-stream", body=body)
        )
        page.goto(f"{twin_url}/#cluster")
        page.reload()
        expect(page.get_by_role("alert").filter(has_text="another version")).to_be_visible()
        page.get_by_role("link", name="Chat").click()
        expect(page.get_by_role("article", name="Answer")).to_be_visible()


def test_stopped_answer_shows_no_token_rate_that_was_not_measured(
    browser: Browser, long_answers_url: str
) -> None:
    with open_page(browser, long_answers_url) as (page, _):
        ask(page, "Tell me the alphabet.")
        answer = page.get_by_role("article", name="Answer")
        expect(answer).to_contain_text(ALPHABET)
        page.get_by_role("button", name="Stop").click()
        expect(answer).to_contain_text("first token after")
        expect(answer).not_to_contain_text("tokens/s")


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
        panel.get_by_role("button", name="Compare").click()
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
        expect(other).to_contain_text("not loaded")
        other.get_by_role("button", name="Predict").click()
        expect(other).to_contain_text(
            re.compile(r"Predicted: [\d.]+ GB of memory, [\d.]+ to [\d.]+ tokens/s")
        )
        other.get_by_role("button", name="Load other").click()
        expect(other).to_contain_text("ready")
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
        name.fill("org/new")
        add.get_by_role("button", name="Download").click()
        expect(add).to_contain_text("org/new is downloaded.")


def test_models_on_the_disk_are_listed_and_downloads_in_progress_are_followed(browser: Browser) -> None:
    catalog = TwinCatalog(TwinService())
    with (
        serving(catalog.models[0], catalog=catalog) as url,
        open_page(browser, url, view="models", width=390) as (page, events),
    ):
        add = page.get_by_role("region", name="Add a model")
        expect(add).to_contain_text(
            re.compile(r"org/other is downloaded for another client. 50\s?%, 1 B of 2 B")
        )
        (pull,) = [request for request in events.requests if request.url.endswith("/models/pull")]
        assert pull.post_data_json == {"model": "org/other", "stream": True}
        disk = page.get_by_role("region", name="On the disk")
        expect(disk).to_contain_text(re.compile(r"demo.*built-in"))
        disk.get_by_role("button", name="Load demo").click()
        expect(page.get_by_role("alert")).to_contain_text("There is no model 'demo'.")
        assert page.evaluate("document.documentElement.scrollWidth") <= 390


def test_chat_is_named_searched_exported_deleted_and_restored(browser: Browser, twin_url: str) -> None:
    with open_page(browser, twin_url) as (page, events):
        for question in ("First question.", "Second question."):
            page.get_by_role("button", name="New chat").click()
            ask(page, question)
            expect(page.get_by_role("button", name="Retry")).to_be_visible()
        expect(page.get_by_role("img", name=re.compile(r"Context: \d+ of 4,096 tokens"))).to_be_visible()
        page.get_by_role("button", name="Rename").click()
        page.get_by_label("Name of this chat").fill("Greetings")
        page.keyboard.press("Enter")
        expect(page.get_by_role("heading", name="Greetings")).to_be_visible()
        with page.expect_download() as saved:
            page.get_by_role("button", name="Export as Markdown").click()
        assert saved.value.suggested_filename == "greetings.md"
        assert f"Second question.\n\n## Answer of org/twin\n\n{ANSWER_TEXT}" in saved.value.path().read_text()
        with page.expect_download() as saved:
            page.get_by_role("button", name="Export as JSON").click()
        assert json.loads(saved.value.path().read_text())["title"] == "Greetings"
        listed = page.get_by_label("Conversations").get_by_role("listitem")
        page.get_by_label("Search chats").fill("FIRST")
        expect(listed).to_have_text([re.compile("First question")])
        page.get_by_label("Search chats").fill("")
        listed.first.hover()
        page.get_by_role("button", name="Delete Greetings").click()
        expect(listed).to_have_count(1)
        page.get_by_role("button", name="Undo").click()
        expect(listed).to_have_text([re.compile("Greetings"), re.compile("First")])
        page.reload()
        expect(page.get_by_role("heading", name="Greetings")).to_be_visible()
        assert events.problems == []


def test_waiting_and_streaming_answers_show_their_progress(browser: Browser) -> None:
    service = TwinService(context=CONTEXT, says=LONG_ANSWER)
    with serving(service) as url, open_page(browser, url) as (page, events):
        ask(page, "Tell me the alphabet.")
        answer = page.get_by_role("article", name="Answer")
        expect(answer).to_contain_text(re.compile(r"[\d.,]+ tokens/s, [\d,]+ tokens"))
        page.get_by_role("button", name="Stop").click()
        expect(answer).to_contain_text("Stopped.")
        assert events.problems == []


def test_stopped_server_causes_one_notice_until_it_is_back(browser: Browser) -> None:
    with contextlib.ExitStack() as cleanup:
        with serving(TwinService(context=CONTEXT, says=LONG_ANSWER)) as url:
            page, _ = cleanup.enter_context(open_page(browser, url))
            ask(page, "Tell me the alphabet.")
            expect(page.get_by_role("article", name="Answer")).to_contain_text(ALPHABET)
        expect(page.get_by_role("article", name="Answer").get_by_role("button", name="Retry")).to_be_visible()
        expect(page.get_by_role("alert")).to_have_count(1)
        cleanup.enter_context(serving(TwinService(), port=urlsplit(url).port or 0))
        expect(page.locator(".notice")).to_have_count(0)
        page.get_by_role("button", name="Retry", exact=True).click()
        expect(page.get_by_role("article", name="Answer")).to_contain_text(ANSWER_TEXT)


def test_machine_is_invited_by_a_command_and_its_code(browser: Browser) -> None:
    with (
        serving(TwinService(), make_api_settings(join_refusal="")) as url,
        open_page(browser, url, view="cluster", width=390) as (page, events),
    ):
        card = page.get_by_role("region", name="Add a machine")
        assert not any(request.url.endswith("/cluster/invite") for request in events.requests)
        card.get_by_role("button", name="Make a join command").click()
        expect(card).to_contain_text(f"mlx-ring join 10.0.0.7:50051 --token {JOIN_TOKEN}")
        assert (card.get_by_text("--token").first.bounding_box() or {})["width"] > 150
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
        serving(TwinService(), make_api_settings(urls=urls)) as url,
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
        expect(card.locator("code")).to_have_text("mlx-ring serve MODEL --nodes 2")
        expect(card.get_by_role("button")).to_have_count(0)
