"""Whether a model has room on this machine, said before anything is fetched or loaded."""

from __future__ import annotations

import shutil
from pathlib import Path

from mlx_ring.core.errors import PlanError
from mlx_ring.core.process_limits import usable_memory

_DISK_RESERVE_BYTES = 1 << 30


def check_memory(name: str, needed_bytes: int) -> None:
    """Refuse what this machine could only serve by swapping.

    Raises:
        PlanError: the weights alone exceed the memory.
    """
    total = usable_memory().total_bytes
    if needed_bytes > total:
        raise PlanError(
            f"{name} needs {_gigabytes(needed_bytes)} of memory for its weights and this machine has "
            f"{_gigabytes(total)}: choose a smaller or more strongly quantized model."
        )


def check_disk(name: str, needed_bytes: int, folder: Path) -> None:
    """Refuse to fetch what would fill the disk on which the folder is, or will be.

    Raises:
        PlanError: too little is free there.
    """
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if needed_bytes + _DISK_RESERVE_BYTES > free:
        raise PlanError(
            f"{name} needs {_gigabytes(needed_bytes)} on disk and {folder} has {_gigabytes(free)} free: "
            "make room, or set HF_HOME to a folder on another disk."
        )


def _gigabytes(count: int) -> str:
    return f"{count / 1e9:.1f} GB"
