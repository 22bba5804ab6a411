"""`mlx-ring models`: which models can be served without fetching anything."""

from __future__ import annotations

import typer
from rich.console import Console
from rich.table import Table

from mlx_ring.core.model_source import list_local_models

app = typer.Typer(help="The models on this machine.", no_args_is_help=True)


@app.callback()
def _models() -> None:  # pyright: ignore[reportUnusedFunction] - typer calls it; without it `list` would be no word
    """The models on this machine."""


@app.command("list")
def list_models() -> None:
    """List the built-in models and those in the hub's cache that are complete."""
    table = Table("model", "from", "kind", box=None, pad_edge=False)
    for title in ("size", "layers", "context"):
        table.add_column(title, justify="right")
    for model in list_local_models():
        folder = model.folder
        table.add_row(
            model.name,
            model.kind,
            folder.model_type,
            f"{folder.weight_bytes / 1e6:,.0f} MB",
            str(folder.num_layers),
            f"{folder.context_length:,}",
        )
    console = Console(soft_wrap=True)
    console.print(table)
    console.print(
        "\nServe one with `mlx-ring serve MODEL`; a folder or any hub id works too.", highlight=False
    )
