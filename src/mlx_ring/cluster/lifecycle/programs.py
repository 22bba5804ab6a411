"""The same mlx-ring on every machine: looked for, compared, and sent where it is missing."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from mlx_ring.cluster.lifecycle.about import PACKAGES, About, Found, different, read_found
from mlx_ring.cluster.lifecycle.places import Place
from mlx_ring.cluster.lifecycle.shell import run_on, send_to
from mlx_ring.cluster.lifecycle.shipping import platform_of_here, python_version, write_archive
from mlx_ring.core.errors import HostFailed
from mlx_ring.rpc.hello import package_version

OWN_PROGRAM = (sys.executable, "-c", "from mlx_ring.cli.main import main; main()")
ON_HOST = ("cluster", "on-host")
_PROBE = r"""
about() {
  [ -n "$1" ] && [ -x "$1" ] || return 0
  said=$("$1" cluster on-host about ${2:+--state-dir "$2"} ${3:+"$3"} 2>/dev/null | tail -n 1)
  printf 'program\t%s\t%s\n' "$1" "$said"
}
if [ -n "$1" ]; then
  [ -x "$1" ] || { echo "there is no program $1" >&2; exit 1; }
  about "$1" "$2" "$3"
else
  for path in "$HOME/.local/share/mlx-ring/bin/mlx-ring" "$HOME/.local/share/mlx-ring/env/bin/mlx-ring" \
      "$(command -v mlx-ring)" "$HOME/.local/bin/mlx-ring" /opt/homebrew/bin/mlx-ring /usr/local/bin/mlx-ring; do
    about "$path" "$2" "$3"
  done
fi
for name in "python$4" "$5/bin/python$4" "$HOME/.local/bin/python$4" "/opt/homebrew/bin/python$4" \
    "/usr/local/bin/python$4" "$HOME"/.local/share/uv/python/*/bin/"python$4" python3; do
  path=$(command -v "$name") || continue
  "$path" -c "import sys; sys.exit('%d.%d' % sys.version_info[:2] != '$4')" 2>/dev/null || continue
  printf 'python\t%s\t%s\n' "$path" "$("$path" -c 'import platform, sys; print(sys.platform, platform.machine())')"
done
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
class Ready:
    """A machine with a program that can be told what to do."""

    place: Place
    program: tuple[str, ...]
    about: About

    def on_host(self, *words: str, told: str = "", timeout_s: float | None = 120.0) -> str:
        """Have the program there do its part; what it prints."""
        state = ("--state-dir", self.about.state)
        return run_on(
            self.place,
            (*self.program, *ON_HOST, words[0], *state, *words[1:]),
            told=told,
            timeout_s=timeout_s,
        )


def own_versions() -> dict[str, str]:
    """Of what runs here."""
    return {name: package_version(name) for name in PACKAGES}


def find_program(place: Place, *, identity: bool = False) -> Found:
    """What there is; with `identity` the machine gets an id where it has none.

    Raises:
        HostFailed: it cannot be reached.
    """
    flag = "--identity" if identity else ""
    if place.is_here:
        state = ("--state-dir", place.device.state_dir) if place.device.state_dir else ()
        said = run_on(place, (*OWN_PROGRAM, *ON_HOST, "about", *state, *((flag,) if flag else ())))
        return read_found([f"program\there\t{said.strip()}"])
    script = ("sh", "-c", _PROBE, "sh", place.device.program, place.device.state_dir, flag)
    return read_found(run_on(place, (*script, python_version(), sys.base_prefix)).splitlines())


def ready(place: Place, found: Found, versions: Mapping[str, str]) -> Ready | None:
    """With the program that is as here; None where there is none."""
    program = found.like(versions)
    if program is None or program.about is None:
        return None
    return Ready(place, OWN_PROGRAM if place.is_here else (program.path,), program.about)


def any_program(place: Place, found: Found) -> Ready | None:
    """With the one as here, or with any that understands: what runs can be ended by another version too."""
    program = found.like(own_versions()) or next((known for known in found.programs if known.about), None)
    if program is None or program.about is None:
        return None
    return Ready(place, OWN_PROGRAM if place.is_here else (program.path,), program.about)


def make_ready(place: Place, *, tell: Callable[[str], None]) -> Ready:
    """The machine with the same versions as here: as found, or sent over ssh.

    Raises:
        HostFailed: it cannot be reached, or not be made alike; why, and what to do.
    """
    if place.is_here and place.device.program:
        tell(f"{place.name}: `program` does nothing, for this is the machine from which you start.")
    versions, found = own_versions(), find_program(place, identity=True)
    known = ready(place, found, versions)
    if known is not None:
        return known
    _check_can_be_sent(place, found, versions)
    running = any_program(place, found)
    if running is not None:
        running.on_host("stop")
    tell(
        f"{place.name}: {different(found, versions)}; sending mlx-ring {versions['mlx-ring']} with all it needs"
    )
    send_to(place, ("sh", "-c", _INSTALL, "sh", found.python, python_version()), write_archive)
    known = ready(place, find_program(place, identity=True), versions)
    if known is None:
        raise HostFailed(
            f"{place.name}: what was sent does not run there: try `~/.local/share/mlx-ring/env/bin/mlx-ring --version`."
        )
    return known


def _check_can_be_sent(place: Place, found: Found, versions: Mapping[str, str]) -> None:
    """Binaries run on their own platform and version of Python only."""
    by_hand = ", ".join(f"{name} {version}" for name, version in versions.items())
    if place.device.program:
        raise HostFailed(
            f"{place.name}: {different(found, versions)}, and here it is {by_hand}: install these there."
        )
    if not found.python or found.platform != platform_of_here():
        has = f"it is {found.platform}" if found.python else f"no Python {python_version()} was found there"
        raise HostFailed(
            f"{place.name}: {different(found, versions)}, and nothing can be sent from here, which is "
            f"{platform_of_here()} with Python {python_version()}: {has}. Install {by_hand} there, and give `program` "
            "in the file where it is in none of the usual places."
        )
