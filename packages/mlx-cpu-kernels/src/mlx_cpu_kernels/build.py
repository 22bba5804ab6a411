"""Building of the native kernels for the installed MLX: `python -m mlx_cpu_kernels.build`.

The extension passes MLX's own array objects. So it must be made for exactly this MLX and this Python, and with the
nanobind that MLX's binary was made with. Where nobody offers a binary for the three, the sources that this package carries are
compiled once, and kept in the virtual environment.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import FrameType
from typing import Self

from mlx_cpu_kernels.machine import free_memory, usable_cores
from mlx_cpu_kernels.packages import Package, Unavailable, find_package
from mlx_cpu_kernels.trial import FOLDER, Verdict, cache_folder, try_out, verdict_on

NAME = "_kernels"
SOURCES = Path(__file__).with_name("native")
BINARIES = Path(__file__).with_name("binaries")
"""Binaries that came with the package, each in a folder named by its key."""
COMPILERS = ("g++", "c++", "clang++")
_DEFINITIONS = ("-DNB_DOMAIN=mlx", "-DNB_COMPACT_ASSERTIONS")
_UNFINISHED = "unfinished-"
_COMPILER_BYTES = 1 << 30
"""Memory for one compiler: the largest source takes 0.7 GB."""
_UNUSED_S = 7 * 24 * 3600.0
_ABANDONED_S = 3600.0
"""Ages from which binaries for something else, and folders of builds that were killed, are removed."""
_TIME_LIMIT_S, _LOOK_S = 3600, 0.2
"""Longest time of one compiler, which may have little of a busy machine, and time between two looks for signals."""
# Name under which nanobind's libraries share their types, e.g. `nanobind_..._a1_v22`: a suffix `_stable` makes it another.
_INTERNALS = re.compile(rb"nanobind_[a-z0-9_]+_v\d+(?:_stable)?(?=\0)")


@dataclass(frozen=True)
class Target:
    """Libraries that a binary is made for."""

    mlx: Package
    nanobind: Package

    @staticmethod
    def installed() -> Target:
        """Find MLX and nanobind without importing them. Raises `Unavailable`."""
        return Target(find_package("mlx", "mlx"), find_package("nanobind", "nanobind"))

    @cached_property
    def core(self) -> Path:
        """MLX's own extension module."""
        suffix = sysconfig.get_config_var("EXT_SUFFIX")
        path = self.mlx.folder / f"core{suffix}"
        if not path.is_file():
            raise Unavailable(f"MLX has no module for this Python: {path} is missing")
        return path

    @property
    def key(self) -> str:
        """Identity of a binary: the sources and flags that it is compiled from, and what it is loaded into.

        The compiler is none of it: a machine that was sent a binary may have none.
        """
        digest = hashlib.sha256()
        for source in sorted(path for kind in ("*.cpp", "*.h", "*.mk") for path in SOURCES.glob(kind)):
            digest.update(source.name.encode() + b"\0" + source.read_bytes())
        parts = (
            self.mlx.version,
            self.nanobind.version,
            sysconfig.get_config_var("EXT_SUFFIX"),
            *_DEFINITIONS,
        )
        digest.update("\0".join(map(str, parts)).encode())
        return digest.hexdigest()[:16]


def find_binary(target: Target) -> Path | None:
    """Return the binary for `target` that works on this host: one that was built here, or the package's own.

    One that this host has not tried is tried first, in a process of its own. That takes a second or two, once.
    """
    for binary, verdict in _verdicts(target):
        if verdict.works:
            _note_use(binary.parent)
            return binary
    return None


def why_without(target: Target) -> str:
    """Return why `find_binary` finds none, as a part of a sentence."""
    refused = [verdict for _, verdict in _verdicts(target)]
    if refused:
        return refused[0].detail
    if _is_being_built(target.key):
        return "they are being built, and the next start uses them"
    return "they are not built; `python -m mlx_cpu_kernels.build` builds them"


