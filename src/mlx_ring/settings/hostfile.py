"""MLX's hostfiles, in each of their three forms, and the variables by which `mlx.launch` names one to its processes.

    [{"ssh": "127.0.0.1", "ips": ["192.168.5.2"], "rdma": [null, "rdma_en2"]}, ...]    for `mlx.launch`
    {"backend": "jaccl", "envs": ["NAME=value"], "hosts": [...]}                       the same, with more
    [["127.0.0.1:32323"], ["127.0.0.1:32324"]]                                        for the ring itself, by rank

`rdma` says which RDMA device of each rank leads to each other one. An entry may also be a list of names, one for each
cable between the two. MLX takes a mesh, in which every two are connected, and a ring, in which neighbours are, all by
equally many cables. Unknown fields are refused by name.
(`mlx/_distributed_utils/common.py`, `mlx/distributed/ring/ring.cpp`, `mlx/distributed/jaccl/lib/jaccl/jaccl.cpp`)
"""

from __future__ import annotations

import ipaddress
import json
import logging
import os
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, cast

import psutil

from mlx_ring.core.environment import library_variable
from mlx_ring.core.errors import ConfigError
from mlx_ring.rpc.backends import BACKENDS

log = logging.getLogger(__name__)

_FAST_SYNCH: Final = "MLX_METAL_FAST_SYNCH"
_FIELDS: Final = frozenset({"backend", "envs", "hosts"})
_HOST_FIELDS: Final = frozenset({"ssh", "ips", "rdma"})
_BACKENDS: Final = ("", *BACKENDS, "jaccl-ring")
RING_OF_JACCL: Final = "MLX_JACCL_RING"
"""Has jaccl join neighbours alone, though every two are connected."""
_VARIABLE: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=.*", re.DOTALL)
_MOST_PORT: Final = 65535
Matrix = tuple[tuple[tuple[str, ...], ...], ...]
"""RDMA devices by rank and other rank, one for each cable."""
_DEVICE: Final = re.compile(r"rdma_en\d+")
_MEND: Final = "`mlx.distributed_config --backend jaccl` writes such a file"


@dataclass(frozen=True, slots=True)
class Host:
    """One rank's machine."""

    ssh: str
    """As `ssh` takes it; of the ring's own form the first address."""
    ips: tuple[str, ...] = ()
    """Addresses of its interfaces for collectives."""
    listens: tuple[str, ...] = ()
    """`address:port`, in the ring's own form alone."""

    @property
    def is_here(self) -> bool:
        """True if it is this machine, and its collectives stay on it."""
        return is_loopback(self.ssh) and all(map(is_loopback, self.ips))


@dataclass(frozen=True, slots=True)
class Hostfile:
    """Machines by rank."""

    hosts: tuple[Host, ...]
    backend: str = ""
    """MLX's name; empty where the file says none."""
    variables: Mapping[str, str] = field(default_factory=dict[str, str])
    """Environment variables for every rank."""
    rdma: Matrix | None = None
    """None if no host names its devices."""


def is_hostfile(content: object) -> bool:
    return isinstance(content, list) or (isinstance(content, dict) and "hosts" in content)


