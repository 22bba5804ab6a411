"""Python interpreters and the binaries that they can load. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from mlx_ring.core.errors import HostFailed

Release = tuple[int, int]
"""Major and minor number of a C library, or of macOS."""

PYTHONS = ("3.14", "3.13", "3.12", "3.11")
"""Minor versions for which all dependencies have wheels, newest first."""

PYTHON_INFO = """
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
"""Script by which an interpreter describes itself for `read_python`.

An unsupported interpreter prints nothing: PyPy, a free-threaded build, or a 32-bit build, which some boards with 64-bit
processors have.
"""

_MACHINES = {"arm64": "aarch64", "amd64": "x86_64"}
_SYSTEMS = {"linux": "Linux", "darwin": "macOS"}
_LINUX_MACHINES = ("x86_64", "aarch64")
_MANYLINUX = (17, 28, *range(31, 41))
"""Minor versions of glibc 2 for which uv has platform names."""
_TAGGED = re.compile(r"(?:manylinux|musllinux|macosx)_(\d+)_(\d+)_")
_OLD_TAGGED = re.compile(r"manylinux(?:1|2010|2014)_")


@dataclass(frozen=True, slots=True)
class Python:
    """An interpreter on a machine."""

    path: str
    system: str
    """The value of `sys.platform`."""
    machine: str
    version: str
    """Major and minor version, because binaries are for one minor version."""
    library: str
    """glibc, musl or macos."""
    release: Release
    """The library's release."""

    def __str__(self) -> str:
        system = _SYSTEMS.get(self.system, self.system)
        number = "" if self.library == "musl" else f" {self.release[0]}.{self.release[1]}"
        library = "" if self.system == "darwin" else f" with {self.library}"
        return f"{system}{library}{number} on {self.machine}, with Python {self.version}"

    def can_load(self, made_for: Python, lowest: Release) -> bool:
        """Return True if packages installed for another interpreter can be copied to this one.

        Args:
            made_for: the other interpreter.
            lowest: the lowest release of the library that its binaries need.
        """
        same = ("system", "machine", "version", "library")
        return all(getattr(self, name) == getattr(made_for, name) for name in same) and (
            self.release >= lowest
        )


def read_python(path: str, output: str) -> Python | None:
    """Parse the output of `PYTHON_INFO`; return None for other text."""
    words = output.split()
    if len(words) != 5:  # noqa: PLR2004 - system, machine, version, library, its release
        return None
    system, machine, version, library, release = words
    return Python(path, system, machine, version, library, _release(release))


def read_pythons(lines: Iterable[str]) -> list[Python]:
    """Parse a machine's interpreters, one a line: `python`, a path and the output of `PYTHON_INFO`, with tabs between."""
    rows = [line.split("\t", 2) for line in lines if line.startswith("python\t") and line.count("\t") >= 2]  # noqa: PLR2004 - see the docstring
    found = (read_python(path, output) for _, path, output in rows)
    return [python for python in found if python is not None]


def best_python(pythons: Sequence[Python], here: Python | None, lowest: Release) -> Python | None:
    """Return the interpreter that can load a copy; otherwise one of the local version, or the newest."""

    def rank(python: Python) -> tuple[bool, bool, bool, int]:
        can_load = here is not None and python.can_load(here, lowest)
        # It also runs on Apple silicon, but translated.
        is_intel_mac = (python.system, python.machine) == ("darwin", "x86_64")
        is_as_here = here is not None and python.version == here.version
        known = PYTHONS.index(python.version) if python.version in PYTHONS else len(PYTHONS)
        return (not can_load, is_intel_mac, not is_as_here, known)

    return min(pythons, key=rank, default=None)


def lowest_release(tags: Iterable[str]) -> Release | None:
    """Return the lowest release of the C library or of macOS for a wheel.

    It is None if the tags do not say, for example for a wheel that was built locally.

    Args:
        tags: the tags of one wheel, such as `cp312-cp312-manylinux_2_28_x86_64`; any of them may apply.
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
    """Return uv's name of the platform whose wheels run there.

    Raises:
        HostFailed: a platform without a name in uv, so without wheels.
    """
    machine = _MACHINES.get(python.machine.lower(), python.machine)
    if python.system == "darwin":
        return f"{machine}-apple-darwin"
    if python.system != "linux" or machine not in _LINUX_MACHINES:
        raise HostFailed(
            f"there are no wheels for {python}: use a Mac with Apple silicon, or Linux on x86_64 or aarch64"
        )
    if python.library == "musl":
        return f"{machine}-unknown-linux-musl"
    fit = [minor for minor in _MANYLINUX if (2, minor) <= python.release]
    return f"{machine}-manylinux_2_{max(fit, default=_MANYLINUX[0])}"


def wheel_variables(python: Python) -> dict[str, str]:
    """Return uv's environment variables for it: a wheel for Macs needs a minimum release of macOS."""
    if python.system != "darwin":
        return {}
    return {"MACOSX_DEPLOYMENT_TARGET": f"{python.release[0]}.{python.release[1]}"}


def _release(text: str) -> Release:
    major, minor, *_ = *map(int, re.findall(r"\d+", text)), 0, 0
    return (major, minor)
