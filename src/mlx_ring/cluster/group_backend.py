"""Which backend joins the ranks of a group, once each rank has told with what it can be joined."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence

from mlx_ring.core.backends import RankMeans, choose_backend
from mlx_ring.rpc.joined_ranks import asked_backend, joined_ranks, wish_of
from mlx_ring.rpc.protos import agent_pb2, worker_pb2

log = logging.getLogger(__name__)


def settle_backend(
    assignment: worker_pb2.StageAssignment, ranks: Sequence[tuple[agent_pb2.StartedWorker, str]]
) -> None:
    """Write into the assignment which backend joins its group, and why.

    Args:
        assignment: of one rank of the group; all get the same.
        ranks: each with the node that it is on, in their order in the group; none where there is no group.

    Raises:
        ConfigError: the backend that was asked for cannot join them.
    """
    if not ranks:
        return
    rdma = json.loads(assignment.rdma) if assignment.rdma else None
    means = [_means(worker, node) for worker, node in ranks]
    choice = choose_backend(asked_backend(assignment), means, wish=wish_of(assignment), rdma=rdma)
    assignment.backend, assignment.backend_why = choice.backend, choice.why
    if (assignment.stage, assignment.rank) == joined_ranks(assignment)[0]:
        log.info("%d workers are joined by MLX's backend %s: %s", len(ranks), choice.backend, choice.why)


def _means(worker: agent_pb2.StartedWorker, node: str) -> RankMeans:
    told = worker.means
    return RankMeans(node, frozenset(told.backends), told.gpu, frozenset(told.rdma_devices))
