"""A run as a table for people and as JSON for programs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any

from rich.console import Console
from rich.table import Table

from mlx_ring.cli.bench.summary import Distribution, Record, Summary


def print_summary(console: Console, summary: Summary) -> None:
    """Throughput in a line, latencies in a table, errors by kind."""
    console.print(
        f"{summary.completed} of {summary.requests} requests in {summary.duration_s:.1f} s: "
        f"{summary.output_tokens_per_s:.1f} output tok/s, {summary.total_tokens_per_s:.1f} tok/s in all, "
        f"{summary.requests_per_s:.2f} requests/s",
        highlight=False,
    )
    console.print(
        f"{summary.prompt_tokens} prompt tokens, {summary.cached_tokens} of them from the cache; "
        f"{summary.output_tokens} output tokens",
        highlight=False,
    )
    table = Table("milliseconds", box=None, pad_edge=False)
    for title in ("mean", "p50", "p95", "p99"):
        table.add_column(title, justify="right")
    rows = (
        ("time to first token", summary.ttft),
        ("between tokens", summary.inter_token),
        ("whole request", summary.end_to_end),
    )
    for name, values in rows:
        table.add_row(name, *_milliseconds(values))
    console.print(table)
    for error, count in sorted(summary.errors.items()):
        console.print(f"{count} x {error}", style="red", highlight=False)


def _milliseconds(values: Distribution | None) -> Sequence[str]:
    if values is None:
        return ("-",) * 4
    return [f"{1000 * value:,.1f}" for value in (values.mean, values.p50, values.p95, values.p99)]


def as_json(
    settings: Mapping[str, Any], server: Mapping[str, Any], records: Sequence[Record], summary: Summary
) -> dict[str, Any]:
    """Everything that was asked, told and seen. Seconds and tokens."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "mlx_ring": version("mlx-ring"),
        "settings": dict(settings),
        "server": dict(server),
        "summary": summary.as_json(),
        "requests": [
            asdict(record) | {"ttft_s": record.ttft_s, "inter_token_s": record.inter_token_s()}
            for record in records
        ],
    }
