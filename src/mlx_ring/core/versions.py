"""Which versions of packages are installed."""

from __future__ import annotations

from functools import cache
from importlib.metadata import PackageNotFoundError, version


@cache
def package_version(name: str) -> str:
    """The installed version of a package, "absent" where there is none."""
    try:
        return version(name)
    except PackageNotFoundError:
        return "absent"
