"""`mlx-ring doctor`: find what is wrong with a machine or its network, and say how to fix it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Literal

Level = Literal["ok", "note", "warning", "broken"]
"""Severity: a note informs, a warning costs speed or space, and a broken item stops a cluster from working."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of one check."""

    level: Level
    what: str
    value: str
    fix: str = ""
    """Instruction to correct it, in a sentence; empty if there is none."""

    def as_json(self) -> dict[str, str]:
        return asdict(self)
