"""Groups of MLX's collectives: the ranks of a stage, or all stages. A process joins one once, and ends with it.

While a rank waits for the others, nothing else runs in its process, so its parent must limit the time.

MLX's backends read the environment and files when a group is made; one function for each backend sets these:

- ring: `MLX_HOSTFILE`, addresses by rank. MLX takes any connection for the neighbour's, so its address is checked.
- mpi: the agent's command, which assigns the ranks.
- jaccl: `MLX_IBV_DEVICES`, the matrix of RDMA devices, and `MLX_JACCL_COORDINATOR`, the address of rank 0.
- nccl: `NCCL_HOST_IP` and `NCCL_PORT`, the address of rank 0, `MLX_WORLD_SIZE`, and `NCCL_SOCKET_IFNAME`.

All but mpi also read `MLX_RANK`.
"""

from __future__ import annotations

import ctypes
import json
import logging
import socket
import sys
import tempfile
import time
from pathlib import Path
from typing import assert_never

import mlx.core as mx
import psutil

from mlx_ring.core.environment import library_variable, set_for_libraries
from mlx_ring.core.errors import GroupStuck, PeerRefused, WorkerLost
from mlx_ring.host.process import usable_cores
from mlx_ring.rpc.backends import (
    BACKENDS,
    Backend,
    backend_of,
    has_collective_link,
    joined_ranks,
    rank_in_group,
)
from mlx_ring.rpc.protos import worker_pb2
from mlx_ring.settings.hostfile import is_loopback
from mlx_ring.worker.platform.ring_waits import share_cores, wait_in_the_kernel
from mlx_ring.worker.tensor import Group

Variables = dict[str, str]


def group_variables(
    backend: Backend, place: int, assignment: worker_pb2.StageAssignment, folder: Path
) -> Variables:
    """Return the variables for the rank at `place` of the assignment's group.

    Args:
        backend: as MLX names it.
        place: of this rank in the group.
        assignment: this rank's, with the group's addresses.
        folder: for files, which must stay until the group is made.
    """
    return _variables_of(backend, place, assignment, folder) | dict(assignment.group_environment)


def _variables_of(
    backend: Backend, place: int, assignment: worker_pb2.StageAssignment, folder: Path
) -> Variables:
    match backend:
        case "ring":
            return _of_ring(place, assignment, folder)
        case "mpi":
            # The agent has set them.
            return {}
        case "jaccl":
            return _of_jaccl(place, assignment, folder)
        case "nccl":
            return _of_nccl(place, assignment)
        case _:
            assert_never(backend)


def _of_ring(place: int, assignment: worker_pb2.StageAssignment, folder: Path) -> Variables:
    """Return the ring's variables. A rank may listen at several addresses, separated by commas."""
    hosts = _write(folder / "hosts.json", [addresses.split(",") for addresses in assignment.group])
    return {"MLX_HOSTFILE": hosts, "MLX_RANK": str(place)}


def _of_jaccl(place: int, assignment: worker_pb2.StageAssignment, folder: Path) -> Variables:
    devices = _write(folder / "devices.json", json.loads(assignment.rdma or "[]"))
    return {
        "MLX_IBV_DEVICES": devices,
        "MLX_JACCL_COORDINATOR": assignment.group[0],
        "MLX_RANK": str(place),
    }


def _of_nccl(place: int, assignment: worker_pb2.StageAssignment) -> Variables:
    """Return NCCL's variables.

    All ranks are on one machine, because NCCL would listen on the first other network as long as it lives.
    """
    host, _, port = assignment.group[0].rpartition(":")
    return {
        "NCCL_HOST_IP": host,
        "NCCL_PORT": port,
        "MLX_RANK": str(place),
        "MLX_WORLD_SIZE": str(len(assignment.group)),
        # `=` means exactly this interface, not every one whose name begins so.
        "NCCL_SOCKET_IFNAME": "=lo",
    }


def _write(path: Path, content: object) -> str:
    path.write_text(json.dumps(content))
    return str(path)


