"""`mlx-ring stop`: end the processes of mlx-ring on this machine."""

from __future__ import annotations

import tempfile
from pathlib import Path

from mlx_ring.cli.flags import with_settings
from mlx_ring.host.running import end_running, remove_abandoned
from mlx_ring.settings.config import state_folder
from mlx_ring.settings.settings_sources import load_settings


@with_settings(("state_dir",))
def stop(*, flags: dict[str, object]) -> None:
    """End the head and the agent of this machine, their workers, and processes that a killed head left behind.

    Processes with another state folder keep running. If nothing runs, the exit code is 0.
    """
    settings = load_settings(flags)
    ended = end_running(state_folder(settings))
    remove_abandoned(settings.run_dir or Path(tempfile.gettempdir()))
    print("\n".join(ended) or "No mlx-ring process runs here.")
