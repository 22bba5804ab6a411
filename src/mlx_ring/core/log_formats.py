"""How a record of the log is written: as lines for people, or as one JSON object for programs."""

from __future__ import annotations

import json
import logging
import re
import time
from datetime import UTC, datetime
from typing import Literal

from mlx_ring.core.request_context import REQUEST_ID, TRACEPARENT

LogFormat = Literal["text", "json"]
_WORKER = re.compile(r"worker-(\d+)-\d+")
_TAGS = ("node", "process", "rank")
_OWN = frozenset(
    (
        *vars(logging.makeLogRecord({})),
        *("message", "asctime", "request_id", "child_process", "child_rank", "color_message"),
    )
)
"""Attributes of a record that are not what whoever logged it added by `extra`."""


class TagFormatter(logging.Formatter):
    """Puts time, level, node, process, rank and epoch before each line of a record."""

    def __init__(self, node: str, process: str, rank: int | None) -> None:
        super().__init__()
        self.node, self.process = node, process
        self.rank = "-" if rank is None else str(rank)
        self.epoch = "-"

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(record.created))
        process, rank = self.origin(record)
        tag = (
            f"{moment}.{int(record.msecs):03d} {record.levelname} node={self.node} process={process} "
            f"rank={rank} epoch={self.epoch} {record.name}: "
        )
        return "\n".join(tag + line for line in text.splitlines() or [""])

    def origin(self, record: logging.LogRecord) -> tuple[str, str]:
        """The process and rank that a record comes from: a child's, where it passes on what a child said."""
        return getattr(record, "child_process", self.process), getattr(record, "child_rank", self.rank)


class JsonFormatter(TagFormatter):
    """One object in one line for a record, its traceback included."""

    def format(self, record: logging.LogRecord) -> str:
        process, rank = self.origin(record)
        worker = _WORKER.fullmatch(process)
        told: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            "node": self.node,
            "process": process,
            "stage": None if worker is None else int(worker[1]),
            "rank": _number(rank),
            "epoch": _number(self.epoch),
        }
        if request_id := getattr(record, "request_id", "") or REQUEST_ID.get():
            told["request_id"] = request_id
        if traceparent := TRACEPARENT.get():
            told["trace_id"] = traceparent.split("-")[1]
        if record.exc_info:
            told["exception"] = self.formatException(record.exc_info)
        if record.stack_info:
            told["stack"] = self.formatStack(record.stack_info)
        told |= {name: value for name, value in vars(record).items() if name not in _OWN and name not in told}
        return json.dumps(told, default=str)


def make_formatter(log_format: LogFormat, node: str, process: str, rank: int | None) -> TagFormatter:
    kind = JsonFormatter if log_format == "json" else TagFormatter
    return kind(node, process, rank)


def is_tagged(line: str) -> bool:
    """Whether a line that a child wrote to its stderr is already one of ours."""
    marks = [f'"{tag}": ' for tag in _TAGS] if line.startswith('{"time": ') else [f" {tag}=" for tag in _TAGS]
    return all(mark in line for mark in marks)


def _number(tag: str) -> int | None:
    return int(tag) if tag.isdecimal() else None
