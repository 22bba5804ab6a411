"""Survey of all links by the nodes at their ends, its rounds, and its results for the planner."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Container
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from tests.agent.linked_nodes import LinkedNode, linked_node

from mlx_ring.cluster.agent_link import AgentLink
from mlx_ring.cluster.link_survey import (
    MAX_AGE_S,
    FoundLink,
    LinkEnd,
    LinkSurvey,
    as_they_are,
    link_profiles,
    link_remarks,
    rounds,
)
from mlx_ring.cluster.security.authority import Authority
from mlx_ring.core.errors import WorkerStuck
from mlx_ring.rpc.channels import open_aio_channel
from mlx_ring.rpc.link_profile import FRAMES_S, UNREACHABLE, LinkProfile
from mlx_ring.rpc.tls.peers import node_name


@asynccontextmanager
async def nodes(
    folder: Path, count: int, clock: Callable[[], float] | None = None
) -> AsyncGenerator[list[LinkEnd]]:
    """Open that number of nodes, with channels to their agents. Their clock gives Unix seconds."""
    authority = Authority.open(folder / "cluster")
    async with AsyncExitStack() as stack:
        ends: list[LinkEnd] = []
        for number in range(1, count + 1):
            node = await stack.enter_async_context(
                linked_node(authority, f"mini-{number}", folder / f"{number}", clock=clock)
            )
            channel = await stack.enter_async_context(
                open_aio_channel(node.agent, authority.head_credentials(), node_name(node.name))
            )
            ends.append(end_of(node, AgentLink(channel, f"the agent of {node.name}")))
        yield ends


def end_of(node: LinkedNode, agent: AgentLink, port: int | None = None, session: int = 1) -> LinkEnd:
    address = f"127.0.0.1:{port or node.links_port}"
    return LinkEnd(node.name, session, agent, lambda _other: address)


def test_every_link_is_measured_once_in_each_direction(tmp_path: Path) -> None:
    async def run() -> None:
        survey = LinkSurvey("mini-1")
        async with nodes(tmp_path, 3) as ends:
            found = await survey.take(ends)
            names = [end.node for end in ends]
            assert {(link.source, link.target) for link in found} == {
                (one, other) for one in names for other in names if one != other
            }
            assert all(link.round_trip_s > 0 and link.bytes_per_s > 0 and not link.problem for link in found)
            assert await survey.take(ends) == found
            assert len(await survey.take(ends[:2])) == 2
        # The nodes have ended, and their stored results need no request.
        assert await survey.take(ends) == found

    asyncio.run(run())


def test_a_reconnected_node_returns_its_stored_measurements(tmp_path: Path) -> None:
    now = [1.8e9]

    def clock() -> float:
        return now[0]

    async def run() -> None:
        async with nodes(tmp_path, 2, clock) as ends:
            before = await LinkSurvey("mini-1", clock).take(ends)
            now[0] += 100.0
            after = await LinkSurvey("mini-1", clock).take(ends)
        # The time of the measurement follows from its age.
        assert [link.unix_time_s for link in after] == [1.8e9, 1.8e9]
        assert after == before

    asyncio.run(run())


def test_a_link_is_measured_again_after_a_loss_despite_stored_measurements(tmp_path: Path) -> None:
    now = [1.8e9]

    def clock() -> float:
        return now[0]

    async def run() -> None:
        survey = LinkSurvey("mini-1", clock)
        async with nodes(tmp_path, 3, clock) as ends:
            before = await survey.take(ends)
            now[0] += 100.0
            survey.distrust(("mini-2", "mini-1"))
            assert len(survey.found) == len(before) - 2
            now[0] += 1.0
            times = {(link.source, link.target): link.unix_time_s for link in await survey.take(ends)}
            # A new survey, as of the next head, gets what the nodes stored since.
            assert set(await survey.take(ends)) == set(await LinkSurvey("mini-1", clock).take(ends))
        again = {pair for pair, time_s in times.items() if time_s == 1.8e9 + 101.0}
        assert again == {("mini-1", "mini-2"), ("mini-2", "mini-1")}

    asyncio.run(run())


def test_a_loss_is_forgotten_when_no_measurement_is_as_old() -> None:
    now = [1.8e9]
    survey = LinkSurvey("mini-1", lambda: now[0])
    for number in range(3):
        survey.distrust(("mini-1", f"mini-{number}"))
        now[0] += MAX_AGE_S / 2
    assert set(survey._lost_at) == {frozenset(("mini-1", f"mini-{number}")) for number in (1, 2)}  # pyright: ignore[reportPrivateUsage] - what it keeps


def test_nodes_report_after_a_measurement_but_not_after_a_loss(tmp_path: Path) -> None:
    now, awaited = [1.8e9], list[set[str]]()

    async def wait_for_reports(nodes: Container[str]) -> None:
        awaited.append({name for name in ("mini-1", "mini-2", "mini-3") if name in nodes})

    async def run() -> None:
        async with nodes(tmp_path, 3, lambda: now[0]) as ends:
            survey = LinkSurvey("mini-1", lambda: now[0], wait_for_reports=wait_for_reports)
            await survey.take(ends[:2])
            assert awaited == [{"mini-1", "mini-2"}]
            await survey.take(ends[:2])
            assert len(awaited) == 1
            await survey.take(ends)
            assert awaited[1:] == [{"mini-1", "mini-2", "mini-3"}]
            survey.distrust(("mini-1", "mini-2"))
            now[0] += 1.0
            await survey.take(ends)
            assert len(awaited) == 2, "answers wait for this plan"
            # A new head gets the nodes' own measurements.
            await LinkSurvey("mini-1", lambda: now[0] + 1, wait_for_reports=wait_for_reports).take(ends)
            assert len(awaited) == 2

    asyncio.run(run())


def test_an_old_measurement_is_repeated(tmp_path: Path) -> None:
    now = [1.8e9]

    async def run() -> None:
        survey = LinkSurvey("mini-1", lambda: now[0])
        async with nodes(tmp_path, 2) as ends:
            await survey.take(ends)
            now[0] += 2 * MAX_AGE_S
            assert all(link.unix_time_s > 1.8e9 + MAX_AGE_S for link in await survey.take(ends))

    asyncio.run(run())


@pytest.mark.slow
def test_a_broken_link_is_reported_and_the_others_are_measured(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)

    async def run() -> None:
        with socket.create_server(("127.0.0.1", 0)) as silent:
            silent_address = f"127.0.0.1:{silent.getsockname()[1]}"
            async with nodes(tmp_path, 3) as (one, two, three):
                # The first node cannot reach the third.
                unreachable = LinkEnd(
                    three.node,
                    three.session,
                    three.agent,
                    lambda other: silent_address if other == one.node else three.address_from(other),
                )
                found = await LinkSurvey("mini-1").take([one, two, unreachable])
        problems = {(link.source, link.target): link.problem for link in found if link.problem}
        assert list(problems) == [("mini-1", "mini-3")]
        assert "did not answer" in problems["mini-1", "mini-3"]
        assert {frozenset((link.source, link.target)) for link in found if not link.problem} == {
            frozenset(("mini-1", "mini-2")),
            frozenset(("mini-2", "mini-3")),
        }

    asyncio.run(run())
    assert len([record for record in caplog.records if "could not be measured" in record.message]) == 1


def test_a_busy_node_is_asked_once_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    requested: list[str] = []
    measure_link = AgentLink.measure_link

    async def late_at_first(link: AgentLink, hello: Any, node: str, *others: Any) -> Any:
        requested.append(node)
        if len(requested) == 1:
            raise WorkerStuck("mini-2 did not answer a probe of its link in time.")
        return await measure_link(link, hello, node, *others)

    monkeypatch.setattr(AgentLink, "measure_link", late_at_first)

    async def run() -> None:
        async with nodes(tmp_path, 2) as (one, two):
            found = await LinkSurvey("mini-1").take([one, two])
        assert [link.problem for link in found] == ["", ""]

    asyncio.run(run())
    assert requested == ["mini-2", "mini-2", "mini-1"]


def test_a_link_that_was_lost_just_now_is_tried_only_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    requested: list[str] = []
    now = [1.8e9]

    async def measure_link(_link: AgentLink, _hello: Any, node: str, *_others: Any) -> Any:
        requested.append(node)
        raise WorkerStuck("mini-2 did not answer a probe of its link in time.")

    monkeypatch.setattr(AgentLink, "measure_link", measure_link)

    async def run() -> None:
        survey = LinkSurvey("mini-1", lambda: now[0])
        survey.distrust(("mini-1", "mini-2"))
        async with nodes(tmp_path, 2) as ends:
            for _ in range(2):
                (link,) = await survey.take(ends)
                assert "did not answer" in link.problem
            assert requested == ["mini-2"]
            assert not survey.has_distrusted
            now[0] += 20.0
            await survey.take(ends)
            assert requested == ["mini-2", "mini-2"]

    asyncio.run(run())


def test_a_lost_agent_is_a_broken_link(tmp_path: Path) -> None:
    async def run() -> None:
        async with nodes(tmp_path, 2) as (one, two):
            channel = open_aio_channel("127.0.0.1:9")
            lost = LinkEnd(one.node, one.session, AgentLink(channel, "the agent of mini-1"), one.address_from)
            (link,) = await LinkSurvey("mini-1").take([lost, two])
            await channel.close()
        assert link.problem.startswith("The connection to the agent of mini-1 broke")

    asyncio.run(run())


@pytest.mark.parametrize("count", range(9))
def test_each_pair_is_measured_once_and_no_node_twice_in_a_round(count: int) -> None:
    nodes = [f"mini-{number}" for number in range(count)]
    made = list(rounds(nodes))
    assert sorted(sorted(pair) for pairs in made for pair in pairs) == sorted(
        map(list, combinations(nodes, 2))
    )
    for pairs in made:
        assert all(times == 1 for times in Counter(node for pair in pairs for node in pair).values())
    assert len(made) == max(0, count - 1 + count % 2)


def test_a_link_is_the_worse_of_its_two_directions() -> None:
    found = [FoundLink("a", "b", 1e-3, 2e8), FoundLink("b", "a", 2e-3, 1e8)]
    assert link_profiles(found) == {frozenset("ab"): LinkProfile(2e-3, 1e8, FRAMES_S)}
    assert link_profiles(reversed(found)) == link_profiles(found)


def test_a_link_that_is_broken_in_one_direction_is_unreachable() -> None:
    found = [FoundLink("a", "b", 1e-3, 2e8), FoundLink("b", "a", problem="b did not answer")]
    assert link_profiles(found) == link_profiles(reversed(found)) == {frozenset("ab"): UNREACHABLE}


def test_links_of_a_node_that_has_left_are_broken() -> None:
    found = [FoundLink("a", "b", 1e-3, 2e8), FoundLink("b", "c", 1e-3, 2e8), FoundLink("c", "b", 1e-3, 2e8)]
    broken = [
        FoundLink("b", "c", problem="c is disconnected"),
        FoundLink("c", "b", problem="c is disconnected"),
    ]
    assert as_they_are(found, {"a", "b"}) == [found[0], *broken]


def test_the_links_of_a_plan_are_listed() -> None:
    links: dict[frozenset[str], LinkProfile] = {
        frozenset(("head", "mini")): LinkProfile(0.31e-3, 1.2e9),
        frozenset(("mini", "box")): LinkProfile(4e-3, 5e6),
        frozenset(("head", "other")): LinkProfile(1e-3, 1e8),
    }
    (remark,) = link_remarks(["head", "mini", "box"], links)
    assert remark == (
        "Measured links: head - mini round trip 0.31 ms, 9.6 Gbit/s; "
        "box - mini round trip 4.00 ms, 40 Mbit/s."
    )
    assert link_remarks(["head"], links) == ()
    assert link_remarks(["here", "there"], {}) == ()
