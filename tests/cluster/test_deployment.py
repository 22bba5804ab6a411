"""Deployment of an instance, and the addresses of neighbours that each stage gets."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import cast

from mlx_ring.cluster.agent_link import AgentLink, Source
from mlx_ring.cluster.deployment import Site, deploy
from mlx_ring.cluster.placement import Cut, even_split, make_assignments
from mlx_ring.rpc.hello import make_hello
from mlx_ring.rpc.protos import agent_pb2, worker_pb2


class _Node:
    """An agent that starts whatever it is asked for, and keeps what it was to load."""

    def __init__(self) -> None:
        self.loaded: Sequence[worker_pb2.StageAssignment] = ()
        self.asked: list[str] = []

    async def start(
        self, _hello: object, assignments: Sequence[worker_pb2.StageAssignment]
    ) -> Sequence[agent_pb2.StartedWorker]:
        return [
            agent_pb2.StartedWorker(
                stage=one.stage,
                rank=one.rank,
                address=f"unix:w{one.stage}-{one.rank}",
                port=4000 + one.rank,
                group_port=5000 + one.stage + one.rank,
                group_host=one.group_host or "127.0.0.1",
                means=worker_pb2.GroupMeans(backends=["ring"]),
            )
            for one in assignments
        ]

    async def load(
        self,
        _hello: object,
        _source: object,
        assignments: Sequence[worker_pb2.StageAssignment],
        _report: object,
        *,
        only_fetch: bool,
    ) -> None:
        self.asked.append("fetch" if only_fetch else "load")
        self.loaded = assignments

    def site(self, node: str, weights: str = "") -> Site:
        source = Source(weights=weights) if weights else Source("model")
        return Site(node, cast("AgentLink", self), is_local=False, hosts={"": node}, source=source)


def test_each_stage_knows_its_neighbouring_nodes() -> None:
    here, there = _Node(), _Node()
    first, second = here.site("a"), there.site("b")
    assignments = make_assignments(
        Cut.alike(even_split(3, 3)),
        instance="one",
        epoch=1,
        dtype="auto",
        model_digest="model",
        max_model_len=64,
    )
    asyncio.run(deploy([first, first, second], assignments, make_hello(), lambda _progress: None))
    told = [(one.previous_node, one.next_node, one.first_node) for one in (*here.loaded, *there.loaded)]
    assert told == [("b", "", ""), ("", "b", ""), ("a", "", "a")]


def test_stages_linked_by_a_collective_get_all_addresses() -> None:
    node = _Node()
    site = node.site("a")
    assignments = make_assignments(
        Cut.alike(even_split(4, 2)),
        instance="one",
        epoch=1,
        dtype="auto",
        model_digest="model",
        max_model_len=64,
        link="ring",
    )
    asyncio.run(deploy([site, site], assignments, make_hello(), lambda _progress: None))
    assert [list(one.group) for one in node.loaded] == [["127.0.0.1:5000", "127.0.0.1:5001"]] * 2
    assert {(one.backend, one.backend_why) for one in node.loaded} == {("ring", "asked for")}


def test_ranks_on_two_machines_load_once_all_weights_are_fetched() -> None:
    here, there = _Node(), _Node()
    first, second = here.site("a"), there.site("b", weights="digest")
    assignments = make_assignments(
        Cut.alike(even_split(4, 2), (1.0, 1.0)),
        instance="one",
        epoch=1,
        dtype="auto",
        model_digest="model",
        max_model_len=64,
    )
    for assignment in assignments:
        assignment.group_host = f"10.0.8.{1 + assignment.rank}"
    asyncio.run(deploy([first, second] * 2, assignments, make_hello(), lambda _progress: None))
    assert (here.asked, there.asked) == (["load"], ["fetch", "load"])
    begins, ends = here.loaded
    assert list(begins.group) == ["10.0.8.1:5000", "10.0.8.2:5001"]
    assert list(ends.group) == ["10.0.8.1:5001", "10.0.8.2:5002"]
    assert (begins.next_address, begins.next_node) == ("unix:w1-0", "")
    (other,) = begins.next_ranks
    assert (other.address, other.node) == ("b:4001", "b")
