"""Description of a machine's mlx-ring installations. Pure.

Every command over ssh imports this module, so it imports little.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, cast

from mlx_ring.core.environment import package_version
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
