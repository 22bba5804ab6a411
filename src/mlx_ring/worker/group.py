"""How the ranks of a stage become a group of MLX's collectives: once in a process, which ends with its group.

MLX's ring connects each rank with its neighbours over TCP. Where they listen is told by a file and a variable of the
environment. While it waits for them nothing else in the process runs, so that whoever started it minds the time.
"""

from __future__ import annotations

import json
import logging
import socket
import tempfile
import time

import mlx.core as mx

from mlx_ring.core.config import set_for_libraries
from mlx_ring.core.errors import WorkerLost
from mlx_ring.rpc.protos import worker_pb2
from mlx_ring.worker.tensor import Group

log = logging.getLogger(__name__)


class GroupPort:
    """A port that is kept until the group is made there."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.bind(("", 0))
        self.number = int(self._socket.getsockname()[1])

    def release(self) -> None:
        self._socket.close()


def join_group(assignment: worker_pb2.StageAssignment, port: GroupPort | None) -> Group | None:
    """Connect with the other ranks of the stage; None where it has one.

    Raises:
        WorkerLost: they were not found.
    """
    if assignment.tp_size <= 1:
        return None
    if port is not None:
        port.release()
    started = time.monotonic()
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump([[address] for address in assignment.group], file)
        file.flush()
        set_for_libraries({"MLX_HOSTFILE": file.name, "MLX_RANK": str(assignment.rank)})
        try:
            group = mx.distributed.init(strict=True, backend="ring")
        except RuntimeError as error:
            raise WorkerLost(
                f"Rank {assignment.rank} of stage {assignment.stage} did not find the others at "
                f"{', '.join(assignment.group)}: {error}"
            ) from error
    log.info("rank %d of %d, joined in %.2f s", group.rank(), group.size(), time.monotonic() - started)
    return Group(group)
