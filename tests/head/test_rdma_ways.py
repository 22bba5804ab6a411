"""Ranks on several machines are told the hostfile's RDMA devices, each group its part."""

from __future__ import annotations

import json
from typing import cast

import pytest

from mlx_ring.cluster.agent_link import AgentLink, Source
from mlx_ring.cluster.deployment import Site
from mlx_ring.head.rank_placements import place_ranks, set_rdma
from mlx_ring.host.trusted_interfaces import TrustedInterface
from mlx_ring.rpc.protos.worker_pb2 import StageAssignment
from mlx_ring.settings.hostfile import Hostfile, read_hostfile

ROWS = [[None, "rdma_en2", "rdma_en3"], ["rdma_en2", None, "rdma_en4"], ["rdma_en3", "rdma_en4", None]]


def hostfile(*ssh: str) -> Hostfile:
    hosts = [
        {"ssh": name, "ips": [f"10.0.8.{place}"], "rdma": row}
        for place, (name, row) in enumerate(zip(ssh, ROWS, strict=True))
    ]
    return read_hostfile({"backend": "jaccl-ring", "hosts": hosts}, "x")


def site(address: str, *, is_local: bool = False) -> Site:
    trusted = (TrustedInterface("en5", address, "10.0.8.0/24"),) if address else ()
    return Site(address, cast("AgentLink", None), is_local, {"": "192.168.1.9"}, Source(), trusted=trusted)


def told(sites: list[Site], hosts: Hostfile) -> list[StageAssignment]:
    ranks = [StageAssignment(tp_size=len(sites), stages=1, rank=rank) for rank in range(len(sites))]
    set_rdma(ranks, place_ranks(sites, [(1.0,) * len(sites)]), hosts)
    return ranks


def test_a_group_of_some_machines_is_told_its_part_in_the_order_of_its_ranks() -> None:
    for rank in told([site("10.0.8.2"), site("", is_local=True)], hostfile("localhost", "b", "c")):
        assert json.loads(rank.rdma) == [[None, "rdma_en3"], ["rdma_en3", None]]
        assert dict(rank.group_environment) == {"MLX_JACCL_RING": "1"}


@pytest.mark.parametrize("others", [["10.0.8.9"], ["10.0.8.1"]])
def test_a_machine_that_is_not_in_the_file_or_is_there_twice_leaves_the_group_without(
    others: list[str],
) -> None:
    for rank in told([site("10.0.8.1"), *map(site, others)], hostfile("a", "b", "c")):
        assert rank.rdma == ""


@pytest.mark.parametrize(("places", "expected"), [((0, 1), True), ((0, 2), False)])
def test_two_of_a_ring_are_told_their_part_only_where_they_are_neighbours(
    places: tuple[int, int],
    expected: bool,  # noqa: FBT001 - as pytest gives it
) -> None:
    rows: list[list[str | None]] = [
        ["rdma_en2" if (one - other) % 4 in {1, 3} else None for other in range(4)] for one in range(4)
    ]
    hosts = [{"ssh": f"m{place}", "ips": [f"10.0.8.{place}"], "rdma": row} for place, row in enumerate(rows)]
    file = read_hostfile({"backend": "jaccl-ring", "hosts": hosts}, "x")
    for rank in told([site(f"10.0.8.{place}") for place in places], file):
        assert bool(rank.rdma) == expected
