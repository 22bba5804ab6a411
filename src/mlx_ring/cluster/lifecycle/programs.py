"""The same mlx-ring on every machine: find it, compare its version, and send it if it is missing."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from mlx_ring.cluster.lifecycle.arguments import Machine
from mlx_ring.cluster.lifecycle.installation import (
    OWN_PROGRAM,
    FoundPrograms,
    Installation,
    different,
    own_versions,
    read_found,
)
from mlx_ring.cluster.lifecycle.shell import run_on, send_to
from mlx_ring.cluster.lifecycle.shipping import lowest_here, python_here, wanted_here, write_archive
from mlx_ring.cluster.lifecycle.systems import PYTHON_INFO, PYTHONS, Python, best_python, read_pythons
from mlx_ring.cluster.lifecycle.wheels import WheelStore, packages_for
from mlx_ring.core.errors import HostFailed

ON_HOST = ("cluster", "on-host")
_PROBE = r"""
describe() {
  [ -n "$1" ] && [ -x "$1" ] || return 0
  said=$("$1" cluster on-host about ${2:+--state-dir "$2"} ${3:+"$3"} 2>/dev/null | tail -n 1)
  printf 'program\t%s\t%s\n' "$1" "$said"
  # The same version as on the asking machine: no other is needed.
  case "$said" in *"$4"*) exit 0 ;; esac
}
if [ -n "$1" ]; then
  [ -x "$1" ] || { echo "there is no program $1" >&2; exit 1; }
  describe "$1" "$2" "$3" "$4"
else
  for path in "$HOME/.local/share/mlx-ring/bin/mlx-ring" "$HOME/.local/share/mlx-ring/env/bin/mlx-ring" \
      "$(command -v mlx-ring)" "$HOME/.local/bin/mlx-ring" /opt/homebrew/bin/mlx-ring /usr/local/bin/mlx-ring; do
    describe "$path" "$2" "$3" "$4"
  done
fi
exit 0
"""
_FIND_PYTHONS = r"""
interpreter() {
  path=$(command -v "$1") || return 0
  said=$("$path" -c "$2" 2>/dev/null) || return 0
  [ -z "$said" ] || printf 'python\t%s\t%s\n' "$path" "$said"
}
for version in $1; do
  for name in "python$version" "$2/bin/python$version" "$HOME/.local/bin/python$version" "/opt/homebrew/bin/python$version" \
      "/usr/local/bin/python$version" "$HOME"/.local/share/uv/python/*/bin/"python$version" \
      "$HOME"/.pyenv/versions/*/bin/"python$version"; do
    interpreter "$name" "$3"
  done
