"""What each stage is told of its neighbours when an instance is brought to life."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import cast

from mlx_ring.cluster.agent_link import AgentLink, Source
from mlx_ring.cluster.deployment import Site, deploy
from mlx_ring.cluster.placement import even_split, make_assignments
from mlx_ring.rpc.hello import make_hello
from mlx_ring.rpc.protos import agent_pb2, worker_pb2


class _Node:
    """An agent that starts whatever it is asked for, and keeps what it was to load."""

    def __init__(self) -> None:
        self.loaded: Sequence[worker_pb2.StageAssignment] = ()

    async def start(
        self, _hello: object, assignments: Sequence[worker_pb2.StageAssignment]
    ) -> Sequence[agent_pb2.StartedWorker]:
        return [
            agent_pb2.StartedWorker(
                stage=one.stage,
                address="unix:w",
                port=4000,
                group_port=5000 + one.stage,
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
    ) -> None:
        self.loaded = assignments

    def site(self, node: str) -> Site:
        return Site(node, cast("AgentLink", self), is_local=False, hosts={"": node}, source=Source("model"))


def test_each_stage_knows_which_other_nodes_are_next_to_it() -> None:
    here, there = _Node(), _Node()
    first, second = here.site("a"), there.site("b")
    assignments = make_assignments(
        even_split(3, 3), instance="one", epoch=1, dtype="auto", model_digest="model", max_model_len=64
    )
    asyncio.run(deploy([first, first, second], assignments, make_hello(), lambda _progress: None))
    told = [(one.previous_node, one.next_node, one.first_node) for one in (*here.loaded, *there.loaded)]
    assert told == [("b", "", ""), ("", "b", ""), ("a", "", "a")]


def test_stages_that_a_collective_links_are_told_where_all_of_them_listen() -> None:
    node = _Node()
    site = node.site("a")
    assignments = make_assignments(
        even_split(4, 2),
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
