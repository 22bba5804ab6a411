"""Variables from which each of MLX's backends makes a group."""

from __future__ import annotations

import json
from pathlib import Path

from mlx_ring.rpc.protos.worker_pb2 import StageAssignment
from mlx_ring.worker.group import group_variables

GROUP = ["10.0.0.1:4001,10.0.1.1:4002", "10.0.0.2:4003"]


def test_the_ring_reads_addresses_by_rank_from_a_file(tmp_path: Path) -> None:
    found = group_variables("ring", 1, StageAssignment(group=GROUP), tmp_path)
    assert found["MLX_RANK"] == "1"
    assert json.loads(Path(found["MLX_HOSTFILE"]).read_text()) == [
        ["10.0.0.1:4001", "10.0.1.1:4002"],
        ["10.0.0.2:4003"],
    ]


def test_jaccl_reads_the_matrix_from_a_file_and_where_rank_0_is(tmp_path: Path) -> None:
    rdma = [[None, "rdma_en2"], ["rdma_en3", None]]
    more = {"MLX_JACCL_RING": "1"}
    assignment = StageAssignment(group=GROUP[::-1], rdma=json.dumps(rdma), group_environment=more)
    found = group_variables("jaccl", 0, assignment, tmp_path)
    assert json.loads(Path(found.pop("MLX_IBV_DEVICES")).read_text()) == rdma
    assert found == {"MLX_JACCL_COORDINATOR": "10.0.0.2:4003", "MLX_RANK": "0"} | more


def test_nccl_reads_where_rank_0_is_and_how_many_there_are(tmp_path: Path) -> None:
    found = group_variables("nccl", 1, StageAssignment(group=["127.0.0.1:4001", "127.0.0.1:4002"]), tmp_path)
    assert found == {
        "NCCL_HOST_IP": "127.0.0.1",
        "NCCL_PORT": "4001",
        "MLX_RANK": "1",
        "MLX_WORLD_SIZE": "2",
        "NCCL_SOCKET_IFNAME": "=lo",
    }


def test_mpi_reads_what_the_agent_gave(tmp_path: Path) -> None:
    assignment = StageAssignment(group=GROUP, group_environment={"PMIX_RANK": "1"})
    assert group_variables("mpi", 1, assignment, tmp_path) == {"PMIX_RANK": "1"}
