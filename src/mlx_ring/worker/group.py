"""How the ranks of a stage, or all stages, become a group of MLX's collectives: once in a process, which ends with its group.

While a rank waits for the others nothing else in its process runs, so that whoever started it minds the time.

What MLX's backends read of the environment and of files when a group is made: one function for each backend.

ring: `MLX_HOSTFILE`, addresses by rank. mpi: what the agent says, which gives the places. jaccl: `MLX_IBV_DEVICES`, the matrix
of RDMA devices, and `MLX_JACCL_COORDINATOR`, where rank 0 tells the others how to reach it. nccl: `NCCL_HOST_IP` and
`NCCL_PORT`, the same, `MLX_WORLD_SIZE`, and `NCCL_SOCKET_IFNAME`. All but mpi: `MLX_RANK`.

Whether who connected to a rank's port is the rank before it: MLX's ring takes whoever comes first for its neighbour.

With what this worker can join others in a group of MLX's collectives.
"""

from __future__ import annotations

import ctypes
import json
import logging
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import mlx.core as mx
import psutil

from mlx_ring.core.environment import library_variable, set_for_libraries
from mlx_ring.core.errors import PeerRefused, WorkerLost
from mlx_ring.rpc.backends import BACKENDS, backend_of, has_collective_link, joined_ranks, rank_in_group
from mlx_ring.rpc.protos import worker_pb2
from mlx_ring.settings.hostfile import is_loopback
from mlx_ring.worker.tensor import Group

Variables = dict[str, str]


def group_variables(
    backend: str, place: int, assignment: worker_pb2.StageAssignment, folder: Path
) -> Variables:
    """For the rank at `place` of the assignment's group.

    Args:
        backend: as MLX names it.
        place: of this rank in the group.
        assignment: this rank's, with the group's addresses.
        folder: for files, which must stay until the group is made.
    """
    return _OF[backend](place, assignment, folder) | dict(assignment.group_environment)


def _of_ring(place: int, assignment: worker_pb2.StageAssignment, folder: Path) -> Variables:
    """A rank may listen at several addresses, between commas."""
    hosts = _write(folder / "hosts.json", [addresses.split(",") for addresses in assignment.group])
    return {"MLX_HOSTFILE": hosts, "MLX_RANK": str(place)}


def _of_mpi(_place: int, _assignment: worker_pb2.StageAssignment, _folder: Path) -> Variables:
    return {}


def _of_jaccl(place: int, assignment: worker_pb2.StageAssignment, folder: Path) -> Variables:
    devices = _write(folder / "devices.json", json.loads(assignment.rdma or "[]"))
    return {
        "MLX_IBV_DEVICES": devices,
        "MLX_JACCL_COORDINATOR": assignment.group[0],
        "MLX_RANK": str(place),
    }


def _of_nccl(place: int, assignment: worker_pb2.StageAssignment, _folder: Path) -> Variables:
    """All ranks are on one machine: NCCL itself would listen on the first network that is not loopback, for as long as it lives."""
    host, _, port = assignment.group[0].rpartition(":")
    return {
        "NCCL_HOST_IP": host,
        "NCCL_PORT": port,
        "MLX_RANK": str(place),
        "MLX_WORLD_SIZE": str(len(assignment.group)),
        # `=`: this interface, and none whose name begins so.
        "NCCL_SOCKET_IFNAME": "=lo",
    }


_OF: Mapping[str, Callable[[int, worker_pb2.StageAssignment, Path], Variables]] = {
    "ring": _of_ring,
    "mpi": _of_mpi,
    "jaccl": _of_jaccl,
    "nccl": _of_nccl,
}


def _write(path: Path, content: object) -> str:
    path.write_text(json.dumps(content))
    return str(path)


def check_neighbour(listened: str, expected: str) -> None:
    """To be called when the ring has been joined, and before anything is sent.

    Args:
        listened: where this process did, addresses with ports, with commas between them.
        expected: the address from which the rank before it comes; empty: this machine.

    Raises:
        PeerRefused: somebody else has come.
    """
    expected = expected or "127.0.0.1"
    ports = {int(address.rpartition(":")[2]) for address in listened.split(",")}
    came = {
        str(connection.raddr.ip)
        for connection in psutil.Process().net_connections("tcp4")
        if connection.laddr.port in ports and connection.raddr
    }
    if strangers := sorted(one for one in came if not _are_one(one, expected)):
        raise PeerRefused(
            f"{strangers[0]} came to the port of this rank's group, where the rank before it comes from {expected}: "
            "see who else is on that network."
        )


