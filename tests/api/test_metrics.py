"""`/metrics`, as Prometheus reads it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from prometheus_client.openmetrics.parser import (
    text_string_to_metric_families as read_open_metrics,  # pyright: ignore[reportUnknownVariableType] - untyped
)
from prometheus_client.parser import text_string_to_metric_families as read_text
from tests.api.clients import Api, refusal
from tests.api.twins import TwinService
from tests.default_settings import make_api_settings

from mlx_ring.api.metrics.machines import LinkCounts, energy_families
from mlx_ring.api.metrics.requests import MeteredReplica, step_families
from mlx_ring.api.ops.status import ClusterParts
from mlx_ring.api.service import LinkInfo
from mlx_ring.core.engine_stats import COUNTS, Meter, StepTotals
from mlx_ring.core.errors import WorkerLost
from mlx_ring.core.generation import OpenRequest
from mlx_ring.core.worker_status import LinkUse
from mlx_ring.engine.kv_budget import RankKv
from mlx_ring.head.status import ClusterView, node_statuses
from mlx_ring.host.energy import PartEnergy

OPEN_METRICS = "application/openmetrics-text; version=1.0.0"
MODEL = {"model_name": "org/twin", "instance": "0"}


class MetricsPage:
    """Samples of one scrape."""

    def __init__(self, api: Api, **headers: str) -> None:
        response = api.get("/metrics", **headers)
        assert response.status_code == 200
        self.samples = [sample for family in read_text(response.text) for sample in family.samples]

    def __call__(self, name: str, **labels: str) -> float:
        (value,) = self.all(name, **labels).values()
        return value

    def all(self, name: str, **labels: str) -> Mapping[str, float]:
        return {
            str(sorted(sample.labels.items())): sample.value
            for sample in self.samples
            if sample.name == f"mlx_ring_{name}" and labels.items() <= sample.labels.items()
        }


def test_request_is_counted_in_every_metric_it_belongs_to(api: Api) -> None:
    usage = api.chat().json()["usage"]
    page = MetricsPage(api)
    assert page("prompt_tokens_total", **MODEL) == usage["prompt_tokens"]
    assert page("generation_tokens_total", **MODEL) == usage["completion_tokens"]
    assert page("request_success_total", finished_reason="stop", **MODEL) == 1
    assert page("request_success_total", finished_reason="abort", **MODEL) == 0
    for name in (
        "time_to_first_token",
        "e2e_request_latency",
        "request_queue_time",
        "request_inference_time",
    ):
        assert page(f"{name}_seconds_count", **MODEL) == 1
        assert page(f"{name}_seconds_bucket", le="+Inf", **MODEL) == 1
    assert page("inter_token_latency_seconds_count", **MODEL) == usage["completion_tokens"] - 1
    assert page("request_prompt_tokens_sum", **MODEL) == usage["prompt_tokens"]
    assert page("num_requests_running", **MODEL) == page("num_requests_waiting", **MODEL) == 0
    assert page("prefix_cache_queries_total", **MODEL) == usage["prompt_tokens"]
    assert len(page.all("worker_weight_bytes", **MODEL)) == 2
    assert all(steps > 1 for steps in page.all("stage_steps_total", node="here", **MODEL).values())
    assert page("instance_up", **MODEL) == page("model_state", model_name="org/twin", state="ready") == 1


def test_uptime_follows_the_monotonic_clock(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    def uptimes() -> list[float]:
        health = [api.get(path).json()["uptime_s"] for path in ("/health", "/health/live")]
        return [MetricsPage(api)("uptime_seconds"), *health]

    clock = SimpleNamespace(monotonic=partial(float, int(time.monotonic()) + 1000))
    monkeypatch.setattr("mlx_ring.api.context.time", clock)
    before = uptimes()
    clock.monotonic = partial(float, clock.monotonic() + 3600)
    assert uptimes() == pytest.approx([uptime_s + 3600 for uptime_s in before])


NOT_MEASURED = {"read_tokens": "a rate on the page; metrics have `prompt_tokens` and `prefix_cache_hits`"}
"""Totals without a metric, each with the reason."""


@dataclass(frozen=True, slots=True)
class Counted:
    """An engine with given totals."""

    totals_now: StepTotals

    def totals(self) -> StepTotals:
        return self.totals_now


def test_every_total_of_steps_is_in_a_metric_or_has_a_reason() -> None:
    totals = StepTotals({}, **{name: 1_000_003 + place for place, name in enumerate(COUNTS)})
    meter = Meter()
    with meter.attached(Counted(totals), {}):
        families = list(step_families([MeteredReplica(("org/twin", "0"), meter, None, None)]))
    values = {sample.value for family in families for sample in family.samples}
    assert {name for name in COUNTS if getattr(totals, name) not in values} == NOT_MEASURED.keys()


class ReadMeter(Meter):
    """Meter that records which of its attributes are read."""

    read: ClassVar[set[str]] = set()

    def __getattribute__(self, name: str) -> Any:
        ReadMeter.read.add(name)
        return super().__getattribute__(name)


def test_every_measurement_of_a_meter_is_read_on_a_scrape() -> None:
    service = TwinService()
    service.meters[:] = [ReadMeter()]
    ReadMeter.read.clear()
    MetricsPage(Api(service))
    predicts = {"measured"}
    assert {name for name in vars(Meter()) if not name.startswith("_")} - ReadMeter.read == predicts


def test_metrics_are_in_openmetrics_format_on_request(api: Api) -> None:
    api.chat()
    response = api.get("/metrics", accept=OPEN_METRICS)
    assert response.headers["content-type"].startswith("application/openmetrics-text")
    names = {family.name for family in read_open_metrics(response.text)}
    assert {"mlx_ring_request_success", "mlx_ring_time_to_first_token_seconds"} <= names


def test_http_requests_are_counted_by_route_and_status_not_by_path() -> None:
    api = Api(settings=make_api_settings(api_keys=("secret",)))
    for name in ("one", "two"):
        api.get(f"/v1/models/{name}", authorization="Bearer secret")
        api.get(f"/nowhere/{name}", authorization="Bearer secret")
        api.request("HEAD", f"/v1/models/{name}", headers={"authorization": "Bearer secret"})
    api.request("BREW", "/v1/models")
    refusal(api.get("/metrics"), 401)
    page = MetricsPage(api, authorization="Bearer secret")
    assert page("http_requests_total", route="/v1/models/{model:path}", method="GET", status="404") == 2
    assert page("http_requests_total", route="/v1/models/{model:path}", method="HEAD", status="404") == 2
    assert page("http_requests_total", route="none", method="GET", status="404") == 2
    assert page("http_requests_total", route="none", method="other", status="401") == 1
    assert page("http_request_duration_seconds_count", route="none", method="GET", status="401") == 1
    assert page("http_requests_in_progress") == 1, "the scrape itself"


def test_counters_survive_the_loss_and_unload_of_a_model(api: Api) -> None:
    api.chat()
    before = MetricsPage(api)
    api.service.error = WorkerLost("Worker 1 died.")
    lost = MetricsPage(api)
    api.post("/models/unload", {"model": "org/twin"})
    unloaded = MetricsPage(api)
    for page in (lost, unloaded):
        for name in ("generation_tokens_total", "request_success_total", "e2e_request_latency_seconds_count"):
            assert page.all(name) == before.all(name)
        assert page("instance_up", **MODEL) == 0
    assert unloaded("model_state", state="unloaded", model_name="org/twin") == 1


def test_replica_that_took_the_place_of_another_has_its_own_number_alone(api: Api) -> None:
    ended = Meter()
    ended.generated_tokens = 7
    api.service.meters.insert(0, ended)
    api.chat()
    page = MetricsPage(api)
    moved = {"instance": "1"}
    assert len(page.all("instance_up")) == page("instance_up", **moved) == 1
    assert len(page.all("instance_info")) == page("instance_info", **moved) == 1
    assert page("generation_tokens_total", instance="0") == 7
    assert page("generation_tokens_total", **moved) > 0
    workers = page.all("worker_weight_bytes", **moved)
    assert len(workers) == 2
    assert workers == page.all("worker_weight_bytes")
    assert len(page.all("stage_steps_total", **moved)) == 2
    api.post("/models/unload", {"model": "org/twin"})
    assert [*MetricsPage(api).all("instance_up").values()] == [0, 0]


def test_error_counters_start_at_zero(api: Api) -> None:
    page = MetricsPage(api)
    assert page("instance_losses_total", error="WorkerLost", **MODEL) == 0
    assert page("request_failures_total", error="WorkerLost", **MODEL) == 0
    assert page("requests_rejected_total", error="Overloaded", model_name="org/twin") == 0


def test_cached_kv_of_ended_requests_is_not_counted_as_used() -> None:
    kv = RankKv(limit_bytes=64 * 256 * 8, bytes_per_token=8)
    api = Api(TwinService(kv=kv))
    api.complete(prompt="x" * 600, max_tokens=1)
    page = MetricsPage(api)
    assert page("kv_cache_usage_perc", **MODEL) == 0
    assert page("worker_kv_kept_bytes", stage="0") <= page("worker_kv_bytes", stage="0")
    assert page("worker_kv_limit_bytes", stage="0") == kv.limit_bytes


def test_links_are_exported_and_a_broken_link_has_no_figures(api: Api) -> None:
    api.catalog.links = (
        LinkInfo("a", "b", 0.001, 1e9, 1.0),
        LinkInfo("b", "a", 0.0, 0.0, 1.0, problem="nothing gets through"),
    )
    page = MetricsPage(api)
    assert page("link_up", source="a", target="b") == 1
    assert page("link_up", source="b", target="a") == 0
    assert page("link_round_trip_seconds", source="a") == 0.001
    assert not page.all("link_bytes_per_second", source="b")


def test_energy_is_exported_as_far_as_it_is_counted() -> None:
    (alone,) = node_statuses(
        ClusterView("a", own_energy=(PartEnergy("cpu", 7.5, 2.5), PartEnergy("gpu", 1.0))), [], {}, {}
    )
    families = {family.name: family.samples for family in energy_families(ClusterParts(nodes=[alone]))}
    found = {
        name: {tuple(each.labels.values()): each.value for each in one} for name, one in families.items()
    }
    assert found == {
        "mlx_ring_node_energy_joules": {("a", "cpu"): 7.5, ("a", "gpu"): 1.0},
        "mlx_ring_node_power_watts": {("a", "cpu"): 2.5},
        "mlx_ring_energy_per_token_joules": {},
    }
    (*_, each) = energy_families(ClusterParts(joules_per_token=0.25))
    assert [sample.value for sample in each.samples] == [0.25]


@pytest.mark.parametrize("pid", [1, 2])
def test_link_totals_continue_when_the_worker_restarts(pid: int) -> None:
    counts, link = LinkCounts(), ("demo", "0", "0", "0", "mini")

    def use(frames: int) -> LinkUse:
        return LinkUse(compresses=True, why="", frames=frames, tensor_bytes=10 * frames, sent_bytes=frames)

    for reported, process in ((3, 1), (5, 1), (2, pid), (4, pid)):
        counts.update(link, process, use(reported))
    assert counts.total[link] == [9, 90, 9]


def test_requests_that_wait_for_an_instance_count_as_waiting() -> None:
    service = TwinService()
    service.held_requests = [
        OpenRequest("a", "paused", 3, 0, 0, 2, 1.0),
        OpenRequest("b", "waiting", 3, 0, 0, 0, 1.0),
    ]
    assert MetricsPage(Api(service))("num_requests_waiting", **MODEL) == 2
