"""Metrics, traces and logs of a running server, through the loss of a worker and an unload."""

from __future__ import annotations

import json
import re
import signal
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import promql_parser
import pytest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from tests.otlp_collector import ReceivedSpan, running_collector
from tests.processes import Server, serving

DASHBOARD = Path(__file__).parents[2] / "docs" / "grafana" / "mlx-ring.json"
DOCS = DASHBOARD.parents[1] / "observability.md"
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
ADDED_BY_PROMETHEUS = {"job"}

Page = Mapping[str, Metric]
"""Families by name."""


@dataclass(frozen=True)
class Run:
    """Observations of a run that served two stages, lost a worker, was unloaded and loaded again."""

    folder: Path
    pages: list[Page]
    """Pages of `/metrics`, in order."""
    spans: list[ReceivedSpan]
    answer: dict[str, Any]
    """Answer to the traced request."""


def ask(client: httpx.Client, **headers: str) -> dict[str, Any]:
    question = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 8, "ignore_eos": True}
    return client.post("/v1/chat/completions", json=question, headers=headers).raise_for_status().json()


def read(client: httpx.Client) -> Page:
    text = client.get("/metrics").raise_for_status().text
    return {family.name: family for family in text_string_to_metric_families(text)}


def pages_over_time(server: Server) -> Iterator[Page]:
    client = server.http
    yield read(client)
    server.child("mlx_ring.worker", "--stage", "1").send_signal(signal.SIGKILL)
    server.wait_for_health(503)
    yield read(client)
    server.wait_for_health(200)
    ask(client)
    yield read(client)
    model = client.get("/v1/models").json()["data"][0]["id"]
    client.post("/models/unload", json={"model": model}).raise_for_status()
    yield read(client)
    client.post("/models/load", json={"model": model}).raise_for_status()
    ask(client)
    yield read(client)


