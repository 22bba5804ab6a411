"""Survey of all links by the nodes at their ends; broken links are reported without delay."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.agent.linked_nodes import LinkedNode, linked_node

from mlx_ring.cluster.agent_link import AgentLink
from mlx_ring.cluster.link_survey import MAX_AGE_S, LinkEnd, LinkSurvey
from mlx_ring.cluster.security.authority import Authority
from mlx_ring.core.errors import WorkerStuck
from mlx_ring.rpc.channels import open_aio_channel
from mlx_ring.rpc.tls.certificates import node_name


@asynccontextmanager
async def nodes(folder: Path, count: int) -> AsyncGenerator[list[LinkEnd]]:
    """Open that number of nodes, with channels to their agents."""
    authority = Authority.open(folder / "cluster")
    async with AsyncExitStack() as stack:
        ends: list[LinkEnd] = []
        for number in range(1, count + 1):
            node = await stack.enter_async_context(
                linked_node(authority, f"mini-{number}", folder / f"{number}")
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
        # Nobody is there any more, and nobody has to be asked.
        assert await survey.take(ends) == found

    asyncio.run(run())


def test_a_reconnected_node_returns_its_stored_measurements(tmp_path: Path) -> None:
    async def run() -> None:
        async with nodes(tmp_path, 2) as ends:
            before = await LinkSurvey("mini-1").take(ends)
            after = await LinkSurvey("mini-1").take(ends)
        assert [link.bytes_per_s for link in after] == [link.bytes_per_s for link in before]
        # The time of the measurement follows from its age, as precisely as messages are fast.
        pairs = zip(after, before, strict=True)
        assert max(abs(link.unix_time_s - earlier.unix_time_s) for link, earlier in pairs) < 60

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


def test_a_broken_link_is_reported_and_the_others_are_measured(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)

    async def run() -> None:
        with socket.create_server(("127.0.0.1", 0)) as silent:
            dark = f"127.0.0.1:{silent.getsockname()[1]}"
            async with nodes(tmp_path, 3) as (one, two, three):
                # The third is not reached from the first.
                hidden = LinkEnd(
                    three.node,
                    three.session,
                    three.agent,
                    lambda other: dark if other == one.node else three.address_from(other),
                )
                found = await LinkSurvey("mini-1").take([one, two, hidden])
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
    asked: list[str] = []
    real = AgentLink.measure_link

    async def late_at_first(link: AgentLink, hello: Any, node: str, *others: Any) -> Any:
        asked.append(node)
        if len(asked) == 1:
            raise WorkerStuck("mini-2 did not answer a probe of its link in time.")
        return await real(link, hello, node, *others)

    monkeypatch.setattr(AgentLink, "measure_link", late_at_first)

    async def run() -> None:
        async with nodes(tmp_path, 2) as (one, two):
            found = await LinkSurvey("mini-1").take([one, two])
        assert [link.problem for link in found] == ["", ""]

    asyncio.run(run())
    assert asked == ["mini-2", "mini-2", "mini-1"]


def test_a_lost_agent_is_a_broken_link(tmp_path: Path) -> None:
    async def run() -> None:
        async with nodes(tmp_path, 2) as (one, two):
            channel = open_aio_channel("127.0.0.1:9")
            gone = LinkEnd(one.node, one.session, AgentLink(channel, "the agent of mini-1"), one.address_from)
            (link,) = await LinkSurvey("mini-1").take([gone, two])
            await channel.close()
        assert link.problem.startswith("The connection to the agent of mini-1 broke")

    asyncio.run(run())
