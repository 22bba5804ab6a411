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
from tests.api.twins import ANSWER_TEXT, TwinService
from tests.default_settings import make_api_settings, make_policy
from tests.end_to_end.page_windows import ask, open_page

from mlx_ring.api.page.routes import load_page
from mlx_ring.core.errors import NotReady

KEY = "a key, and no other"


ALPHABET = "abcdefghijklmnopqrstuvwxyz"


CONTEXT = 10**7


LONG_ANSWER = ALPHABET * 100_000


LONGER_THAN_ITS_WINDOW = """() => {
    const thread = document.querySelector(".thread");
    return thread.scrollHeight > 2 * thread.clientHeight;
}"""


RENAMES_THE_MODEL = """() => {
    const chats = localStorage.getItem("mlx-ring.chats");
    localStorage.setItem("mlx-ring.chats", chats.replaceAll("org/twin", "org/absent"));
}"""


OVERLAPS = """(button) => {
    const own = button.getBoundingClientRect();
    const isOver = (box) => box.top < own.bottom && box.bottom > own.top && box.left < own.right && box.right > own.left;
    return [".thread", ".composer"].filter((name) => isOver(document.querySelector(name).getBoundingClientRect()));
}"""
"""The parts of the chat that a button covers."""


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
        expect(request).to_contain_text("answering")
        page.get_by_role("link", name="Models").click()
        unload = page.get_by_role("button", name="Unload org/twin")
        unload.click()
        expect(page.get_by_text("Unloading org/twin cuts off 1 request that runs or waits.")).to_be_visible()
        expect(page.get_by_role("button", name="Cancel", exact=True)).to_be_focused()
        page.keyboard.press("Escape")
        expect(unload).to_be_enabled()
        page.get_by_role("link", name="Chat").click()
        page.wait_for_function(LONGER_THAN_ITS_WINDOW)
        page.evaluate("document.querySelector('.thread').scrollTop = 0")
        to_end = page.get_by_role("button", name="Scroll to end")
        expect(to_end).to_be_visible()
        assert page.evaluate(OVERLAPS, to_end.element_handle()) == []
        to_end.click()
        expect(to_end).to_have_count(0)
        page.get_by_role("button", name="Stop").click()
        expect(answer).to_contain_text("Stopped.")
        page.get_by_role("button", name="Continue").click()
        expect(answer).not_to_contain_text("Stopped.")
        expect(answer).to_contain_text(ALPHABET)
        page.get_by_role("button", name="Stop").click()
        expect(answer).to_contain_text("Stopped.")
        continued = next(
            request for request in events.requests[::-1] if request.method == "POST"
        ).post_data_json
        assert continued is not None
        assert continued["continue_final_message"] is True
        assert ALPHABET in continued["messages"][-1]["content"]
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
        expect(page.get_by_role("alert")).to_contain_text("Below is the state of")
        assert page.get_by_label("Summary").evaluate("view => view.closest('[inert]') !== null")
        expect(page.get_by_role("status").filter(has_text="offline")).to_be_visible()
        cleanup.enter_context(serving(TwinService(), port=urlsplit(url).port or 0))
        expect(page.get_by_role("alert")).to_have_count(0)
        expect(page.get_by_role("status").filter(has_text="ready")).to_be_visible()


