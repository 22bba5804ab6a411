"""Variables that `mlx.launch` sets for its processes, and the folder where those of one machine meet."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

import psutil

from mlx_ring.core.environment import library_variable
from mlx_ring.core.errors import ConfigError
from mlx_ring.settings.hostfile import Host, Hostfile, is_loopback, load_hostfile

_OWNER_ONLY = 0o700
_OTHERS = 0o077


@dataclass(frozen=True, slots=True)
class Launch:
    """One of the processes that were started together."""

    rank: int
    hosts: Hostfile

    @property
    def size(self) -> int:
        return len(self.hosts.hosts)

    @property
    def meeting_place(self) -> Path:
        """Private folder that all ranks know by their common parent process; it is created if it is missing.

        Raises:
            ConfigError: another user has created it.
        """
        parent = psutil.Process(os.getppid())
        folder = (
            Path(tempfile.gettempdir()) / f"mlx-ring-{os.getuid()}-{parent.pid}-{parent.create_time():.0f}"
        )
        folder.mkdir(mode=_OWNER_ONLY, exist_ok=True)
        found = folder.lstat()
        if found.st_uid != os.getuid() or found.st_mode & _OTHERS or folder.is_symlink():
            raise ConfigError(
                f"{folder} belongs to another user, or is open to others: remove it, and start again."
            )
        return folder


def read_launch() -> Launch | None:
    """Read this process's place from the environment; None if it was not launched, or alone.

    Raises:
        ConfigError: the ranks are on several machines, or the environment is not what `mlx.launch` makes.
    """
    rank, hostfile = library_variable("MLX_RANK"), library_variable("MLX_HOSTFILE")
    if not rank:
        return None
    if library_variable("MLX_IBV_DEVICES"):
        raise ConfigError(f"mlx.launch --backend jaccl starts a server on several machines. {_INSTEAD}")
    if library_variable("MLX_WORLD_SIZE"):
        return _launched(rank, _of_nccl())
    if not hostfile or not Path(hostfile).is_file() or not Path(hostfile).stat().st_size:
        return None
    return _launched(rank, load_hostfile(Path(hostfile)))


_INSTEAD = (
    "mlx-ring starts its own processes, encrypts their traffic and requires certificates: use "
    "`mlx-ring cluster start -c FILE --model MODEL`, which reads the same hostfile."
)


def _launched(rank: str, hosts: Hostfile) -> Launch | None:
    if not rank.isdecimal() or int(rank) >= len(hosts.hosts):
        raise ConfigError(
            f"MLX_RANK is {rank}, and there are {len(hosts.hosts)} ranks: unset it, or start this with mlx.launch."
        )
    if elsewhere := [host.ssh for host in hosts.hosts if not host.is_here]:
        raise ConfigError(
            f"mlx.launch started ranks at {', '.join(elsewhere)}, not at 127.0.0.1 alone. {_INSTEAD}"
        )
    return Launch(int(rank), hosts) if len(hosts.hosts) > 1 else None


def _of_nccl() -> Hostfile:
    size, host, port = (library_variable(name) for name in ("MLX_WORLD_SIZE", "NCCL_HOST_IP", "NCCL_PORT"))
    if not size.isdecimal() or not port.isdecimal() or not host:
        raise ConfigError(
            f"MLX_WORLD_SIZE is {size}, NCCL_HOST_IP {host or 'not set'} and NCCL_PORT {port or 'not set'}: unset "
            "them, or start this with mlx.launch."
        )
    here = Host(host, (host,) if is_loopback(host) else (), (f"{host}:{port}",))
    return Hostfile((here,) * int(size), "nccl")
