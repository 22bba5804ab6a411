"""Commands that `mlx-ring cluster` runs on each machine: start a detached process, wait for it, query it.

On a Mac, launchd starts the process as a daemon of one run. macOS may keep a process that outlives its ssh session from
the LAN, but not a daemon (docs/macos.md). The daemon runs as the present user. It is not kept: it ends with its process,
and the next start of the machine forgets it.
"""

from __future__ import annotations

import contextlib
import getpass
import hashlib
import json
import os
import plistlib
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from mlx_ring.cluster.lifecycle.installation import OWN_PROGRAM, Installation, own_versions
from mlx_ring.core.environment import inherited_environment
from mlx_ring.core.errors import ConfigError, HostFailed
from mlx_ring.core.folders import AUTHORITY_FILE, logs_folder, node_folder, state_folder
from mlx_ring.host.addresses import plain_url
from mlx_ring.host.private_files import make_private_folder, read_private
from mlx_ring.host.running import running_here
from mlx_ring.models.model_source import builtin_names
from mlx_ring.rpc.tls.peers import kept_id
from mlx_ring.settings.settings_sources import api_keys, load_settings

if TYPE_CHECKING:
    import httpx

_LOOK_S = 0.1
_ASK_S = 0.5
"""Pause between requests to a head, each of which writes a log line there."""
_ANSWER_S = 3600.0
_LAST_LINES = 3
_BAD_STATUS = 400
_OWN = False
"""No TLS verification: the head is a process of this machine that recorded its own address.

Its certificate is for the name by which other machines know it.
"""


def state_here(state_dir: str | None) -> Path:
    """Return the state folder in which head and agent run. It ignores every `.env`."""
    return state_folder(load_settings({"state_dir": state_dir}, folder=Path(os.devnull)).state_dir)


def keys_here(state: Path, api_key_file: str | None) -> tuple[str, ...]:
    """Return the keys of this machine's head, of which a request needs one."""
    return tuple(api_keys(load_settings({"api_key_file": api_key_file}, folder=state)))


def installation_here(state: Path, *, identity: bool) -> Installation:
    """Describe this machine; with `identity`, create its ID if it has none."""
    folder = node_folder(state)
    if identity:
        from mlx_ring.rpc.tls.peers import open_identity  # imports gRPC, needed the first time only

        node = open_identity(folder).node
    else:
        node = kept_id(folder)
    authority = read_private(folder / AUTHORITY_FILE)
    cluster = hashlib.sha256(authority).hexdigest()[:16] if authority else ""
    return Installation(own_versions(), str(state), node, tuple(running_here(state)), cluster)


def whole_path(name: str, folders: Sequence[Path]) -> str:
    """Return a local model folder as an absolute path, and any other model name unchanged."""
    if name in builtin_names():
        return name
    found = next((path for folder in folders if (path := folder / Path(name).expanduser()).is_dir()), None)
    return name if found is None else str(found.resolve())


def run_detached(state: Path, arguments: Sequence[str], timeout_s: float) -> int:
    """Start a detached `mlx-ring` and return its process ID once the process reports that it runs.

    It leads its own session and shares no open file with this one, so it survives the end of ssh. On a Mac it is a daemon
    of launchd where `sudo` needs no password: macOS lets a daemon reach the LAN.

    Raises:
        ConfigError: an early end of the process, with its last output.
    """
    leave_program()
    out = out_file(state, arguments[0])
    make_private_folder(out.parent)
    # This file is not rotated; the log files beside it hold the log.
    environment = inherited_environment({"PYTHONUNBUFFERED": "1", "MLX_RING_LOG_STDERR": "off"})
    start = _start_daemon if may_start_daemons() else _start_session
    pid, has_ended = start(state, arguments, out, environment)
    waiting = _Waiting(state, arguments[0], has_ended)
    waiting.until(lambda: any(found.pid == pid() for found in running_here(state)), timeout_s)
    return pid() or 0


_Started = tuple[Callable[[], int | None], Callable[[], bool]]
"""Functions of a process that was started: its ID, and whether it has ended."""


def _start_session(
    state: Path, arguments: Sequence[str], out: Path, environment: Mapping[str, str]
) -> _Started:
    """Start a process in a session of its own."""
    with out.open("wb") as stream:
        process = subprocess.Popen(
            [*OWN_PROGRAM, *arguments],
            cwd=state,
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=environment,
        )
    return lambda: process.pid, lambda: process.poll() is not None


