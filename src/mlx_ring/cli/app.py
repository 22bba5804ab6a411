"""The commands of `mlx-ring`, and the one place where an error becomes a sentence and an exit code."""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.metadata import version
from typing import Annotated, Any

import typer
from typer.core import TyperGroup
from typer.main import get_command, get_group

from mlx_ring.cli import INTERRUPTED
from mlx_ring.core.errors import ConfigError, ModelError, PlanError, RingError, TrustError
from mlx_ring.core.logs import keep_early_records

WRONG_INPUT = 2
"""Exit code for what the person can mend; 1 is the program's own trouble."""
COMMANDS = {
    "serve": "mlx_ring.cli.serve:serve",
    "join": "mlx_ring.cli.join:join",
    "stop": "mlx_ring.cli.stop:stop",
    "chat": "mlx_ring.cli.chat:chat",
    "plan": "mlx_ring.cli.plan:plan",
    "profile": "mlx_ring.cli.profile:profile",
    "bench": "mlx_ring.cli.bench.command:bench",
    "heads": "mlx_ring.cli.heads:heads",
    "doctor": "mlx_ring.cli.doctor.command:doctor",
    "models": "mlx_ring.cli.models:app",
    "token": "mlx_ring.cli.node:token_app",
    "node": "mlx_ring.cli.node:node_app",
    "cluster": "mlx_ring.cli.cluster:app",
    "service": "mlx_ring.cli.service:app",
}
"""Where each is: a function, or a `Typer` with commands of its own. In the order in which help lists them."""
_STYLE: dict[str, Any] = {
    "add_completion": False,
    "pretty_exceptions_enable": False,
    "rich_markup_mode": "rich",
}


class _Commands(TyperGroup):
    """Imports what is typed, and no other command with its libraries."""

    def list_commands(self, ctx: Any) -> list[str]:
        del ctx
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        # For a name that is none, all of them are there to be suggested.
        for name in (cmd_name,) if cmd_name in COMMANDS else COMMANDS:
            if name not in self.commands:
                self.commands[name] = _load_command(name)
        return super().get_command(ctx, cmd_name)


def _load_command(name: str) -> Any:
    module, _, attribute = COMMANDS[name].partition(":")
    found = getattr(import_module(module), attribute)
    holder = typer.Typer(**_STYLE)
    if isinstance(found, typer.Typer):
        holder.add_typer(found, name=name)
    else:
        holder.command(name)(found)
    return get_group(holder).commands[name]


app = typer.Typer(
    name="mlx-ring",
    cls=_Commands,
    no_args_is_help=True,
    help=(
        "Serve a large language model from this machine, its layers split over several processes, "
        "behind an OpenAI-compatible API.\n\n"
        "Begin with [bold]mlx-ring serve[/bold]: it serves a small built-in model on port 8100. "
        "Then, in another terminal, [bold]mlx-ring chat[/bold]."
    ),
    **_STYLE,
)


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
    keep_early_records()
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
