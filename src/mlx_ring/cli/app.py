"""The commands of `mlx-ring`, and the one place where an error becomes a sentence and an exit code."""

from __future__ import annotations

import sys
from importlib.metadata import version
from typing import Annotated

import typer
from typer.main import get_command

from mlx_ring.cli.bench.command import bench
from mlx_ring.cli.cluster import app as cluster_app
from mlx_ring.cli.doctor.command import doctor
from mlx_ring.cli.heads import heads
from mlx_ring.cli.join import join
from mlx_ring.cli.main import INTERRUPTED
from mlx_ring.cli.models import app as models_app
from mlx_ring.cli.node import app as node_app
from mlx_ring.cli.plan import plan
from mlx_ring.cli.profile import profile
from mlx_ring.cli.serve import serve
from mlx_ring.cli.service import app as service_app
from mlx_ring.cli.stop import stop
from mlx_ring.cli.talk import chat
from mlx_ring.cli.token import app as token_app
from mlx_ring.core.errors import ConfigError, ModelError, PlanError, RingError, TrustError

WRONG_INPUT = 2
"""Exit code for what the person can mend; 1 is the program's own trouble."""

app = typer.Typer(
    name="mlx-ring",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help=(
        "Serve a large language model from this machine, its layers split over several processes, "
        "behind an OpenAI-compatible API.\n\n"
        "Begin with [bold]mlx-ring serve[/bold]: it serves a small built-in model on port 8100. "
        "Then, in another terminal, [bold]mlx-ring chat[/bold]."
    ),
)
app.command()(serve)
app.command()(join)
app.command()(stop)
app.command()(chat)
app.command()(plan)
app.command()(profile)
app.command()(bench)
app.command()(heads)
app.command()(doctor)
app.add_typer(models_app, name="models")
app.add_typer(token_app, name="token")
app.add_typer(node_app, name="node")
app.add_typer(cluster_app, name="cluster")
app.add_typer(service_app, name="service")


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"mlx-ring {version('mlx-ring')}")
        raise typer.Exit


@app.callback()
def _common(  # pyright: ignore[reportUnusedFunction] - typer calls it
    _version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and end."),
    ] = False,
) -> None:
    """Options of the program itself."""


def run() -> int:
    """Run what was typed; returns the exit code. Nothing that a person did ends in a traceback."""
    try:
        code = get_command(app).main(prog_name="mlx-ring", standalone_mode=False)
    except typer.Exit as error:
        return error.exit_code
    except typer.Abort:
        return INTERRUPTED
    except typer.TyperException as error:
        _complain(f"{str(error).rstrip('.')}. `mlx-ring --help` tells what there is.")
        return WRONG_INPUT
    except RingError as error:
        _complain(str(error))
        return WRONG_INPUT if isinstance(error, (ConfigError, ModelError, PlanError, TrustError)) else 1
    return code if isinstance(code, int) else 0


def _complain(sentence: str) -> None:
    print(f"mlx-ring: {sentence}", file=sys.stderr)
