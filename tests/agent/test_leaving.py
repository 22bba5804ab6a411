"""Machines that leave their cluster for a while, because they sleep or their battery is low, or for good."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from tests.eventually import run_tasks_until
from tests.host.iokit import HAS_POWERED_ON, REGISTERED, UNREGISTERED, WILL_SLEEP, mac
from tests.host.logind import logind
from tests.machines import free_pair_of_ports
from tests.profiles import made_up_profile

from mlx_ring.agent.enrolment import join
from mlx_ring.agent.leaving import Leave, PowerWatch
from mlx_ring.agent.member import Registration, stay_registered
from mlx_ring.cluster.control import Control, open_control
from mlx_ring.host.addresses import HeadAddress
from mlx_ring.host.head_announcement import HeadPlace
from mlx_ring.host.power import LogindWarnings
from mlx_ring.rpc.protos.cluster_pb2 import AttendReply
from mlx_ring.rpc.tls.peers import open_identity

MAY_LEAVE = AttendReply(may_leave=True)


class Member:
    """Membership without a head: the test gives the head's answers."""

    def __init__(self, *, has_workers: bool = True) -> None:
        self.absences: list[str] = []
        self.leave = Leave(has_workers=lambda: has_workers, on_absence=self.absences.append)
        self.joined = 0
        self.left: list[str] = []

    async def stay_registered(self) -> None:
        self.joined += 1
        self.leave.received(AttendReply())
        await self.leave.left.wait()
        self.leave.silent()

    def refuse(self, request: int | None = None) -> None:
        """Let the head refuse a request, by default the last one."""
        number = self.leave.request if request is None else request
        self.leave.received(AttendReply(stay_reason="The others have no room.", leave_request=number))

    def go_away(self, why: str = "sleep", within_s: float | None = None) -> None:
        self.leave.go_away(why, within_s=within_s, on_left=lambda: self.left.append(why))


@asynccontextmanager
async def running(member: Member) -> AsyncGenerator[asyncio.Task[None]]:
    task = asyncio.create_task(member.leave.attend(member.stay_registered))
    await run_tasks_until(lambda: member.joined)
    yield task
    member.leave.end()
    await task


def test_a_machine_without_layers_leaves_at_once_and_comes_back() -> None:
    async def run() -> None:
        member = Member(has_workers=False)
        async with running(member) as task:
            member.go_away()
            await run_tasks_until(lambda: member.left)
            member.go_away("battery")
            assert member.left == ["sleep", "battery"]
            member.leave.come_back("sleep")
            await asyncio.sleep(0)
            assert (member.joined, task.done()) == (1, False)
            member.leave.come_back("battery")
            await run_tasks_until(lambda: member.joined == 2)
            assert not member.leave.left.is_set()
            assert member.absences == ["sleep", ""]

    asyncio.run(run())


def test_layers_move_before_a_machine_is_away() -> None:
    async def run() -> None:
        member = Member()
        async with running(member):
            member.go_away(within_s=3600)
            assert (member.leave.is_wanted, member.leave.left.is_set()) == (True, False)
            member.leave.received(MAY_LEAVE)
            await run_tasks_until(lambda: member.left)
            member.leave.come_back("sleep")
            await run_tasks_until(lambda: member.joined == 2)
            assert not member.leave.is_wanted

    asyncio.run(run())


@pytest.mark.parametrize("within_s", [0.0, 3600.0])
def test_a_machine_that_is_about_to_sleep_leaves_in_time_or_where_the_others_have_no_room(
    within_s: float,
) -> None:
    async def run() -> None:
        member = Member()
        async with running(member):
            member.go_away(within_s=within_s)
            if within_s:
                member.refuse()
            await run_tasks_until(lambda: member.left)

    asyncio.run(run())


