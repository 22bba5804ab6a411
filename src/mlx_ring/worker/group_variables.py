"""What MLX's backends read of the environment and of files when a group is made: one function for each backend.

ring: `MLX_HOSTFILE`, addresses by rank. mpi: what the agent says, which gives the places. jaccl: `MLX_IBV_DEVICES`, the matrix
of RDMA devices, and `MLX_JACCL_COORDINATOR`, where rank 0 tells the others how to reach it. nccl: `NCCL_HOST_IP` and
`NCCL_PORT`, the same, `MLX_WORLD_SIZE`, and `NCCL_SOCKET_IFNAME`. All but mpi: `MLX_RANK`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

from mlx_ring.rpc.protos import worker_pb2

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
