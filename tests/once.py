"""Make something once in a run of the tests, in the process that first needs it."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from mlx_ring.host.private_files import locked

_run: list[Path] = []


def use_folder(folder: Path) -> None:
    """Set the folder that all processes of this run share."""
    _run[:] = [folder]


def folder_of_run() -> Path:
    """Return the folder that all processes of this run share. A program that sets none has one until it ends."""
    return _run[0] if _run else Path(_folder_of_program().name)


@cache
def _folder_of_program() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="mlx-ring-once-")


def once(folder: Path, make: Callable[[], object]) -> Any:
    """Return the result of `make`, read from JSON. Files that it wrote into the folder are there too."""
    result = folder / "made.json"
    with locked(folder):
        if not result.exists():
            result.write_text(json.dumps(make()))
    return json.loads(result.read_text())
