"""Heads and agents of this machine. Each records that it runs; a record only counts while that process exists."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import shutil
import sys
import threading
import time
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Literal

import psutil

from mlx_ring.core.environment import package_version
from mlx_ring.core.errors import ConfigError
from mlx_ring.core.folders import AGENT_LOCK, node_folder, running_folder
from mlx_ring.host.private_files import is_held, may_remove, read_private, try_lock, write_private

log = logging.getLogger(__name__)

ProcessKind = Literal["head", "agent"]
_OURS = ("mlx_ring", "mlx-ring")
_CLOCK_S = 2.0
"""Tolerance for a process's start if only the clock shows it."""
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_MACHINE_ID, _PID_NAMESPACE = Path("/etc/machine-id"), Path("/proc/self/ns/pid")
_START_TICKS = 19
"""Index of a process's start in `/proc/PID/stat`, after its name; `man 5 proc` counts it as 22."""
END_WAIT_S = 30.0
_LOOK_S = 0.05
_FRESH_S = 60.0
"""Interval at which files are touched. A machine that wakes from days of sleep may remove them within minutes."""


@dataclass(frozen=True, slots=True)
class Running:
    """Running process of ours."""

    kind: ProcessKind
    pid: int
    started_s: float
    """Start according to the operating system, which differs for a later process of the same number."""
    arguments: str
    """Digest of its arguments."""
    url: str = ""
    """URL of a head; of an agent, the address of the head for which it was started."""
    ending_s: float = 0.0
    """Seconds for which it may finish running requests before it ends."""
    start_mark: str = ""
    """Mark that distinguishes it from later processes of the same number whatever the clock; empty if the system has none."""
    away: str = ""
    """Reason for which an agent is not in its cluster just now; empty while it is."""
    place: str = ""
    """Place in which its number is valid, from `own_place`; empty in records of earlier versions."""


RUN_FOLDER = "mlx-ring-"
"""Start of the names of folders for sockets."""
_OWNER = "owner.json"
"""File in such a folder that names the process that made it, which holds the file's lock."""


def _own(kind: ProcessKind, url: str = "", ending_s: float = 0.0) -> Running:
    """Return the record of this process."""
    own = psutil.Process()
    digest, mark = arguments_digest(sys.argv[1:]), start_mark(own.pid)
    return Running(kind, own.pid, own.create_time(), digest, url, ending_s, mark, place=own_place())


@contextlib.contextmanager
def recorded(state: Path, kind: ProcessKind, url: str = "", ending_s: float = 0.0) -> Generator[None]:
    """Record this process as running with this state folder meanwhile. Delete the records of ended ones."""
    record = _own(kind, url, ending_s)
    path = record_file(state, record)
    try:
        with contextlib.suppress(ConfigError):  # other records that cannot be read
            running_here(state)
        write_private(path, json.dumps(asdict(record)).encode())
    except (OSError, ConfigError) as error:
        # A process that cannot write there still serves.
        log.warning("`mlx-ring stop` will not find this process: %s", error)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # it could not be written either, or the disk has become read-only
            path.unlink(missing_ok=True)


def note_absence(state: Path, why: str) -> None:
    """Add to this process's record why the machine is not in its cluster; an empty reason: it is."""
    with contextlib.suppress(OSError, ConfigError):
        for record in running_here(state):
            if record.pid == os.getpid():
                write_private(
                    record_file(state, record), json.dumps(asdict(replace(record, away=why))).encode()
                )


