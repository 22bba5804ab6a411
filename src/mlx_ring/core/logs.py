"""Log lines, each with its origin, and a buffer of the last ones.

    2026-11-20T22:45:08.123 INFO node=mini process=worker-1-0 rank=0 epoch=1 mlx_ring.worker.server: ...

Lines go to stderr and to `<log_dir>/<process>.log`, which rotates. If stderr is a file that nobody
rotates, they only go to the latter. Third-party loggers have no handlers of their own here: what they attach is
dropped, so that their lines take the same way. Each line of a traceback carries the tag too. With `--log-format json`
a record is one object in one line. Lines from before a log is set up go to stderr at once, and to
the log's file later. On request the last lines of a process and its children are kept in memory.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from logging.handlers import RotatingFileHandler
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from mlx_ring.core.errors import reason_of
from mlx_ring.core.traces import REQUEST_ID, TRACEPARENT

LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["text", "json"]
_WORKER = re.compile(r"worker-(\d+)-\d+")
_TAGS = ("node", "process", "rank")
_OWN = frozenset(
    (
        *vars(logging.makeLogRecord({})),
        *("message", "asctime", "request_id", "child_process", "child_rank", "color_message"),
    )
)
"""Attributes of a record that were not added by `extra`."""


class TagFormatter(logging.Formatter):
    """Formatter that puts time, level, node, process, rank and epoch before each line of a record."""

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
        """Return the process and rank of a record: a child's, if the record passes on a child's line."""
        return getattr(record, "child_process", self.process), getattr(record, "child_rank", self.rank)


class JsonFormatter(TagFormatter):
    """Formatter that writes a record as one object in one line, with its traceback."""

    def format(self, record: logging.LogRecord) -> str:
        process, rank = self.origin(record)
        worker = _WORKER.fullmatch(process)
        fields: dict[str, object] = {
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
            fields["request_id"] = request_id
        if traceparent := TRACEPARENT.get():
            fields["trace_id"] = traceparent.split("-")[1]
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        if record.stack_info:
            fields["stack"] = self.formatStack(record.stack_info)
        fields |= {
            name: value for name, value in vars(record).items() if name not in _OWN and name not in fields
        }
        return json.dumps(fields, default=str)


def make_formatter(log_format: LogFormat, node: str, process: str, rank: int | None) -> TagFormatter:
    kind = JsonFormatter if log_format == "json" else TagFormatter
    return kind(node, process, rank)


def is_tagged(line: str) -> bool:
    """Report whether a line that a child wrote to its stderr has our format."""
    marks = [f'"{tag}": ' for tag in _TAGS] if line.startswith('{"time": ') else [f" {tag}=" for tag in _TAGS]
    return all(mark in line for mark in marks)


def _number(tag: str) -> int | None:
    return int(tag) if tag.isdecimal() else None


BUFFERED_LINES = 300
LONGEST_BUFFERED_LINE = 2000
"""Most characters of a line."""
_TAGGED = re.compile(r"(\S+) ([A-Z]+) node=\S+ process=(\S+) rank=\S+ epoch=\S+ (\S+?): (.*)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class LogLine:
    """A buffered line."""

    number: int
    """Number, counted from 1; lines before the first present one were dropped."""
    unix_time_s: float
    level: str
    process: str
    logger: str
    text: str

    def as_json(self) -> dict[str, object]:
        return asdict(self)


class LogBuffer(logging.Handler):
    """Handler that keeps the last lines."""

    def __init__(self) -> None:
        super().__init__()
        self._lines: deque[LogLine] = deque(maxlen=BUFFERED_LINES)
        self._last = 0
        self._one_at_a_time = threading.Lock()

    def emit(self, record: logging.LogRecord) -> None:
        formatter = self.formatter
        process = formatter.origin(record)[0] if isinstance(formatter, TagFormatter) else "-"
        text = logging.Formatter().format(record)
        self._keep(record.created, record.levelname, process, record.name, text)

    def keep_tagged(self, line: str) -> None:
        """Keep a child's line, which names its origin itself; as text, or as JSON."""
        fields = _read_json(line) if line.startswith("{") else _read_text(line)
        if fields is not None:
            moment, level, process, logger, text = fields
            self._keep(_unix_time_s(moment), level, process, logger, text)

    def _keep(self, unix_time_s: float, level: str, process: str, logger: str, text: str) -> None:
        with self._one_at_a_time:
            self._last += 1
            self._lines.append(
                LogLine(self._last, unix_time_s, level, process, logger, text[:LONGEST_BUFFERED_LINE])
            )

    def after(self, number: int) -> list[LogLine]:
        """Return the lines with a higher number."""
        if number >= self._last:
            return []
        with self._one_at_a_time:
            return [line for line in self._lines if line.number > number]