def _are_one(came: str, expected: str) -> bool:
    return came == expected or (is_loopback(came) and is_loopback(expected))


log = logging.getLogger(__name__)


class GroupPort:
    """A port of one address that is kept until the group is made there."""

    def __init__(self, host: str) -> None:
        self.host = host
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.bind((host, 0))
        self.number = int(self._socket.getsockname()[1])

    def release(self) -> None:
        self._socket.close()


def join_group(assignment: worker_pb2.StageAssignment, port: GroupPort | None) -> Group | None:
    """Connect with the other ranks of the stage; None where it has one.

    Raises:
        WorkerLost: they were not found.
    """
    return Group(_join(assignment, port)) if assignment.tp_size > 1 else None


def join_stages(
    assignment: worker_pb2.StageAssignment, port: GroupPort | None
) -> mx.distributed.Group | None:
    """Connect with the other stages; None where links need no group.

    Raises:
        WorkerLost: they were not found.
    """
    return _join(assignment, port) if has_collective_link(assignment) else None


def _join(assignment: worker_pb2.StageAssignment, port: GroupPort | None) -> mx.distributed.Group:
    """The ranks find each other by what the backend reads of the environment."""
    backend, places = backend_of(assignment), joined_ranks(assignment)
    place = rank_in_group(assignment)
    if port is not None:
        port.release()
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mlx-ring-group-") as folder:
        set_for_libraries(group_variables(backend, place, assignment, Path(folder)))
        try:
            group = mx.distributed.init(strict=True, backend=backend)
        except RuntimeError as error:
            raise WorkerLost(
                f"Rank {assignment.rank} of stage {assignment.stage} did not find the others at "
                f"{', '.join(assignment.group)}: {error}"
            ) from error
    if (group.rank(), group.size()) != (place, len(places)):
        raise WorkerLost(
            f"{backend} made this worker rank {group.rank()} of {group.size()}, and it is rank {place} of {len(places)}: "
            f"use another --backend than {backend}."
        )
    if backend == "ring":
        check_neighbour(assignment.group[place], assignment.group_from)
    log.info("rank %d of %d of %s, joined in %.2f s", place, len(places), backend, time.monotonic() - started)
    return group


_MPI, _JACCL = "mpi", "jaccl"
_MPI_LIBRARIES = ("libmpi.so.40", "libmpi.so", "libmpi.dylib", "/opt/homebrew/lib/libmpi.dylib")
"""Open MPI's, where MLX looks for the second or third alone. Debian has a file for those who compile only by that name."""
_RDMA_LIBRARY = "librdma.dylib"


def group_capabilities(asked: str) -> worker_pb2.GroupMeans:
    """What there is; of MPI, whose library brings much along, only where it was asked for."""
    if asked == _MPI:
        _name_mpi_library()
    wanted = [backend for backend in BACKENDS if backend in (asked, "ring", "nccl") or backend == _JACCL]
    return worker_pb2.GroupMeans(
        backends=[backend for backend in wanted if mx.distributed.is_available(backend)],
        gpu=_own_gpu(),
        rdma_devices=rdma_devices(),
    )


def _own_gpu() -> str:
    """The one that the agent gave this worker."""
    visible = library_variable("CUDA_VISIBLE_DEVICES")
    return "" if "," in visible else visible


def _name_mpi_library() -> None:
    """Tell MLX the first of Open MPI's libraries that can be loaded. What a person has set stays."""
    if library_variable("MLX_MPI_LIBNAME"):
        return
    for name in _MPI_LIBRARIES:
        try:
            ctypes.CDLL(name)
        except OSError:
            continue
        set_for_libraries({"MLX_MPI_LIBNAME": name})
        return


def rdma_devices() -> list[str]:
    """Names of this machine's RDMA devices, as macOS's library lists them; none where RDMA is not enabled."""
    if sys.platform != "darwin":
        return []
    try:
        library = ctypes.CDLL(_RDMA_LIBRARY)
    except OSError:
        return []
    library.ibv_get_device_list.restype = ctypes.POINTER(ctypes.c_void_p)
    library.ibv_get_device_list.argtypes = [ctypes.POINTER(ctypes.c_int)]
    library.ibv_get_device_name.restype = ctypes.c_char_p
    library.ibv_get_device_name.argtypes = [ctypes.c_void_p]
    count = ctypes.c_int()
    listed = library.ibv_get_device_list(ctypes.byref(count))
    return (
        [library.ibv_get_device_name(listed[place]).decode() for place in range(count.value)]
        if listed
        else []
    )
