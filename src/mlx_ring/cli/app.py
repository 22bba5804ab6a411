"""Table of the commands of `mlx-ring`. Errors become a sentence and an exit code here, and nowhere else."""

from __future__ import annotations

import errno
import io
import sys
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperArgument, TyperGroup
from typer.main import get_command, get_group

from mlx_ring.cli import INTERRUPTED, LOST_OUTPUT, discard_output
from mlx_ring.core.errors import ConfigError, ModelError, PlanError, RingError, TrustError
from mlx_ring.core.lean_imports import importing
from mlx_ring.core.logs import keep_early_records

WRONG_INPUT = 2
"""Exit code for errors that the user can correct; 1 stands for all others."""
_PANELS = {
    "Models": {
        "run": "mlx_ring.cli.processes:run",
        "pull": "mlx_ring.cli.local_models:pull",
        "list": "mlx_ring.cli.local_models:list_models",
        "recommend": "mlx_ring.cli.local_models:recommend",
        "rm": "mlx_ring.cli.local_models:rm",
        "models": "mlx_ring.cli.models:app",
    },
    "Servers": {
        "serve": "mlx_ring.cli.serve:serve",
        "chat": "mlx_ring.cli.chat:chat",
        "ps": "mlx_ring.cli.processes:ps",
        "stop": "mlx_ring.cli.processes:stop",
        "service": "mlx_ring.cli.os_service:app",
    },
    "Several machines": {
        "join": "mlx_ring.cli.join:join",
        "heads": "mlx_ring.cli.join:heads",
        "token": "mlx_ring.cli.node:token_app",
        "node": "mlx_ring.cli.node:node_app",
        "replan": "mlx_ring.cli.node:replan",
        "cluster": "mlx_ring.cli.cluster:app",
    },
    "Plans and measurements": {
        "plan": "mlx_ring.cli.plan:plan",
        "capacity": "mlx_ring.cli.capacity:capacity",
        "profile": "mlx_ring.cli.profile:profile",
        "bench": "mlx_ring.cli.bench.command:bench",
        "doctor": "mlx_ring.cli.doctor.command:doctor",
    },
}
COMMANDS = {name: place for panel in _PANELS.values() for name, place in panel.items()}
"""Place of each command: a function, or a `Typer` with commands of its own. Help lists them in this order, by panel."""
_OTHER_NAMES = {
    "ask": ("run", "chat"),
    "benchmark": ("bench",),
    "delete": ("rm",),
    "download": ("pull",),
    "get": ("pull",),
    "info": ("list", "ps"),
    "load": ("models load",),
    "logs": ("cluster logs",),
    "ls": ("list",),
    "nodes": ("node list",),
    "remove": ("rm",),
    "search": ("recommend", "list"),
    "show": ("list", "ps"),
    "start": ("serve", "cluster start"),
    "status": ("ps", "cluster status"),
    "unload": ("models unload",),
}
"""Commands by the names that they have in other programs."""
_OTHER_VERBS = {
    "cluster list": "node list",
    "cluster ls": "node list",
    "models ls": "models list",
    "node ls": "node list",
    "node status": "cluster status",
}
"""The same for commands with a verb."""
_HELP = ["--help", "-h"]
_IS_WHOLE = {"int": True, "constrained-int": True, "float": False, "constrained-float": False}
"""True for a whole number, by the title of pydantic's error."""
_STYLE: dict[str, Any] = {
    "add_completion": False,
    "pretty_exceptions_enable": False,
    "rich_markup_mode": "rich",
}


class _Commands(TyperGroup):
    """Group of commands that imports only the one typed, with its libraries."""

    def list_commands(self, ctx: Any) -> list[str]:
        del ctx
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        # An unknown name loads all of them, so that the message can suggest one.
        for name in (cmd_name,) if cmd_name in COMMANDS else COMMANDS:
            if name not in self.commands:
                self.commands[name] = _load_command(name)
        return super().get_command(ctx, cmd_name)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if better := _OTHER_VERBS.get(" ".join(args[:2])):
            ctx.fail(f"No such command '{args[0]} {args[1]}'. Did you mean '{better}'?")
        if names := _OTHER_NAMES.get(args[0]):
            ctx.fail(f"No such command {args[0]!r}. Did you mean {' or '.join(map(repr, names))}?")
        return super().resolve_command(ctx, args)


def _load_command(name: str) -> Any:
    module, _, attribute = COMMANDS[name].partition(":")
    with importing():
        found = getattr(import_module(module), attribute)
    holder = typer.Typer(**_STYLE)
    panel = next(title for title, commands in _PANELS.items() if name in commands)
    if isinstance(found, typer.Typer):
        holder.add_typer(found, name=name, rich_help_panel=panel)
    else:
        holder.command(name, rich_help_panel=panel)(found)
    command = get_group(holder).commands[name]
    _unwrap_help(command)
    _name_values(command)
    return command


def _unwrap_help(command: Any) -> None:
    """Join the lines of each paragraph of the help. Typer does so in the first paragraph alone."""
    paragraphs = (command.help or "").split("\n\n")
    command.help = "\n\n".join(" ".join(each.split()) for each in paragraphs)
    for each in getattr(command, "commands", {}).values():
        _unwrap_help(each)


