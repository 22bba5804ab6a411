"""Open the export of traces, which only the extra `otel` makes possible."""

from __future__ import annotations

from importlib import import_module

from mlx_ring.core.errors import ConfigError
from mlx_ring.core.traces import Tracing


def check_exporter(endpoint: str | None) -> None:
    """Check that traces can be exported, if an endpoint is set.

    Raises:
        ConfigError: OpenTelemetry is not installed.
    """
    if endpoint is None:
        return
    try:
        import_module("mlx_ring.core.otlp_traces")
    except ImportError as error:
        raise ConfigError(
            f"--otlp-traces-endpoint is {endpoint}, and OpenTelemetry is not installed ({error}): "
            "install it with pip install 'mlx-ring[otel]', or leave the flag out."
        ) from error


def open_tracing(endpoint: str | None, node: str, version: str) -> Tracing | None:
    """Start the export of traces to an endpoint; return None without one.

    Raises:
        ConfigError: OpenTelemetry is not installed.
    """
    if endpoint is None:
        return None
    check_exporter(endpoint)
    # OpenTelemetry may be missing.
    from mlx_ring.core.otlp_traces import OtlpTraces

    return OtlpTraces(endpoint, node, version)
