"""Values of the default settings, with changes: for a scheduler, for the HTTP API, for agents and workers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from mlx_ring.api.settings import ApiSettings
from mlx_ring.core.engine_stats import Policy
from mlx_ring.head.served_model import policy_of
from mlx_ring.settings.config import Settings
from mlx_ring.settings.process_settings import AgentSettings, select_settings


def make_policy(**changes: Any) -> Policy:
    """Return a scheduler's configuration, without a deadline of steps unless a change says otherwise."""
    return replace(policy_of(Settings(step_deadline_s=0.0)), **changes)


def make_api_settings(**changes: Any) -> ApiSettings:
    """Return the settings of the HTTP API."""
    from mlx_ring.head.head import api_settings  # imports all of a head

    return replace(api_settings(Settings()), **changes)


def agent_settings(log_dir: Path, **changes: object) -> AgentSettings:
    """Return an agent's settings, with one BLAS thread and no spare worker unless a change says otherwise."""
    given: dict[str, object] = {"log_dir": log_dir, "blas_threads": 1, "spare_worker": "off"}
    return select_settings(AgentSettings, Settings(), **(given | changes))
