"""`mlx-ring service`: run `join` or `serve` as a service of the operating system."""

from __future__ import annotations

import getpass
import os
import plistlib
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, cast

import typer
from typer.main import get_command

from mlx_ring.core.environment import library_variables
from mlx_ring.core.errors import ConfigError
from mlx_ring.core.folders import home_folder
from mlx_ring.core.join_token import PREFIX
from mlx_ring.settings.config import ENVIRONMENT_PREFIX
from mlx_ring.settings.fields import flag_name
from mlx_ring.settings.settings_sources import load_settings, names_in_dotenv, names_in_environment

# ---- units of systemd and launchd; nothing is written here

Scope = Literal["user", "system"]
Keeper = Literal["systemd", "launchd"]
"""Service manager of the operating system."""
VERBS = ("join", "serve")
NO_JOIN_LINES = "--no-join-lines"
_STOP_S = 90
"""Seconds to stop: a head finishes running requests first (`--shutdown-timeout-s`)."""
_RESTART_S = 10
_DESCRIPTORS = 65536
_SECRET_FLAGS = {
    "--token": "run `mlx-ring join HEAD --token TOKEN` once by hand; a machine that has joined needs no token",
    "--api-key": "put the keys into a file that only its owner reads, and give --api-key-file FILE",
    "--ssl-keyfile-password": "unlock the key with `openssl pkey`, into a file that only its owner reads",
    "--hf-token": "log in once with `hf auth login`, which keeps the token in your home folder",
}


@dataclass(frozen=True, slots=True)
class Service:
    """Command to run as a service, and its user."""

    program: tuple[str, ...]
    """Command line of `mlx-ring`, with an absolute path."""
    arguments: tuple[str, ...]
    """Arguments of `mlx-ring`; the first is `join` or `serve`."""
    folder: Path
    """Working directory, for relative paths and `.env`."""
    scope: Scope
    user: str
    home: Path
    """Home folder of the user, which holds a user's unit."""

    @property
    def verb(self) -> str:
        return self.arguments[0]


def check_service(service: Service) -> Service:
    """Return the service if a unit can run it.

    Raises:
        ConfigError: the command is neither `join` nor `serve`, an argument has control characters, or one is a secret.
            Every user of the machine could read it in a unit.
    """
    if not service.arguments or service.verb not in VERBS:
        given = f"not {service.arguments[0]!r}" if service.arguments else "and none was given"
        raise ConfigError(
            f"A service runs {' or '.join(f'`mlx-ring {verb} …`' for verb in VERBS)}, {given}: put it after two "
            "dashes, as in `mlx-ring service install -- join mini.local`."
        )
    for word in (*service.program, *service.arguments, str(service.folder), service.user):
        if not word.isprintable():
            raise ConfigError(f"{word!r} cannot stand in a unit: it has a line break or a control character.")
    for argument in service.arguments:
        _refuse_secret(argument, argument.partition("=")[0])
    return service


def _refuse_secret(argument: str, flag: str) -> None:
    if argument.lower().startswith(PREFIX):
        flag = "--token"
    if flag in _SECRET_FLAGS:
        raise ConfigError(
            f"{flag} is a secret, but every user of this machine can read a unit: {_SECRET_FLAGS[flag]}."
        )


def unit_name(keeper: Keeper, verb: str) -> str:
    """Return the name of a service in its service manager."""
    return f"mlx-ring-{verb}.service" if keeper == "systemd" else f"mlx-ring.{verb}"


def unit_path(keeper: Keeper, scope: Scope, verb: str, home: Path) -> Path:
    """Return the path where the service manager looks for a unit."""
    name = unit_name(keeper, verb)
    if keeper == "systemd":
        system, own = Path("/etc/systemd/system"), home / ".config" / "systemd" / "user"
        return (system if scope == "system" else own) / name
    library = Path("/Library/LaunchDaemons") if scope == "system" else home / "Library" / "LaunchAgents"
    return library / f"{name}.plist"


