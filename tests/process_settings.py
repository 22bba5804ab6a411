"""Settings of agents and workers under test."""

from __future__ import annotations

from pathlib import Path

from mlx_ring.settings.config import Settings
from mlx_ring.settings.process_settings import AgentSettings, select_settings


def agent_settings(log_dir: Path, **changes: object) -> AgentSettings:
    """Return the defaults, with one BLAS thread and no spare worker unless a change says otherwise."""
    given: dict[str, object] = {"log_dir": log_dir, "blas_threads": 1, "spare_worker": "off"}
    return select_settings(AgentSettings, Settings(), **(given | changes))
