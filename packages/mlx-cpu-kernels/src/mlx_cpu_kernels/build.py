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
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

NAME = "_kernels"
_FOLDER = "mlx-cpu-kernels"
SOURCES = Path(__file__).with_name("native")
BINARIES = Path(__file__).with_name("binaries")
"""Binaries that came with the package, each in a folder named by its key."""
COMPILERS = ("g++", "c++", "clang++")
_FLAGS = (
    *(
        "-std=c++20",
        "-O3",
        "-fPIC",
        "-fvisibility=hidden",
        "-fno-strict-aliasing",
        "-fno-math-errno",
        "-fno-trapping-math",
        "-DNDEBUG",
    ),
    *("-DNB_DOMAIN=mlx", "-DNB_COMPACT_ASSERTIONS"),
)
_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_AVX512 = tuple(f"-mavx512{part}" for part in ("f", "bw", "dq", "vl", "vnni", "vbmi"))
_INSTRUCTION_SETS: dict[str, dict[str, tuple[str, ...]]] = {
    "x86_64": {"avx2": _AVX2, "avx512": (*_AVX2, *_AVX512)},
    "aarch64": {"neon": ()},
}
"""Instruction sets of each kind of processor, and the flags of sources whose name begins with them."""
_TIME_LIMIT_S = 300
# Name under which nanobind's libraries share their types, e.g. `nanobind_..._a1_v22`: a suffix `_stable` makes it another.
_INTERNALS = re.compile(rb"nanobind_[a-z0-9_]+_v\d+(?:_stable)?(?=\0)")


class Unavailable(Exception):
    """The kernels cannot be built or used here. Its text is the reason, without a full stop."""


@dataclass(frozen=True, slots=True)
class _Package:
    folder: Path
    version: str


def _package(name: str, distribution: str) -> _Package:
    spec = find_spec(name)
    folders = list(spec.submodule_search_locations or ()) if spec else []
    try:
        return _Package(Path(folders[0]), version(distribution))
    except (IndexError, PackageNotFoundError):
        raise Unavailable(f"the package {distribution} is not installed") from None


@dataclass(frozen=True)
class Target:
    """Libraries that a binary is made for."""

    mlx: _Package
    nanobind: _Package

    @staticmethod
    def installed() -> Target:
        """Find MLX and nanobind without importing them. Raises `Unavailable`."""
        return Target(_package("mlx", "mlx"), _package("nanobind", "nanobind"))

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
        """Identity of a binary: what it is compiled from, and what it is loaded into."""
        digest = hashlib.sha256()
        for source in sorted((*SOURCES.glob("*.cpp"), *SOURCES.glob("*.h"))):
            digest.update(source.name.encode() + b"\0" + source.read_bytes())
        parts = (
            self.mlx.version,
            self.nanobind.version,
            sysconfig.get_config_var("EXT_SUFFIX"),
            *_FLAGS,
            _INSTRUCTION_SETS,
        )
        digest.update("\0".join(map(str, parts)).encode())
        return digest.hexdigest()[:16]


def find_binary(target: Target) -> Path | None:
    """Return the binary for `target`: one that was built here, or the package's own, made elsewhere for this system."""
    key = target.key
    for folder in (*_build_folders(), BINARIES):
        with contextlib.suppress(OSError):  # a folder of another user
            if (path := _binary(folder / key)).is_file():
                return path
    return None


