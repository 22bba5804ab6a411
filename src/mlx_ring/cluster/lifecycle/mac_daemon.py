"""Start of a process by launchd on a Mac, as a daemon of one run.

macOS may keep a process that outlives its ssh session from the LAN, but not a daemon (docs/macos.md). The daemon runs as
the present user. It is not kept: it ends with its process, and the next start of the machine forgets it.
"""

from __future__ import annotations

import getpass
import plistlib
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mlx_ring.core.errors import ConfigError

FOLDER = Path("/var/run")
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
        path = str(FOLDER / f"{self.label}.plist")
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
