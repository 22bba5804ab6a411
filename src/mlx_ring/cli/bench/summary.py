"""Latencies and throughput, computed from the events of each request. Pure.

It shows a run as a table for people and as JSON for programs.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any, cast

from rich.console import Console
from rich.table import Table

STOPPED = "stopped"
"""Error of a request in progress when the user stopped the load; the server is not at fault."""
_PERCENTILES = (50, 95, 99)


@dataclass(slots=True)
class Record:
    """One request, as the client sees it. Times are seconds after the start of the run."""

    number: int
    sent_s: float
    arrivals_s: list[float] = field(default_factory=list[float])
    """Arrival times of all events with content; events from one read share one time."""
    ended_s: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    """Output tokens by the server's usage; without usage, each event counts as one."""
    has_usage: bool = False
    status: int | None = None
    """HTTP status."""
    finish_reason: str | None = None
    error: str | None = None
    """Kind of the error, then a colon and the details."""
    asked_tokens: int = 0

    @property
    def ttft_s(self) -> float | None:
        """Time to the first token."""
        return self.arrivals_s[0] - self.sent_s if self.arrivals_s else None

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens per second after the first chunk; None for a single chunk."""
        chunks = self.chunks()
        if len(chunks) < 2:  # noqa: PLR2004 - time passes between two
            return None
        return (self.output_tokens - chunks[0][1]) / (chunks[-1][0] - chunks[0][0])

    @property
    def error_kind(self) -> str | None:
        return None if self.error is None else self.error.partition(":")[0]

    def chunks(self) -> list[tuple[float, int]]:
        """Return the arrival time and the number of events of each chunk."""
        return [(arrival, len(list(events))) for arrival, events in groupby(self.arrivals_s)]

    def between_chunks_s(self) -> list[float]:
        """Return the times between chunks."""
        return [later - earlier for (earlier, _), (later, _) in pairwise(self.chunks())]

    def inter_token_s(self) -> list[float]:
        """Return the times between tokens: a value for each event after the first chunk.

        A chunk may hold several events, and an event several tokens.
        The method divides the wait for a chunk evenly among its tokens.
        It assumes the average number of tokens for each event, because the server reports only the sum.
        """
        chunks = self.chunks()
        if len(chunks) < 2:  # noqa: PLR2004 - a gap has two ends
            return []
        first = chunks[0][1]
        per_event = max(1.0, (self.output_tokens - first) / (len(self.arrivals_s) - first))
        return [
            (later - earlier) / (events * per_event)
            for (earlier, _), (later, events) in pairwise(chunks)
            for _ in range(events)
        ]


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Mean, percentiles and worst value.

    50, 95 or 99 % of the times do not exceed a percentile; as many speeds reach it.
    """

    mean: float
    p50: float
    p95: float
    p99: float
    worst: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Percentiles | None:
        """Return the distribution of times; None without values."""
        if not values:
            return None
        ordered = sorted(values)
        p50, p95, p99 = (percentile(ordered, share) for share in _PERCENTILES)
        return cls(math.fsum(ordered) / len(ordered), p50, p95, p99, ordered[-1])

    @classmethod
    def of_speeds(cls, values: Sequence[float]) -> Percentiles | None:
        """Return the distribution of speeds, of which the smallest is the worst; None without values."""
        times = cls.of([-value for value in values])
        return times and cls(-times.mean, -times.p50, -times.p95, -times.p99, -times.worst)


def percentile(ordered: Sequence[float], share: float) -> float:
    """Return a percentile, interpolated between the two nearest ranks as NumPy does by default.

    `ordered` is ascending and not empty.
    """
    place = (len(ordered) - 1) * share / 100
    low, high = math.floor(place), math.ceil(place)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


