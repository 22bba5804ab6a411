"""The same mlx-ring on every machine: find it, compare its version, and send it if it is missing."""

from __future__ import annotations

import contextlib
import functools
import json
import subprocess
import sys
import tarfile
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path, PurePosixPath
from typing import IO

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import mlx_ring
from mlx_cpu_kernels.build import BINARIES, SOURCES, Target, find_binary
from mlx_cpu_kernels.packages import Unavailable
from mlx_ring.cluster.lifecycle.arguments import Machine
from mlx_ring.cluster.lifecycle.host_side import ask_head, installation_here, keys_here, state_here
from mlx_ring.cluster.lifecycle.installation import (
    OWN_PROGRAM,
    PACKAGES,
    PYTHON_INFO,
    PYTHONS,
    FoundPrograms,
    Installation,
    Python,
    Release,
    best_python,
    different,
    lowest_release,
    own_versions,
    read_found,
    read_python,
    read_pythons,
)
from mlx_ring.cluster.lifecycle.shell import check_exit, run_on, send_to
from mlx_ring.cluster.lifecycle.wheels import Wanted, WheelStore, packages_for
from mlx_ring.core.errors import ConfigError, HostFailed, RingError

_OWN = "mlx-ring"
_VENDORED = "vendored"
"""Folder of the program that has the kernels where they are no distribution of their own. They are sent as one."""
_FETCHERS = ("uv",)
"""Packages that are not sent: they are large and useless without internet access."""
_EXTRAS = ("otel",)
"""Extras that are sent too if they are installed here."""
_NO_PACKAGES = ("bin", ".lock")
"""Entries that uv adds to a folder and that belong to no package."""


@functools.cache
def python_here() -> Python | None:
    """Return the running interpreter; None if it is an unsupported kind."""
    done = subprocess.run([sys.executable, "-c", PYTHON_INFO], capture_output=True, text=True, check=False)
    return read_python(sys.executable, done.stdout)


def lowest_here(here: Python) -> Release:
    """Return the lowest release of the C library or of macOS that the installed packages run with."""
    return max(lowest_release(_tags(found)) or here.release for found in needed_distributions())


def _tags(found: Distribution) -> list[str]:
    lines = (found.read_text("WHEEL") or "").splitlines()
    return [line.removeprefix("Tag: ") for line in lines if line.startswith("Tag: ")]


def wanted_here() -> Wanted:
    """Return the packages that a machine of another system needs to run the same versions."""
    versions = {canonicalize_name(found.name): found.version for found in needed_distributions()}
    exact = tuple(f"{name}=={versions[canonicalize_name(name)]}" for name in PACKAGES if name != _OWN)
    taken = {text for extra in extras_here() for text in _asked_by(extra)}
    requirements = [
        text.partition(";")[0].strip() if text in taken else text
        for text in distribution(_OWN).requires or ()
        if Requirement(text).name not in _FETCHERS
    ]
    preferred = (f"{name}=={version}" for name, version in sorted(versions.items()) if name != _OWN)
    return Wanted(tuple(requirements), exact, tuple(preferred))


def needed_distributions(name: str = _OWN) -> list[Distribution]:
    """Return a distribution and all its requirements on this machine, each once."""
    extras = extras_here() if name == _OWN else ()
    waiting = [(name, extra) for extra in ("", *extras)]
    seen, found = set[tuple[str, str]](), dict[str, Distribution]()
    while waiting:
        entry = waiting.pop()
        if entry in seen:
            continue
        seen.add(entry)
        known = found.setdefault(entry[0], distribution(entry[0]))
        for text in known.requires or ():
            requirement = Requirement(text)
            if requirement.name in _FETCHERS:
                continue
            if requirement.marker is None or requirement.marker.evaluate({"extra": entry[1]}):
                key = canonicalize_name(requirement.name)
                waiting += [(key, extra) for extra in ("", *requirement.extras)]
    return list(found.values())


def extras_here() -> tuple[str, ...]:
    """Return the extras of mlx-ring that are sent too."""
    return tuple(extra for extra in _EXTRAS if all(map(_is_here, _asked_by(extra))))


def _asked_by(extra: str) -> list[str]:
    """Return the requirements that belong to this extra alone."""
    markers = [(text, Requirement(text).marker) for text in distribution(_OWN).requires or ()]
    return [
        text
        for text, marker in markers
        if marker is not None and marker.evaluate({"extra": extra}) and not marker.evaluate({"extra": ""})
    ]


def _is_here(requirement: str) -> bool:
    try:
        distribution(Requirement(requirement).name)
    except PackageNotFoundError:
        return False
    return True


