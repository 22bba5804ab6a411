"""What an agent refuses of collectives, whatever a head asks for."""

from __future__ import annotations

import pytest

from mlx_ring.agent.trust import Trust, check_hosts, check_ways
from mlx_ring.core.errors import PlanError
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
    check_ways([rank(host, "127.0.0.1:1", "127.0.0.1:2")], Trust())


@pytest.mark.parametrize("trust", [Trust(), Trust(("lo",)), Trust(("nothing0",))])
def test_a_rank_does_not_listen_where_nothing_was_named(trust: Trust) -> None:
    with pytest.raises(PlanError, match=f"were to be spoken on {NOWHERE}, which no --trusted-interface"):
        check_hosts([rank(NOWHERE)], trust)


def test_a_rank_does_not_reach_the_next_by_another_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlx_ring.agent.trust.source_address", loopback)
    asked = [rank("", "127.0.0.1:1", f"{NOWHERE}:2")]
    with pytest.raises(PlanError, match=rf"way to {NOWHERE}, .*, leaves by 127\.0\.0\.1, which no"):
        check_ways(asked, Trust())
    check_ways(asked, Trust(("127.0.0.0/8",)))


def test_a_rank_is_not_loaded_to_listen_elsewhere_than_it_was_started_for() -> None:
    with pytest.raises(PlanError, match=f"A rank was to listen on {NOWHERE}"):
        check_ways([rank("127.0.0.1", f"{NOWHERE}:1,127.0.0.1:3", "localhost:2")], Trust(("lo",)))


def test_an_interface_that_is_gone_is_a_problem_and_no_end() -> None:
    found, problem = Trust(("127.0.0.1", "nothing0")).now()
    assert [one.address for one in found] == ["127.0.0.1"]
    assert "names nothing0, and this machine has no such interface" in problem