def check_neighbour(listened: str, expected: str) -> None:
    """Check who connected, after the ring was joined and before anything is sent.

    Args:
        listened: addresses with ports on which this process listened, separated by commas.
        expected: the address from which the rank before it comes; empty: this machine.

    Raises:
        PeerRefused: another machine connected.
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
            f"{strangers[0]} connected to the port of this rank's group, but the rank before it is at {expected}: "
            "check the other machines on that network."
        )


def _are_one(came: str, expected: str) -> bool:
    return came == expected or (is_loopback(came) and is_loopback(expected))


log = logging.getLogger(__name__)


class GroupPort:
    """Port that is reserved until the group listens on it."""

    def __init__(self, address: str) -> None:
        """Reserve the port of an address; port 0 reserves a free one. Raises OSError for a port that is taken."""
        self.host, _, port = address.rpartition(":")
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        # With it, Linux also lets MLX's ring listen while this socket holds the port.
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._socket.bind((self.host, int(port)))
        except OSError:
            self.release()
            raise
        self.number = int(self._socket.getsockname()[1])

    def release(self) -> None:
        self._socket.close()


def join_group(assignment: worker_pb2.StageAssignment, port: GroupPort | None) -> Group | None:
    """Join the other ranks of the stage; return None if it has only one.

    Raises:
        GroupStuck: the other ranks did not connect.
    """
    return Group(_join(assignment, port)) if assignment.tp_size > 1 else None


def join_stages(
    assignment: worker_pb2.StageAssignment, port: GroupPort | None
) -> mx.distributed.Group | None:
    """Join the other stages; return None if links need no group.

    Raises:
        GroupStuck: the other stages did not connect.
    """
    return _join(assignment, port) if has_collective_link(assignment) else None


def _join(assignment: worker_pb2.StageAssignment, port: GroupPort | None) -> mx.distributed.Group:
    """Join the group. Its ranks connect with the help of the variables that the backend reads."""
    backend, places = backend_of(assignment), joined_ranks(assignment)
    place = rank_in_group(assignment)
    if port is not None and (backend, sys.platform) != ("ring", "linux"):
        port.release()
    if backend == "ring" and share_cores(assignment.group, place, usable_cores()):
        wait_in_the_kernel()
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mlx-ring-group-") as folder:
        set_for_libraries(group_variables(backend, place, assignment, Path(folder)))
        try:
            group = mx.distributed.init(strict=True, backend=backend)
        except RuntimeError as error:
            raise GroupStuck(
                f"Rank {assignment.rank} of stage {assignment.stage} did not find the others at "
                f"{', '.join(assignment.group)}: {error}"
            ) from error
        finally:
            if port is not None:
                port.release()
    if (group.rank(), group.size()) != (place, len(places)):
        raise WorkerLost(
            f"{backend} made this worker rank {group.rank()} of {group.size()}, and it is rank {place} of {len(places)}: "
            f"use another --backend than {backend}."
        )
    if backend == "ring":
        check_neighbour(assignment.group[place], assignment.group_from)
    log.info("Rank %d of %d of %s, joined in %.2f s", place, len(places), backend, time.monotonic() - started)
    return group


_MPI = "mpi"
_MPI_LIBRARIES = ("libmpi.so.40", "libmpi.so", "libmpi.dylib", "/opt/homebrew/lib/libmpi.dylib")
"""Names of Open MPI's library. MLX only tries the second or third, and Debian installs that name only for compiling."""
_RDMA_LIBRARY = "librdma.dylib"


def group_capabilities(asked: str) -> worker_pb2.GroupMeans:
    """Return what this worker can join a group by. MPI's library is large, so it is only loaded on request."""
    if asked == _MPI:
        _name_mpi_library()
    wanted = [backend for backend, info in BACKENDS.items() if info.advantage or backend == asked]
    return worker_pb2.GroupMeans(
        backends=[backend for backend in wanted if mx.distributed.is_available(backend)],
        gpu=_own_gpu(),
        rdma_devices=rdma_devices(),
    )


def _own_gpu() -> str:
    """Return the GPU that the agent assigned to this worker."""
    visible = library_variable("CUDA_VISIBLE_DEVICES")
    return "" if "," in visible else visible


def _name_mpi_library() -> None:
    """Name the first of Open MPI's libraries that can be loaded to MLX, unless the user has set one."""
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
    """Return the names of this machine's RDMA devices, from macOS's library; none if RDMA is not enabled."""
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


def group_use(assignment: worker_pb2.StageAssignment) -> worker_pb2.GroupUse | None:
    """Return how MLX joins a rank with others; None if it joins none."""
    if not joined_ranks(assignment):
        return None
    return worker_pb2.GroupUse(backend=backend_of(assignment), why=assignment.backend_why)
