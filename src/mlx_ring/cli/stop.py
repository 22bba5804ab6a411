"""`mlx-ring stop`: end the processes of mlx-ring on this machine."""

from __future__ import annotations

from mlx_ring.cli.flags import with_settings
from mlx_ring.host.running import end_running
from mlx_ring.settings.config import state_folder
from mlx_ring.settings.settings_sources import load_settings


@with_settings(("state_dir",))
def stop(*, flags: dict[str, object]) -> None:
    """End the head and the agent of this machine with their workers, and what a killed head has left.

    Processes with another state folder stay. Having nothing to end is no error.
    """
    ended = end_running(state_folder(load_settings(flags)))
    print("\n".join(ended) or "No process of mlx-ring runs here.")