@pytest.fixture(scope="module")
def run(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("run")
    with running_collector() as collector:
        flags = ("--stages", "2", "--log-format", "json", "--otlp-traces-endpoint", collector.url)
        with serving(tiny_model, *flags, folder=folder) as server:
            answer = ask(server.http, traceparent=f"00-{TRACE}-{PARENT}-01")
            # A worker exports its spans with the step after them, and a worker is killed next.
            collector.wait_for("stage 0 decode", "stage 1 decode")
            pages = list(pages_over_time(server))
            server.http.get("/nowhere")
            assert server.stop() == 0
        return Run(folder, pages, list(collector.spans), answer)


def samples(page: Page, *, counting: bool) -> dict[tuple[str, str], float]:
    return {
        (sample.name, str(sorted(sample.labels.items()))): sample.value
        for family in page.values()
        if (family.type in ("counter", "histogram")) == counting
        for sample in family.samples
    }


def test_no_counter_decreases_or_vanishes_when_a_worker_is_lost_or_the_model_unloaded(run: Run) -> None:
    before = samples(run.pages[0], counting=True)
    assert before
    for page in run.pages[1:]:
        now = samples(page, counting=True)
        shrunk = {key: (value, now.get(key)) for key, value in before.items() if now.get(key, -1.0) < value}
        assert shrunk == {}
        before = now
    losses = run.pages[-1]["mlx_ring_instance_losses"].samples
    assert [(sample.labels["error"], sample.value) for sample in losses if sample.value] == [
        ("WorkerLost", 1.0)
    ]
    (starts,) = run.pages[-1]["mlx_ring_instance_starts"].samples
    assert starts.value == 3


def test_dashboard_queries_are_promql_over_existing_metrics_and_labels(run: Run) -> None:
    known = {
        name: [set(sample.labels) | ADDED_BY_PROMETHEUS for sample in family.samples if sample.name == name]
        for page in run.pages
        for family in page.values()
        for name in series_names(family)
    }
    unused = {family.name for family in run.pages[-1].values() if family.name.startswith("mlx_ring_")}
    for query in queries():
        for selector in selectors(promql_parser.parse(query)):
            # Only Linux reports metrics of the process.
            name = selector.name or ""
            exists = name in known or (sys.platform != "linux" and "process_" in query)
            assert exists, query
            names = {matcher.name for matcher in selector.matchers.matchers}
            assert all(names <= labels for labels in known.get(name, ())), query
            unused -= {re.sub(r"_(total|bucket|sum|count)$", "", name), name}
    assert unused == set(), "every metric is on the dashboard"


def test_every_metric_is_documented(run: Run) -> None:
    documented = set(re.findall(r"`(\w+?)(?:_total)?`", DOCS.read_text()))
    reported = {name.removeprefix("mlx_ring_") for name in run.pages[-1] if name.startswith("mlx_ring_")}
    assert reported - documented == set()


def series_names(family: Metric) -> set[str]:
    """Return the names of its series, even if it has none now."""
    endings = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count")}
    return {family.name + ending for ending in endings.get(family.type, ("",))}


def queries() -> Iterator[str]:
    board = json.loads(DASHBOARD.read_text())
    for panel in board["panels"]:
        for target in panel.get("targets", ()):
            yield target["expr"].replace("$__rate_interval", "5m")
    for variable in board["templating"]["list"]:
        if variable["type"] == "query":
            yield variable["definition"].removeprefix("label_values(").rpartition(",")[0]


def selectors(expression: object) -> Iterator[promql_parser.VectorSelector]:
    """Yield the selectors of an expression, at any depth."""
    match expression:
        case promql_parser.VectorSelector():
            yield expression
        case promql_parser.MatrixSelector():
            yield expression.vector_selector
        case promql_parser.Call():
            for argument in expression.args:
                yield from selectors(argument)
        case promql_parser.BinaryExpr():
            yield from selectors(expression.lhs)
            yield from selectors(expression.rhs)
        case promql_parser.AggregateExpr() | promql_parser.ParenExpr():
            yield from selectors(expression.expr)
        case _:
            assert isinstance(expression, promql_parser.NumberLiteral), expression


def test_traced_request_is_one_trace_from_the_client_to_every_stage(run: Run) -> None:
    spans = {span.name: span for span in run.spans if span.trace == TRACE}
    route, request = spans["POST /v1/chat/completions"], spans["llm_request"]
    assert (route.parent, request.parent) == (PARENT, route.id)
    assert route.attributes["http.response.status_code"] == 200
    stages = [f"stage {stage} {phase}" for stage in (0, 1) for phase in ("prefill", "decode")]
    for name in ("queue", "prefill", "decode", *stages):
        assert spans[name].parent == request.id
    usage = run.answer["usage"]
    assert request.attributes["gen_ai.usage.input_tokens"] == usage["prompt_tokens"]
    assert request.attributes["gen_ai.usage.output_tokens"] == usage["completion_tokens"] == 8
    for stage in (0, 1):
        prefill, decode = (spans[f"stage {stage} {phase}"] for phase in ("prefill", "decode"))
        assert prefill.attributes["mlx_ring.tokens"] == usage["prompt_tokens"]
        assert int(str(decode.attributes["mlx_ring.steps"])) >= 1
        assert int(str(decode.attributes["mlx_ring.compute_us"])) > 0
        assert prefill.resource["host.name"] == prefill.attributes["mlx_ring.node"] != ""
        assert str(prefill.resource["service.instance.id"]).endswith(f"/{stage}/0")
        assert route.started_ns <= prefill.started_ns <= prefill.ended_ns <= decode.ended_ns


def test_every_log_line_is_a_json_object_that_names_its_process(run: Run) -> None:
    logs = {path.name: path.read_text() for path in (run.folder / "logs").iterdir()}
    assert set(logs) == {"agent.log", "head.log", "worker-0-0.log", "worker-1-0.log"}
    logs["stderr"] = (run.folder / "stderr.txt").read_text()
    for name, text in logs.items():
        records = [json.loads(line) for line in text.splitlines() if line]
        assert records
        for record in records:
            assert {"time", "level", "logger", "message", "node", "process", "stage", "rank", "epoch"} <= set(
                record
            )
            if name.startswith("worker"):
                assert f"worker-{record['stage']}-{record['rank']}.log" == name
    access = [json.loads(line) for line in logs["head.log"].splitlines() if "/nowhere" in line]
    assert any(record.get("request_id", "").startswith("req_") for record in access)