def _build_folders() -> list[Path]:
    """Return where binaries are kept that were built here: the virtual environment, or else the user's cache."""
    folders = [Path(sys.prefix, "lib", _FOLDER)] if sys.prefix != sys.base_prefix else []
    with contextlib.suppress(RuntimeError):  # a user without a home
        folders.append(Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", _FOLDER))
    return folders


def _writable_folder() -> Path:
    for folder in _build_folders():
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            if os.access(folder, os.W_OK):
                return folder
    raise Unavailable("neither the virtual environment nor the user's cache can be written")


def build(target: Target, folder: Path | None = None) -> Path:
    """Compile the kernels for `target` into `folder`, by default one where they are found; return the binary's path.

    Takes less than a minute. Processes that build the same binary do not disturb each other.
    Raises `Unavailable`, with the compiler's first error.
    """
    compiler, flags = _find_compiler(), _flags(target)
    final = _binary(folder or _writable_folder() / target.key)
    final.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=final.parent) as name:
        work = Path(name)
        sources: dict[Path, tuple[str, ...]] = {
            target.nanobind.folder / "src/nb_combined.cpp": (),
            **_sources(),
        }
        with ThreadPoolExecutor(_usable_cores()) as pool:
            compiled = [
                pool.submit(_compile, compiler, [*flags, *own], source, work)
                for source, own in sources.items()
            ]
            objects = [future.result() for future in compiled]
        library = target.mlx.folder / "lib"
        linked = work / final.name
        _run(
            [
                compiler,
                "-shared",
                "-s",
                *map(str, objects),
                f"-L{library}",
                "-lmlx",
                f"-Wl,-rpath,{library}",
                "-o",
                str(linked),
            ]
        )
        _check_internals(target, linked)
        linked.replace(final)
    return final


def _usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def _binary(folder: Path) -> Path:
    return folder / f"{NAME}{sysconfig.get_config_var('EXT_SUFFIX')}"


def _find_compiler() -> str:
    for name in filter(None, (os.environ.get("CXX"), *COMPILERS)):
        if path := shutil.which(name):
            return path
    raise Unavailable(f"no C++ compiler was found ({', '.join(COMPILERS)})")


def _flags(target: Target) -> list[str]:
    python = Path(sysconfig.get_paths()["include"])
    if not (python / "Python.h").is_file():
        raise Unavailable(f"Python's headers are missing: {python / 'Python.h'}")
    headers = target.mlx.folder / "include"
    if not (headers / "mlx/mlx.h").is_file():
        raise Unavailable(f"this MLX carries no headers: {headers / 'mlx/mlx.h'} is missing")
    nanobind = target.nanobind.folder
    folders = (nanobind / "include", nanobind / "ext/robin_map/include", python, headers, SOURCES)
    return [*_FLAGS, *(f"-I{folder}" for folder in folders)]


def _sources() -> dict[Path, tuple[str, ...]]:
    """Return the sources for this kind of processor, each with flags of its own."""
    every_set = {name for sets in _INSTRUCTION_SETS.values() for name in sets}
    here = _INSTRUCTION_SETS.get(platform.machine(), {})
    words = {source: source.stem.partition("_")[0] for source in sorted(SOURCES.glob("*.cpp"))}
    return {
        source: here.get(word, ()) for source, word in words.items() if word in here or word not in every_set
    }


def _compile(compiler: str, flags: Iterable[str], source: Path, work: Path) -> Path:
    path = work / f"{source.stem}.o"
    _run([compiler, *flags, "-c", str(source), "-o", str(path)])
    return path


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIME_LIMIT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unavailable(f"{command[0]} failed: {error}") from None
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()
        raise Unavailable(f"{command[0]} failed: {errors[0] if errors else f'exit status {done.returncode}'}")


def _check_internals(target: Target, binary: Path) -> None:
    """Compare the name under which both binaries share types. Where it differs, every array would be a TypeError."""
    theirs, ours = (set(_INTERNALS.findall(path.read_bytes())) for path in (target.core, binary))
    if not theirs & ours:
        expected = b", ".join(sorted(theirs)).decode() or "none"
        raise Unavailable(
            f"nanobind {target.nanobind.version} shares no types with this MLX, which needs {expected}"
        )


def _works() -> bool:
    """Load the binary that is found, and check its results, in a process of its own: it may crash."""
    code = "import sys; from mlx_cpu_kernels.operations import install; sys.exit(not install().active)"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0


def main() -> None:
    """Build the kernels unless they are there and work, and print where they are, or why not."""
    parser = argparse.ArgumentParser(prog="python -m mlx_cpu_kernels.build", description=__doc__)
    parser.add_argument(
        "--into", type=Path, metavar="FOLDER", help="folder of the binary (default: one where they are found)"
    )
    options = parser.parse_args()
    try:
        target = Target.installed()
        path = None if options.into else find_binary(target)
        if path is None or not _works():
            path = build(target, options.into)
        print(path)  # noqa: T201 - the command's result
    except Unavailable as reason:
        sys.exit(f"The native kernels cannot be built: {reason}.")


if __name__ == "__main__":
    main()
