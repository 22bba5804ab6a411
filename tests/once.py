"""What is made once in a run of the tests, by whichever of its processes asks first."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mlx_ring.host.private_files import locked


def once(folder: Path, make: Callable[[], object]) -> Any:
    """What `make` has returned, as JSON has it; what it wrote to the folder is there too."""
    told = folder / "made.json"
    with locked(folder):
        if not told.exists():
            told.write_text(json.dumps(make()))
    return json.loads(told.read_text())
