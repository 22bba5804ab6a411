"""Units of systemd and launchd that run `mlx-ring join` or `mlx-ring serve`. Pure: nothing is written here."""

from __future__ import annotations

import plistlib
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mlx_ring.core.errors import ConfigError
from mlx_ring.core.join_token import PREFIX

Scope = Literal["user", "system"]
Keeper = Literal["systemd", "launchd"]
"""Service manager of the operating system."""
VERBS = ("join", "serve")
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
        _refuse_secret(argument)
    return service


def _refuse_secret(argument: str) -> None:
    flag = argument.partition("=")[0]
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
