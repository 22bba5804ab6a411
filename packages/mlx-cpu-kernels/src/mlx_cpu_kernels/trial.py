"""Trial of a binary in a process of its own: it may not load on this host, compute something else, or crash.

A host tries each binary once. The verdict is kept beside the binary, or in the user's cache where that folder cannot be
written. It holds for the same C library and the same instruction sets, so hosts that share a folder have one each.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, cast

FOLDER = "mlx-cpu-kernels"
"""Name of the folders of binaries, in a virtual environment and in the user's cache."""
_CHILD = ("-m", "mlx_cpu_kernels.selfcheck")
_TIME_LIMIT_S = 120
# Signals that a binary causes. Others, such as SIGKILL where memory is short, say nothing about it.
_CRASHES = (signal.SIGILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGABRT)


@dataclass(frozen=True, slots=True)
class Verdict:
    """Result of a trial on this host."""

    works: bool
    detail: str
    """The instruction set, or why the binary is not used."""
    is_of_here: bool = False
    """It was compiled on this host: compiling it again would not help."""


def cache_folder() -> Path | None:
    """Return the folder of binaries in the user's cache; None for a user without a home."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", FOLDER)
    except RuntimeError:
        return None


def verdict_on(binary: Path) -> Verdict:
    """Return the verdict on a binary, from a trial if this host has not tried it. Raises OSError without a file.

    A process tries a binary once, also where the verdict cannot be kept or another trial may end differently.
    """
    return verdict_of_process(binary, *_identity(binary))


@cache
def verdict_of_process(binary: Path, _size: int, _mtime_ns: int) -> Verdict:
    """Return the kept verdict, or else that of a trial."""
    return _recall(binary) or try_out(binary)


def try_out(binary: Path, *, is_of_here: bool = False, keep: bool = True) -> Verdict:
    """Load a binary and check its results in a process of its own, which takes a second or two; keep the verdict."""
    verdict, is_final = _run(binary, is_of_here=is_of_here)
    if keep and is_final:
        _keep(binary, verdict)
    return verdict


def _run(binary: Path, *, is_of_here: bool) -> tuple[Verdict, bool]:
    """Return the verdict, and true unless another trial may end differently."""

    def refuse(reason: str) -> Verdict:
        return Verdict(works=False, detail=reason, is_of_here=is_of_here)

    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    try:
        done = subprocess.run(
            [sys.executable, *_CHILD, str(binary)],
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_TIME_LIMIT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return refuse(f"their trial failed: {error}"), False
    if done.returncode < 0:
        name = signal.Signals(-done.returncode).name
        return refuse(f"they crash on this machine ({name})"), -done.returncode in _CRASHES
    try:
        answer = json.loads(done.stdout)
        return Verdict(bool(answer["works"]), str(answer["detail"]), is_of_here), True
    except (ValueError, KeyError, TypeError):
        lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        return refuse(f"their trial failed: {lines[-1]}"), False


def _recall(binary: Path) -> Verdict | None:
    identity = _identity(binary)
    for mark in _marks(binary):
        with contextlib.suppress(
            OSError, ValueError, TypeError, KeyError, AttributeError
        ):  # or of another version
            kept = cast("dict[str, Any]", json.loads(mark.read_text("utf-8")))
            if kept.pop("binary") == identity and kept.pop("libc") is not None:
                return Verdict(**kept)
    return None


def _keep(binary: Path, verdict: Verdict) -> None:
    """Write the verdict where it can be: without such a place, the next process tries again."""
    text = json.dumps({"binary": _identity(binary), "libc": _libc(), **asdict(verdict)})
    for mark in _marks(binary):
        with contextlib.suppress(OSError):
            mark.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(
                "w", dir=mark.parent, prefix=mark.name, delete=False
            ) as unfinished:
                unfinished.write(text)
            Path(unfinished.name).replace(mark)
            return


def _marks(binary: Path) -> list[Path]:
    """Return the files that may have the verdict."""
    folders = [binary.parent]
    if (of_user := cache_folder()) is not None:
        folders.append(of_user / binary.parent.name)
    return [folder / f"tried-{_host()}.json" for folder in folders]


def _identity(binary: Path) -> list[int]:
    status = binary.stat()
    return [status.st_size, status.st_mtime_ns]


def _libc() -> str:
    with contextlib.suppress(AttributeError, OSError, ValueError):
        return os.confstr("CS_GNU_LIBC_VERSION") or ""
    return ""


@cache
def _host() -> str:
    """Return a short name of everything that decides on a host if a binary works."""
    parts = (_libc(), platform.machine(), sys.version, _instruction_sets())
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:12]


def _instruction_sets() -> str:
    """Return the names of the first processor's instruction sets."""
    with contextlib.suppress(OSError), Path("/proc/cpuinfo").open(encoding="utf-8") as lines:
        return next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return ""
