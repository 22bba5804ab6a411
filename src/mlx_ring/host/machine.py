"""Resources from the operating system: a name, an address, a folder for sockets, descriptors, cores, the machine's model.

The machine's model comes from its makers' names: nothing is measured, and MLX is not asked.
"""

from __future__ import annotations

import contextlib
import errno
import os
import platform
import resource
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Generator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from mlx_ring.core.errors import AddressInUse, ConfigError
from mlx_ring.host.process import ROOT, usable_cores
from mlx_ring.host.running import RUN_FOLDER, owned, remove_abandoned

SOCKET_PATH_LIMIT = 103
"""Most bytes in a Unix socket's path: 104 with its end on macOS, 108 on Linux."""
_LONGEST_SOCKET_NAME = len("/mlx-ring-12345678/a99/worker-1000.sock")


def node_name() -> str:
    """Return the machine's name, as in logs and greetings."""
    return socket.gethostname().split(".", 1)[0] or "local"


def listen(host: str, port: int) -> socket.socket:
    """Bind the address before anything is loaded.

    Raises:
        AddressInUse: another process has it.
        ConfigError: it is not an address of this machine, or cannot be used.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (socket.gaierror, UnicodeError) as error:
        raise ConfigError(
            f"--host is {host}, which is not a valid address: {error}. Give a name or an IP address."
        ) from error
    server = socket.socket(family, kind, protocol)
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        server.bind(address)
        server.listen(2048)
    except OSError as error:
        server.close()
        if error.errno == errno.EADDRINUSE:
            raise AddressInUse(
                f"Port {port} on {host} is in use by another process: stop it, or choose another port with --port."
            ) from error
        raise ConfigError(f"Port {port} on {host} cannot be opened: {error.strerror}.") from error
    return server


def share_cores(stages: int) -> int:
    """Return the default BLAS threads for each worker: the cores that we may use but one, shared."""
    return max(1, (usable_cores() - 1) // stages)


@contextlib.contextmanager
def make_run_folder(parent: Path | None) -> Generator[Path]:
    """Make a private folder for sockets, and remove it afterwards. Also remove those of killed processes.

    Args:
        parent: folder in which to make it; None: the system's folder for temporary files.

    Raises:
        ConfigError: the path of a socket in it would be too long, or it cannot be created.
    """
    parents = [parent] if parent is not None else [Path(tempfile.gettempdir()), Path("/tmp")]  # noqa: S108 - mkdtemp makes a private folder there
    short = [path for path in parents if len(os.fsencode(path)) + _LONGEST_SOCKET_NAME <= SOCKET_PATH_LIMIT]
    if not short:
        raise ConfigError(
            f"--run-dir is {parent}, whose path is too long for sockets in it: "
            f"use one of at most {SOCKET_PATH_LIMIT - _LONGEST_SOCKET_NAME} bytes."
        )
    try:
        short[0].mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=RUN_FOLDER, dir=short[0]))
    except OSError as error:
        raise ConfigError(f"No folder for sockets can be created in {short[0]}: {error.strerror}.") from error
    try:
        with owned(folder):
            remove_abandoned(short[0])
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def raise_descriptor_limit(wanted: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    ceiling = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < ceiling:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (ceiling, hard))


_ASK_LIMIT_S = 5.0


@dataclass(frozen=True, slots=True)
class MachineIdentity:
    """Model of a machine; a field is empty if the system does not know it."""

    model: str
    processor: str
    gpus: tuple[str, ...] = ()
    """GPUs beside the processor; Apple's are part of it."""


@cache
def machine_identity() -> MachineIdentity:
    """Return the identity of this machine."""
    if platform.system() == "Darwin":
        return MachineIdentity(_ask_mac("hw.model"), _ask_mac("machdep.cpu.brand_string"))
    return linux_identity(ROOT)


def linux_identity(root: Path) -> MachineIdentity:
    """Read a Linux machine's identity below a root of the file system."""
    cards = sorted((root / "proc/driver/nvidia/gpus").glob("*/information"))
    processor = _after_colon(root / "proc/cpuinfo", "model name") or platform.machine()
    return MachineIdentity(
        _text(root / "sys/class/dmi/id/product_name").strip(),
        processor,
        tuple(_after_colon(card, "Model") for card in cards),
    )


def _ask_mac(name: str) -> str:
    try:
        asked = subprocess.run(
            ["/usr/sbin/sysctl", "-n", name],
            capture_output=True,
            text=True,
            timeout=_ASK_LIMIT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return asked.stdout.strip()


def _after_colon(file: Path, name: str) -> str:
    """Return the value in the first line that begins with a name."""
    lines = (line.partition(":") for line in _text(file).splitlines())
    return next((value.strip() for key, _, value in lines if key.strip() == name), "")


def _text(file: Path) -> str:
    try:
        return file.read_text("utf-8", errors="replace")
    except OSError:
        return ""