def check_tools(target: Target) -> None:
    """Check for a compiler and headers. Raises `Unavailable` with the first that is missing."""
    _find_compiler()
    extension_flags(target)


def _is_being_built(key: str) -> bool:
    for folder in _build_folders():
        for work in (folder / key).glob(f"{_UNFINISHED}*"):
            with contextlib.suppress(OSError):  # the build has just ended
                if time.time() - work.stat().st_mtime < _TIME_LIMIT_S:
                    return True
    return False


def advice() -> str:
    """Return what makes the kernels available where no binary works: a sentence."""
    run = "`python -m mlx_cpu_kernels.build`"
    try:
        target = Target.installed()
    except Unavailable as reason:
        return f"Install what is missing ({reason}), then run {run}."
    try:
        check_tools(target)
    except Unavailable:
        return f"Install a C++ compiler and Python's headers (`apt install g++ python3-dev`), then run {run}."
    if any(verdict.is_of_here for _, verdict in _verdicts(target)):
        return "They were compiled here. `python -m mlx_cpu_kernels.build --force` compiles them again."
    return f"Run {run}: it compiles them here, in less than a minute."


def _verdicts(target: Target) -> Iterator[tuple[Path, Verdict]]:
    """Yield the binaries for `target`, with what this host thinks of each."""
    key = target.key
    for folder in (*_build_folders(), BINARIES):
        with contextlib.suppress(OSError):  # no such file, or a folder of another user
            if (path := _binary(folder / key)).is_file():
                yield path, verdict_on(path)


def _note_use(folder: Path) -> None:
    """Keep the folder from being removed as unused."""
    with contextlib.suppress(OSError):
        if time.time() - folder.stat().st_mtime > _UNUSED_S / 7:
            os.utime(folder)


def _build_folders() -> list[Path]:
    """Return where binaries are kept that were built here: the virtual environment, or else the user's cache."""
    folders = [Path(sys.prefix, "lib", FOLDER)] if sys.prefix != sys.base_prefix else []
    return folders + [folder for folder in (cache_folder(),) if folder is not None]


def _writable_folder() -> Path:
    for folder in _build_folders():
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            if os.access(folder, os.W_OK):
                return folder
    raise Unavailable("neither the virtual environment nor the user's cache can be written")


def build(target: Target, folder: Path | None = None) -> Path:
    """Compile the kernels for `target` into `folder`, by default one where they are found; return the binary's path.

    Takes less than a minute. Processes that build the same binary do not disturb each other. An exception, such as
    KeyboardInterrupt, ends the compilers and leaves nothing behind.
    Raises `Unavailable`, with the compiler's first error, or with what a trial of the binary found.
    """
    compiler, flags = _find_compiler(), extension_flags(target)
    home = None
    if folder is None:
        home = _writable_folder()
        folder = home / target.key
    final = _binary(folder)
    final.parent.mkdir(parents=True, exist_ok=True)
    try:
        with tempfile.TemporaryDirectory(prefix=_UNFINISHED, dir=final.parent) as name:
            linked = _compile_all(target, compiler, flags, Path(name))
            _check_internals(target, linked)
            linked.replace(final)
    finally:
        with contextlib.suppress(OSError):  # it has a binary
            final.parent.rmdir()
    if home is not None:
        _remove_outdated(home, final.parent)
    verdict = try_out(final, is_of_here=True, keep=home is not None)
    if not verdict.works:
        raise Unavailable(f"compiled, but not usable here: {verdict.detail}")
    return final