LOG_BUFFER = LogBuffer()
"""Buffer of this process, which `configure_logging` connects."""


def recent_lines(after: int = 0) -> list[LogLine]:
    """Return the last lines after the one of that number."""
    return LOG_BUFFER.after(after)


def _read_text(line: str) -> tuple[str, ...] | None:
    found = _TAGGED.match(line)
    return None if found is None else found.groups()


def _read_json(line: str) -> tuple[str, ...] | None:
    try:
        fields: dict[str, Any] = json.loads(line)
    except ValueError:
        return None
    text = "\n".join(str(fields[name]) for name in ("message", "exception") if name in fields)
    return (*(str(fields.get(name, "")) for name in ("time", "level", "process", "logger")), text)


def _unix_time_s(moment: str) -> float:
    """Return the time of a line; now if it has none."""
    try:
        return datetime.fromisoformat(moment).timestamp()
    except ValueError:
        return time.time()


FILE_BYTES = 10 << 20
FILES_KEPT = 3
_CHATTY = (
    "asyncio",
    "filelock",
    "grpc",
    "httpcore",
    "httpcore2",
    "httpx",
    "httpx2",
    "huggingface_hub",
    "transformers",
    "urllib3",
    "uvicorn.error",
)
"""Loggers whose INFO lines do not help an operator."""


_GRPC_READS = ("grpc._common", "grpc._cython.cygrpc")
_OF_PEERS = ("DecodeError", "ExecuteBatchError")
"""Errors of gRPC's own code about a peer's message, or about a lost peer."""


class _CentralLogger(logging.Logger):
    """Logger that leaves its lines to the root's handlers, whatever its library attaches."""

    def addHandler(self, hdlr: logging.Handler) -> None:  # noqa: N802 - name in logging's interface
        del hdlr

    def __setattr__(self, name: str, value: object) -> None:
        super().__setattr__(name, True if name == "propagate" else value)


def _without_foreign_traceback(record: logging.LogRecord) -> bool:
    """Replace gRPC's traceback of an unreadable message by fields in one line, because the stack is gRPC's own.

    A filter.
    """
    error = record.exc_info[1] if record.exc_info else None
    if type(error).__name__ in _OF_PEERS:
        record.msg, record.args = f"{record.getMessage()}: {error}", ()
        record.exc_info = record.exc_text = None
    return True


class _StderrHandler(logging.Handler):
    """Handler that writes to the present `sys.stderr`: progress bars replace it while they are drawn."""

    shows_children = True
    """False if children's lines below WARNING are not written."""

    def emit(self, record: logging.LogRecord) -> None:
        write_to_stderr(self.format(record))


class _LogFile(RotatingFileHandler):
    """Rotating file that reports once per outage, such as a full disk, that it cannot be written."""

    _is_out = _has_failed = False

    def emit(self, record: logging.LogRecord) -> None:
        self._has_failed = False
        super().emit(record)
        self._is_out = self._has_failed

    def format(self, record: logging.LogRecord) -> str:
        return "\n" * (self._is_out and self._ends_within_a_line()) + super().format(record)

    def _ends_within_a_line(self) -> bool:
        """Return True if an outage has cut the file's last line."""
        with contextlib.suppress(OSError), Path(self.baseFilename).open("rb") as file:
            return file.seek(0, os.SEEK_END) > 0 and file.seek(-1, os.SEEK_END) >= 0 and file.read() != b"\n"
        return False

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - name in logging's interface
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
            return
        with contextlib.suppress(OSError, ValueError):
            self.close()  # drops buffered lines; the next one opens the file again
        self._has_failed = True
        if not self._is_out:
            text = f"The log file {self.baseFilename} cannot be written ({reason_of(error)}): its lines are lost until it can."
            note = logging.LogRecord(__name__, logging.WARNING, __file__, 0, text, None, None)
            root = logging.getLogger()
            for each in root.handlers:
                if each is not self and max(each.level, root.level) <= note.levelno:
                    each.handle(note)