def unit_text(keeper: Keeper, service: Service) -> str:
    """Return the unit's content.

    Raises:
        ConfigError: as `check_service`.
    """
    check_service(service)
    return systemd_unit(service) if keeper == "systemd" else launchd_plist(service)


def start_commands(keeper: Keeper, scope: Scope, verb: str, home: Path) -> list[list[str]]:
    """Return the commands that start a service now and at every boot or login, also after a change."""
    if keeper == "systemd":
        systemctl, name = _systemctl(scope), unit_name(keeper, verb)
        return [[*systemctl, "daemon-reload"], [*systemctl, "enable", name], [*systemctl, "restart", name]]
    path = str(unit_path(keeper, scope, verb, home))
    return [*stop_commands(keeper, scope, verb, home), ["launchctl", "load", "-w", path]]


def stop_commands(keeper: Keeper, scope: Scope, verb: str, home: Path) -> list[list[str]]:
    """Return the commands that stop a service and disable it, while its unit still exists."""
    if keeper == "systemd":
        return [[*_systemctl(scope), "disable", "--now", unit_name(keeper, verb)]]
    return [["launchctl", "unload", str(unit_path(keeper, scope, verb, home))]]


def _systemctl(scope: Scope) -> list[str]:
    return ["systemctl", "--user"] if scope == "user" else ["systemctl"]


def systemd_unit(service: Service) -> str:
    """Return a unit of systemd; see systemd.service(5) and systemd.kill(5)."""
    system = service.scope == "system"
    lines = [
        f"# Written by `mlx-ring service install`; `mlx-ring service install -- {_shell(service.arguments)}` again replaces it.",
        "[Unit]",
        f"Description=mlx-ring {service.verb}",
        *(("Wants=network-online.target", "After=network-online.target") if system else ()),
        "# Keep trying if the head is off for hours.",
        "StartLimitIntervalSec=0",
        "",
        "[Service]",
        "Type=exec",
        f"ExecStart={' '.join(_systemd_word(word) for word in (*service.program, *service.arguments))}",
        f"WorkingDirectory={_without_specifiers(str(service.folder))}",
        *((f"User={service.user}",) if system else ()),
        "Environment=PYTHONUNBUFFERED=1",
        "Restart=always",
        f"RestartSec={_RESTART_S}",
        *_KILLING[service.verb],
        f"TimeoutStopSec={_STOP_S}",
        "# A worker that runs out of memory is replaced; the others continue.",
        "OOMPolicy=continue",
        "# A control group with a weight, which a service of the user may lower (--yield-to-user).",
        "CPUWeight=100",
        f"LimitNOFILE={_DESCRIPTORS}",
        "NoNewPrivileges=yes",
        "UMask=0077",
        "StandardOutput=journal",
        "StandardError=journal",
        "SyslogIdentifier=mlx-ring",
        "",
        "[Install]",
        f"WantedBy={'multi-user' if system else 'default'}.target",
    ]
    return "\n".join(lines) + "\n"


_KILLING = {
    "join": ("# The agent stops its workers; systemd kills whatever is left.", "KillMode=mixed"),
    "serve": (
        "# On SIGTERM a head stops its agent and workers. After a crash, the next head takes them over.",
        "KillMode=process",
    ),
}


def _systemd_word(word: str) -> str:
    """Quote a word of ExecStart, so that it holds no specifier and no variable."""
    plain = _without_specifiers(word).replace("$", "$$")
    if re.fullmatch(r"[\w@%+=:,./$-]+", plain, re.ASCII):
        return plain
    return '"' + plain.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _without_specifiers(text: str) -> str:
    return text.replace("%", "%%")


def _shell(words: Sequence[str]) -> str:
    return shlex.join(words)


