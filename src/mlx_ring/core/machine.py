"""What the operating system gives a process: a name, an address, a folder for sockets, descriptors, cores."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import shutil
import socket
import tempfile
from collections.abc import Generator
from pathlib import Path

from mlx_ring.core.config import SOCKET_PATH_LIMIT
from mlx_ring.core.errors import AddressInUse, ConfigError
from mlx_ring.core.process_limits import usable_cores

_LONGEST_SOCKET_NAME = len("/mlx-ring-12345678/a99/worker-1000.sock")


def node_name() -> str:
    """The machine's name, as logs and greetings have it."""
    return socket.gethostname().split(".", 1)[0] or "local"


def listen(host: str, port: int) -> socket.socket:
    """Take the address before anything is loaded.

    Raises:
        AddressInUse: somebody else has it.
        ConfigError: it is not an address of this machine, or not to be had.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (socket.gaierror, UnicodeError) as error:
        raise ConfigError(f"--host is {host}, which is no address: {error}.") from error
    server = socket.socket(family, kind, protocol)
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        server.bind(address)
        server.listen(2048)
    except OSError as error:
        server.close()
        if error.errno == errno.EADDRINUSE:
            raise AddressInUse(
                f"Port {port} on {host} is held by another process: stop that one, or choose another with --port."
            ) from error
        raise ConfigError(f"Port {port} on {host} cannot be listened on: {error.strerror}.") from error
    return server


def share_cores(stages: int) -> int:
    """BLAS threads for each worker, where none is asked for: the cores that we may use but one, shared."""
    return max(1, (usable_cores() - 1) // stages)


@contextlib.contextmanager
def make_run_folder(parent: Path | None) -> Generator[Path]:
    """A private folder for sockets, gone afterwards."""
    parents = [parent] if parent is not None else [Path(tempfile.gettempdir()), Path("/tmp")]  # noqa: S108 - mkdtemp
    short = [path for path in parents if len(os.fsencode(path)) + _LONGEST_SOCKET_NAME <= SOCKET_PATH_LIMIT]
    try:
        short[0].mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix="mlx-ring-", dir=short[0]))
    except OSError as error:
        raise ConfigError(f"No folder for sockets can be made in {short[0]}: {error.strerror}.") from error
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def raise_descriptor_limit(wanted: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    ceiling = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < ceiling:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (ceiling, hard))