def _name_values(command: Any) -> None:
    """Name the values of arguments and flags as people write them. Typer names Python's types, also after `--help`."""
    context = typer.Context(command, help_option_names=_HELP)
    for each in command.get_params(context):
        if isinstance(each, TyperArgument):
            _name_argument(each)
        elif each.is_flag:
            each.metavar = ""
    for each in getattr(command, "commands", {}).values():
        _name_values(each)


def _name_argument(argument: Any) -> None:
    name = argument.metavar or argument.name.upper()
    usage = f"{name if argument.required else f'[{name}]'}{'' if argument.nargs == 1 else '...'}"
    argument.metavar = name

    def no_type(ctx: object) -> None:
        del ctx

    def usage_pieces(ctx: object) -> list[str]:
        del ctx
        return [usage]

    vars(argument).update(display_type_rich=no_type, get_usage_pieces=usage_pieces)


app = typer.Typer(
    name="mlx-ring",
    cls=_Commands,
    no_args_is_help=True,
    context_settings={"help_option_names": _HELP},
    help=(
        "A distributed inference server for large language models on MLX, compatible with the OpenAI, Anthropic and "
        "Ollama APIs.\n\n"
        "Start with [bold]mlx-ring run demo[/bold], a chat with a small built-in model, or with [bold]mlx-ring serve[/bold], "
        "which serves it on port 8100. [bold]mlx-ring recommend[/bold] names larger ones that run well here."
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
        typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit."),
    ] = False,
) -> None:
    """Take the options of the program itself."""


def run() -> int:
    """Run the command line and return the exit code. No mistake of the user ends in a traceback."""
    try:
        code = _run()
        # Python would report a failure at its own end as an ignored exception.
        if sys.stdout is not None:  # pyright: ignore[reportUnnecessaryComparison] - it is None if it was closed
            sys.stdout.flush()
    except OSError as error:
        if _has_lost_its_folder():
            _complain("The working directory does not exist any more: change to another one.")
            return WRONG_INPUT
        if error.errno not in LOST_OUTPUT or error.filename is not None:
            raise
        if error.errno != errno.EPIPE:  # the reader of a pipe may leave whenever it has enough
            _complain(
                f"The output cannot be written: {error.strerror}. Free some space, or write it elsewhere."
            )
        discard_output()
        return 1
    return code


def _has_lost_its_folder() -> bool:
    try:
        Path.cwd()
    except FileNotFoundError:
        return True
    return False


def _print_all_characters() -> None:
    """Let no name or answer end a command because the terminal's encoding lacks one of its characters."""
    # A test may have put another object there, and a closed one is None.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # as Python prints to stderr


def _run() -> int:
    keep_early_records()
    _print_all_characters()
    sys.argv[1:] = _in_full(sys.argv[1:])
    try:
        program = get_command(app)
        _name_values(program)
        code = program.main(prog_name="mlx-ring", standalone_mode=False)
    except typer.Exit as error:
        return error.exit_code
    except typer.Abort:
        return INTERRUPTED
    except typer.TyperException as error:
        message = _wrong_number(error) or error.format_message()
        if not message:  # a command without a verb has printed its help
            return 0
        _complain(f"{message}{'' if message.endswith(('.', '?')) else '.'} {_advice(error)}")
        return WRONG_INPUT
    except RingError as error:
        _complain(str(error))
        return WRONG_INPUT if isinstance(error, (ConfigError, ModelError, PlanError, TrustError)) else 1
    return code if isinstance(code, int) else 0


def _in_full(typed: list[str]) -> list[str]:
    """Return the arguments for what people type first: `demo`, `version`, `help`, `help COMMAND` and `GROUP help`."""
    match typed:
        case ["demo", *rest]:  # for those who try it without a checkout
            return ["serve", "demo", *rest]
        case ["version", *_]:
            return ["--version"]
        case ["help", "help" | "version"]:
            return ["--help"]
        case ["help", *command]:
            return [*_in_full(command), "--help"]
        case [group, "help"] if group in COMMANDS and COMMANDS[group].endswith("app"):
            return [group, "--help"]
        case _:
            return typed


def _wrong_number(error: typer.TyperException) -> str:
    """Return the sentence about the number of a flag, in the form of those about settings; empty for other errors."""
    cause: Any = error.__cause__
    is_whole = _IS_WHOLE.get(getattr(cause, "title", ""))
    if not isinstance(error, typer.BadParameter) or is_whole is None:
        return ""
    flag: Any = error.param
    bounds = {
        (False, False): "",
        (False, True): f" of {flag.max} or less",
        (True, False): f" of {flag.min} or more",
        (True, True): f" from {flag.min} to {flag.max}",
    }
    kind = f"a {'whole ' if is_whole else ''}number{bounds[flag.min is not None, flag.max is not None]}"
    return f"{flag.opts[0]} is {cause.errors()[0]['input']}; it must be {kind}."


def _advice(error: typer.TyperException) -> str:
    """Return a sentence that names the help of the command that was given."""
    context: Any = getattr(error, "ctx", None)
    if context is None:
        command = next((name for name in sys.argv[1:2] if name in COMMANDS), "")
        return (
            f"`mlx-ring {command} --help` lists its options."
            if command
            else "`mlx-ring --help` lists the commands."
        )
    listed = "commands" if isinstance(context.command, TyperGroup) else "arguments and options"
    return f"`{context.command_path} --help` lists the {listed}."


def _complain(sentence: str) -> None:
    print(f"mlx-ring: {sentence}", file=sys.stderr)