@contextlib.contextmanager
def kept_fresh(folder: Path) -> Generator[None]:
    """Renew the times of a folder's files meanwhile: systems remove what is old from the folder for temporary files.

    macOS does so after three days, and systemd after ten. Nothing could connect to a socket that was removed.
    """
    ended = threading.Event()

    def renew() -> None:
        while not ended.wait(_FRESH_S):
            for place, _, names in os.walk(folder):  # passes over folders that are removed meanwhile
                for path in (place, *(f"{place}/{name}" for name in names)):
                    with contextlib.suppress(OSError):  # it has been removed
                        os.utime(path, follow_symlinks=False)

    thread = threading.Thread(target=renew, name="times of sockets", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@contextlib.contextmanager
def owned(folder: Path) -> Generator[None]:
    """Mark a folder meanwhile as this process's, by a lock that the system frees if the process is killed."""
    lock = try_lock(folder / _OWNER)
    try:
        if lock is not None:
            os.write(lock, json.dumps(asdict(_own("agent"))).encode())
        with kept_fresh(folder):
            yield
    finally:
        if lock is not None:
            os.close(lock)


def remove_abandoned(parent: Path) -> list[Path]:
    """Remove the folders for sockets in `parent` whose owners were killed, and return them.

    A folder stays if its mark is missing, is locked by a process that this one may not see, or belongs to a running one.
    """
    found = [folder for folder in sorted(parent.glob(f"{RUN_FOLDER}*")) if _is_abandoned(folder)]
    for folder in found:
        shutil.rmtree(folder, ignore_errors=True)
    return found


def _is_abandoned(folder: Path) -> bool:
    mark = folder / _OWNER
    with contextlib.suppress(OSError, ConfigError):
        if folder.is_symlink() or folder.stat().st_uid != os.getuid() or not mark.is_file():
            return False
        if may_remove(mark):
            owner = _read(mark)
            return owner is not None and _process(owner) is None
    return False


def running_here(state: Path) -> list[Running]:
    """Return the running processes of this machine and PID namespace. Delete the records of ended ones.

    Other machines and containers may have the same state folder. Their records stay.

    Raises:
        ConfigError: the records cannot be read.
    """
    found: list[Running] = []
    for path in _records(running_folder(state)):
        record = _read(path)
        if record is not None and not _is_of_here(record):
            continue
        if record is not None and _process(record) is not None:
            found.append(record)
        else:
            with contextlib.suppress(OSError):  # a disk that is mounted read-only
                path.unlink(missing_ok=True)
    return found


def _records(folder: Path) -> list[Path]:
    try:
        return sorted(path for path in folder.iterdir() if path.match("[!.]*.json"))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise ConfigError(
            f"{folder} cannot be read ({error.strerror}): correct its permissions, or choose another state folder "
            "with --state-dir."
        ) from error


def own_place() -> str:
    """Return the machine's id ("-" if unknown), its boot and the PID namespace; empty on systems other than Linux.

    A process number is only valid in such a place.
    """
    try:
        boot, namespace = _BOOT_ID.read_text().strip(), _PID_NAMESPACE.readlink()
    except OSError:
        return ""
    with contextlib.suppress(OSError):
        return f"{_MACHINE_ID.read_text().strip() or '-'} {boot} {namespace}"
    return f"- {boot} {namespace}"


def _is_of_here(record: Running) -> bool:
    """Report whether this process can see that one, or could before this machine was started again."""
    own, theirs = own_place().split(), record.place.split()
    if not own or not theirs:
        return True
    return theirs[1:] == own[1:] or (own[0] != "-" and (theirs[0], theirs[-1]) == (own[0], own[-1]))


def end_running(state: Path) -> list[str]:
    """End heads, and then remaining agents, with all their workers; return a sentence for each."""
    ended: list[str] = []
    for kind in ("head", "agent"):
        ended += _end([found for found in running_here(state) if found.kind == kind])
    return ended


def agent_note(head_port: int) -> bytes:
    """Return what an agent notes in its lock: its head's port, and its version."""
    return f"{head_port} {package_version('mlx-ring')}".encode()


def end_stray_agent(state: Path, head_port: int) -> bool:
    """End an agent of this state that serves a head at another port, or is of another version; return True if one was.

    The caller is the only head with this state, so that no other head needs that agent. Blocks until it has ended.

    Raises:
        ConfigError: it does not end.
    """
    lock = node_folder(state) / AGENT_LOCK
    note = read_private(lock)
    if not note or note == agent_note(head_port) or not is_held(lock):
        return False
    described = note.decode(errors="replace").partition(" ")
    where = f"the head's port {described[0]} with version {described[2]}"
    log.warning("An agent of this machine was started for %s: ending it", where)
    for sentence in _end([found for found in running_here(state) if found.kind == "agent"]):
        log.info("%s", sentence)
    if is_held(lock):
        raise ConfigError(
            f"An agent of this machine was started for {where}, and does not end: end it with `mlx-ring stop`."
        )
    return True


def arguments_digest(arguments: Sequence[str]) -> str:
    """Return a digest that is equal for equal arguments and hides the keys among them.

    The head's address is left out for an agent, because it depends on where it was typed.
    """
    words = list(arguments)
    if words[:1] == ["join"] and not "".join(words[1:2]).startswith("-"):
        del words[1:2]
    return hashlib.sha256(json.dumps(words).encode()).hexdigest()[:16]


def started_with(running: Iterable[Running], kind: ProcessKind, arguments: Sequence[str]) -> Iterator[int]:
    """Yield the IDs of the processes that were started with these arguments."""
    digest = arguments_digest(arguments)
    return (found.pid for found in running if found.kind == kind and found.arguments == digest)


def start_mark(pid: int) -> str:
    """Return the boot, and the time since it, as Linux counts: wall-clock times of starts change when the clock is set.

    Empty elsewhere, where the kernel keeps the original time of day.
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
        f"The {record.kind} has ended (process {record.pid}"
        + (f", killed after {patience_s:g} s)." if process in stuck else ").")
        for record, process in pairs
    ]


def _wait(processes: Sequence[psutil.Process], timeout_s: float) -> list[psutil.Process]:
    """Wait for their ends; return those that have not ended in time. A zombie counts as ended."""
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


def record_file(state: Path, record: Running) -> Path:
    """Return the file of a process's record."""
    # Containers give the same numbers to their processes.
    where = f"-{hashlib.sha256(record.place.encode()).hexdigest()[:8]}" if record.place else ""
    return running_folder(state) / f"{record.kind}-{record.pid}{where}.json"


def _read(path: Path) -> Running | None:
    """Read a record, without fields of later versions; None if it is none.

    Raises:
        ConfigError: its file cannot be read.
    """
    known = {field.name for field in fields(Running)}
    try:
        content = json.loads(read_private(path) or b"null")
        return Running(**{name: value for name, value in content.items() if name in known})
    except (ValueError, TypeError, AttributeError):
        return None


def _process(record: Running) -> psutil.Process | None:
    """Return the process that wrote the record; None if it has ended, or another has its number."""
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
