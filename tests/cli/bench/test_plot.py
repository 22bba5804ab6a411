"""Plot of a run."""

from __future__ import annotations

import sys
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_ring.cli.bench.command import check_matplotlib
from mlx_ring.cli.bench.summary import Record, cumulative, draw_plot, summarize, throughput
from mlx_ring.core.errors import ConfigError

ANSWERS = [
    Record(n, 0.1 * n, [0.1 * n + 0.01 * k for k in range(1, 30)], 1.0, output_tokens=29) for n in range(6)
]


@given(st.lists(st.floats(0, 1e4), min_size=1, max_size=2000))
def test_a_cumulative_curve_rises_from_the_least_to_the_most(values: list[float]) -> None:
    points = cumulative(values)
    assert (points[0][0], points[-1][0]) == (min(values), max(values))
    assert (points[0][1], points[-1][1]) == (0, pytest.approx(100))
    assert points == sorted(points)
    assert len(points) <= 500


@given(st.lists(st.floats(0, 7), min_size=1, max_size=50), st.integers(1, 99))
def test_throughput_over_time_adds_up_to_the_tokens(arrivals: list[float], tokens: int) -> None:
    record = Record(0, 0.0, sorted(arrivals), 7.0, output_tokens=tokens)
    rates = throughput([record], 7.0, bars=10)
    assert sum(rates) * 0.7 == pytest.approx(tokens)


@pytest.mark.slow
@pytest.mark.parametrize("records", [ANSWERS, ANSWERS[:1], [Record(0, 0.0, error="timeout")], []])
def test_a_plot_has_the_format_of_its_file_name(records: list[Record], tmp_path: Path) -> None:
    summary = summarize(records, 2.0 if records else 0.0)
    draw_plot(tmp_path / "run.svg", "m <$1$>: 6 requests", records, summary)
    draw_plot(tmp_path / "run.PNG", "m", records, summary)
    assert (tmp_path / "run.PNG").read_bytes().startswith(b"\x89PNG")
    assert ET.parse(tmp_path / "run.svg").getroot().tag.endswith("svg")  # noqa: S314 - our own file


def test_a_plot_names_its_axes_and_units(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import matplotlib as mpl  # needed here alone

    monkeypatch.setitem(mpl.rcParams, "svg.fonttype", "none")
    draw_plot(tmp_path / "run.svg", "m: 6 requests", ANSWERS, summarize(ANSWERS, 2.0))
    text = (tmp_path / "run.svg").read_text()
    for words in ("m: 6 requests", "Time to first token", "Between tokens", "Throughput"):
        assert words in text
    for words in (
        "milliseconds",
        "% at or below",
        "output tokens/s",
        "seconds since the start",
        "p95 10.0 ms",
    ):
        assert words in text


def test_a_plot_without_matplotlib_is_refused_with_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    check_matplotlib(Path("run.svg"))
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r"^--plot is run\.svg, .* pip install 'mlx-ring\[plot\]'"):
        check_matplotlib(Path("run.svg"))
