"""The running program with all that it needs, as one archive: for machines that have no internet."""

from __future__ import annotations

import platform
import sys
import tarfile
from collections.abc import Iterator
from importlib.metadata import Distribution, distribution
from pathlib import Path, PurePosixPath
from typing import IO

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import mlx_ring
from mlx_ring.core.errors import ConfigError

_OWN = "mlx-ring"


def platform_of_here() -> str:
    """What machines must have in common to run the same binaries."""
    return f"{sys.platform} {platform.machine()}"


def python_version() -> str:
    """Binaries are for one minor version."""
    return f"{sys.version_info.major}.{sys.version_info.minor}"


def needed_distributions(name: str = _OWN) -> list[Distribution]:
    """A distribution and all that it requires here, each once."""
    waiting, seen, found = [(name, "")], set[tuple[str, str]](), dict[str, Distribution]()
    while waiting:
        entry = waiting.pop()
        if entry in seen:
            continue
        seen.add(entry)
        known = found.setdefault(entry[0], distribution(entry[0]))
        for text in known.requires or ():
            requirement = Requirement(text)
            if requirement.marker is None or requirement.marker.evaluate({"extra": entry[1]}):
                key = canonicalize_name(requirement.name)
                waiting += [(key, extra) for extra in ("", *requirement.extras)]
    return list(found.values())


def write_archive(stream: IO[bytes]) -> None:
    """A tar of what lies in `site-packages`.

    Raises:
        ConfigError: something that is needed was not installed as packages are.
    """
    with tarfile.open(fileobj=stream, mode="w|") as archive:
        for name, path in archived_files():
            archive.add(path, name, recursive=False, filter=of_nobody)


def of_nobody(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    """Without whose it is here, and writable by its owner alone: users have other numbers elsewhere."""
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    entry.mode &= 0o755
    return entry


def archived_files() -> Iterator[tuple[str, Path]]:
    """Each file's name in the archive, and where it lies here."""
    package = Path(next(iter(mlx_ring.__path__)))
    for path in sorted(package.rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts:
            yield str(PurePosixPath("mlx_ring", path.relative_to(package))), path
    for found in needed_distributions():
        yield from _files_of(found, only_metadata=canonicalize_name(found.name) == _OWN)


def _files_of(found: Distribution, *, only_metadata: bool) -> Iterator[tuple[str, Path]]:
    """`only_metadata`: the package itself may lie in a checkout, and is taken from there.

    Where it was itself sent there is no list of its files, and its metadata are those of its folder.
    """
    if only_metadata and found.files is None:
        yield from _own_metadata(found)
        return
    if found.files is None:
        raise ConfigError(
            f"{found.name} does not say which files are its own: it cannot be sent to other machines."
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
    """What lies in the folder that the version was read from."""
    site = Path(str(found.locate_file("")))
    for folder in site.glob(f"{_OWN.replace('-', '_')}-{found.version}.dist-info"):
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                yield str(PurePosixPath(path.relative_to(site))), path