done
interpreter python3 "$3"
exit 0
"""
_INSTALL = r"""
set -e
env="$HOME/.local/share/mlx-ring/env"
rm -rf "$env.new"
mkdir -p "$HOME/.local/share/mlx-ring"
"$1" -m venv --without-pip "$env.new"
tar -xf - --no-same-owner --no-same-permissions -C "$env.new/lib/python$2/site-packages"
cat > "$env.new/bin/mlx-ring" <<END
#!/bin/sh
exec "$env/bin/python" -c "from mlx_ring.cli.main import main; main()" "\$@"
END
chmod +x "$env.new/bin/mlx-ring"
rm -rf "$env"
mv "$env.new" "$env"
"""


@dataclass(frozen=True, slots=True)
class ReadyMachine:
    """A machine with a program that accepts commands."""

    machine: Machine
    program: tuple[str, ...]
    installation: Installation

    def on_host(self, *words: str, stdin: str = "", timeout_s: float | None = 120.0) -> str:
        """Run a command with the program there and return its output."""
        state = ("--state-dir", self.installation.state)
        return run_on(
            self.machine,
            (*self.program, *ON_HOST, words[0], *state, *words[1:]),
            stdin=stdin,
            timeout_s=timeout_s,
        )


def find_program(machine: Machine, *, identity: bool = False) -> FoundPrograms:
    """Return the programs on a machine; with `identity`, create the machine's ID if it has none.

    Raises:
        HostFailed: a machine out of reach.
    """
    flag = "--identity" if identity else ""
    if machine.is_here:
        state = ("--state-dir", machine.device.state_dir) if machine.device.state_dir else ()
        said = run_on(machine, (*OWN_PROGRAM, *ON_HOST, "about", *state, *((flag,) if flag else ())))
        return read_found([f"program\there\t{said.strip()}"])
    versions = json.dumps(own_versions())
    script = ("sh", "-c", _PROBE, "sh", machine.device.program, machine.device.state_dir, flag, versions)
    return read_found(run_on(machine, script).splitlines())


def find_pythons(machine: Machine) -> list[Python]:
    """Return the interpreters there that a program can be sent for.

    Each one is run, which takes seconds if there are many.

    Raises:
        HostFailed: a machine out of reach.
    """
    script = ("sh", "-c", _FIND_PYTHONS, "sh", " ".join(PYTHONS), sys.base_prefix, PYTHON_INFO)
    return read_pythons(run_on(machine, script).splitlines())


def ready(machine: Machine, found: FoundPrograms, versions: Mapping[str, str]) -> ReadyMachine | None:
    """Return the machine with a program of these versions, or None if it has none."""
    program = found.like(versions)
    if program is None or program.installation is None:
        return None
    return ReadyMachine(machine, OWN_PROGRAM if machine.is_here else (program.path,), program.installation)


def any_program(machine: Machine, found: FoundPrograms) -> ReadyMachine | None:
    """Return the machine with a program of the local versions, or else with any that accepts commands.

    Another version can end what runs too.
    """
    program = found.like(own_versions()) or next(
        (known for known in found.programs if known.installation), None
    )
    if program is None or program.installation is None:
        return None
    return ReadyMachine(machine, OWN_PROGRAM if machine.is_here else (program.path,), program.installation)


def make_ready(machine: Machine, *, store: WheelStore, report: Callable[[str], None]) -> ReadyMachine:
    """Return the machine with a program of the local versions, sent over ssh if it is missing.

    Args:
        machine: the machine.
        store: the packages for other systems.
        report: the callback that reports progress.

    Raises:
        HostFailed: a machine out of reach, or one that cannot run these versions, with the reason and the remedy.
    """
    if machine.is_here and machine.device.program:
        report(f"{machine.name}: `program` has no effect, because this command runs on that machine.")
    versions, found = own_versions(), find_program(machine, identity=True)
    known = ready(machine, found, versions)
    if known is not None:
        return known
    python = _python_to_send_for(machine, found, versions)
    packages = _packages(machine, python, store, report)
    running = any_program(machine, found)
    if running is not None:
        running.on_host("stop")
    report(
        f"{machine.name}: {different(found, versions)}; sending mlx-ring {versions['mlx-ring']} and its dependencies"
    )
    send_to(
        machine,
        ("sh", "-c", _INSTALL, "sh", python.path, python.version),
        lambda stream: write_archive(stream, packages),
    )
    known = ready(machine, find_program(machine, identity=True), versions)
    if known is None:
        raise HostFailed(
            f"{machine.name}: the program that was sent does not run there: "
            "run `~/.local/share/mlx-ring/env/bin/mlx-ring --version` there to see why."
        )
    return known


def _packages(
    machine: Machine, python: Python, store: WheelStore, report: Callable[[str], None]
) -> Path | None:
    """Return the folder of packages to send; None if the local ones run there too."""
    here = python_here()
    if here is not None and python.can_load(here, lowest_here(here)):
        return None
    report(f"{machine.name}: fetching packages for {python}")
    try:
        return packages_for(python, wanted_here(), store)
    except HostFailed as error:
        raise HostFailed(f"{machine.name}: {error}.") from error


def _python_to_send_for(machine: Machine, found: FoundPrograms, versions: Mapping[str, str]) -> Python:
    """Return the interpreter to send the program for: binaries need their own system and Python version."""
    if machine.device.program:
        by_hand = ", ".join(f"{name} {version}" for name, version in versions.items())
        raise HostFailed(
            f"{machine.name}: {different(found, versions)}, but this machine has {by_hand}: install these versions there."
        )
    here = python_here()
    python = best_python(find_pythons(machine), here, (0, 0) if here is None else lowest_here(here))
    if python is None:
        raise HostFailed(
            f"{machine.name}: {different(found, versions)}, and no Python from {PYTHONS[-1]} to {PYTHONS[0]} was found there: "
            "install one with the system's package manager or `uv python install`; everything else is sent from here."
        )
    return python