def launchd_plist(service: Service) -> str:
    """Return a property list of launchd; see launchd.plist(5)."""
    log = f"{service.home}/Library/Logs/mlx-ring-{service.verb}.log"
    content: dict[str, object] = {
        "Label": unit_name("launchd", service.verb),
        "ProgramArguments": [*service.program, *service.arguments],
        "WorkingDirectory": str(service.folder),
        # Nothing rotates the file below, so log lines go to --log-dir, which is rotated.
        "EnvironmentVariables": {"PYTHONUNBUFFERED": "1", "MLX_RING_LOG_STDERR": "off"},
        "RunAtLoad": True,
        "KeepAlive": True,
        "ThrottleInterval": _RESTART_S,
        "ExitTimeOut": _STOP_S,
        # macOS slows down background work.
        "ProcessType": "Interactive",
        # As KillMode above: after a crash, the next head takes over the agent and workers.
        "AbandonProcessGroup": service.verb == "serve",
        "SoftResourceLimits": {"NumberOfFiles": _DESCRIPTORS},
        # 0077: property lists have no octal numbers.
        "Umask": 0o077,
        "StandardOutPath": log,
        "StandardErrorPath": log,
    }
    if service.scope == "system":
        content["UserName"] = service.user
    return plistlib.dumps(content, sort_keys=False).decode()


# ---- the command

app = typer.Typer(help="Install, show and uninstall a service of systemd or launchd.", no_args_is_help=True)

_COMMAND_S = 60.0
_ACCOUNT = "run `mlx-ring service` as a user with an account"
_NO_LAN = (
    'macOS 15 and newer may keep a user\'s service from the LAN ("no route to host"); a daemon is exempt: '
    "`sudo mlx-ring service install --system --run-as USER -- ...`. See docs/macos.md."
)
ARGUMENTS = typer.Argument(metavar="-- join|serve", help="Command to run, after two dashes.")
SYSTEM = typer.Option("--system", help="Service of the whole machine, started at boot. Requires root.")
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
    print(f"{path} {_write(path, unit_text(keeper, service), service.scope)}.")
    if keeper == "launchd" and not system:
        print(_NO_LAN)
    for sentence in _left_out(keeper, service, path):
        print(sentence)
    if service.verb == "serve":
        print("It prints no join token. To let a machine join, run here: mlx-ring token create")
    commands = start_commands(keeper, service.scope, service.verb, service.home)
    if now:
        _run(commands)
        return
    print("To start it now and at every login or boot:")
    for command in commands:
        print(f"  {shlex.join(command)}")
    if keeper == "systemd" and service.scope == "user":
        print(f"It stops when you log out, unless you run: loginctl enable-linger {service.user}")


def _left_out(keeper: Keeper, service: Service, path: Path) -> Iterator[str]:
    """Yield sentences about the variables of this shell, which a unit does not have."""
    lacks = "The service does not get {} from this shell: {}.".format
    settings = sorted({*names_in_environment()} - {*names_in_dotenv(service.folder)})
    secrets: set[str] = set()
    for name in (*settings, *library_variables()):
        if advice := _SECRET_FLAGS.get(flag_name(name.removeprefix(ENVIRONMENT_PREFIX).lower())):
            secrets.add(name)
            yield lacks(name, advice)
    if settings := [name for name in settings if name not in secrets]:
        yield lacks(", ".join(settings), f"give flags, or write such lines into {service.folder / '.env'}")
    if others := [name for name in library_variables() if name not in secrets]:
        edit = shlex.join([*_systemctl(service.scope), "edit", unit_name(keeper, service.verb)])
        add = f"run `{edit}`, and add lines such as Environment={others[0]}=… below [Service]"
        if keeper == "launchd":
            add = f"add them to EnvironmentVariables in {path}, after each `install`"
        yield lacks(", ".join(others), add)


