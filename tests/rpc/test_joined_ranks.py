"""Which workers are in one group: head, agent and worker must say alike."""

from __future__ import annotations

import pytest

from mlx_ring.rpc.backends import backend_of, has_collective_link, joined_ranks
from mlx_ring.rpc.protos.worker_pb2 import StageAssignment


@pytest.mark.parametrize("link", ["", "grpc"])
def test_stages_that_grpc_links_are_in_no_group(link: str) -> None:
    assignment = StageAssignment(stage=1, stages=3, tp_size=1, link=link)
    assert not has_collective_link(assignment)
    assert joined_ranks(assignment) == []


@pytest.mark.parametrize(
    ("link", "backend"), [("ring", "ring"), ("allreduce", "ring"), ("mpi", "mpi"), ("jaccl", "jaccl")]
)
def test_a_collective_link_joins_all_stages_in_their_order(link: str, backend: str) -> None:
    assignment = StageAssignment(stage=1, stages=3, tp_size=1, link=link)
    assert joined_ranks(assignment) == [(0, 0), (1, 0), (2, 0)]
    assert backend_of(assignment) == backend


def test_ranks_that_share_layers_are_a_group_of_their_stage() -> None:
    assignment = StageAssignment(stage=1, stages=3, tp_size=2, rank=1)
    assert joined_ranks(assignment) == [(1, 0), (1, 1)]
    assert backend_of(assignment) == "ring"