def write_archive(stream: IO[bytes], packages: Path | None = None) -> None:
    """Write a tar archive with the content of `site-packages`.

    Args:
        stream: the stream to write to.
        packages: the folder of packages to send with the program; by default, the installed ones.

    Raises:
        ConfigError: a dependency whose metadata do not list its files.
    """
    with tarfile.open(fileobj=stream, mode="w|") as archive:
        for name, path in archived_files(packages):
            archive.add(path, name, recursive=False, filter=of_nobody)


def of_nobody(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    """Remove the owner, and write access for others: user IDs differ between machines."""
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    entry.mode &= 0o755
    return entry


def archived_files(packages: Path | None = None) -> Iterator[tuple[str, Path]]:
    """Yield each file's name in the archive and its local path."""
    for package in (Path(next(iter(mlx_ring.__path__))), SOURCES.parent):
        for name, path in _files_in(package):
            if name.parts[0] != _VENDORED:
                yield str(PurePosixPath(package.name, name)), path
    yield from _kernels()
    for found in needed_distributions() if packages is None else [distribution(_OWN)]:
        yield from _files_of(found, only_metadata=canonicalize_name(found.name) == _OWN)
    if packages is not None:
        for name, path in _files_in(packages):
            if name.parts[0] not in _NO_PACKAGES:
                yield str(name), path


def _kernels() -> Iterator[tuple[str, Path]]:
    """Yield the native kernels that were compiled here: a machine of the same system needs no compiler then."""
    with contextlib.suppress(Unavailable):
        target = Target.installed()
        binary = find_binary(target)
        if binary is not None and not binary.is_relative_to(BINARIES):
            yield str(PurePosixPath("mlx_cpu_kernels", BINARIES.name, target.key, binary.name)), binary


def _files_in(folder: Path) -> Iterator[tuple[PurePosixPath, Path]]:
    for path in sorted(folder.rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts:
            yield PurePosixPath(path.relative_to(folder)), path


def _files_of(found: Distribution, *, only_metadata: bool) -> Iterator[tuple[str, Path]]:
    """Yield a distribution's files; only its metadata for a package that may be in a checkout.

    A program that was itself sent here has no list of files, so its metadata folder is read instead.
    """
    if only_metadata and found.files is None:
        yield from _own_metadata(found)
        return
    if found.files is None:
        raise ConfigError(
            f"{found.name} has no list of its files, so it cannot be sent to other machines: "
            "install it as a wheel."
        )
    for file in found.files:
        is_metadata = file.parts[0].endswith(".dist-info")
        if ".." in file.parts or "__pycache__" in file.parts or file.is_absolute():
            continue
        if only_metadata and (not is_metadata or file.name in ("direct_url.json", "RECORD")):
            continue
        path = Path(str(found.locate_file(file)))
        if path.is_file():
            yield str(file), path


def _own_metadata(found: Distribution) -> Iterator[tuple[str, Path]]:
    """Yield the files of the metadata folder that the version was read from."""
    site = Path(str(found.locate_file("")))
    for folder in site.glob(f"{_OWN.replace('-', '_')}-{found.version}.dist-info"):
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                yield str(PurePosixPath(path.relative_to(site))), path


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

    def ask_head(
        self, method: str, path: str, body: str, *, api_key_file: str | None, timeout_s: float
    ) -> str:
        """Send the head there a request and return its answer. On this machine, that needs no further process.

        Raises:
            HostFailed: a machine out of reach, no running head, or an error as its answer.
        """
        if self.machine.is_here:
            with _errors_of(self.machine):
                state = Path(self.installation.state)
                return ask_head(state, method, path, body, keys_here(state, api_key_file))
        keys = ("--api-key-file", api_key_file) if api_key_file else ()
        return self.on_host("ask", *keys, method, path, stdin=body, timeout_s=timeout_s)


@contextlib.contextmanager
def _errors_of(machine: Machine) -> Generator[None]:
    """Raise errors of this process as those of a command that runs on the machine."""
    try:
        yield
    except RingError as error:
        check_exit(machine, 1, str(error))


def find_program(machine: Machine, *, identity: bool = False) -> FoundPrograms:
    """Return the programs on a machine; with `identity`, create the machine's ID if it has none.

    Raises:
        HostFailed: a machine out of reach.
    """
    flag = "--identity" if identity else ""
    if machine.is_here and not identity:
        with _errors_of(machine):
            here = installation_here(state_here(machine.device.state_dir or None), identity=False)
        return read_found([f"program\there\t{here.to_json()}"])
    if machine.is_here:
        state = ("--state-dir", machine.device.state_dir) if machine.device.state_dir else ()
        said = run_on(machine, (*OWN_PROGRAM, *ON_HOST, "about", *state, flag))
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