def _start_daemon(
    state: Path, arguments: Sequence[str], out: Path, environment: Mapping[str, str]
) -> _Started:
    """Start a daemon of launchd."""
    out.write_bytes(b"")
    place = hashlib.sha256(str(state).encode()).hexdigest()[:8]
    daemon = MacDaemon(f"mlx-ring.cluster.{arguments[0]}.{place}")
    daemon.start([*OWN_PROGRAM, *arguments], folder=state, out=out, environment=environment)
    return daemon.pid, daemon.has_ended


def leave_program() -> None:
    """Install a launcher for the running program at the path where other machines look first.

    The program itself may be in a checkout, where they would not look.
    """
    path = Path.home() / ".local" / "share" / "mlx-ring" / "bin" / "mlx-ring"
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        text = f'#!/bin/sh\nexec {shlex.join(OWN_PROGRAM)} "$@"\n'
        fresh = path.with_suffix(".new")
        fresh.write_text(text, "utf-8")
        fresh.chmod(0o755)
        fresh.replace(path)


def wait_for_port(state: Path, pid: int, port: int, timeout_s: float) -> None:
    """Wait until that process listens on the port.

    It does not connect, because a head would count that as a client that it must refuse.

    Raises:
        ConfigError: the end of the process, or of the time.
    """

    def listens() -> bool:
        connections = psutil.Process(pid).net_connections("tcp")
        return any(
            found.status == psutil.CONN_LISTEN and found.laddr and found.laddr.port == port
            for found in connections
        )

    _Waiting(state, "serve", lambda: _has_ended(pid)).until(listens, timeout_s)


def wait_until_ready(state: Path, pid: int, timeout_s: float) -> bool:
    """Wait until that head answers requests; return False if the time ends before.

    Raises:
        ConfigError: the end of the process, with its last output.
    """
    import httpx  # most commands send no request

    url = next((found.url for found in running_here(state) if found.pid == pid), "")
    with httpx.Client(timeout=_ANSWER_S, trust_env=False, verify=_OWN) as client:

        def is_ready() -> bool:
            try:
                return client.get(plain_url(f"{url}/health/ready")).status_code < _BAD_STATUS
            except httpx.HTTPError:
                return False

        return _Waiting(state, "serve", lambda: _has_ended(pid)).holds_before(is_ready, timeout_s, _ASK_S)


def ask_head(state: Path, method: str, path: str, body: str, keys: Sequence[str]) -> str:
    """Send a request to this machine's head and return its answer; of several heads, use the newest.

    Raises:
        HostFailed: no running head, or an error as its answer.
    """
    import httpx

    heads = [found for found in running_here(state) if found.kind == "head"]
    if not heads:
        raise HostFailed("No head runs here: start it with `mlx-ring cluster start`.")
    headers = {"authorization": f"Bearer {keys[0]}"} if keys else {}
    headers |= {"content-type": "application/json"} if body else {}
    url = f"{max(heads, key=lambda found: found.started_s).url}{path}"
    try:
        answer = httpx.request(
            method,
            plain_url(url),
            content=body or None,
            headers=headers,
            timeout=_ANSWER_S,
            trust_env=False,
            verify=_OWN,
        )
    except httpx.HTTPError as error:
        raise HostFailed(f"The head at {url} does not answer: {error}.") from error
    if answer.status_code >= _BAD_STATUS:
        raise HostFailed(f"The head answered with status {answer.status_code}: {_said(answer)}")
    return answer.text


def log_command(state: Path, lines: int, *, follow: bool) -> list[str]:
    """Return the command that prints the ends of this machine's log files, and with `follow` new lines too."""
    files = sorted(map(str, Path(logs_folder(str(state))).glob("*.log")))
    if not files:
        raise ConfigError(
            f"There are no log files in {logs_folder(str(state))}: nothing has been started there yet."
        )
    return ["tail", "-q", "-n", str(lines), *(["-F"] if follow else []), *files]


def out_file(state: Path, verb: str) -> Path:
    """Return the path of the file for start-up output and fatal errors; log files rotate separately."""
    return Path(logs_folder(str(state))) / f"{verb}.out"


def last_output(text: str) -> str:
    """Return the reason why a program ended, taken from its last output."""
    lines = [line for line in text.splitlines() if line.strip()]
    sentences = [line.removeprefix("mlx-ring: ") for line in lines if line.startswith("mlx-ring: ")]
    return sentences[-1] if sentences else " / ".join(lines[-_LAST_LINES:]) or "it printed nothing"


