"""Groups of MLX's collectives: variables that each backend reads, and the check of a ring's neighbour."""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Generator
from pathlib import Path

import mlx.core as mx
import pytest
from grpc import local_server_credentials

from mlx_ring.core.errors import GroupStuck, PeerRefused
from mlx_ring.rpc.backends import BACKENDS, Backend
from mlx_ring.rpc.channels import add_secure_port, make_server
from mlx_ring.rpc.protos.worker_pb2 import StageAssignment
from mlx_ring.worker import group
from mlx_ring.worker.__main__ import listening
from mlx_ring.worker.group import GroupPort, check_neighbour, group_variables, join_group

GROUP = ["10.0.0.1:4001,10.0.1.1:4002", "10.0.0.2:4003"]


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_backend_has_variables_beside_those_of_the_agent(backend: Backend, tmp_path: Path) -> None:
    assignment = StageAssignment(group=GROUP, group_environment={"PMIX_RANK": "1"})
    assert group_variables(backend, 1, assignment, tmp_path)["PMIX_RANK"] == "1"


def test_ring_reads_addresses_by_rank_from_a_file(tmp_path: Path) -> None:
    variables = group_variables("ring", 1, StageAssignment(group=GROUP), tmp_path)
    assert variables["MLX_RANK"] == "1"
    assert json.loads(Path(variables["MLX_HOSTFILE"]).read_text()) == [
        ["10.0.0.1:4001", "10.0.1.1:4002"],
        ["10.0.0.2:4003"],
    ]


def test_jaccl_reads_the_matrix_from_a_file_and_the_address_of_rank_0(tmp_path: Path) -> None:
    rdma = [[None, "rdma_en2"], ["rdma_en3", None]]
    more = {"MLX_JACCL_RING": "1"}
    assignment = StageAssignment(group=GROUP[::-1], rdma=json.dumps(rdma), group_environment=more)
    variables = group_variables("jaccl", 0, assignment, tmp_path)
    assert json.loads(Path(variables.pop("MLX_IBV_DEVICES")).read_text()) == rdma
    assert variables == {"MLX_JACCL_COORDINATOR": "10.0.0.2:4003", "MLX_RANK": "0"} | more


def test_nccl_reads_the_address_of_rank_0_and_the_number_of_ranks(tmp_path: Path) -> None:
    variables = group_variables(
        "nccl", 1, StageAssignment(group=["127.0.0.1:4001", "127.0.0.1:4002"]), tmp_path
    )
    assert variables == {
        "NCCL_HOST_IP": "127.0.0.1",
        "NCCL_PORT": "4001",
        "MLX_RANK": "1",
        "MLX_WORLD_SIZE": "2",
        "NCCL_SOCKET_IFNAME": "=lo",
    }


def test_mpi_reads_the_variables_from_the_agent(tmp_path: Path) -> None:
    assignment = StageAssignment(group=GROUP, group_environment={"PMIX_RANK": "1"})
    assert group_variables("mpi", 1, assignment, tmp_path) == {"PMIX_RANK": "1"}


@pytest.fixture
def port() -> Generator[int]:
    """Yield a port of this process to which this machine has connected."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        number = listening.getsockname()[1]
        with socket.create_connection(("127.0.0.1", number)), listening.accept()[0]:
            yield number


def test_connection_from_the_expected_neighbour_is_accepted(port: int) -> None:
    check_neighbour(f"127.0.0.1:{port}", "")
    check_neighbour(f"127.0.0.1:{port}", "127.0.0.1")


@pytest.mark.parametrize("other_address", ["", "127.0.0.1:9,"])
def test_connection_from_another_address_is_refused_on_any_listening_port(
    port: int, other_address: str
) -> None:
    with pytest.raises(PeerRefused, match=r"127\.0\.0\.1 connected .* before it is at 10\.0\.8\.1"):
        check_neighbour(f"{other_address}127.0.0.1:{port}", "10.0.8.1")


def test_a_worker_whose_port_another_process_has_taken_ends_with_what_to_do() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        server = make_server(threads=1)
        with pytest.raises(SystemExit) as of_group:
            listening(address, GroupPort)
        with pytest.raises(SystemExit) as of_server:
            listening(address, lambda address: add_secure_port(server, address, local_server_credentials()))
    for ended in (of_group, of_server):
        assert str(ended.value).startswith(f"{address} cannot be used: ")
        assert str(ended.value).endswith("have the same --node-ports, give each its own.")


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not let two sockets bind one port")
def test_no_other_process_can_take_the_port_of_a_ring_that_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    port = GroupPort("127.0.0.1:0")
    place = ("127.0.0.1", port.number)

    def listen_as_a_ring(*, strict: bool, backend: str) -> None:
        assert (strict, backend) == (True, "ring")
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(place)
        with socket.socket() as ring:
            for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):
                ring.setsockopt(socket.SOL_SOCKET, option, 1)
            ring.bind(place)
            ring.listen(0)
            with socket.create_connection(place), ring.accept()[0]:
                raise RuntimeError("no neighbour")

    monkeypatch.setattr(mx.distributed, "init", listen_as_a_ring)
    monkeypatch.setattr(group, "set_for_libraries", dict[str, str])
    assignment = StageAssignment(
        tp_size=2, stages=1, group=["127.0.0.1:1", f"127.0.0.1:{port.number}"], rank=1
    )
    with pytest.raises(GroupStuck, match="no neighbour"):
        join_group(assignment, port)
    with socket.socket() as free:
        free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        free.bind(place)