class _EarlyHandler(_StderrHandler):
    """Handler that shows lines from before a log is set up, and keeps them for the log's file."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        super().emit(record)
        self.records.append(record)


def keep_early_records() -> None:
    """Keep later records for the log that `configure_logging` may set up."""
    if not logging.getLogger().handlers:
        logging.getLogger().addHandler(_EarlyHandler())


def configure_logging(
    *,
    process: str,
    node: str,
    rank: int | None,
    level: str,
    log_dir: Path | None,
    to_stderr: bool = True,
    log_format: LogFormat = "text",
    keeps_lines: bool = False,
    is_for_people: bool = False,
) -> None:
    """Send every log line of this process, tagged, to stderr and to its file. Call it once, first thing.

    Args:
        process: "head", "agent", "worker-<stage>-<rank>"; names the file.
        node: this machine's name.
        rank: of a worker; None for a process without one.
        level: "debug", "info", "warning" or "error".
        log_dir: folder for the file; None for stderr alone. One that cannot be written is a warning.
        to_stderr: True to write lines there too if there is a file; the process's death is always written there.
        log_format: "text" for people, "json" for programs.
        keeps_lines: True to keep the last lines for `recent_lines`, those that children pass on included.
        is_for_people: True if somebody may read stderr in a terminal. INFO lines of children are then only in their
            files, unless the level is "debug" or the format "json".
    """
    formatter = make_formatter(log_format, node, process, rank)
    stderr = _StderrHandler()
    stderr.shows_children = not is_for_people or log_dir is None or level == "debug" or log_format == "json"
    handlers: list[logging.Handler] = [stderr]
    if keeps_lines:
        handlers.append(LOG_BUFFER)
    early = [each for each in logging.getLogger().handlers if isinstance(each, _EarlyHandler)]
    problem = ""
    if log_dir is not None:
        try:
            handlers.append(_file_handler(log_dir / f"{process}.log"))
            stderr.setLevel(logging.NOTSET if to_stderr else logging.CRITICAL)
        except OSError as error:
            stderr.shows_children = True
            problem = f"The log folder {log_dir} cannot be written ({reason_of(error)}): log lines are written to stderr only."
    _make_central(handlers, formatter, level)
    _quieten(level)
    for name in _GRPC_READS:
        logging.getLogger(name).addFilter(_without_foreign_traceback)
    logging.captureWarnings(capture=True)
    sys.excepthook = _log_uncaught
    threading.excepthook = _log_uncaught_in_thread
    for record in (record for each in early for record in each.records):
        for handler in handlers[1:]:
            if record.levelno >= logging.getLogger().level:
                handler.handle(record)
    if problem:
        logging.getLogger(__name__).warning("%s", problem)


def set_log_epoch(epoch: int) -> None:
    """Set the epoch of this process's later lines."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler.formatter, TagFormatter):
            handler.formatter.epoch = str(epoch)


def write_to_stderr(line: str) -> None:
    """Write a line, but survive a closed stderr: a process must still be able to clean up."""
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(line + "\n")
        sys.stderr.flush()


def pass_on(line: str) -> None:
    """Pass on a line of a child's log, which is in the child's own file, to this process's destinations except its file."""
    handlers = logging.getLogger().handlers
    if LOG_BUFFER in handlers:
        LOG_BUFFER.keep_tagged(line)
    stderr = next((each for each in handlers if isinstance(each, _StderrHandler)), None)
    if stderr is None or (
        stderr.level < logging.CRITICAL and (stderr.shows_children or not _is_routine(line))
    ):
        write_to_stderr(line)


def _is_routine(line: str) -> bool:
    found = _TAGGED.match(line)
    return found is not None and found[2] in ("DEBUG", "INFO")


def _file_handler(path: Path) -> logging.Handler:
    for folder in reversed(path.parents):
        folder.mkdir(exist_ok=True, mode=0o700)  # lines name clients, and the state folder may be made here
    return _LogFile(path, maxBytes=FILE_BYTES, backupCount=FILES_KEPT, encoding="utf-8")


def _make_central(handlers: Sequence[logging.Handler], formatter: TagFormatter, level: str) -> None:
    root = logging.getLogger()
    root.handlers = list(handlers)
    root.setLevel(level.upper())
    for handler in handlers:
        handler.setFormatter(formatter)
    logging.setLoggerClass(_CentralLogger)
    for logger in logging.Logger.manager.loggerDict.values():
        if isinstance(logger, logging.Logger):
            logger.handlers.clear()
            logger.propagate = True
            logger.__class__ = _CentralLogger


def _quieten(level: str) -> None:
    for name in _CHATTY:
        logging.getLogger(name).setLevel("DEBUG" if level == "debug" else "WARNING")


def _log_uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if issubclass(kind, KeyboardInterrupt):
        return
    logging.getLogger("mlx_ring").critical("Ended by an error.", exc_info=(kind, error, trace))


def _log_uncaught_in_thread(arguments: threading.ExceptHookArgs) -> None:
    if arguments.exc_value is None or issubclass(arguments.exc_type, SystemExit):
        return
    name = arguments.thread.name if arguments.thread is not None else "?"
    logging.getLogger("mlx_ring").critical(
        "Thread %s ended by an error.",
        name,
        exc_info=(arguments.exc_type, arguments.exc_value, arguments.exc_traceback),
    )
