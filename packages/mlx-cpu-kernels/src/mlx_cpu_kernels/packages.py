"""Installed packages, found without importing them."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
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
        return Package(folders_of(name)[0], version(distribution))
    except (Unavailable, PackageNotFoundError):
        raise Unavailable(f"the package {distribution} is not installed") from None


def folders_of(name: str) -> list[Path]:
    """Return the folders of the package `name`: several where distributions share it. Raises `Unavailable`."""
    spec = find_spec(name)
    folders = list(spec.submodule_search_locations or ()) if spec else []
    if not folders:
        raise Unavailable(f"the package {name} is not installed")
    return [Path(folder) for folder in folders]