def test_a_machine_whose_layers_fit_nowhere_else_stays_with_a_low_battery(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def run() -> None:
        member = Member()
        async with running(member):
            member.go_away("battery")
            for _ in range(2):
                member.refuse()
            assert caplog.text.count("cannot move: The others have no room. It stays in its cluster.") == 1
            assert (member.leave.left.is_set(), member.leave.is_wanted) == (False, True)
            member.leave.come_back("battery")
            member.refuse()
            assert not member.leave.is_wanted
            assert (member.joined, member.left) == (1, [])

    asyncio.run(run())


def test_a_refusal_of_before_does_not_end_the_wait_of_a_machine_that_is_about_to_sleep() -> None:
    async def run() -> None:
        member = Member()
        async with running(member):
            member.go_away("battery")
            member.refuse()
            refused = member.leave.request
            member.go_away("sleep", within_s=3600)
            member.refuse(refused)
            assert not member.leave.left.is_set()
            member.refuse()
            await run_tasks_until(lambda: member.left)
            assert member.left == ["battery", "sleep"]

    asyncio.run(run())


def test_a_machine_that_sleeps_again_before_it_is_back_delays_nothing() -> None:
    async def run() -> None:
        member = Member()
        async with running(member):
            member.go_away(within_s=3600)
            member.go_away(within_s=3600)
            member.leave.received(MAY_LEAVE)
            await run_tasks_until(lambda: member.left)
            member.go_away(within_s=3600)
            assert member.left == ["sleep", "sleep"]

    asyncio.run(run())


def test_a_machine_that_has_power_again_while_its_layers_move_joins_anew() -> None:
    """Let it leave all the same: its head gives it no layers before it has joined again."""

    async def run() -> None:
        member = Member()
        async with running(member):
            member.go_away("battery")
            member.leave.come_back("battery")
            assert member.leave.is_wanted
            member.leave.received(MAY_LEAVE)
            await run_tasks_until(lambda: member.joined == 2)

    asyncio.run(run())


def test_a_low_battery_takes_no_layers_away_while_the_head_does_not_answer() -> None:
    async def run() -> None:
        member = Member()
        async with running(member):
            member.go_away("battery")
            member.refuse()
            member.leave.silent()
            assert not member.leave.left.is_set()
            member.leave.come_back("battery")
            member.refuse()
            assert not member.leave.is_wanted
            member.leave.silent()
            member.go_away("battery")
            assert (member.leave.left.is_set(), member.leave.is_wanted) == (False, True)
            member.go_away("sleep", within_s=3600)
            assert member.leave.left.is_set()

    asyncio.run(run())


def test_a_machine_that_is_awake_again_keeps_its_new_lock() -> None:
    """Let it be awake before its head knows that it has left."""

    async def run() -> None:
        member = Member()
        async with running(member):
            member.go_away("sleep", within_s=3600)
            member.leave.come_back("sleep")
            member.leave.received(MAY_LEAVE)
            await run_tasks_until(lambda: member.joined == 2)
            assert not member.left

    asyncio.run(run())


def test_an_agent_that_is_away_ends_at_the_first_signal() -> None:
    async def run() -> None:
        member = Member(has_workers=False)
        async with running(member) as task:
            member.go_away()
            await run_tasks_until(lambda: member.left)
            member.leave.want(is_patient=True)
            await task
            assert member.joined == 1

    asyncio.run(run())


def test_a_signal_counts_more_than_sleep() -> None:
    async def run() -> None:
        member = Member()
        async with running(member) as task:
            member.leave.want(is_patient=True)
            member.go_away(within_s=3600)
            assert not member.leave.left.is_set()
            member.leave.received(MAY_LEAVE)
            await task
            assert member.leave.ended.is_set()
            assert member.left == ["sleep"]

    asyncio.run(run())


def test_an_agent_that_stays_after_a_signal_delays_no_sleep_for_long() -> None:
    async def run() -> None:
        member = Member()
        async with running(member) as task:
            member.leave.want(is_patient=True)
            member.refuse()
            member.go_away(within_s=0.0)
            await task
            assert (member.left, member.leave.ended.is_set()) == (["sleep"], True)

    asyncio.run(run())


def test_the_battery_decides_with_a_margin() -> None:
    async def run() -> None:
        member, left = Member(has_workers=False), [0.5]
        watch = PowerWatch(member.leave, 0.1, battery=lambda: left[0] if left else None)
        never = PowerWatch(member.leave, 0.0, battery=lambda: 0.01)
        async with running(member):
            for watched in (watch, never):
                watched.look_at_battery()
                assert not member.leave.left.is_set()
            left[0] = 0.09
            watch.look_at_battery()
            assert member.leave.left.is_set()
            left[0] = 0.12
            watch.look_at_battery()
            await asyncio.sleep(0)
            assert member.joined == 1
            left.clear()
            watch.look_at_battery()
            await run_tasks_until(lambda: member.joined == 2)

    asyncio.run(run())


@asynccontextmanager
async def attending(folder: Path, leave: Leave) -> AsyncGenerator[tuple[Control, str]]:
    """Let a node attend a head, and be away and back as `leave` says; yield the head's side and the node's ID."""
    head = HeadAddress("127.0.0.1", free_pair_of_ports())
    async with open_control(folder / "head", head) as control:
        token = control.make_token(life_s=60.0)
        credentials = await asyncio.to_thread(join, str(head), token, folder / "a")
        who = Registration(open_identity(folder / "a").node, 4000, made_up_profile(), 0.9)
        task = asyncio.create_task(
            leave.attend(
                lambda: stay_registered(HeadPlace(head), lambda: credentials, who, lambda _: None, leave)
            )
        )
        yield control, who.node
        leave.end()
        await task


@asynccontextmanager
async def watching(power: PowerWatch) -> AsyncGenerator[None]:
    task = asyncio.create_task(power.run())
    yield
    task.cancel()
    await asyncio.wait((task,))


def test_a_member_leaves_its_head_before_the_system_sleeps_and_joins_when_it_is_awake(tmp_path: Path) -> None:
    async def run() -> None:
        leave = Leave(has_workers=lambda: False)
        with logind(tmp_path) as system:
            power = PowerWatch(leave, 0.0, make_warnings=lambda put: LogindWarnings(put, system.address))
            async with attending(tmp_path, leave) as (control, node):
                async with watching(power):
                    await asyncio.to_thread(system.is_locked.acquire)
                    await control.wait_for(1)
                    system.warn("PrepareForSleep", begins=True)
                    await run_tasks_until(lambda: node not in control.membership.members)
                    assert control.has_left(node)
                    await asyncio.to_thread(system.wait_for_release, 0)
                    system.warn("PrepareForSleep", begins=False)
                    await control.wait_for(1)
                    assert await asyncio.to_thread(system.is_held, 1)
                await asyncio.to_thread(system.wait_for_release, 1)

    asyncio.run(run())


def test_a_mac_sleeps_once_its_layers_have_moved_and_joins_when_it_is_awake(tmp_path: Path) -> None:
    async def run() -> None:
        leave, moving, moved = Leave(has_workers=lambda: True), asyncio.Event(), asyncio.Event()

        async def let_go(_node: str) -> None:
            moving.set()
            await moved.wait()

        with mac(tmp_path) as system:
            async with attending(tmp_path, leave) as (control, node):
                control.let_go = let_go
                async with watching(PowerWatch(leave, 0.0, make_warnings=system.warnings)):
                    assert await asyncio.to_thread(system.calls, 2) == REGISTERED
                    await control.wait_for(1)
                    await run_tasks_until(lambda: leave.is_connected)
                    system.send(WILL_SLEEP, 7)
                    await moving.wait()
                    assert not leave.left.is_set()
                    moved.set()
                    await run_tasks_until(lambda: node not in control.membership.members)
                    assert await asyncio.to_thread(system.calls, 1) == ("allow 7",)
                    system.send(WILL_SLEEP, 8)
                    assert await asyncio.to_thread(system.calls, 1) == ("allow 8",)
                    assert control.has_left(node)
                    system.send(HAS_POWERED_ON, 0)
                    await control.wait_for(1)
                assert await asyncio.to_thread(system.calls, 4) == UNREGISTERED

    asyncio.run(run())