def _compile_all(target: Target, compiler: str, flags: list[str], work: Path) -> Path:
    """Compile and link in the folder `work`; return the library."""
    library, linked = target.mlx.folder / "lib", work / _binary(work).name
    sources: dict[Path, tuple[str, ...]] = {target.nanobind.folder / "src/nb_combined.cpp": (), **_sources()}
    compilers, pool = _Compilers(), ThreadPoolExecutor(_parallel_compilers())
    with contextlib.ExitStack() as stack:
        signals = stack.enter_context(_DeferredSignals())
        stack.callback(pool.shutdown, cancel_futures=True)
        stack.callback(compilers.stop)  # first: the pool waits for them
        objects = [work / f"{source.stem}.o" for source in sources]
        compiled = [
            pool.submit(compilers.run, [compiler, *flags, *own, "-c", str(source), "-o", str(path)])
            for (source, own), path in zip(sources.items(), objects, strict=True)
        ]
        for future in compiled:
            _wait_for(future, signals)
        link = ["-shared", "-s", *map(str, objects), f"-L{library}", "-lmlx", f"-Wl,-rpath,{library}"]
        _wait_for(pool.submit(compilers.run, [compiler, *link, "-o", str(linked)]), signals)
    return linked


def _wait_for(future: Future[None], signals: _DeferredSignals) -> None:
    """Wait for a compiler, and handle the signals that come meanwhile."""
    while True:
        signals.handle()
        with contextlib.suppress(TimeoutError):
            return future.result(timeout=_LOOK_S)


class _DeferredSignals(contextlib.AbstractContextManager["_DeferredSignals", None]):
    """Signals whose handlers are called where `handle` is.

    An exception that a handler raises elsewhere may leave a lock of the thread pool locked, or a process unnoted.
    """

    def __init__(self) -> None:
        self._came: list[tuple[int, FrameType | None]] = []
        self._handlers: dict[int, Callable[[int, FrameType | None], object]] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                handler = signal.getsignal(number)
                if callable(handler):
                    self._handlers[number] = handler
                    signal.signal(number, self._note)
        return self

    def handle(self) -> None:
        """Call the handlers of the signals that have come, which may raise what they want."""
        while self._came:
            number, frame = self._came.pop(0)
            self._handlers[number](number, frame)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for number, handler in self._handlers.items():
            if signal.getsignal(number) == self._note:  # no handler has set another
                signal.signal(number, handler)
        if kind is None:
            self.handle()

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._came.append((number, frame))


