"""The last lines of a process's log, and of what its children pass on, kept in memory for whoever looks."""

from __future__ import annotations

import json
import logging
import re
import threading
import time
from collections import deque
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

from mlx_ring.core.log_formats import TagFormatter

LINES_KEPT = 300
LONGEST_KEPT = 2000
"""Characters of a line."""
_TAGGED = re.compile(r"(\S+) ([A-Z]+) node=\S+ process=(\S+) rank=\S+ epoch=\S+ (\S+?): (.*)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class LogLine:
    """A kept line."""

    number: int
    """Counted from 1; those before the first that is there were forgotten."""
    unix_time_s: float
    level: str
    process: str
    logger: str
    text: str

    def as_json(self) -> dict[str, object]:
        return asdict(self)


class KeptLines(logging.Handler):
    """Keeps the last lines that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self._lines: deque[LogLine] = deque(maxlen=LINES_KEPT)
        self._last = 0
        self._one_at_a_time = threading.Lock()

    def emit(self, record: logging.LogRecord) -> None:
        formatter = self.formatter
        process = formatter.origin(record)[0] if isinstance(formatter, TagFormatter) else "-"
        text = logging.Formatter().format(record)
        self._keep(record.created, record.levelname, process, record.name, text)

    def keep_tagged(self, line: str) -> None:
        """A child's, which says itself where it comes from; as text, or as JSON."""
        told = _read_json(line) if line.startswith("{") else _read_text(line)
        if told is not None:
            moment, level, process, logger, text = told
            self._keep(_unix_time_s(moment), level, process, logger, text)

    def _keep(self, unix_time_s: float, level: str, process: str, logger: str, text: str) -> None:
        with self._one_at_a_time:
            self._last += 1
            self._lines.append(LogLine(self._last, unix_time_s, level, process, logger, text[:LONGEST_KEPT]))

    def after(self, number: int) -> list[LogLine]:
        """Those with a higher number."""
        if number >= self._last:
            return []
        with self._one_at_a_time:
            return [line for line in self._lines if line.number > number]


KEPT = KeptLines()
"""This process's. It keeps what `configure_logging` has it given."""


def recent_lines(after: int = 0) -> list[LogLine]:
    """The last lines that came after the one of that number."""
    return KEPT.after(after)


def _read_text(line: str) -> tuple[str, ...] | None:
    found = _TAGGED.match(line)
    return None if found is None else found.groups()


def _read_json(line: str) -> tuple[str, ...] | None:
    try:
        told: dict[str, Any] = json.loads(line)
    except ValueError:
        return None
    text = "\n".join(str(told[name]) for name in ("message", "exception") if name in told)
    return (*(str(told.get(name, "")) for name in ("time", "level", "process", "logger")), text)


def _unix_time_s(moment: str) -> float:
    """Of a line's moment; now where it is none."""
    try:
        return datetime.fromisoformat(moment).timestamp()
    except ValueError:
        return time.time()
