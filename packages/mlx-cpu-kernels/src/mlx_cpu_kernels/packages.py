"""Installed packages, found without importing them."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path


class Unavailable(Exception):
    """Something that the speed-up needs is missing or does not work. Its text is the reason, without a full stop."""


@dataclass(frozen=True, slots=True)
class Package:
    """Folder of an installed package, and the version of its distribution."""

    folder: Path
    version: str


def find_package(name: str, distribution: str) -> Package:
    """Find the package `name` of a distribution. Raises `Unavailable`."""
    try:
        found = Package(folders_of(name)[0], version_of(distribution))
    except Unavailable:
        raise Unavailable(f"the package {distribution} is not installed") from None
    if not found.version:
        raise Unavailable(f"the package {distribution} is not installed")
    return found


def version_of(distribution: str) -> str:
    """Return the version of an installed distribution; empty if it is not installed.

    The name of the folder of its metadata usually has it. Reading the metadata takes an import of 0.03 s of CPU time,
    which every worker would pay.
    """
    prefix = distribution.replace("-", "_")
    for place in sys.path:
        names = [folder.name for folder in Path(place).glob(f"{prefix}-*.dist-info")]
        if len(names) == 1:
            return names[0].removesuffix(".dist-info").removeprefix(f"{prefix}-")
        if names:
            break
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(distribution)
    except PackageNotFoundError:
        return ""


def folders_of(name: str) -> list[Path]:
    """Return the folders of the package `name`: several where distributions share it. Raises `Unavailable`."""
    spec = find_spec(name)
    folders = list(spec.submodule_search_locations or ()) if spec else []
    if not folders:
        raise Unavailable(f"the package {name} is not installed")
    return [Path(folder) for folder in folders]
