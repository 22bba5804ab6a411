"""How the ranks of a stage, or all stages, become a group of MLX's collectives: once in a process, which ends with its group.

While a rank waits for the others nothing else in its process runs, so that whoever started it minds the time.
"""

from __future__ import annotations

import logging
import socket
import tempfile
import time
from pathlib import Path

import mlx.core as mx

from mlx_ring.core.environment import set_for_libraries
from mlx_ring.core.errors import WorkerLost
from mlx_ring.rpc.joined_ranks import backend_of, has_collective_link, joined_ranks, rank_in_group
from mlx_ring.rpc.protos import worker_pb2
from mlx_ring.worker.group_variables import group_variables
from mlx_ring.worker.neighbour import check_neighbour
from mlx_ring.worker.tensor import Group

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