def load_hostfile(path: Path) -> Hostfile:
    """Read a hostfile.

    Raises:
        ConfigError: it cannot be read, or is no hostfile.
    """
    try:
        content: object = json.loads(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise ConfigError(f"The hostfile {path} cannot be read: {error}.") from error
    if not is_hostfile(content):
        raise ConfigError(f"{path} is no hostfile: it is neither a list of hosts nor an object with `hosts`.")
    return read_hostfile(content, str(path))


def read_hostfile(content: object, where: str) -> Hostfile:
    """Read a hostfile of any form.

    Raises:
        ConfigError: a field is invalid; the message names it and its value.
    """
    if isinstance(content, dict):
        return _read_object(cast("dict[str, object]", content), where)
    entries = cast("list[object]", content)
    if not entries:
        raise ConfigError(f"{where} is a hostfile without hosts.")
    if all(isinstance(entry, list) for entry in entries):
        return Hostfile(tuple(_read_listening(cast("list[object]", entry), where) for entry in entries))
    return _read_hosts(entries, where)


def is_loopback(name: str) -> bool:
    """Return True for an address or name of this machine's loopback."""
    host = name.rpartition("@")[2]
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _read_object(content: Mapping[str, object], where: str) -> Hostfile:
    if unknown := sorted(content.keys() - _FIELDS):
        raise ConfigError(
            f"{where}: the hostfile has the field {unknown[0]}, which does not exist; fields are {', '.join(sorted(_FIELDS))}."
        )
    backend, hosts = content.get("backend", ""), content.get("hosts")
    if backend not in _BACKENDS:
        raise ConfigError(f"{where}: backend is {backend!r}; it must be one of {', '.join(_BACKENDS[1:])}.")
    if not isinstance(hosts, list) or not hosts:
        raise ConfigError(f"{where}: hosts is {hosts!r}; it must be a list with one or more hosts.")
    read = _read_hosts(cast("list[object]", hosts), where)
    variables = _read_variables(content.get("envs", []), where) | (
        {RING_OF_JACCL: "1"} if backend == "jaccl-ring" else {}
    )
    return Hostfile(read.hosts, backend.removesuffix("-ring"), variables, read.rdma)


def _read_variables(envs: object, where: str) -> dict[str, str]:
    listed = cast("list[object]", envs) if isinstance(envs, list) else [envs]
    for entry in listed:
        if not isinstance(entry, str) or not _VARIABLE.fullmatch(entry):
            raise ConfigError(f"{where}: envs has {entry!r}; it must be a list of texts such as NAME=value.")
    variables = dict(cast("str", entry).split("=", 1) for entry in listed)
    if variables.pop(_FAST_SYNCH, None) is not None:
        log.warning(
            "%s: %s under `envs` is left out, because it can lock a Mac's GPU until a reboot: remove it",
            where,
            _FAST_SYNCH,
        )
    return variables


def _read_hosts(entries: Sequence[object], where: str) -> Hostfile:
    hosts = tuple(_read_host(entry, place, where) for place, entry in enumerate(entries))
    rows = [cast("dict[str, object]", entry).get("rdma") or None for entry in entries]
    if not any(rows):
        return Hostfile(hosts)
    return Hostfile(hosts, rdma=read_matrix(rows, [host.ssh for host in hosts], where))


def _read_host(entry: object, place: int, where: str) -> Host:
    if not isinstance(entry, dict):
        raise ConfigError(f"{where}: host {place} is {entry!r}; it must have fields.")
    fields = cast("dict[str, object]", entry)
    if unknown := sorted(map(str, fields.keys() - _HOST_FIELDS)):
        raise ConfigError(
            f"{where}: a host has the field {unknown[0]}, which does not exist; fields are {', '.join(sorted(_HOST_FIELDS))}."
        )
    ssh, ips = fields.get("ssh"), fields.get("ips", [])
    if not ssh:
        raise ConfigError(f"{where}: host {place} has no `ssh`.")
    if not isinstance(ssh, str) or not ssh.isprintable():
        raise ConfigError(f"{where}: ssh is {ssh!r}; it must be a text of one line.")
    if not isinstance(ips, list) or not all(isinstance(ip, str) and ip for ip in cast("list[object]", ips)):
        raise ConfigError(f"{where}: ips of {ssh} is {ips!r}; it must be a list of addresses.")
    return Host(ssh, tuple(cast("list[str]", ips)))


def _read_listening(entry: Sequence[object], where: str) -> Host:
    """Read the addresses that a rank listens on; MLX's ring supports only IPv4."""
    for address in entry:
        host, _, port = address.rpartition(":") if isinstance(address, str) else ("", "", "")
        if not _is_ipv4(host) or not port.isdecimal() or not 0 < int(port) <= _MOST_PORT:
            raise ConfigError(
                f"{where}: {address!r} is no address to listen on, of which MLX's ring takes IPv4 alone; "
                "give one such as 127.0.0.1:32323."
            )
    listens = cast("tuple[str, ...]", tuple(entry))
    if not listens:
        raise ConfigError(f"{where}: a rank has no address; give each one such as 127.0.0.1:32323.")
    ips = tuple(address.rpartition(":")[0] for address in listens)
    return Host(ips[0], ips, listens)


def _is_ipv4(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).version == 4  # noqa: PLR2004 - the version of IP
    except ValueError:
        return False


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


# ---- matrices of RDMA devices


def read_matrix(rows: Sequence[object], hosts: Sequence[str], where: str) -> Matrix:
    """Read the matrix from the rows of a hostfile.

    Args:
        rows: `rdma` of each host.
        hosts: their names, for errors.
        where: the file.

    Raises:
        ConfigError: it is not square, or makes neither a mesh nor a ring. It leads from a host to itself, or connects
            two from one side only. It names something other than an RDMA device.
    """
    matrix = tuple(_read_row(row, place, hosts, where) for place, row in enumerate(rows))
    for one, row in enumerate(matrix):
        for other in range(one):
            if len(row[other]) != len(matrix[other][one]):
                raise ConfigError(
                    f"{where}: rdma connects {hosts[one]} to {hosts[other]} by {_cables(row[other])}, and {hosts[other]} to "
                    f"{hosts[one]} by {_cables(matrix[other][one])}; {_MEND}."
                )
    if not (is_mesh(matrix) or is_ring(matrix)):
        one, other = _first_gap(matrix)
        raise ConfigError(
            f"{where}: rdma lists no device from {hosts[one]} to {hosts[other]}; every two hosts must be connected, or each with "
            f"the next one of the list in a ring, all by equally many cables. {_MEND}."
        )
    return matrix


def is_mesh(matrix: Matrix) -> bool:
    """Report whether every two are connected."""
    return all(
        bool(devices) != (one == other) for one, row in enumerate(matrix) for other, devices in enumerate(row)
    )


def is_ring(matrix: Matrix) -> bool:
    """Report whether each is connected with the next, and all by equally many cables."""
    size = len(matrix)
    cables = {len(matrix[one][(one + step) % size]) for one in range(size) for step in (1, -1)}
    return len(cables) == 1 and cables != {0}


def as_json(matrix: Matrix) -> list[list[str | list[str] | None]]:
    """Return the matrix as MLX reads it from the file of MLX_IBV_DEVICES."""
    return [[_entry(devices) for devices in row] for row in matrix]


def part_of(matrix: Matrix, ranks: Sequence[int]) -> Matrix:
    """Return the matrix of some of the ranks, in their order."""
    return tuple(tuple(matrix[one][other] for other in ranks) for one in ranks)


def _entry(devices: Sequence[str]) -> str | list[str] | None:
    if not devices:
        return None
    return devices[0] if len(devices) == 1 else list(devices)


def _read_row(row: object, place: int, hosts: Sequence[str], where: str) -> tuple[tuple[str, ...], ...]:
    listed = cast("list[object]", row) if isinstance(row, list) else []
    if len(listed) != len(hosts) or listed[place] not in (None, []):
        raise ConfigError(
            f"{where}: rdma of {hosts[place]} is {row!r}; it must be a list of {len(hosts)} with null at place {place}, its own."
        )
    return tuple(_read_entry(entry, hosts[place], where) for entry in listed)


def _read_entry(entry: object, host: str, where: str) -> tuple[str, ...]:
    names = () if entry is None else cast("list[object]", entry) if isinstance(entry, list) else (entry,)
    for name in names:
        if not isinstance(name, str) or not _DEVICE.fullmatch(name):
            raise ConfigError(
                f"{where}: rdma of {host} names {name!r}, which is no RDMA device; these have names such as rdma_en2."
            )
    return cast("tuple[str, ...]", tuple(names))


def _first_gap(matrix: Matrix) -> tuple[int, int]:
    """Return two that are not connected, or neighbours with unequal numbers of cables if all are."""
    size = len(matrix)
    gaps = (
        (one, other)
        for one in range(size)
        for other in range(size)
        if one != other and not matrix[one][other]
    )
    return next(gaps, (0, 1 % size))


def _cables(devices: Sequence[str]) -> str:
    return " and ".join(devices) or "none"
