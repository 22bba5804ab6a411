"""Deployment of an instance, the addresses of neighbours that each stage gets, and routes between ranks."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

import pytest

from mlx_ring.cluster.agent_link import AgentLink, Source
from mlx_ring.cluster.deployment import GroupRoute, Site, blaming, deploy, group_routes, place_at
from mlx_ring.cluster.layer_split import Cut, even_split, make_assignments
from mlx_ring.core.errors import PlanError, WorkerLost
from mlx_ring.core.types import RankId
from mlx_ring.host.interfaces import TrustedInterface
from mlx_ring.rpc.channels import open_aio_channel
from mlx_ring.rpc.hello import make_hello
from mlx_ring.rpc.protos import agent_pb2, worker_pb2


class _Node:
    """Agent that starts every requested worker, and records the assignments to load."""

    def __init__(self) -> None:
        self.loaded: Sequence[worker_pb2.StageAssignment] = ()
        self.requests: list[str] = []

    async def start(
        self, _hello: object, assignments: Sequence[worker_pb2.StageAssignment], **_: object
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
        self.requests.append("fetch" if only_fetch else "load")
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
    neighbours = [(one.previous_node, one.next_node, one.first_node) for one in (*here.loaded, *there.loaded)]
    assert neighbours == [("b", "", ""), ("", "b", ""), ("a", "", "a")]


@pytest.mark.parametrize(
    ("node", "port", "reached"),
    [
        ("a", 7000, ("unix:/run/worker", "")),
        ("b", 7000, ("host-for-b:7000", "a")),
        ("c", 7000, ("host:7000", "a")),
        ("b", 0, ("", "a")),
    ],
)
def test_worker_is_reached_by_its_socket_on_its_machine_and_by_its_port_elsewhere(
    node: str, port: int, reached: tuple[str, str]
) -> None:
    hosts = {"": "host", "b": "host-for-b"}
    site = Site("a", cast("AgentLink", None), is_local=True, hosts=hosts, source=Source(""))
    place = place_at(RankId(1, 0), "unix:/run/worker", port, site)
    assert (place.node, place.address) == ("", "unix:/run/worker")
    assert place.reached_from(node, site) == reached


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
    assert (here.requests, there.requests) == (["load"], ["fetch", "load"])
    first_stage, last_stage = here.loaded
    assert list(first_stage.group) == ["10.0.8.1:5000", "10.0.8.2:5001"]
    assert list(last_stage.group) == ["10.0.8.1:5001", "10.0.8.2:5002"]
    assert (first_stage.next_address, first_stage.next_node) == ("unix:w1-0", "")
    (other,) = first_stage.next_ranks
    assert (other.address, other.node) == ("b:4001", "b")


@dataclass(frozen=True)
class Node:
    node: str
    trusted: tuple[TrustedInterface, ...] = ()
    trusted_problem: str = ""


def cable(number: int, end: int) -> TrustedInterface:
    return TrustedInterface(f"thunder{number}", f"10.0.{number}.{end}", f"10.0.{number}.0/24")


def test_ranks_on_one_machine_use_loopback() -> None:
    assert set(group_routes([Node("a"), Node("a")], "it")) == {GroupRoute("127.0.0.1", "127.0.0.1")}


def test_only_hops_between_machines_use_a_trusted_interface() -> None:
    here, there = Node("a", (cable(1, 1),)), Node("b", (cable(1, 2),))
    assert group_routes([here, here, there], "it") == (
        GroupRoute("10.0.1.1", "10.0.1.2"),
        GroupRoute(),
        GroupRoute("10.0.1.2", "10.0.1.1"),
    )


def test_each_cable_of_a_ring_may_be_a_separate_network() -> None:
    nodes = [
        Node("a", (cable(1, 1), cable(3, 1))),
        Node("b", (cable(1, 2), cable(2, 2))),
        Node("c", (cable(2, 3), cable(3, 3))),
    ]
    assert [way.listens for way in group_routes(nodes, "it")] == ["10.0.3.1", "10.0.1.2", "10.0.2.3"]


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (Node("b"), r"A stage joins b and a: .* and b names none\. Start it with --trusted-interface NAME"),
        (Node("b", (), "thunder7 is not there."), r"and b has none: thunder7 is not there\."),
        (
            Node("b", (cable(2, 2),)),
            r"no network in common: b has .*, a has thunder1 \(10.0.1.1\) in 10.0.1.0/24\.",
        ),
    ],
)
def test_machines_without_a_common_trusted_network_are_refused(other: Node, said: str) -> None:
    with pytest.raises(PlanError, match=said):
        group_routes([other, Node("a", (cable(1, 1),))][::-1], "A stage")


def test_no_worker_is_started_on_a_machine_that_has_left_and_nobody_waits_for_it() -> None:
    async def start() -> None:
        link = AgentLink(open_aio_channel("unix:no-agent.sock"), "the agent of mini-1")
        async with asyncio.timeout(60):
            with pytest.raises(WorkerLost, match="The connection to the agent of mini-1"):
                await link.start(make_hello(), [], waits=False)
        await link.close()

    asyncio.run(start())


def test_a_call_after_another_recovery_has_closed_the_connection_fails_as_the_agent() -> None:
    async def calls_after_close() -> None:
        link = AgentLink(open_aio_channel("unix:no-agent.sock"), "the agent of mini-1")
        await link.close()
        hello = make_hello()
        calls = (
            link.start(hello, []),
            link.load(hello, Source("model"), [], lambda _: None),
            link.relink(hello, [], commit=False),
            link.measure_link(hello, "mini-2", "mini-2:1", 1.0, 1.0),
            anext(link.watch(hello)),
        )
        for call in calls:
            with pytest.raises(WorkerLost, match="The connection to the agent of mini-1 was closed"):
                await call
        assert await link.look(hello, 1.0) is None
        await link.stop("demo-1", 1.0)
        await link.end(1.0)

    asyncio.run(calls_after_close())


@pytest.mark.parametrize(
    ("sentence", "is_local", "expected"),
    [
        ("The disk is full.", False, "mini-1: The disk is full."),
        ("The worker on mini-1 has ended.", False, "The worker on mini-1 has ended."),
        ("The disk is full.", True, "The disk is full."),
    ],
)
def test_an_error_of_another_machine_names_it(sentence: str, *, is_local: bool, expected: str) -> None:
    site = replace(_Node().site("mini-1"), is_local=is_local)
    with pytest.raises(PlanError) as caught, blaming(site):
        raise PlanError(sentence)
    assert (str(caught.value), caught.value.node) == (expected, "mini-1")
