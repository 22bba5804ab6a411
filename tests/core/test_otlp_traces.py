"""Traces that are sent to a collector."""

from __future__ import annotations

import sys

import pytest
from tests.otlp_collector import running_collector

from mlx_ring.core.errors import ConfigError
from mlx_ring.core.otlp_traces import OtlpTraces
from mlx_ring.core.traces import TracePlace, check_exporter
from mlx_ring.settings.settings_sources import load_settings

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


def test_a_clients_trace_continues_and_each_span_names_its_node() -> None:
    with running_collector() as collector:
        traces = OtlpTraces(collector.url, "mini", "1.0")
        span = traces.start("request", {"a": 1}, parent=f"00-{TRACE}-{PARENT}-01", kind="server")
        assert span is not None
        place = TracePlace("studio", 1, 0)
        part = traces.start("part", {}, parent=span.traceparent, at_ns=5_000, place=place)
        assert part is not None
        part.end(7_000, error="WorkerLost")
        span.end()
        traces.close()
        spans = {exported.name: exported for exported in collector.spans}
    assert (spans["request"].trace, spans["request"].parent) == (TRACE, PARENT)
    assert (spans["part"].trace, spans["part"].parent) == (TRACE, spans["request"].id)
    assert (spans["part"].started_ns, spans["part"].ended_ns, spans["part"].is_error) == (5_000, 7_000, True)
    assert spans["request"].resource["host.name"] == "mini"
    assert spans["part"].resource["host.name"] == "studio"
    assert {exported.resource["service.name"] for exported in spans.values()} == {"mlx-ring"}


@pytest.mark.parametrize("parent", ["", "nonsense", f"00-{'0' * 32}-{PARENT}-01", "00-" + "f" * 9000])
def test_a_missing_or_invalid_parent_starts_a_new_trace(parent: str) -> None:
    with running_collector() as collector:
        traces = OtlpTraces(f"{collector.url}/v1/traces", "mini", "1.0")
        span = traces.start("request", {}, parent=parent)
        assert span is not None
        span.end()
        traces.close()
        (exported,) = collector.spans
    assert exported.parent == ""


def test_an_unsampled_parent_records_no_span() -> None:
    traces = OtlpTraces("http://127.0.0.1:9", "mini", "1.0")
    assert traces.start("request", {}, parent=f"00-{TRACE}-{PARENT}-00") is None
    traces.close()


def test_without_opentelemetry_the_flag_is_refused_with_the_extra_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(sys.modules, "mlx_ring.core.otlp_traces")
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.resources", None)
    check_exporter(None)
    with pytest.raises(
        ConfigError, match=r"^--otlp-traces-endpoint is http://c:4318, and .*'mlx-ring\[otel\]'"
    ):
        check_exporter("http://c:4318")


@pytest.mark.parametrize("endpoint", ["localhost:4318", "grpc://localhost:4317", "http://"])
def test_an_endpoint_that_is_no_http_address_is_refused(endpoint: str) -> None:
    with pytest.raises(ConfigError, match=r"it must be an address that begins with http:// or https://"):
        load_settings({"otlp_traces_endpoint": endpoint})
