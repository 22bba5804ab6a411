"""What an agent refuses of collectives, whatever a head asks for."""

from __future__ import annotations

import pytest

from mlx_ring.agent.trust import check_hosts, check_routes, trusted_devices
from mlx_ring.core.errors import PlanError
from mlx_ring.host.trusted_interfaces import Trust
from mlx_ring.rpc.protos import worker_pb2

NOWHERE = "198.51.100.7"
"""An address that documents are written with."""


def rank(host: str, *group: str) -> worker_pb2.StageAssignment:
    return worker_pb2.StageAssignment(
        instance="one", stages=1, tp_size=2, rank=0, group_host=host, group=group
    )


def loopback(_host: str) -> str:
    return "127.0.0.1"


@pytest.mark.parametrize("host", ["", "127.0.0.1"])
def test_loopback_needs_no_trust(host: str) -> None:
    check_hosts([rank(host)], Trust())
    check_routes([rank(host, "127.0.0.1:1", "127.0.0.1:2")], Trust())


@pytest.mark.parametrize("trust", [Trust(), Trust(("lo",)), Trust(("nothing0",))])
def test_a_rank_does_not_listen_where_nothing_was_named(trust: Trust) -> None:
    with pytest.raises(PlanError, match=f"would use {NOWHERE}, which no --trusted-interface"):
        check_hosts([rank(NOWHERE)], trust)


def test_a_rank_does_not_reach_the_next_by_another_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlx_ring.agent.trust.source_address", loopback)
    asked = [rank("", "127.0.0.1:1", f"{NOWHERE}:2")]
    with pytest.raises(PlanError, match=rf"route to {NOWHERE}, .*, leaves through 127\.0\.0\.1, which no"):
        check_routes(asked, Trust())
    check_routes(asked, Trust(("127.0.0.0/8",)))


def test_nor_does_it_answer_the_one_before_by_another() -> None:
    asked = rank("", "127.0.0.1:1", "127.0.0.1:2")
    asked.group_from = NOWHERE
    with pytest.raises(PlanError, match=f"route to {NOWHERE}"):
        check_routes([asked], Trust())


def test_no_rank_of_jaccl_reaches_rank_0_by_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlx_ring.agent.trust.source_address", loopback)
    asked = rank("", f"{NOWHERE}:1", "127.0.0.1:2", "127.0.0.1:3")
    asked.tp_size, asked.rank = 3, 1
    check_routes([asked], Trust())
    asked.backend, asked.rdma = "jaccl", "[[], [], []]"
    with pytest.raises(PlanError, match=f"route to {NOWHERE}"):
        check_routes([asked], Trust())


def test_a_name_is_no_place_for_a_rank_for_it_could_lead_elsewhere_the_next_time() -> None:
    with pytest.raises(PlanError, match=r"no route to mini\.local"):
        check_routes([rank("", "127.0.0.1:1", "mini.local:2")], Trust(("127.0.0.0/8",)))


def test_a_group_has_as_many_addresses_as_ranks() -> None:
    with pytest.raises(PlanError, match="has 2 ranks, but 3 addresses were given"):
        check_routes([rank("", "127.0.0.1:1", "127.0.0.1:2", f"{NOWHERE}:3")], Trust())


@pytest.mark.parametrize("name", ["OMPI_MCA_btl", "MLX_HOSTFILE", "NCCL_SOCKET_IFNAME"])
def test_a_head_sets_no_variables_that_could_lead_elsewhere(name: str) -> None:
    asked = rank("", "127.0.0.1:1", "127.0.0.1:2")
    asked.group_environment["MLX_JACCL_RING"] = "1"
    check_routes([asked], Trust())
    asked.group_environment[name] = "x"
    with pytest.raises(PlanError, match=f"was requested with {name}, which no head may set"):
        check_routes([asked], Trust())


@pytest.mark.parametrize("backend", ["nccl", "mpi"])
def test_what_joins_workers_of_one_machine_reaches_no_other(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mlx_ring.agent.trust.source_address", loopback)
    asked = rank("", "127.0.0.1:1", f"{NOWHERE}:2")
    asked.backend = backend
    with pytest.raises(PlanError, match=f"reach {NOWHERE}, but {backend} only joins workers of one machine"):
        check_routes([asked], Trust(("127.0.0.0/8",)))


def test_only_rdma_devices_of_interfaces_that_were_named_are_used() -> None:
    asked = rank("", "127.0.0.1:1", "127.0.0.1:2")
    asked.backend, asked.rdma = (
        "jaccl",
        '[[null, ["rdma_en5", "rdma_en2"]], [["rdma_en2", "rdma_en9"], null]]',
    )
    check_routes([asked], Trust(("en5", "en2")))
    with pytest.raises(PlanError, match="would use rdma_en2, but no --trusted-interface"):
        check_routes([asked], Trust(("en5",)))
    assert trusted_devices(["rdma_en2", "rdma_en5"], Trust(("en5",))) == ["rdma_en5"]


def test_a_rank_is_not_loaded_to_listen_elsewhere_than_it_was_started_for() -> None:
    with pytest.raises(PlanError, match=f"A rank would listen on {NOWHERE}"):
        check_routes([rank("127.0.0.1", f"{NOWHERE}:1,127.0.0.1:3", "localhost:2")], Trust(("lo",)))


def test_an_interface_that_is_gone_is_a_problem_and_no_end() -> None:
    found, problem = Trust(("127.0.0.1", "nothing0")).now()
    assert [one.address for one in found] == ["127.0.0.1"]
    assert "names nothing0, but this machine has no such interface" in problem
