"""`mlx-ring doctor`: find what is wrong with a machine or its network, and say how to fix it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Literal

Level = Literal["ok", "note", "warning", "broken"]
"""A note is worth knowing, a warning costs speed or room, and with what is broken a cluster does not work."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at."""

    level: Level
    what: str
    value: str
    fix: str = ""
    """What to do, in a sentence; empty where nothing is to be done."""

    def as_json(self) -> dict[str, str]:
        return asdict(self)
