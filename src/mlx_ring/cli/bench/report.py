"""A run as a table for people and as JSON for programs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any, cast

from rich.console import Console
from rich.table import Table

from mlx_ring.cli.bench.summary import Distribution, Record, Summary

_SEVERAL = 1.05
"""Tokens per event from which it is worth telling."""
_MICROSECOND_DIGITS = 6


def print_summary(
    console: Console, summary: Summary, records: Sequence[Record], notes: Sequence[str] = ()
) -> None:
    """Throughput in a line, latencies in a table, errors by kind."""

    def line(text: str, style: str | None = None) -> None:
        console.print(text, style=style, highlight=False, markup=False)

    line(
        f"{summary.completed} of {summary.requests} requests in {summary.duration_s:.1f} s: "
        f"{summary.output_tokens_per_s:,.1f} output tok/s, {summary.total_tokens_per_s:,.1f} total tok/s, "
        f"{summary.requests_per_s:.2f} requests/s"
    )
    line(
        f"{summary.prompt_tokens:,} prompt tokens, {summary.cached_tokens:,} of them from the cache; "
        f"{summary.output_tokens:,} output tokens"
    )
    console.print(_latencies(summary))
    console.print(_speeds(summary))
    for note in (*notes, *_remarks(summary)):
        line(note, "yellow")
    for kind, count in sorted(summary.errors.items()):
        line(f"{count} x {_example(kind, records)}", "red")


def _table(unit: str) -> Table:
    table = Table(f"{unit:26}", box=None, pad_edge=False)
    for title in ("mean", "p50", "p95", "p99"):
        table.add_column(title, justify="right", min_width=8)
    return table


def _speeds(summary: Summary) -> Table:
    table, values = _table("tokens a second"), summary.request_tokens_per_s
    told = ["-"] * 4 if values is None else [f"{value:,.1f}" for value in _numbers(values)]
    table.add_row("each request", *told)
    return table


def _numbers(values: Distribution) -> Sequence[float]:
    return (values.mean, values.p50, values.p95, values.p99)


def _latencies(summary: Summary) -> Table:
    table = _table("milliseconds")
    table.add_row("time to first token (TTFT)", *_milliseconds(summary.ttft))
    table.add_row("between tokens (ITL)", *_milliseconds(summary.inter_token))
    if _several_at_once(summary):
        table.add_row("between chunks", *_milliseconds(summary.between_chunks))
    table.add_row("whole request (E2E)", *_milliseconds(summary.end_to_end))
    return table


def _milliseconds(values: Distribution | None) -> Sequence[str]:
    if values is None:
        return ("-",) * 4
    return [f"{1000 * value:,.1f}" for value in _numbers(values)]


def _several_at_once(summary: Summary) -> bool:
    return summary.tokens_per_event is not None and summary.tokens_per_event >= _SEVERAL


def _remarks(summary: Summary) -> list[str]:
    """What the numbers alone might hide."""
    remarks: list[str] = []
    if _several_at_once(summary):
        remarks.append(
            f"An event brought {summary.tokens_per_event:.2f} tokens on average; its wait is shared out among them."
        )
    if summary.shorter:
        remarks.append(f"{summary.shorter} answers were shorter than asked for: the model ended them.")
    if summary.stopped:
        remarks.append(
            f"{summary.stopped} requests were under way when the load was stopped; they do not count."
        )
    return remarks


def _example(kind: str, records: Sequence[Record]) -> str:
    """The kind with the first of its messages."""
    texts = {record.error: None for record in records if record.error_kind == kind}
    first = next(iter(texts), None) or kind
    return first if len(texts) < 2 else f"{first} (and {len(texts) - 1} other messages)"  # noqa: PLR2004 - several


def as_json(
    settings: Mapping[str, Any],
    server: Mapping[str, Any],
    records: Sequence[Record],
    summary: Summary,
    *,
    notes: Sequence[str] = (),
    interrupted: bool = False,
) -> dict[str, Any]:
    """Everything that was asked, told and seen, in seconds and tokens; no host and no address."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "mlx_ring": version("mlx-ring"),
        "settings": dict(settings),
        "server": dict(server),
        "interrupted": interrupted,
        "notes": list(notes),
        "summary": summary.as_json(),
        "requests": [_request(record) for record in records],
    }


def _request(record: Record) -> dict[str, Any]:
    told = asdict(record) | {"ttft_s": record.ttft_s, "inter_token_s": record.inter_token_s()}
    return {name: _rounded(value) for name, value in told.items()}


def _rounded(value: object) -> object:
    """To the microsecond; clocks tell no more."""
    if isinstance(value, float):
        return round(value, _MICROSECOND_DIGITS)
    return [_rounded(one) for one in cast("list[object]", value)] if isinstance(value, list) else value
