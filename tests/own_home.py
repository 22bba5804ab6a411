"""An empty home for a run of tests: profiles, models, clusters and settings of the user must not change a result."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

_PREFIX = "mlx-ring-tests-home-"
_USER_SETTINGS = ("XDG_", "MLX_RING_", "HF_", "HUGGING_FACE_", "OLLAMA_", "OPENAI_", "ANTHROPIC_")
"""Prefixes of variables by which a user's folders, accounts and settings reach programs."""
_CACHES = {"UV_CACHE_DIR": "uv", "PIP_CACHE_DIR": "pip"}
"""Caches of downloaded packages, which stay the user's: a run would fetch all again."""
_made: list[Path] = []
"""The home, in the process that made it."""


def use_own_home() -> None:
    """Give this process and its children an empty home. Processes of a run inherit the one of the first."""
    if Path.home().name.startswith(_PREFIX):
        return
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    for variable, name in _CACHES.items():
        os.environ.setdefault(variable, str(caches / name))
    for variable in [name for name in os.environ if name.startswith(_USER_SETTINGS)]:
        del os.environ[variable]
    _made.append(Path(tempfile.mkdtemp(prefix=_PREFIX)))
    os.environ["HOME"] = str(_made[0])


def remove_own_home() -> None:
    """Remove the home that this process made, at the end of the run."""
    for home in _made:
        shutil.rmtree(home, ignore_errors=True)
