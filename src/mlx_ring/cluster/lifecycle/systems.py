"""Interpreters, and which binaries they can load. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from mlx_ring.core.errors import HostFailed

Release = tuple[int, int]
"""Major and minor number of a C library, or of macOS."""

PYTHONS = ("3.14", "3.13", "3.12", "3.11")
"""Minor versions for which all that is needed has wheels, the newest first."""

TELL_PYTHON = """
import os, platform, struct, sys, sysconfig
def library():
    if sys.platform == "darwin":
        return "macos " + platform.mac_ver()[0]
    try:
        return os.confstr("CS_GNU_LIBC_VERSION") or "musl 0.0"
    except (ValueError, OSError):
        return "musl 0.0"
is_usual = sys.implementation.name == "cpython" and not sysconfig.get_config_var("Py_GIL_DISABLED")
if is_usual and struct.calcsize("P") == 8 and sys.version_info >= (3, 11):
    print(sys.platform, platform.machine(), "%d.%d" % sys.version_info[:2], library())
"""
"""An interpreter that runs this tells what `read_python` reads; one that is of no use tells nothing: PyPy, one without the
global lock, one of 32 bits, as on a small board whose processor has 64."""

_MACHINES = {"arm64": "aarch64", "amd64": "x86_64"}
_SYSTEMS = {"linux": "Linux", "darwin": "macOS"}
_LINUX_MACHINES = ("x86_64", "aarch64")
_MANYLINUX = (17, 28, *range(31, 41))
"""Minor numbers of glibc 2 that uv has names for."""
_TAGGED = re.compile(r"(?:manylinux|musllinux|macosx)_(\d+)_(\d+)_")
_OLD_TAGGED = re.compile(r"manylinux(?:1|2010|2014)_")


@dataclass(frozen=True, slots=True)
class Python:
    """An interpreter on a machine."""

    path: str
    system: str
    """As `sys.platform` has it."""
    machine: str
    version: str
    """Without the patch: binaries are for one minor version."""
    library: str
    """glibc, musl or macos."""
    release: Release
    """Of the library."""

    def __str__(self) -> str:
        system = _SYSTEMS.get(self.system, self.system)
        number = "" if self.library == "musl" else f" {self.release[0]}.{self.release[1]}"
        library = "" if self.system == "darwin" else f" with {self.library}"
        return f"{system}{library}{number} on {self.machine}, with Python {self.version}"

    def can_load(self, made_for: Python, lowest: Release) -> bool:
        """Whether what is installed for another interpreter can be copied to this one.

        Args:
            made_for: the other one.
            lowest: of its library, that its binaries ask for.
        """
        alike = ("system", "machine", "version", "library")
        return all(getattr(self, name) == getattr(made_for, name) for name in alike) and (
            self.release >= lowest
        )


def read_python(path: str, told: str) -> Python | None:
    """What `TELL_PYTHON` prints; None where that is nothing of the kind."""
    words = told.split()
    if len(words) != 5:  # noqa: PLR2004 - system, machine, version, library, its release
        return None
    system, machine, version, library, release = words
    return Python(path, system, machine, version, library, _release(release))


def read_pythons(lines: Iterable[str]) -> list[Python]:
    """Those of a machine, a line each: `python`, a path, and what `TELL_PYTHON` prints, with tabs between them."""
    rows = [line.split("\t", 2) for line in lines if line.startswith("python\t") and line.count("\t") >= 2]  # noqa: PLR2004 - as said
    found = (read_python(path, told) for _, path, told in rows)
    return [python for python in found if python is not None]


def best_python(pythons: Sequence[Python], here: Python | None, lowest: Release) -> Python | None:
    """Of a machine's interpreters: one that can load a copy, else one of the version here, else the newest."""

    def rank(python: Python) -> tuple[bool, bool, bool, int]:
        can_load = here is not None and python.can_load(here, lowest)
        # On Apple silicon too, where it is translated.
        is_intel_mac = (python.system, python.machine) == ("darwin", "x86_64")
        is_as_here = here is not None and python.version == here.version
        known = PYTHONS.index(python.version) if python.version in PYTHONS else len(PYTHONS)
        return (not can_load, is_intel_mac, not is_as_here, known)

    return min(pythons, key=rank, default=None)


def lowest_release(tags: Iterable[str]) -> Release | None:
    """Of a C library or of macOS, with which a wheel runs; None where its tags do not say, as when it was built here.

    Args:
        tags: of one wheel, as `cp312-cp312-manylinux_2_28_x86_64`; it is for any of them.
    """
    found: list[Release] = []
    for tag in tags:
        platform = tag.rpartition("-")[2]
        if platform == "any" or _OLD_TAGGED.match(platform):
            return (0, 0)
        if match := _TAGGED.match(platform):
            found.append((int(match[1]), int(match[2])))
    return min(found, default=None)


def wheel_platform(python: Python) -> str:
    """What uv calls the platform whose wheels run there.

    Raises:
        HostFailed: it has no name for it, so that there are no wheels.
    """
    machine = _MACHINES.get(python.machine.lower(), python.machine)
    if python.system == "darwin":
        return f"{machine}-apple-darwin"
    if python.system != "linux" or machine not in _LINUX_MACHINES:
        raise HostFailed(
            f"there are no wheels for {python}: a cluster's machines are Macs with Apple silicon, or Linux on x86_64 or aarch64"
        )
    if python.library == "musl":
        return f"{machine}-unknown-linux-musl"
    fit = [minor for minor in _MANYLINUX if (2, minor) <= python.release]
    return f"{machine}-manylinux_2_{max(fit, default=_MANYLINUX[0])}"


def wheel_variables(python: Python) -> dict[str, str]:
    """What uv reads in the environment for it: wheels for Macs are for a macOS or newer ones."""
    if python.system != "darwin":
        return {}
    return {"MACOSX_DEPLOYMENT_TARGET": f"{python.release[0]}.{python.release[1]}"}


def _release(text: str) -> Release:
    major, minor, *_ = *map(int, re.findall(r"\d+", text)), 0, 0
    return (major, minor)
