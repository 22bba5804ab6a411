"""Traces on their way to a collector."""

from __future__ import annotations

import sys

import pytest
from tests.otlp_collector import running_collector

from mlx_ring.core.errors import ConfigError
from mlx_ring.core.otlp_traces import OtlpTraces
from mlx_ring.core.trace_export import check_exporter
from mlx_ring.core.traces import TracePlace
from mlx_ring.settings.settings_sources import load_settings

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


def test_a_client_s_trace_goes_on_and_each_span_is_of_its_node() -> None:
    with running_collector() as collector:
        traces = OtlpTraces(collector.url, "mini", "1.0")
        span = traces.start("asked", {"a": 1}, parent=f"00-{TRACE}-{PARENT}-01", kind="server")
        assert span is not None
        place = TracePlace("studio", 1, 0)
        part = traces.start("part", {}, parent=span.traceparent, at_ns=5_000, place=place)
        assert part is not None
        part.end(7_000, error="WorkerLost")
        span.end()
        traces.close()
        told = {found.name: found for found in collector.spans}
    assert (told["asked"].trace, told["asked"].parent) == (TRACE, PARENT)
    assert (told["part"].trace, told["part"].parent) == (TRACE, told["asked"].id)
    assert (told["part"].started_ns, told["part"].ended_ns, told["part"].is_error) == (5_000, 7_000, True)
    assert told["asked"].resource["host.name"] == "mini"
    assert told["part"].resource["host.name"] == "studio"
    assert {found.resource["service.name"] for found in told.values()} == {"mlx-ring"}


@pytest.mark.parametrize("parent", ["", "nonsense", f"00-{'0' * 32}-{PARENT}-01", "00-" + "f" * 9000])
def test_without_a_parent_that_means_something_a_trace_of_its_own_begins(parent: str) -> None:
    with running_collector() as collector:
        traces = OtlpTraces(f"{collector.url}/v1/traces", "mini", "1.0")
        span = traces.start("asked", {}, parent=parent)
        assert span is not None
        span.end()
        traces.close()
        (told,) = collector.spans
    assert told.parent == ""


def test_a_client_that_does_not_record_its_trace_has_nothing_recorded_here() -> None:
    traces = OtlpTraces("http://127.0.0.1:9", "mini", "1.0")
    assert traces.start("asked", {}, parent=f"00-{TRACE}-{PARENT}-00") is None
    traces.close()


def test_without_opentelemetry_the_flag_is_one_sentence_that_says_how_to_get_it(
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
