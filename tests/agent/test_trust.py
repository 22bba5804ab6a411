"""Collectives and links that an agent refuses, whatever a head requests."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import cast
from unittest.mock import AsyncMock, Mock

import pytest

from mlx_ring.agent.server import AgentService
from mlx_ring.agent.supervisor import Supervisor
from mlx_ring.agent.trust import check_hosts, check_links, check_routes, trusted_devices
from mlx_ring.core.errors import PlanError
from mlx_ring.host.interfaces import Trust
from mlx_ring.rpc import backends
from mlx_ring.rpc.backends import DIRECT_LINKS, LinkKind
from mlx_ring.rpc.hello import make_hello
from mlx_ring.rpc.protos import agent_pb2, worker_pb2

NOWHERE = "198.51.100.7"
"""An address reserved for documentation."""


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
def test_a_rank_does_not_listen_on_an_untrusted_interface(trust: Trust) -> None:
    with pytest.raises(PlanError, match=f"would use {NOWHERE}, which no --trusted-interface"):
        check_hosts([rank(NOWHERE)], trust)


def test_a_rank_does_not_reach_the_next_by_an_untrusted_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlx_ring.agent.trust.source_address", loopback)
    assignment = [rank("", "127.0.0.1:1", f"{NOWHERE}:2")]
    with pytest.raises(PlanError, match=rf"route to {NOWHERE}, .*, leaves through 127\.0\.0\.1, which no"):
        check_routes(assignment, Trust())
    check_routes(assignment, Trust(("127.0.0.0/8",)))


def test_a_rank_does_not_answer_the_previous_one_by_an_untrusted_interface() -> None:
    assignment = rank("", "127.0.0.1:1", "127.0.0.1:2")
    assignment.group_from = NOWHERE
    with pytest.raises(PlanError, match=f"route to {NOWHERE}"):
        check_routes([assignment], Trust())


def test_no_rank_of_jaccl_reaches_rank_0_by_an_untrusted_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlx_ring.agent.trust.source_address", loopback)
    assignment = rank("", f"{NOWHERE}:1", "127.0.0.1:2", "127.0.0.1:3")
    assignment.tp_size, assignment.rank = 3, 1
    check_routes([assignment], Trust())
    assignment.backend, assignment.rdma = "jaccl", "[[], [], []]"
    with pytest.raises(PlanError, match=f"route to {NOWHERE}"):
        check_routes([assignment], Trust())


@pytest.mark.parametrize("end", ["next", "first"])
def test_an_unencrypted_link_does_not_leave_trusted_interfaces(
    end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mlx_ring.agent.trust.source_address", loopback)
    assignment = worker_pb2.StageAssignment(instance="one", stages=2, link="grpc")
    setattr(assignment, f"{end}_address", f"{NOWHERE}:1")
    setattr(assignment, f"{end}_node", "mini-2")
    check_links([assignment], Trust())
    monkeypatch.setattr(backends, "DIRECT_LINKS", dict.fromkeys(DIRECT_LINKS, LinkKind(None)))
    with pytest.raises(PlanError, match=rf"route to {NOWHERE}, .*, leaves through 127\.0\.0\.1, which no"):
        check_links([assignment], Trust())
    check_links([assignment], Trust(("127.0.0.0/8",)))


def test_an_unencrypted_link_to_any_rank_of_a_stage_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlx_ring.agent.trust.source_address", loopback)
    monkeypatch.setattr(backends, "DIRECT_LINKS", dict.fromkeys(DIRECT_LINKS, LinkKind(None)))
    assignment = worker_pb2.StageAssignment(stages=2, next_address="unix:/run/one.sock")
    assignment.next_ranks.add(address="127.0.0.1:1", node="mini-1")
    check_links([assignment], Trust())
    assignment.next_ranks.add(address=f"{NOWHERE}:1", node="mini-2")
    with pytest.raises(PlanError, match=f"route to {NOWHERE}"):
        check_links([assignment], Trust())


def test_no_worker_is_loaded_or_linked_by_an_unencrypted_link_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("mlx_ring.agent.trust.source_address", loopback)
    monkeypatch.setattr(backends, "DIRECT_LINKS", dict.fromkeys(DIRECT_LINKS, LinkKind(None)))
    assignment = worker_pb2.StageAssignment(instance="one", stages=2, next_node="mini-2")
    assignment.next_address = f"{NOWHERE}:1"
    child = SimpleNamespace(pid=1)
    worker = SimpleNamespace(instance="one", stage=0, rank=0, head=0, assignment=assignment, child=child)
    supervisor = SimpleNamespace(workers=[worker], trusted=Trust(), stop=AsyncMock(return_value=1))
    service = AgentService("here", cast("Supervisor", supervisor), 1.0)

    async def failures() -> list[str]:
        load = agent_pb2.LoadStagesRequest(hello=make_hello(), assignments=[assignment])
        relink = agent_pb2.RelinkWorkersRequest(hello=make_hello(), assignments=[assignment], commit=True)
        loads = [progress async for progress in service.load_stages(load, Mock())]
        return [loads[-1].progress.failure.message, (await service.relink(relink, Mock())).failure.message]

    for failure in asyncio.run(failures()):
        assert f"route to {NOWHERE}" in failure


def test_a_host_name_is_no_address_for_a_rank() -> None:
    with pytest.raises(PlanError, match=r"no route to mini\.local"):
        check_routes([rank("", "127.0.0.1:1", "mini.local:2")], Trust(("127.0.0.0/8",)))


def test_a_group_has_as_many_addresses_as_ranks() -> None:
    with pytest.raises(PlanError, match="has 2 ranks, but 3 addresses were given"):
        check_routes([rank("", "127.0.0.1:1", "127.0.0.1:2", f"{NOWHERE}:3")], Trust())


@pytest.mark.parametrize("name", ["OMPI_MCA_btl", "MLX_HOSTFILE", "NCCL_SOCKET_IFNAME"])
def test_a_head_may_not_set_variables_that_change_addresses(name: str) -> None:
    assignment = rank("", "127.0.0.1:1", "127.0.0.1:2")
    assignment.group_environment["MLX_JACCL_RING"] = "1"
    check_routes([assignment], Trust())
    assignment.group_environment[name] = "x"
    with pytest.raises(PlanError, match=f"was requested with {name}, which no head may set"):
        check_routes([assignment], Trust())


@pytest.mark.parametrize("backend", ["nccl", "mpi"])
def test_a_backend_for_one_machine_reaches_no_other(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlx_ring.agent.trust.source_address", loopback)
    assignment = rank("", "127.0.0.1:1", f"{NOWHERE}:2")
    assignment.backend = backend
    with pytest.raises(PlanError, match=f"reach {NOWHERE}, but {backend} only joins workers of one machine"):
        check_routes([assignment], Trust(("127.0.0.0/8",)))


def test_only_rdma_devices_of_trusted_interfaces_are_used() -> None:
    assignment = rank("", "127.0.0.1:1", "127.0.0.1:2")
    assignment.backend, assignment.rdma = (
        "jaccl",
        '[[null, ["rdma_en5", "rdma_en2"]], [["rdma_en2", "rdma_en9"], null]]',
    )
    check_routes([assignment], Trust(("en5", "en2")))
    with pytest.raises(PlanError, match="would use rdma_en2, but no --trusted-interface"):
        check_routes([assignment], Trust(("en5",)))
    assert trusted_devices(["rdma_en2", "rdma_en5"], Trust(("en5",))) == ["rdma_en5"]


def test_a_rank_must_load_with_the_address_that_it_was_started_with() -> None:
    with pytest.raises(PlanError, match=f"A rank would listen on {NOWHERE}"):
        check_routes([rank("127.0.0.1", f"{NOWHERE}:1,127.0.0.1:3", "localhost:2")], Trust(("lo",)))


def test_a_missing_interface_is_a_problem_but_no_error() -> None:
    found, problem = Trust(("127.0.0.1", "nothing0")).now()
    assert [one.address for one in found] == ["127.0.0.1"]
    assert "names nothing0, but this machine has no such interface" in problem