def _said(answer: httpx.Response) -> str:
    try:
        return str(answer.json()["error"]["message"])
    except (json.JSONDecodeError, KeyError, TypeError):
        return answer.text[:200]


def _has_ended(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A wait for a condition of a process that also notices the end of the process."""

    state: Path
    verb: str
    has_ended: Callable[[], bool]

    def until(self, holds: Callable[[], bool], timeout_s: float) -> None:
        """Wait until the condition holds; raise ConfigError if it does not in time."""
        if not self.holds_before(holds, timeout_s):
            raise ConfigError(
                f"`mlx-ring {self.verb}` has not started within {timeout_s:g} s: "
                f"see {out_file(self.state, self.verb)}."
            )

    def holds_before(self, holds: Callable[[], bool], timeout_s: float, pause_s: float = _LOOK_S) -> bool:
        """Check the condition repeatedly; return False when the time ends."""
        end = time.monotonic() + timeout_s
        while True:
            with contextlib.suppress(psutil.NoSuchProcess):
                if holds():
                    return True
            if self.has_ended():
                reason = last_output(out_file(self.state, self.verb).read_text("utf-8", errors="replace"))
                raise ConfigError(f"`mlx-ring {self.verb}` has ended: {reason}")
            if time.monotonic() > end:
                return False
            time.sleep(pause_s)


# ---- daemons of launchd

DAEMON_FOLDER = Path("/var/run")
"""Folder that macOS empties when it starts."""
_COMMAND_S = 30.0
_DESCRIPTORS = 65536
_PID = re.compile(r"^\s*pid = (\d+)$", re.MULTILINE)
_EXIT = re.compile(r"^\s*last (?:exit code|terminating signal) = (?!\(never exited\))", re.MULTILINE)


def may_start_daemons(system: str = sys.platform) -> bool:
    """Return True on a Mac whose user needs no password for `sudo`."""
    return system == "darwin" and _as_root("true").returncode == 0


@dataclass(frozen=True, slots=True)
class MacDaemon:
    """Daemon by its label in launchd."""

    label: str

    def start(
        self, command: Sequence[str], *, folder: Path, out: Path, environment: Mapping[str, str]
    ) -> None:
        """Start a command, in place of an ended one of the same label.

        Args:
            command: program with its arguments.
            folder: working directory.
            out: file for its output.
            environment: its variables.

        Raises:
            ConfigError: launchd refused it.
        """
        content = {
            "Label": self.label,
            "UserName": getpass.getuser(),
            "ProgramArguments": list(command),
            "WorkingDirectory": str(folder),
            "EnvironmentVariables": dict(environment),
            "RunAtLoad": True,
            # macOS slows down background work.
            "ProcessType": "Interactive",
            # Workers outlive a killed head, and the next one takes them over.
            "AbandonProcessGroup": True,
            "SoftResourceLimits": {"NumberOfFiles": _DESCRIPTORS},
            # 0077: property lists have no octal numbers.
            "Umask": 0o077,
            "StandardOutPath": str(out),
            "StandardErrorPath": str(out),
        }
        path = str(DAEMON_FOLDER / f"{self.label}.plist")
        _as_root("launchctl", "bootout", f"system/{self.label}")
        # Arguments may hold a token, so root alone reads them.
        written = _as_root("sh", "-c", 'umask 077; cat > "$0"', path, text=plistlib.dumps(content).decode())
        done = _as_root("launchctl", "bootstrap", "system", path) if written.returncode == 0 else written
        if done.returncode != 0:
            said = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
            raise ConfigError(
                f"launchd did not start `{command[0]}` as a daemon ({said}): see docs/macos.md."
            )

    def pid(self) -> int | None:
        """Return the process ID; None before launchd has begun the process, and after its end."""
        found = _PID.search(self._state())
        return None if found is None else int(found[1])

    def has_ended(self) -> bool:
        state = self._state()
        return _PID.search(state) is None and _EXIT.search(state) is not None

    def _state(self) -> str:
        return _as_root("launchctl", "print", f"system/{self.label}").stdout


def _as_root(*command: str, text: str = "") -> subprocess.CompletedProcess[str]:
    """Run a command as root, without asking for a password. A failure has an exit code other than 0."""
    whole = ["sudo", "-n", *command]
    try:
        return subprocess.run(
            whole, input=text, capture_output=True, text=True, timeout=_COMMAND_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return subprocess.CompletedProcess(whole, 1, "", str(error))