class _Compilers:
    """Compilers that run side by side, each with the programs that it starts in a process group of its own."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: set[subprocess.Popen[str]] = set()
        self._is_stopped = False

    def run(self, command: list[str]) -> None:
        """Run a compiler to its end. Raises `Unavailable`, with its first error."""
        try:
            process = self._start(command)
        except OSError as error:
            raise Unavailable(f"{command[0]} failed: {error}") from None
        try:
            _, text = process.communicate(timeout=_TIME_LIMIT_S)
        except subprocess.TimeoutExpired:
            raise Unavailable(f"{command[0]} took longer than {_TIME_LIMIT_S} s") from None
        finally:
            self._end(process)
        if process.returncode:
            lines = text.splitlines()
            errors = [line for line in lines if "error" in line] or lines
            raise Unavailable(
                f"{command[0]} failed: {errors[0] if errors else f'exit status {process.returncode}'}"
            )

    def stop(self) -> None:
        """End all that run, and start no further."""
        with self._lock:
            self._is_stopped = True
            for process in self._running:
                _kill_group(process)

    def _start(self, command: list[str]) -> subprocess.Popen[str]:
        with self._lock:
            if self._is_stopped:
                raise Unavailable("compiling was stopped")
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                process_group=0,
            )
            self._running.add(process)
            return process

    def _end(self, process: subprocess.Popen[str]) -> None:
        with self._lock:  # its number belongs to it until it is waited for
            if process.returncode is None:
                _kill_group(process)
                process.wait()
            self._running.discard(process)


def _kill_group(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _parallel_compilers() -> int:
    return max(1, min(usable_cores(), free_memory() // _COMPILER_BYTES))


def _remove_outdated(home: Path, current: Path) -> None:
    """Remove binaries that nothing has used for a while, and what killed builds have left."""
    now = time.time()
    for folder, age in (
        *((path, _UNUSED_S) for path in home.iterdir() if path != current),
        *((path, _ABANDONED_S) for path in home.glob(f"*/{_UNFINISHED}*")),
    ):
        with contextlib.suppress(OSError):
            if folder.is_dir() and now - folder.stat().st_mtime > age:
                shutil.rmtree(folder, ignore_errors=True)


def _binary(folder: Path) -> Path:
    return folder / f"{NAME}{sysconfig.get_config_var('EXT_SUFFIX')}"


def _find_compiler() -> str:
    for name in filter(None, (os.environ.get("CXX"), *COMPILERS)):
        if path := shutil.which(name):
            return path
    raise Unavailable(f"no C++ compiler was found ({', '.join(COMPILERS)})")


def extension_flags(target: Target) -> list[str]:
    """Return the compiler's flags for the extension's sources. Raises `Unavailable` without the headers that they need."""
    python = Path(sysconfig.get_paths()["include"])
    if not (python / "Python.h").is_file():
        raise Unavailable(f"Python's headers are missing: {python / 'Python.h'}")
    headers = target.mlx.folder / "include"
    if not (headers / "mlx/mlx.h").is_file():
        raise Unavailable(f"this MLX carries no headers: {headers / 'mlx/mlx.h'} is missing")
    nanobind = target.nanobind.folder
    folders = (nanobind / "include", nanobind / "ext/robin_map/include", python, headers, SOURCES)
    return [*_lists()["FLAGS"], *_DEFINITIONS, *(f"-I{folder}" for folder in folders)]


def _lists() -> dict[str, list[str]]:
    """Return the lists of flags and instruction sets, which `make` reads too."""
    lines = (SOURCES / "flags.mk").read_text("utf-8").splitlines()
    pairs = (line.split("=", 1) for line in lines if "=" in line and not line.startswith("#"))
    return {name.strip(): words.split() for name, words in pairs}


def _sources() -> dict[Path, tuple[str, ...]]:
    """Return the sources for this kind of processor, each with flags of its own."""
    lists = _lists()
    every_set = {word for name, words in lists.items() if name.startswith("SETS_") for word in words}
    here = lists.get(f"SETS_{platform.machine()}", [])
    words = {source: source.stem.partition("_")[0] for source in sorted(SOURCES.glob("*.cpp"))}
    return {
        source: tuple(lists[f"FLAGS_{word}"]) if word in here else ()
        for source, word in words.items()
        if word in here or word not in every_set
    }


def _check_internals(target: Target, binary: Path) -> None:
    """Compare the name under which both binaries share types. Where it differs, every array would be a TypeError."""
    theirs, ours = (set(_INTERNALS.findall(path.read_bytes())) for path in (target.core, binary))
    if not theirs & ours:
        expected = b", ".join(sorted(theirs)).decode() or "none"
        raise Unavailable(
            f"nanobind {target.nanobind.version} shares no types with this MLX, which needs {expected}"
        )


def _find_or_build(into: Path | None, *, force: bool) -> Path:
    target = Target.installed()
    if into is not None or force:
        return build(target, into)
    if (found := find_binary(target)) is not None:
        return found
    failed = next((verdict for _, verdict in _verdicts(target) if verdict.is_of_here), None)
    if failed is not None:
        raise Unavailable(
            f"compiled before, but not usable here: {failed.detail} (--force compiles them again)"
        )
    return build(target)


def _interrupt(number: int, _frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


def main() -> None:
    """Build the kernels unless they are there and work, and print where they are, or why not."""
    parser = argparse.ArgumentParser(prog="python -m mlx_cpu_kernels.build", description=__doc__)
    parser.add_argument(
        "--into", type=Path, metavar="FOLDER", help="folder of the binary (default: one where they are found)"
    )
    parser.add_argument("--force", action="store_true", help="compile also where a binary is there")
    options = parser.parse_args()
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)
    try:
        print(_find_or_build(options.into, force=options.force))  # noqa: T201 - the command's result
    except Unavailable as reason:
        sys.exit(f"The native kernels cannot be built: {reason}.")
    except KeyboardInterrupt:
        sys.exit("Compiling was interrupted.")


if __name__ == "__main__":
    main()
