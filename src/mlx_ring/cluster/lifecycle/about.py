"""What a machine tells of the mlx-ring on it. Pure.

The mlx-ring that runs here. Whatever is asked over ssh begins with it, so it brings nothing along.
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
"""Whose versions must be alike on all machines."""


@dataclass(frozen=True, slots=True)
class About:
    """One program on one machine."""

    versions: Mapping[str, str]
    state: str
    """Its state folder."""
    node: str
    """The machine's id; empty where it has none yet."""
    running: tuple[Running, ...]
    cluster: str = ""
    """A digest of the cluster's authority that it trusts; empty where it is a member of none."""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> About | None:
        """None where it is nothing of ours: another version's help, or nothing."""
        try:
            content = cast("dict[str, Any]", json.loads(text))
            running = tuple(Running(**found) for found in content.pop("running"))
            return cls(running=running, **content)
        except (ValueError, TypeError, KeyError, AttributeError):
            return None


@dataclass(frozen=True, slots=True)
class Program:
    """Where it lies, and what it says; None of what says nothing."""

    path: str
    about: About | None


@dataclass(frozen=True, slots=True)
class Found:
    """What there is on a machine."""

    programs: tuple[Program, ...]

    def like(self, versions: Mapping[str, str]) -> Program | None:
        """The first whose versions are these."""
        return next(
            (
                found
                for found in self.programs
                if found.about and dict(found.about.versions) == dict(versions)
            ),
            None,
        )


def read_found(lines: Sequence[str]) -> Found:
    """What the probe prints: fields with tabs between them."""
    rows = [line.split("\t", 2) for line in lines if line.count("\t") >= 2]  # noqa: PLR2004 - kind, path, rest
    return Found(
        tuple(Program(path, About.from_json(rest)) for kind, path, rest in rows if kind == "program")
    )


def different(found: Found, versions: Mapping[str, str]) -> str:
    """In words: how the programs differ from what runs here."""
    told: list[str] = []
    for program in found.programs:
        theirs: Mapping[str, str] = program.about.versions if program.about is not None else {}
        unlike = [
            f"{name} {theirs.get(name, 'of another version')}"
            for name in PACKAGES
            if theirs.get(name) != versions[name]
        ]
        told.append(f"{program.path} has {', '.join(unlike)}")
    return "; ".join(told) or "mlx-ring is not installed there"


OWN_PROGRAM = (sys.executable, "-c", "from mlx_ring.cli.main import main; main()")


def own_versions() -> dict[str, str]:
    """Of what runs here."""
    return {name: package_version(name) for name in PACKAGES}