@dataclass(frozen=True, slots=True)
class Summary:
    """Numbers of a run. Latencies and tokens include only completed requests."""

    requests: int
    completed: int
    stopped: int
    """Requests in progress when the load was stopped."""
    shorter: int
    """Answers with fewer tokens than requested."""
    errors: dict[str, int]
    """Number of failed requests by kind of error."""
    duration_s: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    tokens_per_event: float | None
    requests_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    request_tokens_per_s: Percentiles | None
    """Tokens per second of each request, after its first chunk."""
    ttft: Percentiles | None
    inter_token: Percentiles | None
    between_chunks: Percentiles | None
    end_to_end: Percentiles | None

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def summarize(records: Iterable[Record], duration_s: float) -> Summary:
    """Return the summary of a run of that duration."""
    records = list(records)
    completed = [record for record in records if record.error is None]
    kinds = Counter(record.error_kind for record in records if record.error_kind is not None)
    prompt = sum(record.prompt_tokens for record in completed)
    output = sum(record.output_tokens for record in completed)
    events = sum(len(record.arrivals_s) for record in completed)
    seconds = max(duration_s, 1e-9)
    return Summary(
        requests=len(records),
        completed=len(completed),
        stopped=kinds.pop(STOPPED, 0),
        shorter=sum(record.output_tokens < record.asked_tokens for record in completed),
        errors=dict(kinds),
        duration_s=duration_s,
        prompt_tokens=prompt,
        cached_tokens=sum(record.cached_tokens for record in completed),
        output_tokens=output,
        tokens_per_event=output / events if events else None,
        requests_per_s=len(completed) / seconds,
        output_tokens_per_s=output / seconds,
        total_tokens_per_s=(prompt + output) / seconds,
        request_tokens_per_s=Percentiles.of_speeds(
            [record.tokens_per_s for record in completed if record.tokens_per_s is not None]
        ),
        ttft=Percentiles.of([record.ttft_s for record in completed if record.ttft_s is not None]),
        inter_token=Percentiles.of([gap for record in completed for gap in record.inter_token_s()]),
        between_chunks=Percentiles.of([gap for record in completed for gap in record.between_chunks_s()]),
        end_to_end=Percentiles.of([record.ended_s - record.sent_s for record in completed]),
    )


_SEVERAL = 1.05
"""Minimum tokens per event for a remark."""
_MICROSECOND_DIGITS = 6


def print_summary(
    console: Console, summary: Summary, records: Sequence[Record], notes: Sequence[str] = ()
) -> None:
    """Print throughput in a line, latencies in a table, and errors by kind."""

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
    cells = ["-"] * 4 if values is None else [f"{value:,.1f}" for value in _numbers(values)]
    table.add_row("each request", *cells)
    return table


def _numbers(values: Percentiles) -> Sequence[float]:
    return (values.mean, values.p50, values.p95, values.p99)


def _latencies(summary: Summary) -> Table:
    table = _table("milliseconds")
    table.add_row("time to first token (TTFT)", *_milliseconds(summary.ttft))
    table.add_row("between tokens (ITL)", *_milliseconds(summary.inter_token))
    if _several_at_once(summary):
        table.add_row("between chunks", *_milliseconds(summary.between_chunks))
    table.add_row("whole request (E2E)", *_milliseconds(summary.end_to_end))
    return table


def _milliseconds(values: Percentiles | None) -> Sequence[str]:
    if values is None:
        return ("-",) * 4
    return [f"{1000 * value:,.1f}" for value in _numbers(values)]


def _several_at_once(summary: Summary) -> bool:
    return summary.tokens_per_event is not None and summary.tokens_per_event >= _SEVERAL


def _remarks(summary: Summary) -> list[str]:
    """Return remarks on facts that the numbers alone might hide."""
    remarks: list[str] = []
    if _several_at_once(summary):
        remarks.append(
            f"An event carried {summary.tokens_per_event:.2f} tokens on average; its latency is divided among them."
        )
    if summary.shorter:
        remarks.append(
            f"{summary.shorter} answers were shorter than requested, because the model ended them."
        )
    if summary.stopped:
        remarks.append(
            f"{summary.stopped} requests were in progress when the load was stopped; they do not count."
        )
    return remarks


def _example(kind: str, records: Sequence[Record]) -> str:
    """Return the first message of a kind of error, and the number of other messages."""
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
    """Return the settings, the server and all results, in seconds and tokens, without hosts and addresses."""
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
    fields = asdict(record) | {"ttft_s": record.ttft_s, "inter_token_s": record.inter_token_s()}
    return {name: _rounded(value) for name, value in fields.items()}


