"""Heads and agents of this machine. Each writes down that it runs; it is believed only where that process is still there."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import sys
import time
from collections.abc import Generator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import psutil

from mlx_ring.core.cluster_folders import running_folder
from mlx_ring.core.errors import ConfigError
from mlx_ring.host.private_files import read_private, write_private

log = logging.getLogger(__name__)

Kind = Literal["head", "agent"]
_OURS = ("mlx_ring", "mlx-ring")
_CLOCK_S = 2.0
"""By so much a process's start may differ where nothing but the clock tells it."""
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_START_TICKS = 19
"""Place of a process's start in `/proc/PID/stat`, behind its name; `man 5 proc` counts it as 22."""
END_WAIT_S = 30.0
_LOOK_S = 0.05


@dataclass(frozen=True, slots=True)
class Running:
    """One of our processes."""

    kind: Kind
    pid: int
    started_s: float
    """As the operating system has it: a later process of the same number has another."""
    arguments: str
    """A digest of what it was started with."""
    url: str = ""
    """Of a head: where it answers."""
    ending_s: float = 0.0
    """For how long it may finish what it has under way before it ends."""
    start_mark: str = ""
    """What tells it from later processes of the same number wherever the clock is set; empty where nothing does."""


@contextlib.contextmanager
def recorded(state: Path, kind: Kind, url: str = "", ending_s: float = 0.0) -> Generator[None]:
    """Meanwhile this process stands among those that run with this state folder."""
    own = psutil.Process()
    record = Running(
        kind,
        own.pid,
        own.create_time(),
        arguments_digest(sys.argv[1:]),
        url,
        ending_s,
        start_mark(own.pid),
    )
    path = _path(state, record)
    try:
        write_private(path, json.dumps(asdict(record)).encode())
    except (OSError, ConfigError) as error:
        # Who cannot write there serves all the same.
        log.warning("`mlx-ring stop` will not find this process: %s", error)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def running_here(state: Path) -> list[Running]:
    """Those that run; what ended without a word is forgotten."""
    found: list[Running] = []
    for path in sorted(running_folder(state).glob("*.json")):
        record = _read(path)
        if record is not None and _process(record) is not None:
            found.append(record)
        else:
            path.unlink(missing_ok=True)
    return found


def end_running(state: Path) -> list[str]:
    """End heads, and then agents that are still there, with all their workers; a sentence for each."""
    ended: list[str] = []
    for kind in ("head", "agent"):
        ended += _end([found for found in running_here(state) if found.kind == kind])
    return ended


def arguments_digest(arguments: Sequence[str]) -> str:
    """Equal for equal arguments; keys among them cannot be read off it.

    By which of its addresses an agent goes to the head is left out: it depends on where that was typed.
    """
    words = list(arguments)
    if words[:1] == ["join"] and not "".join(words[1:2]).startswith("-"):
        del words[1:2]
    return hashlib.sha256(json.dumps(words).encode()).hexdigest()[:16]


def start_mark(pid: int) -> str:
    """Which boot, and how long after it, as Linux counts: its wall-clock times of starts move when the clock is set.

    Empty elsewhere, where the kernel keeps the time of day that it was.
    """
    try:
        stat, boot = Path(f"/proc/{pid}/stat").read_text("utf-8", errors="replace"), _BOOT_ID.read_text()
    except OSError:
        return ""
    # A name may have spaces and parentheses in it.
    return f"{boot.strip()} {stat.rpartition(')')[2].split()[_START_TICKS]}"


def _end(records: Sequence[Running]) -> list[str]:
    pairs = [(record, process) for record in records if (process := _process(record)) is not None]
    for _, process in pairs:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.terminate()
    patience_s = END_WAIT_S + max((record.ending_s for record, _ in pairs), default=0.0)
    stuck = _wait([process for _, process in pairs], patience_s)
    for process in stuck:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    _wait(stuck, END_WAIT_S)
    return [
        f"The {record.kind} is ended (process {record.pid}"
        + (f", killed after {patience_s:g} s)." if process in stuck else ").")
        for record, process in pairs
    ]


def _wait(processes: Sequence[psutil.Process], timeout_s: float) -> list[psutil.Process]:
    """Until they have ended; those that have not in time. One that nobody has asked after has ended too."""
    end = time.monotonic() + timeout_s
    left = list(processes)
    while left and time.monotonic() < end:
        left = [process for process in left if _runs(process)]
        time.sleep(_LOOK_S)
    return left


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _path(state: Path, record: Running) -> Path:
    return running_folder(state) / f"{record.kind}-{record.pid}.json"


def _read(path: Path) -> Running | None:
    """What cannot be read is none of ours."""
    try:
        return Running(**json.loads(read_private(path) or b"null"))
    except (ValueError, TypeError):
        return None


def _process(record: Running) -> psutil.Process | None:
    """The very process that wrote it; None where it has ended, or the number is another's."""
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(record.pid)
        ours = any(name in word for word in process.cmdline() for name in _OURS)
        if _same_start(record, process) and ours and process.status() != psutil.STATUS_ZOMBIE:
            return process
    return None


def _same_start(record: Running, process: psutil.Process) -> bool:
    mark = start_mark(record.pid)
    if record.start_mark and mark:
        return record.start_mark == mark
    return abs(process.create_time() - record.started_s) < _CLOCK_S
