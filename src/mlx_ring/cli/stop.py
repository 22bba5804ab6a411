"""`mlx-ring stop`: end what runs on this machine."""

from __future__ import annotations

from typing import Annotated

import typer

from mlx_ring.host.running import end_running
from mlx_ring.settings.config import Settings, state_folder
from mlx_ring.settings.settings_sources import load_settings


def stop(
    state_dir: Annotated[
        str | None, typer.Option(metavar="DIR", help=Settings.model_fields["state_dir"].description)
    ] = None,
) -> None:
    """End the head and the agent of this machine, with their workers; also what a head that was killed has left.

    What runs with another state folder stays. Nothing to end is no error.
    """
    told = end_running(state_folder(load_settings({"state_dir": state_dir})))
    print("\n".join(told) or "Nothing of mlx-ring runs here.")