MARKDOWN = {
    "plain *emphasis*, **strong** and `code`": "<p>plain <em>emphasis</em>, <strong>strong</strong> and <code>code</code></p>",
    "snake_case_name and 2 * 3 * 4": "<p>snake_case_name and 2 * 3 * 4</p>",
    "1. one\n   - inner\n2. two": '<ol dir="ltr"><li>one<ul dir="ltr"><li>inner</li></ul></li><li>two</li></ol>',
    "- loose\n\n- list": '<ul dir="ltr"><li>loose</li><li>list</li></ul>',
    "## Title\ntext": "<h4>Title</h4><p>text</p>",
    "> quoted\nlazily": '<blockquote dir="ltr"><p>quoted<br>lazily</p></blockquote>',
    "| a | b |\n|---|--:|\n| 1 | 2 |": (
        '<div class="scroll" dir="ltr" tabindex="0"><table><thead><tr><th>a</th><th class="right">b</th></tr></thead>'
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


TWO_SCRIPTS = """مرحبا

- a list
- of two

> quoted

| a | b |
|---|---|
| 1 | 2 |

1. **Python**: אחת
2. two

- `ls` عنصر

> - عنصر

| GPU | الذاكرة |
|---|---|
| A100 | كبيرة |
"""

TEXTS_BESIDE_THEIR_MARKS = """() => [...document.querySelectorAll(".markdown :is(li, blockquote, table)")].map((element) => {
    const range = document.createRange();
    range.selectNodeContents(element);
    const [text, box] = [range.getBoundingClientRect(), element.getBoundingClientRect()];
    const { direction } = getComputedStyle(element);
    return [direction, direction === "ltr" ? text.left - box.left < 50 : box.right - text.right < 50];
})"""
"""The direction of each list item, quote and table, and whether its text begins at that side."""


def test_list_quote_and_table_run_as_their_own_text_does(browser: Browser) -> None:
    with serving(TwinService(says=TWO_SCRIPTS)) as url, open_page(browser, url) as (page, events):
        ask(page, "Write in two scripts.")
        expect(page.get_by_role("article", name="Answer").locator("table")).to_have_count(2)
        assert page.evaluate("getComputedStyle(document.querySelector('.markdown')).direction") == "rtl"
        english, right_to_left = ["ltr", True], ["rtl", True]
        assert page.evaluate(TEXTS_BESIDE_THEIR_MARKS) == [*[english] * 4, *[right_to_left] * 6]
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
        expect(page.get_by_role("button", name="Rename")).to_be_focused()
        page.get_by_role("button", name="Edit").click()
        page.keyboard.press("Escape")
        expect(page.get_by_role("button", name="Edit")).to_be_focused()
        with page.expect_download() as saved:
            page.get_by_role("button", name="Export as Markdown").click()
        assert saved.value.suggested_filename == "greetings.md"
        exported = saved.value.path().read_text()
        assert re.search(
            rf"Second question\.\n\n## Answer of org/twin\n\n\*.* UTC\*\n\n{re.escape(ANSWER_TEXT)}", exported
        )
        expect(page.get_by_text("Saved greetings.md")).to_be_visible()
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


def test_question_waits_until_the_model_is_loaded(browser: Browser) -> None:
    service = TwinService()
    service.error = NotReady(
        "The model will be loaded once 1 more machine has joined: run `mlx-ring join` there."
    )
    with serving(service) as url, open_page(browser, url) as (page, _):
        ask(page, "Hello.")
        answer = page.get_by_role("article", name="Answer")
        expect(answer).to_contain_text(
            "Waiting: the question is sent again by itself. The model will be loaded once"
        )
        expect(answer.locator("code")).to_have_text("mlx-ring join")
        service.error = None
        expect(answer).to_contain_text(ANSWER_TEXT)
        expect(answer).not_to_contain_text("Waiting")
        service.error = NotReady("The model is being loaded; ask again in a moment.")
        ask(page, "Hello again.")
        expect(answer.last).to_contain_text("by itself. The model is being loaded.")
        page.get_by_role("button", name="Stop").click()
        expect(answer.last).to_contain_text("Stopped.")


def test_stopped_server_causes_one_notice_until_it_is_back(browser: Browser) -> None:
    with contextlib.ExitStack() as cleanup:
        with serving(TwinService(context=CONTEXT, says=LONG_ANSWER)) as url:
            page, _ = cleanup.enter_context(open_page(browser, url))
            ask(page, "Tell me the alphabet.")
            expect(page.get_by_role("article", name="Answer")).to_contain_text(ALPHABET)
        answer = page.get_by_role("article", name="Answer")
        expect(answer.get_by_role("button", name="Retry")).to_be_disabled()
        expect(page.get_by_role("alert")).to_have_count(1)
        expect(page.get_by_role("button", name="Reconnect")).to_be_visible()
        expect(page.locator(".start-again code")).to_have_text(
            f"mlx-ring serve org/twin --port {urlsplit(url).port}"
        )
        ask(page, "Is somebody there?")
        expect(page.get_by_role("button", name="Send")).to_be_disabled()
        expect(page.get_by_label("Your question")).to_have_value("Is somebody there?")
        expect(answer).to_contain_text(ALPHABET)
        expect(page.get_by_label("Model").locator("option:checked")).to_have_text("org/twin")
        page.get_by_role("button", name="New chat").click()
        expect(page.get_by_role("button", name="Write a haiku about the sea.")).to_be_disabled()
        page.get_by_role("link", name="Tell me the alphabet.", exact=True).click()
        cleanup.enter_context(serving(TwinService(), port=urlsplit(url).port or 0))
        expect(page.locator(".notice")).to_have_count(0)
        answer.get_by_role("button", name="Retry").click()
        expect(answer).to_contain_text(ANSWER_TEXT)
        expect(page.get_by_role("button", name="Retry")).to_be_enabled()
        page.evaluate(RENAMES_THE_MODEL)
        page.reload()
        expect(page.get_by_label("Model")).to_have_value("org/absent")
        ask(page, "Hello.")
        expect(page.get_by_text("org/absent is not loaded.")).to_be_visible()
        expect(answer).to_have_count(1)
        page.get_by_role("button", name="Use org/twin").click()
        ask(page, "Hello.")
        expect(answer.last).to_contain_text("org/twin")


def test_tabs_neither_revert_what_others_change_nor_ask_in_the_same_chat(
    browser: Browser, long_answers_url: str
) -> None:
    with open_page(browser, long_answers_url) as (one, events):
        answers = one.get_by_role("article", name="Answer")
        ask(one, "First question.")
        expect(answers).to_contain_text(ALPHABET)
        other = one.context.new_page()
        other.goto(long_answers_url)
        field = other.get_by_label("Your question")
        expect(field).to_have_attribute(
            "placeholder", "Another tab of this browser receives an answer in this chat."
        )
        field.fill("Second question.")
        expect(other.get_by_role("button", name="Send")).to_be_disabled()
        other.get_by_role("button", name="Rename").click()
        other.get_by_label("Name of this chat").fill("Named elsewhere")
        other.keyboard.press("Enter")
        expect(one.get_by_role("heading", name="Named elsewhere")).to_be_visible()
        one.get_by_role("button", name="Stop").click()
        expect(other.get_by_role("article", name="Answer")).to_contain_text(ALPHABET)
        expect(other.get_by_role("heading", name="Named elsewhere")).to_be_visible()
        expect(other.get_by_role("button", name="Send")).to_be_enabled()
        one.get_by_role("button", name="Continue").click()
        expect(one.get_by_role("button", name="Stop")).to_be_visible()
        other.get_by_role("button", name="Delete all").click()
        expect(other.get_by_role("button", name="Cancel")).to_be_focused()
        other.get_by_role("button", name="Delete permanently").click()
        expect(answers).to_have_count(0)
        one.close(run_before_unload=True)
        other.reload()
        expect(other.get_by_role("button", name="New chat")).to_be_visible()
        assert (
            other.evaluate("Object.keys(localStorage).filter((name) => name.startsWith('mlx-ring.chat'))")
            == []
        )
        assert events.problems == []


def test_focus_moves_to_the_question_when_its_button_is_removed(
    browser: Browser, long_answers_url: str
) -> None:
    with open_page(browser, long_answers_url) as (page, _):
        question = page.get_by_label("Your question")
        answer = page.get_by_role("article", name="Answer")

        def press(name: str) -> None:
            page.get_by_role("button", name=name).focus()
            page.keyboard.press("Enter")

        press("What can you help me with?")
        for name in ("Stop", "Continue", "Stop", "Retry", "Stop"):
            expect(answer).to_contain_text(ALPHABET)
            expect(question).to_be_focused()
            press(name)
        expect(question).to_be_focused()
        press("Edit")
        page.get_by_label("Edit the question").fill("Another?")
        press("Ask again")
        expect(page.get_by_role("article", name="You")).to_contain_text("Another?")
        expect(answer).to_contain_text(ALPHABET)
        expect(question).to_be_focused()
        press("Stop")
        page.evaluate("Object.defineProperty(navigator, 'clipboard', { value: undefined })")
        press("Copy answer")
        expect(page.get_by_role("button", name="Copied")).to_be_focused()


def test_change_of_a_question_is_kept_while_other_views_are_open(browser: Browser, twin_url: str) -> None:
    with open_page(browser, twin_url) as (page, _):
        ask(page, "First question.")
        expect(page.get_by_role("article", name="Answer")).to_contain_text("tokens")
        page.get_by_role("button", name="Edit").click()
        page.get_by_label("Edit the question").fill("Rewritten with care")
        page.get_by_role("link", name="Models").click()
        page.get_by_role("link", name="Chat").click()
        expect(page.get_by_label("Edit the question")).to_have_value("Rewritten with care")
        page.get_by_role("button", name="Cancel").click()
        page.get_by_role("link", name="Models").click()
        page.get_by_role("link", name="Chat").click()
        expect(page.get_by_role("button", name="Edit")).to_be_visible()


def test_draft_of_each_chat_is_kept_until_the_tab_is_closed(browser: Browser, twin_url: str) -> None:
    with open_page(browser, twin_url) as (page, events):
        question = page.get_by_label("Your question")
        ask(page, "First question.")
        expect(page.get_by_role("article", name="Answer")).to_contain_text("tokens")
        question.fill("About the first.")
        page.get_by_role("button", name="New chat").click()
        expect(question).to_have_value("")
        question.fill("About another matter.")
        page.reload()
        expect(question).to_have_value("About the first.")
        page.get_by_role("button", name="New chat").click()
        expect(question).to_have_value("About another matter.")
        page.keyboard.press("Enter")
        expect(page.get_by_role("article", name="Answer")).to_contain_text("tokens")
        expect(question).to_have_value("")
        page.get_by_role("button", name="New chat").click()
        expect(question).to_have_value("")
        page.get_by_role("button", name="Delete all").click()
        page.get_by_role("button", name="Delete permanently").click()
        assert page.evaluate("sessionStorage.length") == 0
        assert events.problems == []


DROPS_FILES = """([target, files]) => {
    const dataTransfer = new DataTransfer();
    for (const [name, type, content] of files) {
        dataTransfer.items.add(new File([new Uint8Array(content)], name, { type }));
    }
    const options = { dataTransfer, bubbles: true, cancelable: true };
    const events = ["dragover", "drop"].map((name) => new DragEvent(name, options));
    for (const event of events) document.querySelector(target).dispatchEvent(event);
    return events.every((event) => event.defaultPrevented);
}"""
"""Report whether the browser stays on the page."""


PASTES_A_PICTURE = """() => {
    const clipboardData = new DataTransfer();
    clipboardData.items.add(new File([new Uint8Array(9)], "photo.png", { type: "image/png" }));
    const event = new ClipboardEvent("paste", { clipboardData, bubbles: true, cancelable: true });
    document.querySelector("#question").dispatchEvent(event);
}"""


def test_text_files_are_attached_and_others_are_refused(browser: Browser, twin_url: str) -> None:
    with open_page(browser, twin_url) as (page, events):
        question, problem = page.get_by_label("Your question"), page.locator(".composer [role=alert]")
        question.fill("Explain this:")
        code = list(b"def f(x):\n    return x\n")
        assert page.evaluate(DROPS_FILES, [".thread", [["f.py", "text/x-python", code]]])
        expect(question).to_have_value(
            re.compile(r"^Explain this:\n\nf.py:\n```py\ndef f\(x\):\n    return x\n```\n")
        )
        expect(question).to_be_focused()
        assert page.evaluate(
            DROPS_FILES, ["#question", [["a.bin", "", [0, 1]], ["old.txt", "text/plain", [228]]]]
        )
        expect(problem).to_have_text(
            "a.bin is not text in UTF-8. Only text can be sent. old.txt is not text in UTF-8. Only text can be sent."
        )
        page.evaluate(PASTES_A_PICTURE)
        expect(problem).to_have_text("photo.png is not text in UTF-8. Only text can be sent.")
        question.press("End")
        question.press("Space")
        expect(problem).to_have_count(0)
        large = {"name": "large.log", "mimeType": "text/plain", "buffer": b"line\n" * 300_000}
        page.locator("#files").set_input_files([large, {**large, "name": "b.md", "buffer": b"# Title"}])  # pyright: ignore[reportArgumentType]
        expect(problem).to_have_text("large.log has 1.5 MB. Files of up to 1 MB can be sent.")
        expect(question).to_have_value(re.compile("b.md:\n```md\n# Title\n```"))
        page.get_by_role("link", name="Models").click()
        assert page.evaluate(DROPS_FILES, ["main", [["f.py", "text/x-python", code]]])
        assert events.problems == []


def test_chat_is_continued_in_a_copy_and_keeps_what_an_edit_would_replace(
    browser: Browser, twin_url: str
) -> None:
    with open_page(browser, twin_url) as (page, events):
        answers, questions = (
            page.get_by_role("article", name="Answer"),
            page.get_by_role("article", name="You"),
        )
        chats = page.get_by_label("Conversations").get_by_role("listitem")
        for count, text in enumerate(("One.", "Two."), 1):
            ask(page, text)
            expect(answers).to_have_count(count)
            expect(page.get_by_role("button", name="Branch")).to_have_count(count)
        page.get_by_role("button", name="Branch").first.click()
        expect(page.get_by_role("heading", name="One. (branch)")).to_be_visible()
        expect(answers).to_have_count(1)
        expect(chats).to_have_count(2)
        chats.nth(1).get_by_role("link", name="One.", exact=True).click()
        questions.last.get_by_role("button", name="Edit").click()
        expect(page.get_by_role("button", name="Ask in a new chat")).to_have_count(0)
        page.keyboard.press("Escape")
        questions.first.get_by_role("button", name="Edit").click()
        page.get_by_label("Edit the question").fill("Uno.")
        page.get_by_role("button", name="Ask in a new chat").click()
        expect(page.get_by_role("heading", name="Uno.")).to_be_visible()
        expect(questions).to_have_text([re.compile("^Uno")])
        expect(chats).to_have_count(3)
        chats.get_by_role("link", name="One.", exact=True).click()
        expect(questions).to_have_text([re.compile("^One"), re.compile("^Two")])
        expect(page.get_by_label("Edit the question")).to_have_count(0)
        assert events.problems == []


def test_long_question_is_shown_in_part_until_it_is_opened(browser: Browser, twin_url: str) -> None:
    with open_page(browser, twin_url) as (page, _):
        ask(page, "line\n" * 100)
        question = page.get_by_role("article", name="You")
        expect(page.get_by_role("article", name="Answer")).to_be_in_viewport()
        assert (question.bounding_box() or {})["height"] < 400
        question.get_by_role("button", name="Show all").click()
        assert (question.bounding_box() or {})["height"] > 1500
        question.get_by_role("button", name="Show less").click()
        assert (question.bounding_box() or {})["height"] < 400


@pytest.mark.parametrize(("width", "height"), [(320, 256), (390, 330), (390, 664), (1280, 300)])
def test_conversation_can_be_read_in_a_short_window(
    width: int, height: int, browser: Browser, twin_url: str
) -> None:
    with open_page(browser, twin_url, width=width) as (page, _):
        page.set_viewport_size({"width": width, "height": height})
        ask(page, "Hello.")
        expect(page.get_by_role("article", name="Answer")).to_contain_text("Retry")
        page.get_by_role("button", name="Parameters").click()
        expect(page.get_by_label("Temperature")).to_be_visible()
        assert page.evaluate("document.querySelector('.thread').clientHeight") > 100
        assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_task_list_has_its_boxes_beside_the_text(browser: Browser) -> None:
    with serving(TwinService(says="- [ ] one\n- [x] two")) as url, open_page(browser, url) as (page, events):
        ask(page, "Show me.")
        items = page.get_by_role("article", name="Answer").get_by_role("listitem")
        expect(items).to_have_text(["one", "two"])
        expect(items.nth(0).get_by_role("checkbox", name="open")).not_to_be_checked()
        expect(items.nth(1).get_by_role("checkbox", name="done")).to_be_checked()
        heights = items.evaluate_all("(items) => items.map((item) => item.clientHeight)")
        assert max(heights) < 30, "one line each"
        assert events.problems == []


TABLE = r"""| Model | Memory | Speed | Words |
|---|--:|--:|---|
| Qwen3-30B-A3B-Instruct-2507 | 17.25 GB | 55.5 tok/s | a rather long description of extraordinary things |

Sets: $\mathbb{R}$ and $\cancel{y}$.
"""


BROKEN_WORDS = """(cells) => cells.flatMap((cell) => {
    const range = document.createRange();
    const text = cell.firstChild;
    return [...text.data.matchAll(/\\S+/g)].filter(({ 0: word, index }) => {
        range.setStart(text, index);
        range.setEnd(text, index + word.length);
        return !word.includes("-") && range.getClientRects().length > 1;
    }).map(([word]) => word);
})"""
"""The words that are broken into several lines."""


def test_table_on_a_phone_breaks_no_word_and_formulas_have_their_letters_and_lines(browser: Browser) -> None:
    with serving(TwinService(says=TABLE)) as url, open_page(browser, url, width=390) as (page, events):
        ask(page, "Show me.")
        answer = page.get_by_role("article", name="Answer")
        expect(answer.locator("math")).to_have_count(2)
        assert answer.locator("td").evaluate_all(BROKEN_WORDS) == []
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        expect(answer.locator("math").first.locator("mi")).to_have_text("\N{DOUBLE-STRUCK CAPITAL R}")
        lines = answer.locator("math .updiagonalstrike").evaluate(
            "(row) => getComputedStyle(row).backgroundImage"
        )
        assert "linear-gradient" in lines
        assert events.problems == []
