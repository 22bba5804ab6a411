"""The running program and its dependencies as one archive, for machines without internet access."""

from __future__ import annotations

import contextlib
import functools
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path, PurePosixPath
from typing import IO

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import mlx_ring
from mlx_cpu_kernels.build import BINARIES, SOURCES, Target, find_binary
from mlx_cpu_kernels.packages import Unavailable
from mlx_ring.cluster.lifecycle.installation import PACKAGES
from mlx_ring.cluster.lifecycle.systems import PYTHON_INFO, Python, Release, lowest_release, read_python
from mlx_ring.cluster.lifecycle.wheels import Wanted
from mlx_ring.core.errors import ConfigError

_OWN = "mlx-ring"
_VENDORED = "vendored"
"""Folder of the program that has the kernels where they are no distribution of their own. They are sent as one."""
_FETCHERS = ("uv",)
"""Packages that are not sent: they are large and useless without internet access."""
_EXTRAS = ("otel",)
"""Extras that are sent too if they are installed here."""
_NO_PACKAGES = ("bin", ".lock")
"""Entries that uv adds to a folder and that belong to no package."""


@functools.cache
def python_here() -> Python | None:
    """Return the running interpreter; None if it is an unsupported kind."""
    done = subprocess.run([sys.executable, "-c", PYTHON_INFO], capture_output=True, text=True, check=False)
    return read_python(sys.executable, done.stdout)


def lowest_here(here: Python) -> Release:
    """Return the lowest release of the C library or of macOS that the installed packages run with."""
    return max(lowest_release(_tags(found)) or here.release for found in needed_distributions())


def _tags(found: Distribution) -> list[str]:
    lines = (found.read_text("WHEEL") or "").splitlines()
    return [line.removeprefix("Tag: ") for line in lines if line.startswith("Tag: ")]


def wanted_here() -> Wanted:
    """Return the packages that a machine of another system needs to run the same versions."""
    versions = {canonicalize_name(found.name): found.version for found in needed_distributions()}
    exact = tuple(f"{name}=={versions[canonicalize_name(name)]}" for name in PACKAGES if name != _OWN)
    taken = {text for extra in extras_here() for text in _asked_by(extra)}
    requirements = [
        text.partition(";")[0].strip() if text in taken else text
        for text in distribution(_OWN).requires or ()
        if Requirement(text).name not in _FETCHERS
    ]
    preferred = (f"{name}=={version}" for name, version in sorted(versions.items()) if name != _OWN)
    return Wanted(tuple(requirements), exact, tuple(preferred))


def needed_distributions(name: str = _OWN) -> list[Distribution]:
    """Return a distribution and all its requirements on this machine, each once."""
    extras = extras_here() if name == _OWN else ()
    waiting = [(name, extra) for extra in ("", *extras)]
    seen, found = set[tuple[str, str]](), dict[str, Distribution]()
    while waiting:
        entry = waiting.pop()
        if entry in seen:
            continue
        seen.add(entry)
        known = found.setdefault(entry[0], distribution(entry[0]))
        for text in known.requires or ():
            requirement = Requirement(text)
            if requirement.name in _FETCHERS:
                continue
            if requirement.marker is None or requirement.marker.evaluate({"extra": entry[1]}):
                key = canonicalize_name(requirement.name)
                waiting += [(key, extra) for extra in ("", *requirement.extras)]
    return list(found.values())


def extras_here() -> tuple[str, ...]:
    """Return the extras of mlx-ring that are sent too."""
    return tuple(extra for extra in _EXTRAS if all(map(_is_here, _asked_by(extra))))


def _asked_by(extra: str) -> list[str]:
    """Return the requirements that belong to this extra alone."""
    markers = [(text, Requirement(text).marker) for text in distribution(_OWN).requires or ()]
    return [
        text
        for text, marker in markers
        if marker is not None and marker.evaluate({"extra": extra}) and not marker.evaluate({"extra": ""})
    ]


def _is_here(requirement: str) -> bool:
    try:
        distribution(Requirement(requirement).name)
    except PackageNotFoundError:
        return False
    return True


def write_archive(stream: IO[bytes], packages: Path | None = None) -> None:
    """Write a tar archive with the content of `site-packages`.

    Args:
        stream: the stream to write to.
        packages: the folder of packages to send with the program; by default, the installed ones.

    Raises:
        ConfigError: a dependency whose metadata do not list its files.
    """
    with tarfile.open(fileobj=stream, mode="w|") as archive:
        for name, path in archived_files(packages):
            archive.add(path, name, recursive=False, filter=of_nobody)


def of_nobody(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    """Remove the owner, and write access for others: user IDs differ between machines."""
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    entry.mode &= 0o755
    return entry


def archived_files(packages: Path | None = None) -> Iterator[tuple[str, Path]]:
    """Yield each file's name in the archive and its local path."""
    for package in (Path(next(iter(mlx_ring.__path__))), SOURCES.parent):
        for name, path in _files_in(package):
            if name.parts[0] != _VENDORED:
                yield str(PurePosixPath(package.name, name)), path
    yield from _kernels()
    for found in needed_distributions() if packages is None else [distribution(_OWN)]:
        yield from _files_of(found, only_metadata=canonicalize_name(found.name) == _OWN)
    if packages is not None:
        for name, path in _files_in(packages):
            if name.parts[0] not in _NO_PACKAGES:
                yield str(name), path


def _kernels() -> Iterator[tuple[str, Path]]:
    """Yield the native kernels that were compiled here: a machine of the same system needs no compiler then."""
    with contextlib.suppress(Unavailable):
        target = Target.installed()
        binary = find_binary(target)
        if binary is not None and not binary.is_relative_to(BINARIES):
            yield str(PurePosixPath("mlx_cpu_kernels", BINARIES.name, target.key, binary.name)), binary


def _files_in(folder: Path) -> Iterator[tuple[PurePosixPath, Path]]:
    for path in sorted(folder.rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts:
            yield PurePosixPath(path.relative_to(folder)), path


def _files_of(found: Distribution, *, only_metadata: bool) -> Iterator[tuple[str, Path]]:
    """Yield a distribution's files; only its metadata for a package that may be in a checkout.

    A program that was itself sent here has no list of files, so its metadata folder is read instead.
    """
    if only_metadata and found.files is None:
        yield from _own_metadata(found)
        return
    if found.files is None:
        raise ConfigError(
            f"{found.name} has no list of its files, so it cannot be sent to other machines: "
            "install it as a wheel."
        )
    for file in found.files:
        is_metadata = file.parts[0].endswith(".dist-info")
        if ".." in file.parts or "__pycache__" in file.parts or file.is_absolute():
            continue
        if only_metadata and (not is_metadata or file.name in ("direct_url.json", "RECORD")):
            continue
        path = Path(str(found.locate_file(file)))
        if path.is_file():
            yield str(file), path


def _own_metadata(found: Distribution) -> Iterator[tuple[str, Path]]:
    """Yield the files of the metadata folder that the version was read from."""
    site = Path(str(found.locate_file("")))
    for folder in site.glob(f"{_OWN.replace('-', '_')}-{found.version}.dist-info"):
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                yield str(PurePosixPath(path.relative_to(site))), path
