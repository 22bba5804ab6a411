"""The page at `/` in a real browser, over a real server of two stages."""

from __future__ import annotations

import json
import re
from collections.abc import Generator
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect
from tests.end_to_end.page_windows import ask, open_page
from tests.processes import Server, serving

CAPITAL = "What is the capital of France?"
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, browser: Browser) -> Generator[Server]:
    """Serve the demo over two stages. The browser comes first: without one there is nothing to serve."""
    del browser
    folder = tmp_path_factory.mktemp("page")
    with serving("demo", "--stages", "2", "--state-dir", str(folder / "state"), folder=folder) as server:
        yield server


def test_conversation_is_answered_retried_edited_and_stored(browser: Browser, server: Server) -> None:
    with open_page(browser, server.url) as (page, events):
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
        bodies: list[Any] = [
            request.post_data_json for request in events.requests if request.method == "POST"
        ]
        assert bodies[-1]["reasoning_effort"] == "medium"
        assert bodies[-1]["max_completion_tokens"] == 40
        assert events.problems == []
        assert events.to_other_servers(server.url) == []


def test_answer_continues_with_the_result_of_a_tool_call(browser: Browser, server: Server) -> None:
    with open_page(browser, server.url) as (page, events):
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
        sent = next(request.post_data_json for request in events.requests[::-1] if request.method == "POST")
        assert sent is not None
        assert [message["role"] for message in sent["messages"]] == ["user", "assistant", "tool"]
        assert sent["messages"][1]["tool_calls"][0]["id"] == sent["messages"][2]["tool_call_id"]
        assert events.problems == []


WHOLE = "document.getElementById('page').offsetHeight"
LENGTH = {"Chat": "innerHeight", "Models": WHOLE, "Cluster": WHOLE}
"""Height of a view that fits its window, in JavaScript."""
UNLABELLED = """() => [...document.querySelectorAll("button, a, input, select, textarea")]
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
    pairs.push(...["keyword", "string", "number", "title", "attr"].map((kind) => [`--code-${kind}`, "--sunken"]));
    const stages = [0, 1, 2, 3, 4, 5, 6, 7].map((stage) => ["--surface", `--stage-${stage}`]);
    return [...pairs, ...stages].map(([ink, paper]) => [ratio(ink, paper), ink, paper]).sort((a, b) => a[0] - b[0])[0];
}"""


@pytest.mark.parametrize(("width", "scheme"), [(320, "dark"), (768, "light"), (1440, "dark")])
def test_every_view_fits_its_window_and_is_readable_and_labelled(
    browser: Browser, server: Server, width: int, scheme: str
) -> None:
    with open_page(browser, server.url, width=width, scheme=scheme) as (page, events):
        expect(page.get_by_role("heading", name="Ask demo")).to_be_visible()
        ask(page, "Hello.\n" * 40)
        expect(page.get_by_role("article", name="Answer")).to_contain_text("tokens/s")
        page.get_by_role("button", name="Parameters").click()
        for view, length in LENGTH.items():
            page.get_by_role("link", name=view, exact=True).click()
            if view == "Models":
                expect(page.get_by_role("article", name="demo")).to_contain_text("of weights")
            if view == "Cluster":
                expect(page.get_by_role("heading", name="Stage 1")).to_be_visible()
            assert page.evaluate("document.documentElement.scrollWidth") <= width
            assert page.evaluate(f"document.documentElement.scrollHeight - {length}") <= 0
            assert page.evaluate(UNLABELLED) == []
        ratio, ink, paper = page.evaluate(CONTRASTS)
        assert ratio >= 4.5, (ink, paper)
        assert events.problems == []


MANY_STAGES = """(bar) => {
    for (let count = 0; count < 40; count += 1) bar.append(bar.firstElementChild.cloneNode(true));
}"""


def test_layers_of_many_stages_fit_on_a_phone(browser: Browser, server: Server) -> None:
    with open_page(browser, server.url, width=390, view="cluster") as (page, _):
        page.locator(".layers").evaluate(MANY_STAGES)
        assert page.evaluate("document.documentElement.scrollWidth") <= 390


def test_theme_follows_the_system_until_the_switch_changes_it(browser: Browser, server: Server) -> None:
    def is_dark(page: Page) -> bool:
        return page.evaluate("getComputedStyle(document.documentElement).colorScheme") == "dark"

    with open_page(browser, server.url, scheme="dark") as (page, _):
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
        assert page.url.endswith("#chat")


def test_cluster_view_shows_stages_and_reports_a_lost_worker(browser: Browser, server: Server) -> None:
    with open_page(browser, server.url, view="cluster") as (page, events):
        for stage, layers in enumerate(["layers 0 to 4", "layers 5 to 7"]):
            card = page.get_by_role("article").filter(has=page.get_by_role("heading", name=f"Stage {stage}"))
            expect(card).to_contain_text(layers)
            expect(card).to_contain_text("weights")
            expect(card.get_by_role("img", name=re.compile("Memory of .* KV cache limit"))).to_be_visible()
            expect(card.get_by_role("img", name=re.compile("In the last second: computing"))).to_be_visible()
        machines = page.get_by_role("region", name="Machines")
        expect(machines).to_contain_text("2 workers active on 1 machine")
        expect(machines).to_contain_text("Head: serves the API and computes layers 0 to 7 of demo")
        expect(machines.locator("dl")).not_to_be_visible()
        expect(page.get_by_role("img", name=re.compile("free of"))).to_be_visible()
        expect(page.get_by_role("region", name="Requests")).to_contain_text("No requests")
        expect(page.get_by_role("region", name="Cache")).to_contain_text("KV cache")
        expect(page.get_by_role("log")).to_contain_text("Started worker-1-0")
        assert page.locator(".chart canvas").count() == 3
        assert events.problems == []
        pipeline = page.get_by_role("region", name="Pipeline of demo")
        expect(pipeline).to_contain_text("8 layers in 2 stages")
        # The names of logs and metrics wait behind the details.
        expect(pipeline.locator("dl")).not_to_be_visible()
        pipeline.locator("summary", has_text="Details").click()
        expect(pipeline.locator("dl")).to_contain_text(re.compile(r"demo-\w+.*epoch\s*1\."))
        # The agent starts a worker anew. While it is stopped, the state lasts long enough for a page that is busy.
        agent = server.child("mlx_ring.agent")
        agent.suspend()
        server.child("mlx_ring.worker", "--stage", "1").kill()
        expect(page.get_by_text(re.compile("demo is (loading|unavailable)"))).to_be_visible()
        agent.resume()
        # Either is first: the agent's word of the signal, or the head's of the broken connection.
        expect(page.get_by_role("log")).to_contain_text(
            re.compile(r"worker-1-0 \(pid \d+\) ended by signal 9")
        )
        expect(page.get_by_role("log")).to_contain_text("Patching demo: 1 of 2 workers stay")
        expect(pipeline.locator("dl")).to_contain_text(re.compile(r"epoch\s*2\."))
        expect(page.get_by_role("status").filter(has_text="ready")).to_be_visible()
