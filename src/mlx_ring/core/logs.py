"""Log lines: every line of every process says where it comes from.

    2026-11-20T22:45:08.123 INFO node=mini process=worker-1-0 rank=0 epoch=1 mlx_ring.worker.front: ...

Lines go to stderr and to `<log_dir>/<process>.log`, which rotates; where stderr is a file that nobody
rotates, to the latter alone. Third-party loggers have no handlers of their own here: whatever they attach is
dropped, so that their lines take the same way. Each line of a traceback carries the tag too; with `--log-format json`
a record is one object in one line (`log_formats.py`). What is said before a log is set up goes to stderr at once, and to
the log's file later. The last lines are kept in memory where that is asked for.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
from collections.abc import Sequence
from logging.handlers import RotatingFileHandler
from pathlib import Path
from types import TracebackType

from mlx_ring.core.kept_lines import KEPT
from mlx_ring.core.log_formats import LogFormat, TagFormatter, make_formatter

FILE_BYTES = 10 << 20
FILES_KEPT = 3
_CHATTY = (
    "asyncio",
    "filelock",
    "grpc",
    "httpcore",
    "httpx",
    "huggingface_hub",
    "transformers",
    "urllib3",
    "uvicorn.error",
)
"""Loggers whose INFO lines say nothing to whoever runs a server."""


_GRPC_READS = ("grpc._common", "grpc._cython.cygrpc")
_OF_PEERS = ("DecodeError", "ExecuteBatchError")
"""Errors of gRPC's own code about what a peer sent, or about one that is gone."""


class _CentralLogger(logging.Logger):
    """A logger that leaves its lines to the root's handlers, whatever its library attaches."""

    def addHandler(self, hdlr: logging.Handler) -> None:  # noqa: N802 - logging's own name
        del hdlr

    def __setattr__(self, name: str, value: object) -> None:
        super().__setattr__(name, True if name == "propagate" else value)


def _without_foreign_traceback(record: logging.LogRecord) -> bool:
    """A filter: what gRPC could not read of a peer is told in one line, for the stack is gRPC's own."""
    error = record.exc_info[1] if record.exc_info else None
    if type(error).__name__ in _OF_PEERS:
        record.msg, record.args = f"{record.getMessage()}: {error}", ()
        record.exc_info = record.exc_text = None
    return True


class _StderrHandler(logging.Handler):
    """Writes to whatever `sys.stderr` is now: progress bars replace it while they are drawn."""

    def emit(self, record: logging.LogRecord) -> None:
        write_to_stderr(self.format(record))


class _EarlyHandler(_StderrHandler):
    """Shows what is said before a log is set up, and keeps it for the log's file."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        super().emit(record)
        self.records.append(record)


def keep_early_records() -> None:
    """Keep what is logged from now on for the log that `configure_logging` may set up later."""
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
) -> None:
    """Send every log line of this process, tagged, to stderr and to its file. Call it once, first thing.

    Args:
        process: "head", "agent", "worker-<stage>-<rank>"; names the file.
        node: this machine's name.
        rank: of a worker; None for a process without one.
        level: "debug", "info", "warning" or "error".
        log_dir: folder for the file; None for stderr alone. One that cannot be written is a warning.
        to_stderr: whether lines go there too where there is a file; the process's death does in any case.
        log_format: "text" for people, "json" for programs.
        keeps_lines: whether `recent_lines` tells the last of them, and of what children pass on.
    """
    formatter = make_formatter(log_format, node, process, rank)
    stderr = _StderrHandler()
    handlers: list[logging.Handler] = [stderr]
    if keeps_lines:
        handlers.append(KEPT)
    early = [each for each in logging.getLogger().handlers if isinstance(each, _EarlyHandler)]
    trouble = ""
    if log_dir is not None:
        try:
            handlers.append(_file_handler(log_dir / f"{process}.log"))
            stderr.setLevel(logging.NOTSET if to_stderr else logging.CRITICAL)
        except OSError as error:
            trouble = f"The log folder {log_dir} cannot be written ({error}): lines go to stderr alone."
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
    if trouble:
        logging.getLogger(__name__).warning("%s", trouble)


def set_log_epoch(epoch: int) -> None:
    """From now on this process's lines carry this epoch."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler.formatter, TagFormatter):
            handler.formatter.epoch = str(epoch)


def write_to_stderr(line: str) -> None:
    """Write a line, unless whoever read stderr is gone: a process that cleans up must not end of that."""
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(line + "\n")
        sys.stderr.flush()


def pass_on(line: str) -> None:
    """A line of a child's log, which is in the child's own file: it goes where this process's go besides their file."""
    handlers = logging.getLogger().handlers
    if KEPT in handlers:
        KEPT.keep_tagged(line)
    if not any(isinstance(each, _StderrHandler) and each.level >= logging.CRITICAL for each in handlers):
        write_to_stderr(line)


def _file_handler(path: Path) -> RotatingFileHandler:
    path.parent.mkdir(parents=True, exist_ok=True)
    return RotatingFileHandler(path, maxBytes=FILE_BYTES, backupCount=FILES_KEPT, encoding="utf-8")


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