def _rounded(value: object) -> object:
    """Round to microseconds, the resolution of the clocks."""
    if isinstance(value, float):
        return round(value, _MICROSECOND_DIGITS)
    return [_rounded(one) for one in cast("list[object]", value)] if isinstance(value, list) else value


_SIZE_INCHES = (12.0, 3.8)
_BARS = 40
_MOST_POINTS = 500
"""Maximum number of points of a curve, because an SVG holds each of them."""


def draw_plot(path: Path, title: str, records: Sequence[Record], summary: Summary) -> None:
    """Write an SVG or a PNG, by the suffix of `path`."""
    # The import takes a second, and only a plot needs it.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure: Any = Figure(figsize=_SIZE_INCHES, layout="constrained")
    FigureCanvasAgg(figure)
    first, between, over_time = figure.subplots(1, 3)
    done = [record for record in records if record.error is None]
    ttft = [record.ttft_s for record in done if record.ttft_s is not None]
    _spread(first, "Time to first token", ttft, summary.ttft)
    _spread(
        between, "Between tokens", [gap for one in done for gap in one.inter_token_s()], summary.inter_token
    )
    _throughput(over_time, done, summary)
    # A dollar sign would start a formula.
    figure.suptitle(title.replace("$", r"\$"), fontsize=10)
    figure.savefig(path, dpi=150, format=path.suffix.lower().removeprefix("."))


def cumulative(values: Sequence[float]) -> list[tuple[float, float]]:
    """Return points (value, % of values at or below) in ascending order, at most `_MOST_POINTS`."""
    ordered = sorted(values)
    count = min(len(ordered), _MOST_POINTS)
    if count < 2:  # noqa: PLR2004 - a curve has two ends
        return [(value, share) for value in ordered for share in (0.0, 100.0)]
    shares = [100 * place / (count - 1) for place in range(count)]
    return [(percentile(ordered, share), share) for share in shares]


def throughput(records: Sequence[Record], duration_s: float, bars: int = _BARS) -> list[float]:
    """Return the output tokens per second in equal parts of the run, by arrival."""
    width = max(duration_s, 1e-6) / bars
    tokens = [0.0] * bars
    for record in records:
        for arrival in record.arrivals_s:
            tokens[min(bars - 1, int(arrival / width))] += record.output_tokens / len(record.arrivals_s)
    return [count / width for count in tokens]


def _spread(axes: Any, title: str, seconds: Sequence[float], distribution: Percentiles | None) -> None:
    axes.set(title=title, xlabel="milliseconds", ylabel="% at or below", ylim=(0, 101))
    axes.grid(color="0.93")
    if distribution is None:
        axes.text(0.5, 0.5, "nothing was measured", ha="center", transform=axes.transAxes, color="grey")
        return
    points = cumulative([1000 * value for value in seconds])
    axes.plot([value for value, _ in points], [share for _, share in points], color="tab:blue")
    marks = (
        ("p50", distribution.p50, "tab:green"),
        ("p95", distribution.p95, "tab:orange"),
        ("p99", distribution.p99, "tab:red"),
    )
    for name, value, colour in marks:
        label = f"{name} {1000 * value:,.1f} ms"
        axes.axvline(1000 * value, color=colour, linewidth=1, linestyle="--", label=label)
    axes.legend(fontsize=8, loc="best")
    axes.set_xlim(left=0)


def _throughput(axes: Any, records: Sequence[Record], summary: Summary) -> None:
    duration_s = max(summary.duration_s, 1e-6)
    rates = throughput(records, duration_s)
    edges = [duration_s * place / len(rates) for place in range(len(rates) + 1)]
    axes.stairs(rates, edges, fill=True, color="tab:blue", alpha=0.35)
    mean = summary.output_tokens_per_s
    axes.axhline(mean, color="tab:blue", linewidth=1, linestyle="--", label=f"mean {mean:,.1f} tok/s")
    axes.set(
        title="Throughput", xlabel="seconds since the start", ylabel="output tokens/s", xlim=(0, duration_s)
    )
    axes.set_ylim(bottom=0)
    axes.grid(color="0.93")
    axes.legend(fontsize=8, loc="lower center")
