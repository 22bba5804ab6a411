"""`mlx-ring service`: run `join` or `serve` as a service of the operating system."""

from __future__ import annotations

import getpass
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from mlx_ring.cli.service_unit import (
    VERBS,
    Keeper,
    Scope,
    Service,
    check_service,
    start_commands,
    stop_commands,
    unit_path,
    unit_text,
)
from mlx_ring.core.errors import ConfigError

app = typer.Typer(help="Install, show and uninstall a service of systemd or launchd.", no_args_is_help=True)

_COMMAND_S = 60.0
ARGUMENTS = typer.Argument(metavar="-- join|serve …", help="Command to run, after two dashes.")
SYSTEM = typer.Option("--system", help="Install for the whole machine, started at boot. Requires root.")
RUN_AS = typer.Option("--run-as", metavar="USER", help="User of a --system service; yourself by default.")


@app.command("install")
def install(
    arguments: Annotated[list[str] | None, ARGUMENTS] = None,
    system: Annotated[bool, SYSTEM] = False,
    run_as: Annotated[str | None, RUN_AS] = None,
    now: Annotated[bool, typer.Option("--now", help="Start or restart it too.")] = False,
) -> None:
    """Write the unit of the service. Repeat it to replace a changed unit."""
    keeper, service = _keeper(), _service(arguments, system, run_as)
    path = unit_path(keeper, service.scope, service.verb, service.home)
    print(f"{path} {_write(path, unit_text(keeper, service))}.")
    commands = start_commands(keeper, service.scope, service.verb, service.home)
    if now:
        _run(commands)
        return
    print("To start it now and at every login or boot:")
    for command in commands:
        print(f"  {shlex.join(command)}")
    if keeper == "systemd" and service.scope == "user":
        print(f"It stops when you log out, unless you run: loginctl enable-linger {service.user}")


@app.command("uninstall")
def uninstall(
    verbs: Annotated[
        list[str] | None, typer.Argument(metavar="[join|serve]", help="Services to remove; both by default.")
    ] = None,
    system: Annotated[bool, SYSTEM] = False,
) -> None:
    """Stop the service and remove its unit.

    If there is none, the exit code is 0.
    """
    keeper, scope = _keeper(), _scope(system)
    for verb in _known(verbs):
        path = unit_path(keeper, scope, verb, Path.home())
        if not path.exists():
            print(f"{path} is not there.")
            continue
        _stop(stop_commands(keeper, scope, verb, Path.home()))
        _remove(path)
        print(f"{path} is removed.")


@app.command("show")
def show(
    arguments: Annotated[list[str] | None, ARGUMENTS] = None,
    system: Annotated[bool, SYSTEM] = False,
    run_as: Annotated[str | None, RUN_AS] = None,
) -> None:
    """Print the unit that `install` would write; without arguments, print the installed ones."""
    if arguments:
        print(unit_text(_keeper(), _service(arguments, system, run_as)), end="")
        return
    paths = [unit_path(_keeper(), _scope(system), verb, Path.home()) for verb in VERBS]
    written = [path for path in paths if path.exists()]
    for path in written:
        print(f"# {path}\n{path.read_text('utf-8')}")
    if not written:
        print(f"No service is installed: neither {' nor '.join(map(str, paths))} is there.")


def _keeper() -> Keeper:
    return "launchd" if sys.platform == "darwin" else "systemd"


def _scope(system: bool) -> Scope:
    return "system" if system else "user"


def _service(arguments: Sequence[str] | None, system: bool, run_as: str | None) -> Service:
    if run_as is not None and not system:
        raise ConfigError(
            f"--run-as is {run_as}, which needs --system, because a user's own service runs as that user."
        )
    user = run_as or getpass.getuser()
    service = Service(_program(), tuple(arguments or ()), Path.cwd(), _scope(system), user, _home_of(user))
    return check_service(service)


def _home_of(user: str) -> Path:
    if user == getpass.getuser():
        return Path.home()
    try:
        return Path(f"~{user}").expanduser()
    except RuntimeError as error:
        raise ConfigError(f"--run-as is {user}, which is no user of this machine.") from error


def _program() -> tuple[str, ...]:
    """Return the command of the console script beside this Python."""
    script = Path(sys.executable).with_name("mlx-ring")
    if script.exists():
        return (str(script),)
    return (sys.executable, "-c", "from mlx_ring.cli.main import main; main()")


def _known(verbs: Sequence[str] | None) -> Sequence[str]:
    for verb in verbs or ():
        if verb not in VERBS:
            raise ConfigError(f"There is no service {verb!r}: it is one of {', '.join(VERBS)}.")
    return verbs or VERBS


def _write(path: Path, text: str) -> str:
    """Write the file if it differs, and return a phrase for the result."""
    try:
        before = path.read_text("utf-8") if path.exists() else None
        if before == text:
            return "is already up to date"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be written ({error.strerror}): a service of the whole machine needs root; for your "
            "own, leave out --system."
        ) from error
    return "is written" if before is None else "is replaced"


def _remove(path: Path) -> None:
    try:
        path.unlink()
    except OSError as error:
        raise ConfigError(f"{path} cannot be removed ({error.strerror}).") from error


def _run(commands: Sequence[Sequence[str]]) -> None:
    for command in commands:
        done = _call(command)
        if done is None or (done.returncode != 0 and "unload" not in command):
            said = " ".join(done.stderr.split()) if done is not None else "there is no such program"
            raise ConfigError(f"`{shlex.join(command)}` failed: {said or 'without a message'}.")
        print(f"done: {shlex.join(command)}")


def _stop(commands: Sequence[Sequence[str]]) -> None:
    """Stop the service, and ignore errors because the unit is removed in any case."""
    for command in commands:
        _call(command)


def _call(command: Sequence[str]) -> subprocess.CompletedProcess[str] | None:
    if shutil.which(command[0]) is None:
        return None
    return subprocess.run(command, capture_output=True, text=True, timeout=_COMMAND_S, check=False)
