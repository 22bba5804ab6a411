"""A run as a picture: how latencies are spread, and throughput over time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mlx_ring.cli.bench.summary import Record, Summary

_SIZE_INCHES = (11.0, 3.6)
_SECONDS_PER_BAR = 40


def draw_plot(path: Path, title: str, records: Sequence[Record], summary: Summary) -> None:
    """Write an SVG or a PNG, by the suffix of `path`."""
    # It takes a second to come in, and only who asks for a picture waits for it.
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415
    from matplotlib.figure import Figure  # noqa: PLC0415

    figure: Any = Figure(figsize=_SIZE_INCHES, layout="constrained")
    FigureCanvasAgg(figure)
    first, between, over_time = figure.subplots(1, 3)
    done = [record for record in records if record.error is None]
    _spread(first, "Time to first token", [record.ttft_s for record in done if record.ttft_s is not None])
    _spread(between, "Between tokens", [gap for record in done for gap in record.inter_token_s()])
    _throughput(over_time, done, summary.duration_s)
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=150)


def _spread(axes: Any, title: str, seconds: Sequence[float]) -> None:
    """The share of values at or below each."""
    ordered = sorted(1000 * value for value in seconds)
    shares = [100 * (place + 1) / len(ordered) for place in range(len(ordered))]
    axes.step(ordered, shares, where="post", color="tab:blue")
    for share in (50, 95, 99):
        axes.axhline(share, color="lightgrey", linewidth=0.8, zorder=0)
        axes.annotate(f"p{share}", (1.0, share), xycoords=("axes fraction", "data"), fontsize=7, color="grey")
    axes.set(title=title, xlabel="milliseconds", ylabel="% of values", ylim=(0, 101))
    axes.set_xlim(left=0)


def _throughput(axes: Any, records: Sequence[Record], duration_s: float) -> None:
    """Output tokens a second, as they came."""
    width = max(duration_s / _SECONDS_PER_BAR, 1e-3)
    bars = [0.0] * (_SECONDS_PER_BAR + 1)
    for record in records:
        tokens = record.output_tokens / max(1, len(record.arrivals_s))
        for arrival in record.arrivals_s:
            bars[min(_SECONDS_PER_BAR, int(arrival / width))] += tokens / width
    axes.bar(
        [width * place for place in range(len(bars))], bars, width=width, align="edge", color="tab:green"
    )
    axes.set(title="Throughput", xlabel="seconds", ylabel="output tokens/s")
