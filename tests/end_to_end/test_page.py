"""The page at `/`, in a real browser."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Generator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page, Request, expect
from tests.api.clients import serving as twin_serving
from tests.api.twins import ANSWER_TEXT, TwinService
from tests.browser import running_browser
from tests.processes import Server, serving

from mlx_ring.api.page.routes import load_page
from mlx_ring.api.settings import ApiSettings
from mlx_ring.core.engine_stats import Policy

KEY = "a key, and no other"
CAPITAL = "What is the capital of France?"
ALPHABET = "abcdefghijklmnopqrstuvwxyz"
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
WAIT_MS = 30_000.0
"""As long as the slowest of machines may take; what is waited for comes in a moment."""


@pytest.fixture(scope="module")
def browser() -> Generator[Browser]:
    with running_browser() as browser:
        expect.set_options(timeout=WAIT_MS)
        yield browser


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, browser: Browser) -> Generator[Server]:
    """Serve the demo over two stages. The browser comes first: without one there is nothing to serve."""
    del browser
    folder = tmp_path_factory.mktemp("page")
    with serving("demo", "--stages", "2", "--state-dir", str(folder / "state"), folder=folder) as server:
        yield server


@dataclass
class Observed:
    """Requests and complaints of a page."""

    requests: list[Request] = field(default_factory=list[Request])
    complaints: list[str] = field(default_factory=list[str])

    def strangers(self, url: str) -> list[str]:
        """Return the requests to other servers."""
        own = urlsplit(url).netloc
        return [request.url for request in self.requests if urlsplit(request.url).netloc != own]


@contextlib.contextmanager
def opened(
    browser: Browser, url: str, *, width: int = 1280, scheme: str = "light", view: str = "chat"
) -> Generator[tuple[Page, Observed]]:
    """Open the page in a new window with empty storage."""
    context = browser.new_context(
        viewport={"width": width, "height": 800},
        color_scheme="dark" if scheme == "dark" else "light",
        locale="en-GB",
    )
    page, observed = context.new_page(), Observed()

    def complain(message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            observed.complaints.append(message.text)

    def record(request: Request) -> None:
        observed.requests.append(request)

    page.set_default_timeout(WAIT_MS)
    page.on("console", complain)
    page.on("pageerror", lambda error: observed.complaints.append(str(error)))
    page.on("request", record)
    page.goto(f"{url}/#{view}")
    yield page, observed
    context.close()


def ask(page: Page, text: str) -> None:
    page.get_by_label("Your question").fill(text)
    page.keyboard.press("Enter")


def test_a_question_is_answered_retried_changed_and_kept(browser: Browser, server: Server) -> None:
    with opened(browser, server.url) as (page, observed):
        ask(page, CAPITAL)
        answers = page.get_by_role("article", name="Answer")
        expect(answers).to_have_text(re.compile("The capital of France is Paris."))
        expect(answers).to_have_text(re.compile(r"[\d.]+ tokens/s.*first token after [\d.]+ m?s.*\d+ tokens"))
        page.get_by_role("button", name="Retry").click()
        expect(answers).to_have_count(1)
        expect(answers).to_have_text(re.compile("Paris"))
        page.get_by_role("button", name="Edit").click()
        page.get_by_label("Edit the question").fill("What is the capital of Italy?")
        page.get_by_role("button", name="Ask again").click()
        expect(answers).to_have_text(re.compile("Rome"))
        page.get_by_label("Reasoning").select_option("on")
        page.get_by_role("button", name="Parameters").click()
        page.get_by_label("Max tokens").fill("many")
        ask(page, "What is 2 plus 3?")
        expect(page.get_by_text("Max tokens is many. Enter a whole number")).to_be_visible()
        page.get_by_label("Max tokens").fill("40")
        ask(page, "What is 2 plus 3?")
        expect(answers.last.get_by_text("Reasoning")).to_be_visible()
        expect(answers.last).to_have_text(re.compile("Retry"))
        page.reload()
        expect(answers).to_have_count(2)
        page.get_by_role("button", name="Delete all").click()
        page.get_by_role("button", name="Delete permanently").click()
        expect(answers).to_have_count(0)
        assert page.evaluate("localStorage.getItem('mlx-ring.chats')") is None
        asked: list[Any] = [
            request.post_data_json for request in observed.requests if request.method == "POST"
        ]
        assert asked[-1]["reasoning_effort"] == "medium"
        assert asked[-1]["max_completion_tokens"] == 40
        assert observed.complaints == []
        assert observed.strangers(server.url) == []


def test_an_answer_is_seen_as_it_comes_until_it_is_stopped(browser: Browser) -> None:
    service = TwinService(context=10**7, says=ALPHABET * 100_000)
    with twin_serving(service) as url, opened(browser, url) as (page, observed):
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
        assert observed.complaints == []


def test_an_answer_that_breaks_off_keeps_what_came_and_says_why(browser: Browser) -> None:
    service = TwinService(context=10**7, says=ALPHABET * 100_000, policy=Policy(request_timeout_s=1.0))
    with twin_serving(service) as url, opened(browser, url) as (page, observed):
        ask(page, "Tell me the alphabet.")
        answer = page.get_by_role("article", name="Answer")
        expect(answer.get_by_role("alert")).to_contain_text("The request was not finished within 1 s")
        expect(answer).to_contain_text(ALPHABET)
        expect(answer.get_by_role("button", name="Retry")).to_be_visible()
        assert observed.complaints == []


def test_what_is_written_or_clicked_at_a_bad_moment_does_no_harm(browser: Browser) -> None:
    service = TwinService(context=10**7, says=ALPHABET * 100_000)
    with twin_serving(service) as url, opened(browser, url) as (page, observed):
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
        asked = len(observed.requests)
        page.get_by_role("button", name="Retry").click()
        expect(page.get_by_role("alert")).to_contain_text("Temperature is warm")
        assert [request.url for request in observed.requests[asked:]] == []
        page.get_by_label("Your question").fill("Not sent yet.")
        page.get_by_role("link", name="Cluster").click()
        page.get_by_role("link", name="Chat").click()
        expect(page.get_by_label("Your question")).to_have_value("Not sent yet.")
        assert observed.complaints == []


def test_an_answer_is_kept_as_far_as_it_came_when_the_page_is_left(browser: Browser) -> None:
    service = TwinService(context=10**7, says="שלום עולם. " * 100_000)
    with twin_serving(service) as url, opened(browser, url) as (page, observed):
        ask(page, "Greet me for ever.")
        answer = page.get_by_role("article", name="Answer")
        expect(answer).to_contain_text("שלום עולם")
        assert page.evaluate("getComputedStyle(document.querySelector('.markdown')).direction") == "rtl"
        page.reload()
        expect(answer).to_contain_text("שלום עולם")
        expect(answer).to_contain_text("when the page was closed")
        expect(answer.get_by_role("alert")).to_have_count(0)
        assert observed.complaints == []


def test_a_tool_is_called_and_the_answer_goes_on_with_its_result(browser: Browser, server: Server) -> None:
    with opened(browser, server.url) as (page, observed):
        page.get_by_role("button", name="Parameters").click()
        page.get_by_label("Temperature").fill("0")
        page.get_by_label("Tools").fill(json.dumps([WEATHER]))
        ask(page, "What is the weather in Paris?")
        call = page.get_by_role("region", name="Call of get_weather")
        expect(call).to_contain_text('"city": "Paris"')
        call.get_by_label("Result of get_weather").fill("sunny")
        call.get_by_role("button", name="Send result").click()
        expect(page.get_by_role("article", name="Result of get_weather")).to_contain_text("sunny")
        expect(page.get_by_role("article", name="Answer").last).to_contain_text("tokens/s")
        sent = next(request.post_data_json for request in observed.requests[::-1] if request.method == "POST")
        assert sent is not None
        assert [message["role"] for message in sent["messages"]] == ["user", "assistant", "tool"]
        assert sent["messages"][1]["tool_calls"][0]["id"] == sent["messages"][2]["tool_call_id"]
        assert observed.complaints == []


def test_a_key_is_asked_for_and_goes_nowhere_but_into_a_header(browser: Browser) -> None:
    settings = ApiSettings(api_keys=(KEY,))
    with twin_serving(TwinService(), settings) as url, opened(browser, url) as (page, observed):
        field = page.get_by_label("API key")
        expect(field).to_be_visible()
        assert observed.complaints == []
        field.fill("another")
        page.keyboard.press("Enter")
        expect(page.get_by_role("alert")).to_contain_text("not one of this server's")
        watched = [request.url for request in observed.requests if request.url.endswith("/cluster/events")]
        assert len(watched) == 1
        field.fill(KEY)
        page.get_by_role("button", name="Use this key").click()
        ask(page, "Hello.")
        expect(page.get_by_role("article", name="Answer")).to_contain_text(ANSWER_TEXT)
        assert page.evaluate("Object.values(sessionStorage)") == [KEY]
        assert KEY not in str(page.evaluate("JSON.stringify(localStorage)"))
        assert all("key" not in request.url for request in observed.requests)
        assert f"Bearer {KEY}" in [request.headers.get("authorization") for request in observed.requests]
        page.get_by_role("button", name="Forget key").click()
        expect(field).to_be_visible()
        expect(page.get_by_text(ANSWER_TEXT)).to_have_count(0)


KEEPS_NOTHING = """for (const name of ["localStorage", "sessionStorage"]) {
    Object.defineProperty(window, name, { get() { throw new DOMException("denied", "SecurityError"); } });
}"""


def test_a_browser_that_keeps_nothing_can_be_used_with_a_key(browser: Browser) -> None:
    with twin_serving(TwinService(), ApiSettings(api_keys=(KEY,))) as url, opened(browser, url) as (page, _):
        page.add_init_script(KEEPS_NOTHING)
        page.reload()
        page.get_by_label("API key").fill(KEY)
        page.keyboard.press("Enter")
        ask(page, "Hello.")
        expect(page.get_by_role("article", name="Answer")).to_contain_text(ANSWER_TEXT)


def test_a_lost_server_is_reported_and_found_again(browser: Browser) -> None:
    with contextlib.ExitStack() as cleanup:
        with twin_serving(TwinService()) as url:
            page, _ = cleanup.enter_context(opened(browser, url, view="cluster"))
            expect(page.get_by_label("Summary")).to_be_visible()
        expect(page.get_by_role("alert")).to_contain_text("The values shown may be stale.")
        cleanup.enter_context(twin_serving(TwinService(), port=urlsplit(url).port or 0))
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
DRAW = """async ([base, texts]) => {
    const { h, render } = await import(new URL("vendor/preact.js", base));
    const { Markdown } = await import(new URL("markdown/markdown.js", base));
    return texts.map((text) => {
        const place = document.createElement("div");
        render(h(Markdown, { text }), place);
        return place.firstChild.innerHTML;
    });
}"""


def test_what_a_model_writes_is_drawn_as_markdown_and_never_as_html(browser: Browser) -> None:
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
    ]
    with twin_serving(TwinService()) as url, opened(browser, url) as (page, observed):
        base = f"{url}/page/{load_page().digest}/"
        drawn = page.evaluate(DRAW, [base, list(MARKDOWN)])
        assert dict(zip(MARKDOWN, drawn, strict=True)) == MARKDOWN
        fenced = page.evaluate(DRAW, [base, ["```js\n<b>1</b>\n```\nend"]])[0]
        assert "<code>&lt;b&gt;1&lt;/b&gt;</code>" in fenced
        assert len(page.evaluate(DRAW, [base, hostile])) == len(hostile)
        assert observed.complaints == []


def test_a_change_in_one_tab_is_seen_and_kept_by_the_others(browser: Browser) -> None:
    with twin_serving(TwinService()) as url, opened(browser, url) as (one, observed):
        other = one.context.new_page()
        other.goto(url)
        for page, question in ((one, "First."), (other, "Second.")):
            ask(page, question)
            expect(page.get_by_role("article", name="Answer")).to_contain_text(ANSWER_TEXT)
            expect(page.get_by_role("button", name="Retry")).to_be_visible()
        kept = one.get_by_label("Conversations").get_by_role("listitem")
        expect(kept).to_have_text([re.compile("Second"), re.compile("First")])
        one.get_by_role("button", name="Delete all").click()
        one.get_by_role("button", name="Delete permanently").click()
        expect(other.get_by_role("article", name="Answer")).to_have_count(0)
        other.close(run_before_unload=False)
        one.reload()
        expect(kept).to_have_count(0)
        assert observed.complaints == []


STATUS = """async ([base, state]) => {
    const { describeStatus } = await import(new URL("status.js", base));
    return describeStatus({ connection: "open", state }).notices.map((notice) => notice.text);
}"""


def test_of_two_machines_of_one_name_the_lost_one_is_named(browser: Browser) -> None:
    nodes = [
        {"id": "mini-1", "name": "mini", "state": "attending", "reason": None},
        {"id": "mini-2", "name": "mini", "state": "gone", "reason": "it was cut off"},
    ]
    state = {"draining": False, "time": 1, "cluster": {"nodes": nodes, "models": [], "instances": []}}
    with twin_serving(TwinService()) as url, opened(browser, url) as (page, _):
        texts = page.evaluate(STATUS, [f"{url}/page/{load_page().digest}/", state])
    assert texts == ["mini-2 is disconnected: it was cut off"]


def test_data_of_another_version_does_not_end_the_page(browser: Browser) -> None:
    strange = [None, {"id": "a", "messages": [{"role": "assistant"}]}, {"id": "b", "messages": "none"}]
    fewer = {"role": "assistant", "content": "An answer of before."}
    kept = json.dumps([*strange, {"id": "c", "title": "Before", "at": 1, "messages": [fewer]}])
    with twin_serving(TwinService()) as url, opened(browser, url) as (page, _):
        page.evaluate("kept => localStorage.setItem('mlx-ring.chats', kept)", kept)
        page.reload()
        expect(page.get_by_role("article", name="Answer")).to_contain_text("An answer of before.")
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
        page.goto(f"{url}/#cluster")
        page.reload()
        expect(page.get_by_role("alert").filter(has_text="another version")).to_be_visible()
        page.get_by_role("link", name="Chat").click()
        expect(page.get_by_role("article", name="Answer")).to_be_visible()


def test_an_answer_that_is_stopped_has_no_pace_that_nobody_has_measured(browser: Browser) -> None:
    service = TwinService(context=10**7, says=ALPHABET * 100_000)
    with twin_serving(service) as url, opened(browser, url) as (page, _):
        ask(page, "Tell me the alphabet.")
        answer = page.get_by_role("article", name="Answer")
        expect(answer).to_contain_text(ALPHABET)
        page.get_by_role("button", name="Stop").click()
        expect(answer).to_contain_text("first token after")
        expect(answer).not_to_contain_text("tokens/s")


LENGTH = {"Chat": "innerHeight", "Cluster": "document.getElementById('page').offsetHeight"}
"""Height of a window in which nothing is below the view."""
NAMELESS = """() => [...document.querySelectorAll("button, a, input, select, textarea")]
    .filter((each) => !(each.ariaLabel || each.textContent.trim() || each.labels?.[0]?.textContent.trim()))
    .map((each) => each.outerHTML)"""
CONTRASTS = """() => {
    const style = getComputedStyle(document.documentElement);
    const light = (name) => {
        const channels = style.getPropertyValue(name).trim().match(/^#(..)(..)(..)$/).slice(1);
        const [r, g, b] = channels.map((hex) => parseInt(hex, 16) / 255)
            .map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4));
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const ratio = (one, two) => {
        const [least, most] = [light(one), light(two)].sort((a, b) => a - b);
        return (most + 0.05) / (least + 0.05);
    };
    const inks = ["--ink", "--muted", "--accent", "--good", "--busy", "--bad"];
    const papers = ["--bg", "--surface", "--sunken", "--raised"];
    const pairs = inks.flatMap((ink) => papers.map((paper) => [ink, paper]));
    const stages = [0, 1, 2, 3, 4, 5, 6, 7].map((stage) => ["--surface", `--stage-${stage}`]);
    return [...pairs, ...stages].map(([ink, paper]) => [ratio(ink, paper), ink, paper]).sort((a, b) => a[0] - b[0])[0];
}"""


@pytest.mark.parametrize(("width", "scheme"), [(320, "dark"), (768, "light"), (1440, "dark")])
def test_every_view_fits_its_window_and_can_be_read_and_named(
    browser: Browser, server: Server, width: int, scheme: str
) -> None:
    with opened(browser, server.url, width=width, scheme=scheme) as (page, observed):
        expect(page.get_by_role("heading", name="Ask demo")).to_be_visible()
        ask(page, "Hello.\n" * 40)
        expect(page.get_by_role("article", name="Answer")).to_contain_text("tokens/s")
        page.get_by_role("button", name="Parameters").click()
        for view in ("Chat", "Cluster"):
            page.get_by_role("link", name=view, exact=True).click()
            if view == "Cluster":
                expect(page.get_by_role("heading", name="Stage 1")).to_be_visible()
            assert page.evaluate("document.documentElement.scrollWidth") <= width
            assert page.evaluate(f"document.documentElement.scrollHeight - {LENGTH[view]}") <= 0
            assert page.evaluate(NAMELESS) == []
        ratio, ink, paper = page.evaluate(CONTRASTS)
        assert ratio >= 4.5, (ink, paper)
        assert observed.complaints == []


def test_the_theme_follows_the_system_until_the_switch_changes_it(browser: Browser, server: Server) -> None:
    def is_dark(page: Page) -> bool:
        return page.evaluate("getComputedStyle(document.documentElement).colorScheme") == "dark"

    with opened(browser, server.url, scheme="dark") as (page, _):
        switch = page.get_by_role("button", name=re.compile("Theme"))
        expect(switch).to_have_accessible_name("Theme: system. Change theme.")
        assert is_dark(page)
        switch.click()
        assert not is_dark(page)
        page.reload()
        expect(switch).to_have_accessible_name("Theme: light. Change theme.")
        assert not is_dark(page)
        switch.click()
        assert is_dark(page)
        page.keyboard.press("Tab")
        assert Path(page.url).name.endswith("#chat")


def test_the_cluster_is_drawn_as_it_is_and_a_lost_worker_is_reported(
    browser: Browser, server: Server
) -> None:
    with opened(browser, server.url, view="cluster") as (page, observed):
        for stage, layers in enumerate(["layers 0 to 4", "layers 5 to 7"]):
            drawn = page.get_by_role("article").filter(has=page.get_by_role("heading", name=f"Stage {stage}"))
            expect(drawn).to_contain_text(layers)
            expect(drawn).to_contain_text("weights")
            expect(drawn.get_by_role("img", name=re.compile("Memory of .* KV cache limit"))).to_be_visible()
            expect(drawn.get_by_role("img", name=re.compile("In the last second: computing"))).to_be_visible()
        expect(page.get_by_role("region", name="Machines")).to_contain_text("2 devices active on 1 machine")
        expect(page.get_by_role("img", name=re.compile("free of"))).to_be_visible()
        expect(page.get_by_role("region", name="Requests")).to_contain_text("No requests")
        expect(page.get_by_role("region", name="Cache")).to_contain_text("KV cache")
        expect(page.get_by_role("log")).to_contain_text("started worker-1-0")
        assert page.locator(".chart canvas").count() == 2
        assert observed.complaints == []
        epoch = page.get_by_text(re.compile(", epoch 1,"))
        expect(epoch).to_be_visible()
        server.child("mlx_ring.worker", "--stage", "1").kill()
        expect(page.get_by_text(re.compile("demo is (loading|unavailable)"))).to_be_visible()
        expect(page.get_by_text(re.compile(", epoch 2,"))).to_be_visible()
        expect(page.get_by_role("status").filter(has_text="ready")).to_be_visible()
