"""A Python of another minor version than the one that runs the tests, if the machine has one."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from mlx_ring.cluster.lifecycle.installation import PYTHON_INFO, PYTHONS, Python, read_python

FOLDERS = ("/usr/local/bin", "/usr/bin", f"{sys.base_prefix}/bin")
OWN = f"python{sys.version_info.major}.{sys.version_info.minor}"


def other_python() -> Python | None:
    """Return a Python of the system, or one beside this one, as version managers install them; None without any."""
    return next(_found(), None)


def _found() -> Iterator[Python]:
    beside = Path(sys.base_prefix).parent.glob("*/bin/python3.*")
    for path in (*beside, *(Path(folder, f"python{one}") for folder in FOLDERS for one in PYTHONS)):
        if path.name.removeprefix("python") in PYTHONS and path.name != OWN and path.exists():
            done = subprocess.run([path, "-c", PYTHON_INFO], capture_output=True, text=True, check=False)
            if (python := read_python(str(path), done.stdout)) is not None:
                yield python
