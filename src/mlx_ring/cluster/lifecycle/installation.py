"""Description of a machine's mlx-ring installations, its Python interpreters and the binaries that these can load. Pure.

Every command over ssh imports this module, so it imports little.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, cast

from mlx_ring.core.environment import package_version
from mlx_ring.core.errors import HostFailed
from mlx_ring.host.running import Running

PACKAGES = ("mlx-ring", "mlx", "mlx-lm")
"""Packages that must have the same version on all machines."""


@dataclass(frozen=True, slots=True)
class Installation:
    """Versions, state and running processes of one mlx-ring installation."""

    versions: Mapping[str, str]
    state: str
    """The state folder."""
    node: str
    """The machine's ID; empty if it has none yet."""
    running: tuple[Running, ...]
    cluster: str = ""
    """Digest of the trusted cluster authority; empty if the machine is in no cluster."""

    def to_json(self) -> str:
        """Return the description as JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Installation | None:
        """Parse a description; return None for other text, such as another version's help."""
        try:
            content = cast("dict[str, Any]", json.loads(text))
            running = tuple(Running(**found) for found in content.pop("running"))
            return cls(running=running, **content)
        except (ValueError, TypeError, KeyError, AttributeError):
            return None


@dataclass(frozen=True, slots=True)
class Program:
    """An mlx-ring program on a machine."""

    path: str
    installation: Installation | None
    """Its description of itself; None if it gave none that this version can read."""


@dataclass(frozen=True, slots=True)
class FoundPrograms:
    """The mlx-ring programs found on a machine."""

    programs: tuple[Program, ...]

    def like(self, versions: Mapping[str, str]) -> Program | None:
        """Return the first program with exactly these versions."""
        return next(
            (
                found
                for found in self.programs
                if found.installation and dict(found.installation.versions) == dict(versions)
            ),
            None,
        )


def read_found(lines: Sequence[str]) -> FoundPrograms:
    """Parse the probe's output, whose fields are separated by tabs."""
    rows = [line.split("\t", 2) for line in lines if line.count("\t") >= 2]  # noqa: PLR2004 - kind, path, rest
    return FoundPrograms(
        tuple(Program(path, Installation.from_json(rest)) for kind, path, rest in rows if kind == "program")
    )


def different(found: FoundPrograms, versions: Mapping[str, str]) -> str:
    """Describe how the versions of the programs differ from the local ones."""
    differences: list[str] = []
    for program in found.programs:
        theirs: Mapping[str, str] = program.installation.versions if program.installation is not None else {}
        unlike = [
            f"{name} {theirs.get(name, 'of an unknown version')}"
            for name in PACKAGES
            if theirs.get(name) != versions[name]
        ]
        differences.append(f"{program.path} has {', '.join(unlike)}")
    return "; ".join(differences) or "mlx-ring is not installed there"


OWN_PROGRAM = (sys.executable, "-c", "from mlx_ring.cli.main import main; main()")


def own_versions() -> dict[str, str]:
    """Return the versions of the local packages."""
    return {name: package_version(name) for name in PACKAGES}


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