@app.command("uninstall")
def uninstall(
    verbs: Annotated[
        list[str] | None, typer.Argument(metavar="join|serve", help="Services to remove; both by default.")
    ] = None,
    system: Annotated[bool, SYSTEM] = False,
) -> None:
    """Stop the service and remove its unit.

    If there is none, the exit code is 0.
    """
    keeper, scope, home = _keeper(), _scope(system), _own_home()
    for verb in _known(verbs):
        path = unit_path(keeper, scope, verb, home)
        if not path.exists():
            print(f"{path} is not there.")
            continue
        for command in stop_commands(keeper, scope, verb, home):
            _call(command)  # if it fails, the unit is removed all the same
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
    paths = [unit_path(_keeper(), _scope(system), verb, _own_home()) for verb in VERBS]
    for path in (written := [path for path in paths if path.exists()]):
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
    user = run_as or _own_name()
    words = _without_token(tuple(arguments or ()))
    service = check_service(Service(_program(), words, Path.cwd(), _scope(system), user, _home_of(user)))
    _check_start(service)
    return service


def _without_token(arguments: tuple[str, ...]) -> tuple[str, ...]:
    """Return the arguments with which a head prints no join token: the journal would keep it, with one for each start."""
    if arguments[:1] != ("serve",) or NO_JOIN_LINES in arguments:
        return arguments
    return (arguments[0], NO_JOIN_LINES, *arguments[1:])


def _check_start(service: Service) -> None:
    """Raise what the command itself would raise at each start: for its flags, its settings, and names of models."""
    from mlx_ring.cli.flags import given_settings
    from mlx_ring.cli.join import join  # the commands of a service import what most others do without
    from mlx_ring.cli.serve import model_settings, serve
    from mlx_ring.models.model_source import full_name

    holder = typer.Typer()
    holder.command(service.verb)(serve if service.verb == "serve" else join)
    context = get_command(holder).make_context(f"mlx-ring {service.verb}", list(service.arguments[1:]))
    flags, models = given_settings(context.params), cast("list[str]", context.params.get("models") or [])
    flags |= model_settings(models, flags.get("more_models"))
    load_settings(flags, config=context.params.get("config"), folder=service.folder)
    for model in models:
        full_name(model)


def _own_name() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError) as error:
        raise ConfigError(
            f"This user, number {os.getuid()}, has no name on this machine: {_ACCOUNT}."
        ) from error


def _own_home() -> Path:
    return home_folder("services", f"set HOME, or {_ACCOUNT}")


def _home_of(user: str) -> Path:
    if user == _own_name():
        return _own_home()
    try:
        return Path(f"~{user}").expanduser()
    except RuntimeError as error:
        raise ConfigError(f"--run-as is {user}, which is no user of this machine.") from error


def _program() -> tuple[str, ...]:
    """Return the command of the console script beside this Python."""
    if (script := Path(sys.executable).with_name("mlx-ring")).exists():
        return (str(script),)
    return (sys.executable, "-c", "from mlx_ring.cli.main import main; main()")


def _known(verbs: Sequence[str] | None) -> Sequence[str]:
    for verb in verbs or ():
        if verb not in VERBS:
            raise ConfigError(f"There is no service {verb!r}: it is one of {', '.join(VERBS)}.")
    return verbs or VERBS


def _write(path: Path, text: str, scope: Scope) -> str:
    """Write the file if it differs, and return a phrase for the result."""
    try:
        if (before := path.read_text("utf-8") if path.exists() else None) == text:
            return "is already up to date"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")
    except OSError as error:
        own = "correct that, or log in as the user of the service"
        advice = own if scope == "user" else "use sudo, or leave out --system for a service of your own"
        raise ConfigError(f"{path} cannot be written ({error.strerror}): {advice}.") from error
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


def _call(command: Sequence[str]) -> subprocess.CompletedProcess[str] | None:
    if shutil.which(command[0]) is None:
        return None
    return subprocess.run(command, capture_output=True, text=True, timeout=_COMMAND_S, check=False)
