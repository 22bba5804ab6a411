"""`mlx-ring chat`: the flags of the terminal chat, which is in `chat.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mlx_ring.cli.trust import CACERT, trust
from mlx_ring.core.settings_sources import load_settings


def chat(
    url: Annotated[str, typer.Option(help="Where the server is.")] = "http://127.0.0.1:8100",
    model: Annotated[str | None, typer.Option(help="The model to ask, where the server has several.")] = None,
    system: Annotated[str | None, typer.Option(help="Instructions that stand before the talk.")] = None,
    api_key: Annotated[
        str | None,
        typer.Option(metavar="KEY", help="Where the server asks for one; MLX_RING_API_KEY otherwise."),
    ] = None,
    cacert: Annotated[Path | None, CACERT] = None,
) -> None:
    """Talk to a model that is being served, in this terminal."""
    from mlx_ring.cli.chat import run_chat  # noqa: PLC0415 - the other commands do without its libraries

    settings = load_settings({"api_key": api_key})
    key = settings.api_key[0] if settings.api_key else None
    raise typer.Exit(
        run_chat(url, model=model, system=system, api_key=key, trusted=trust(cacert, settings.ssl_certfile))
    )
