"""Hosts with a home and an `sshd` of their own, in network namespaces.

Each host sees an `/etc/passwd` in which root's home is a temporary folder. Thus ssh and sshd use that home, and no
person's `~/.ssh` is read or written. Each started program has its own mounts.
"""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from tests.namespaces import Host
from tests.processes import clean_environment

_FETCHED = Path(__file__).parent.parent / ".debian" / "root"
_ENTER = """
mount --bind "$1" /etc/passwd && mount -t tmpfs none /run && mkdir /run/sshd || exit 1
for path in $2; do mount --bind /dev/null "$path" || exit 1; done
shift 2 && exec "$@"
"""
_SSHD = """
Port 22
HostKey {folder}/host_key
AuthorizedKeysFile {keys}/user_key.pub
PidFile none
UsePAM no
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin yes
StrictModes no
LogLevel ERROR
"""
_CLIENT = """
Host *
  IdentityFile {keys}/user_key
  UserKnownHostsFile {keys}/known_hosts
  LogLevel ERROR
"""


@dataclass(frozen=True, slots=True)
class SshHost:
    """A host whose root has a home of its own."""

    host: Host
    folder: Path
    hidden: tuple[Path, ...] = ()
    """Files that the host does not see."""

    @property
    def home(self) -> Path:
        return self.folder / "home"

    @property
    def state(self) -> Path:
        """Default state folder of mlx-ring."""
        return self.home / ".local" / "share" / "mlx-ring"

    def command(self, *arguments: str) -> list[str]:
        """Return the command that runs `arguments` in this host."""
        hidden = " ".join(map(str, self.hidden))
        return self.host.command("sh", "-c", _ENTER, "sh", str(self.folder / "passwd"), hidden, *arguments)

    def run(
        self, *arguments: str, folder: Path, timeout_s: float = 600.0
    ) -> subprocess.CompletedProcess[str]:
        """Run a program to its end in `folder`."""
        return subprocess.run(
            self.command(*arguments),
            cwd=folder,
            env=self.environment(),
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )

    def environment(self) -> dict[str, str]:
        """Return the environment after a login: this host's home, and no settings of mlx-ring."""
        kept = {
            name: value
            for name, value in clean_environment().items()
            if not name.startswith(("XDG_", "SSH_"))
        }
        return {**kept, "HOME": str(self.home)}

    def processes(self) -> list[int]:
        """Return the ids of all processes in this host."""
        done = subprocess.run(
            ["ip", "netns", "pids", self.host.namespace], capture_output=True, text=True, check=True
        )
        return [int(pid) for pid in done.stdout.split()]


def skip_without_sshd() -> None:
    """Skip the test where there is no sshd, and say how to install one."""
    if _sshd() is None:
        pytest.skip("there is no sshd: scripts/setup_sshd fetches Debian's")


@contextlib.contextmanager
def ssh_hosts(hosts: Sequence[Host], folder: Path, hidden: Sequence[Path] = ()) -> Generator[list[SshHost]]:
    """Run an sshd on each host, trusted by all of them. The last host does not see the files `hidden`."""
    keys = folder / "keys"
    keys.mkdir()
    _make_key(keys / "user_key")
    made = [SshHost(host, folder / f"host{number}") for number, host in enumerate(hosts, start=1)]
    made[-1] = replace(made[-1], hidden=tuple(hidden))
    for host in made:
        _write_files(host, keys)
    known = [f"{host.host.address} {(host.folder / 'host_key.pub').read_text()}" for host in made]
    (keys / "known_hosts").write_text("".join(known))
    with contextlib.ExitStack() as stack:
        for host in made:
            stack.enter_context(_serving(host))
        yield made


def _write_files(host: SshHost, keys: Path) -> None:
    ssh = host.home / ".ssh"
    ssh.mkdir(parents=True)
    _make_key(host.folder / "host_key")
    (ssh / "config").write_text(_CLIENT.format(keys=keys))
    (host.folder / "sshd_config").write_text(_SSHD.format(folder=host.folder, keys=keys))
    (host.folder / "passwd").write_text(_passwd(host.home))


def _passwd(home: Path) -> str:
    lines = [
        line
        for line in Path("/etc/passwd").read_text().splitlines()
        if line.split(":")[0] not in ("root", "sshd")
    ]
    own = [f"root:x:0:0:root:{home}:/bin/sh", "sshd:x:65533:65534::/run/sshd:/usr/sbin/nologin"]
    return "\n".join([*own, *lines]) + "\n"


@contextlib.contextmanager
def _serving(host: SshHost) -> Generator[None]:
    """Run sshd in the foreground, and wait until it answers."""
    program, environment = _sshd() or ("", {})
    with (host.folder / "sshd.txt").open("w") as errors:
        process = subprocess.Popen(
            host.command(program, "-D", "-e", "-f", str(host.folder / "sshd_config")),
            env={**host.environment(), **environment},
            stdin=subprocess.DEVNULL,
            stdout=errors,
            stderr=errors,
        )
    try:
        while not _answers(host):
            assert process.poll() is None, (host.folder / "sshd.txt").read_text()
        yield
    finally:
        process.terminate()
        process.wait(30)


def _answers(host: SshHost) -> bool:
    done = host.run("ssh", "-o", "BatchMode=yes", host.host.address, "true", folder=host.folder, timeout_s=30)
    return done.returncode == 0


def _make_key(path: Path) -> None:
    subprocess.run(
        ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(path)],
        check=True,
        capture_output=True,
        timeout=60,
    )


def _sshd() -> tuple[str, Mapping[str, str]] | None:
    """Return the machine's own sshd, or the fetched one, with the variables that it needs."""
    own = shutil.which("sshd", path="/usr/sbin:/usr/local/sbin")
    if own is not None:
        return own, {}
    fetched = _FETCHED / "usr" / "sbin" / "sshd"
    if not fetched.exists():
        return None
    folders = [*_FETCHED.glob("usr/lib/*-linux-gnu*"), *_FETCHED.glob("lib/*-linux-gnu*")]
    return str(fetched), {"LD_LIBRARY_PATH": ":".join(map(str, folders))}
