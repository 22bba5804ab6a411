"""Plot of a run: distribution of latencies, and throughput over time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mlx_ring.cli.bench.summary import Percentiles, Record, Summary, percentile

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
