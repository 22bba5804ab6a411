"""The last lines of a log, kept for whoever looks."""

from __future__ import annotations

import logging

from mlx_ring.core.logs import BUFFERED_LINES, LONGEST_BUFFERED_LINE, LogBuffer, LogFormat, make_formatter


def kept() -> LogBuffer:
    lines = LogBuffer()
    lines.setFormatter(make_formatter("text", "mini", "head", None))
    return lines


def record(text: str, level: int = logging.INFO) -> logging.LogRecord:
    return logging.LogRecord("mlx_ring.node", level, "file", 1, text, (), None)


def test_lines_are_numbered_and_returned_from_a_number_on() -> None:
    lines = kept()
    for text in ("one", "two", "three"):
        lines.handle(record(text))
    assert [(line.number, line.text) for line in lines.after(1)] == [(2, "two"), (3, "three")]
    assert lines.after(3) == []
    (first, *_) = lines.after(0)
    assert (first.level, first.process, first.logger) == ("INFO", "head", "mlx_ring.node")


def test_only_the_last_lines_are_kept_and_no_line_is_endless() -> None:
    lines = kept()
    for number in range(BUFFERED_LINES + 5):
        lines.handle(record(f"{number} " + "x" * 10_000))
    told = lines.after(0)
    assert (len(told), told[0].number, told[-1].number) == (BUFFERED_LINES, 6, BUFFERED_LINES + 5)
    assert {len(line.text) for line in told} == {LONGEST_BUFFERED_LINE}


def test_a_child_s_line_is_kept_as_the_child_said_it_in_either_format() -> None:
    said = record("loaded layers [0, 5): in 0.1 s", logging.WARNING)
    formats: tuple[LogFormat, ...] = ("text", "json")
    for format_ in formats:
        lines = kept()
        lines.keep_tagged(make_formatter(format_, "mini", "worker-1-0", 0).format(said))
        (line,) = lines.after(0)
        assert (line.level, line.process, line.logger) == ("WARNING", "worker-1-0", "mlx_ring.node")
        assert line.text == "loaded layers [0, 5): in 0.1 s"
        assert abs(line.unix_time_s - said.created) < 0.01


def test_a_line_that_is_none_of_ours_is_left_out() -> None:
    lines = kept()
    for text in ("", "Traceback", "{", '{"time": 1'):
        lines.keep_tagged(text)
    assert lines.after(0) == []
