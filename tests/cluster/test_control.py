"""Nodes that attend a head, over real connections on loopback."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import grpc
import pytest
from tests.eventually import run_tasks_until
from tests.machines import free_pair_of_ports
from tests.profiles import made_up_profile

from mlx_ring.agent import member as attendance
from mlx_ring.agent.enrolment import join
from mlx_ring.agent.leaving import Leave
from mlx_ring.agent.member import Registration, Revoke, stay_registered
from mlx_ring.cluster import control as subject
from mlx_ring.cluster.agent_link import energy_of, yielding_of
from mlx_ring.cluster.control import Control, open_control
from mlx_ring.cluster.membership import Event, Joined, Member, Membership, Reported, SessionEnded
from mlx_ring.cluster.security.records import Members
from mlx_ring.core.errors import ConfigError, Conflict, PeerRefused
from mlx_ring.core.folders import authority_folder
from mlx_ring.host.addresses import HeadAddress
from mlx_ring.host.energy import EnergyMeter, Part, PartEnergy
from mlx_ring.host.head_announcement import HeadPlace
from mlx_ring.host.yielding import Yielding, YieldWatch
from mlx_ring.rpc.channels import open_aio_channel
from mlx_ring.rpc.hello import make_hello
from mlx_ring.rpc.methods import ATTEND
from mlx_ring.rpc.protos import cluster_pb2
from mlx_ring.rpc.tls.credentials import load_credentials
from mlx_ring.rpc.tls.peers import HEAD_NAME, open_identity

WAIT_S = 60.0


@asynccontextmanager
async def attending(
    head: HeadAddress,
    control: Control,
    folder: Path,
    revoke: Revoke = lambda _serials: None,
    **changes: object,
) -> AsyncGenerator[asyncio.Task[None]]:
    """Let a machine with its state in `folder` join and attend."""
    credentials = await asyncio.to_thread(join, str(head), control.make_token(life_s=60.0), folder)
    who = Registration(open_identity(folder).node, 4000, made_up_profile(), 0.9)
    who = replace(who, **changes)  # pyright: ignore[reportArgumentType] - fields of the dataclass
    task = asyncio.create_task(stay_registered(HeadPlace(head), lambda: credentials, who, revoke))
    try:
        yield task
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError, PeerRefused):
            await task


async def until(control: Control, nodes: int) -> Membership:
    """Wait until exactly that number of nodes is connected."""
    changed = asyncio.Event()
    with control.watching(lambda _event: changed.set()):
        async with asyncio.timeout(WAIT_S):
            while len(control.membership.members) != nodes:
                changed.clear()
                await changed.wait()
    return control.membership


def test_a_second_head_with_the_same_state_is_refused(tmp_path: Path) -> None:
    async def run() -> None:
        first, second = (HeadAddress("127.0.0.1", free_pair_of_ports()) for _ in range(2))
        async with open_control(tmp_path / "head", first):
            with pytest.raises(ConfigError, match=r"Another head with the state in .* already runs"):
                async with open_control(tmp_path / "head", second):
                    pass
        async with open_control(tmp_path / "head", second):
            pass

    asyncio.run(run())


def test_a_node_that_does_not_count_is_not_waited_for(tmp_path: Path) -> None:
    async def run() -> None:
        head = HeadAddress("127.0.0.1", free_pair_of_ports())
        async with open_control(tmp_path / "head", head) as control:
            names = ("listed", "second", "old")
            listed, second, old = (open_identity(tmp_path / name).node for name in names)
            control.counted = {listed, second}
            async with attending(head, control, tmp_path / "old"):
                assert set((await control.wait_for(1)).members) == {old}
                waiting = asyncio.create_task(control.wait_for(2))
                async with attending(head, control, tmp_path / "listed"):
                    await control.look()
                    assert not waiting.done()
                    assert control.lacks(2)
                    async with attending(head, control, tmp_path / "second"):
                        assert set((await waiting).members) == {listed, second, old}

    asyncio.run(run())


def first_message() -> cluster_pb2.AttendRequest:
    """Return a node's first message."""
    return cluster_pb2.AttendRequest(
        hello=make_hello(), port=4000, profile=made_up_profile().model_dump_json(), memory_utilization=0.9
    )


def test_connected_nodes_are_members_with_their_reported_state(tmp_path: Path) -> None:
    async def run() -> None:
        head = HeadAddress("127.0.0.1", free_pair_of_ports())
        async with open_control(tmp_path / "head", head) as control:
            async with (
                attending(head, control, tmp_path / "a", memory_utilization=0.5),
                attending(head, control, tmp_path / "b"),
            ):
                connected = (await control.wait_for(2)).members
                first = connected[open_identity(tmp_path / "a").node]
                assert (first.host, first.head_host, first.port) == ("127.0.0.1", "127.0.0.1", 4000)
                assert (first.memory_utilization, first.profile) == (0.5, made_up_profile())
            former = (await until(control, 0)).former
            assert set(former) == set(connected)

    asyncio.run(run())


class Counting:
    """A counter of energy that grows by 2 J at each reading."""

    joules = 0.0

    def read(self) -> dict[Part, float]:
        self.joules += 2.0
        return {"gpu": self.joules}


def test_energy_of_a_node_grows_at_the_head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attendance, "_BEAT_S", 0.01)

    async def run() -> None:
        head = HeadAddress("127.0.0.1", free_pair_of_ports())
        async with open_control(tmp_path / "head", head) as control:
            meter = EnergyMeter([Counting()])
            async with attending(head, control, tmp_path / "a", energy=meter), asyncio.timeout(WAIT_S):
                (member,) = (await control.wait_for(1)).members.values()
                assert member.energy == (PartEnergy("gpu", 0.0),)
                changed = asyncio.Event()
                with control.watching(lambda _event: changed.set()):
                    while member.energy[0].joules < 6.0:
                        await changed.wait()
                        changed.clear()
                        (member,) = control.membership.members.values()
                assert member.energy[0].joules % 2.0 == 0.0
                assert (member.energy[0].watts or 0.0) > 0.0

    asyncio.run(run())


def test_the_head_knows_while_a_node_yields(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attendance, "_BEAT_S", 0.01)

    async def run() -> None:
        head = HeadAddress("127.0.0.1", free_pair_of_ports())
        async with open_control(tmp_path / "head", head) as control:
            watch = YieldWatch(tuple)
            async with attending(head, control, tmp_path / "a", yields=watch), asyncio.timeout(WAIT_S):
                await control.wait_for(1)
                changed = asyncio.Event()
                with control.watching(lambda _event: changed.set()):
                    for state in (None, Yielding("it is busy", 0.5, 1.0, "nice 10"), None):
                        watch.state = state
                        while next(iter(control.membership.members.values())).yielding != state:
                            await changed.wait()
                            changed.clear()

    asyncio.run(run())


@pytest.mark.parametrize("share", [-1.0, 0.0, 1.5, math.nan])
def test_shares_that_are_none_count_as_the_whole(share: float) -> None:
    said = first_message()
    assert yielding_of(said) is None
    said.yielding.reason, said.yielding.speed_share, said.yielding.memory_share = "it is busy", share, 0.5
    assert yielding_of(said) == Yielding("it is busy", 1.0, 0.5)


@pytest.mark.parametrize("joules", [-1.0, math.nan, math.inf])
def test_energy_that_is_no_number_is_left_out_like_that_of_an_unknown_part(joules: float) -> None:
    said = first_message()
    said.energy.add(part="fans", joules=1.0)
    said.energy.add(part="cpu", joules=3.0)
    said.energy.add(part="memory", joules=joules)
    said.energy.add(part="gpu", joules=1.0, watts=joules)
    assert energy_of(said) == (PartEnergy("cpu", 3.0),)


def test_a_node_reconnects_after_the_head_has_restarted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attendance, "_FIRST_PAUSE_S", 0.05)

    async def run() -> None:
        head = HeadAddress("127.0.0.1", free_pair_of_ports())
        async with AsyncExitStack() as node:
            async with open_control(tmp_path / "head", head) as control:
                await node.enter_async_context(attending(head, control, tmp_path / "a"))
                before = await control.wait_for(1)
            async with open_control(tmp_path / "head", head) as again, asyncio.timeout(WAIT_S):
                assert set((await again.wait_for(1)).members) == set(before.members)

    asyncio.run(run())


def test_a_removed_node_is_disconnected_with_the_reason(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)

    async def run() -> None:
        head = HeadAddress("127.0.0.1", free_pair_of_ports())
        async with (
            open_control(tmp_path / "head", head) as control,
            attending(head, control, tmp_path / "a") as task,
        ):
            await control.wait_for(1)
            Members(authority_folder(tmp_path / "head")).remove(open_identity(tmp_path / "a").node)
            async with asyncio.timeout(WAIT_S):
                with pytest.raises(PeerRefused, match="removed"):
                    await task
            await until(control, 0)

    asyncio.run(run())


def test_other_nodes_get_a_removed_node_s_certificates_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attendance, "_BEAT_S", 2.5)

    async def run() -> None:
        revocations: asyncio.Queue[tuple[int, tuple[str, ...]]] = asyncio.Queue()
        reports: list[Reported] = []
        head = HeadAddress("127.0.0.1", free_pair_of_ports())

        def note(event: Event) -> None:
            if isinstance(event, Reported):
                reports.append(event)

        def revoke(serials: tuple[str, ...]) -> None:
            revocations.put_nowait((len(reports), serials))

        async with (
            open_control(tmp_path / "head", head) as control,
            attending(head, control, tmp_path / "a") as removed,
            attending(head, control, tmp_path / "b", revoke),
        ):
            await control.wait_for(2)
            assert await revocations.get() == (0, ())
            with control.watching(note):
                Members(authority_folder(tmp_path / "head")).remove(open_identity(tmp_path / "a").node)
                async with asyncio.timeout(WAIT_S):
                    before, serials = await revocations.get()
            assert (before, len(serials)) == (0, 1), "no node had reported since"
            former = (await until(control, 1)).former
            assert [was.reason for was in former.values()] == ["it was removed from the cluster"]
            with suppress(PeerRefused):
                await removed

    asyncio.run(run())


def test_the_end_of_a_replaced_session_is_not_reported(tmp_path: Path) -> None:
    async def run() -> list[Event]:
        head, events = HeadAddress("127.0.0.1", free_pair_of_ports()), list[Event]()
        async with open_control(tmp_path / "head", head) as control:
            token = control.make_token(life_s=60.0)
            credentials = await asyncio.to_thread(join, str(head), token, tmp_path / "a")
            async with open_aio_channel(head.cluster, credentials, HEAD_NAME) as channel:
                first, second = (ATTEND.aio_stream_stream(channel)() for _ in range(2))
                with control.watching(events.append):
                    for call in (first, second):
                        await call.write(first_message())
                        await call.read()
                    # The call ends after all its consequences.
                    await first.done_writing()
                    assert await first.read() is grpc.aio.EOF
                    assert len(control.membership.members) == 1
                second.cancel()
        return events

    assert [type(event) for event in asyncio.run(run())] == [Joined, Joined]


def test_a_copy_of_a_connected_machine_is_refused_and_the_same_process_may_reconnect(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attendance, "_BEAT_S", 0.01)

    async def run() -> None:
        head = HeadAddress("127.0.0.1", free_pair_of_ports())
        async with (
            open_control(tmp_path / "head", head) as control,
            attending(head, control, tmp_path / "a", process="first"),
            asyncio.timeout(WAIT_S),
        ):
            (member,) = (await control.wait_for(1)).members.values()
            credentials = load_credentials(tmp_path / "a")
            assert credentials is not None
            copied = Registration(member.node, 4001, made_up_profile(), 0.9, process="copy")
            with pytest.raises(PeerRefused, match="is a copy with the same identity"):
                await stay_registered(HeadPlace(head), lambda: credentials, copied, lambda _: None)
            assert control.membership.has_session(member.node, member.session)
            again = asyncio.create_task(
                stay_registered(
                    HeadPlace(head), lambda: credentials, replace(copied, process="first"), lambda _: None
                )
            )
            await wait_for_session_after(control, member)
            again.cancel()
            await asyncio.gather(again, return_exceptions=True)

    asyncio.run(run())


def test_a_process_that_replaces_a_silent_one_is_admitted(tmp_path: Path) -> None:
    async def run() -> None:
        head = HeadAddress("127.0.0.1", free_pair_of_ports())
        async with open_control(tmp_path / "head", head) as control, asyncio.timeout(WAIT_S):
            token = control.make_token(life_s=60.0)
            credentials = await asyncio.to_thread(join, str(head), token, tmp_path / "a")
            async with open_aio_channel(head.cluster, credentials, HEAD_NAME) as channel:
                # It sends nothing more, as a machine that lost its power.
                old = ATTEND.aio_stream_stream(channel)()
                await old.write(first_message())
                await old.read()
                (member,) = control.membership.members.values()
                who = Registration(member.node, 4001, made_up_profile(), 0.9)
                new = asyncio.create_task(
                    stay_registered(HeadPlace(head), lambda: credentials, who, lambda _: None)
                )
                await wait_for_session_after(control, member)
                new.cancel()
                await asyncio.gather(new, return_exceptions=True)

    asyncio.run(run())


async def wait_for_session_after(control: Control, member: Member) -> None:
    """Wait until the node is connected in a later session."""
    changed = asyncio.Event()
    with control.watching(lambda _event: changed.set()):
        while control.membership.members[member.node].session == member.session:
            changed.clear()
            await changed.wait()


@pytest.mark.parametrize(("field", "value"), [("port", 0), ("memory_utilization", 1.5), ("profile", "{}")])
def test_a_node_with_invalid_values_is_refused(tmp_path: Path, field: str, value: float | str) -> None:
    async def run() -> None:
        head = HeadAddress("127.0.0.1", free_pair_of_ports())
        async with open_control(tmp_path / "head", head) as control:
            credentials = await asyncio.to_thread(
                join, str(head), control.make_token(life_s=60.0), tmp_path / "a"
            )
            invalid = first_message()
            setattr(invalid, field, value)
            async with open_aio_channel(head.cluster, credentials, HEAD_NAME) as channel:
                call = ATTEND.aio_stream_stream(channel)(iter([invalid]))
                reply = await call.read()
                assert isinstance(reply, cluster_pb2.AttendReply)
                assert reply.failure.kind == "ProtocolError"
            assert not control.membership.members

    asyncio.run(run())


def test_a_new_request_to_leave_asks_again_after_a_refusal(tmp_path: Path) -> None:
    async def run() -> None:
        head, asked, may_end = HeadAddress("127.0.0.1", free_pair_of_ports()), list[str](), asyncio.Event()

        async def let_go(node: str) -> None:
            asked.append(node)
            await may_end.wait()
            raise Conflict(f"refusal {len(asked)}")

        async with open_control(tmp_path / "head", head) as control:
            control.let_go = let_go
            credentials = await asyncio.to_thread(
                join, str(head), control.make_token(life_s=60.0), tmp_path / "a"
            )
            async with open_aio_channel(head.cluster, credentials, HEAD_NAME) as channel:
                call = ATTEND.aio_stream_stream(channel)()
                await call.write(first_message())
                await call.read()

                async def ask(request: int) -> tuple[int, str]:
                    message = cluster_pb2.AttendRequest(wants_to_leave=True, leave_request=request)
                    await call.write(message)
                    reply = await call.read()
                    assert isinstance(reply, cluster_pb2.AttendReply)
                    return reply.leave_request, reply.stay_reason

                async def ask_until_refused(request: int) -> tuple[int, str]:
                    while not (answer := await ask(request))[1]:
                        pass
                    return answer

                # A move that is still in progress answers the later request, too.
                assert [await ask(request) for request in (1, 2)] == [(0, ""), (0, "")]
                may_end.set()
                assert await ask_until_refused(2) == (2, "refusal 1")
                assert await ask(2) == (2, "refusal 1")
                may_end.clear()
                assert await ask(3) == (0, "")
                may_end.set()
                assert await ask_until_refused(3) == (3, "refusal 2")
                call.cancel()

    asyncio.run(run())


@pytest.mark.parametrize(
    ("end", "expected"),
    [("leave", ("it left the cluster", True)), ("cut off", ("its connection was lost", False))],
)
def test_only_a_node_that_says_so_has_left_for_good(
    tmp_path: Path, end: str, expected: tuple[str, bool]
) -> None:
    async def run() -> list[tuple[str, bool]]:
        head, events = HeadAddress("127.0.0.1", free_pair_of_ports()), list[Event]()
        async with open_control(tmp_path / "head", head) as control:
            credentials = await asyncio.to_thread(
                join, str(head), control.make_token(life_s=60.0), tmp_path / "a"
            )
            leave = Leave()
            who = Registration(open_identity(tmp_path / "a").node, 4000, made_up_profile(), 0.9)
            attends = stay_registered(HeadPlace(head), lambda: credentials, who, lambda _serials: None, leave)
            task = asyncio.create_task(attends)
            await control.wait_for(1)
            with control.watching(events.append):
                (leave.end if end == "leave" else task.cancel)()
                await until(control, 0)
                await asyncio.wait((task,))
        return [(event.reason, event.is_final) for event in events if isinstance(event, SessionEnded)]

    assert asyncio.run(run()) == [expected]


def test_a_plan_waits_while_a_connected_node_is_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attendance, "_BEAT_S", 3600.0)
    monkeypatch.setattr(subject, "_SETTLED_WITHIN_S", 0.1)
    monkeypatch.setattr(subject, "SILENCE_S", 0.6)

    async def run() -> None:
        head = HeadAddress("127.0.0.1", free_pair_of_ports())
        async with (
            open_control(tmp_path / "head", head) as control,
            attending(head, control, tmp_path / "a"),
        ):
            session = (await control.wait_for(1)).members[open_identity(tmp_path / "a").node].session
            await run_tasks_until(lambda: any(one.seconds >= 0.1 for _, one in control._silences.values()))  # pyright: ignore[reportPrivateUsage] - what a plan sees
            await control.settle()
            sessions = [member.session for member in control.membership.members.values()]
            assert session not in sessions

    asyncio.run(run())


def test_a_plan_waits_for_the_next_report_of_a_connected_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    used_bytes = [300 << 20]
    monkeypatch.setattr(attendance, "own_memory", lambda: used_bytes[0])

    async def run() -> None:
        head = HeadAddress("127.0.0.1", free_pair_of_ports())
        async with open_control(tmp_path / "head", head) as control:
            async with attending(head, control, tmp_path / "a") as attends:
                (node,) = (await control.wait_for(1)).members
                used_bytes[0] = 100 << 20
                await control.wait_for_reports({node, "unknown"})
                assert control.membership.members[node].agent_bytes == 100 << 20
                waiting = asyncio.create_task(control.wait_for_reports({node}))
                attends.cancel()
                await waiting
            await control.wait_for_reports({node})

    asyncio.run(run())


def test_a_plan_waits_for_a_node_whose_connection_broke_a_moment_ago(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subject, "_RETURNS_WITHIN_S", 3600.0)

    async def run() -> None:
        head = HeadAddress("127.0.0.1", free_pair_of_ports())
        async with open_control(tmp_path / "head", head) as control:
            async with attending(head, control, tmp_path / "a") as attends:
                await control.wait_for(1)
                attends.cancel()
                await until(control, 0)
            node = open_identity(tmp_path / "a").node
            assert not control.has_left(node)
            await control.settle({node})
            settling = asyncio.create_task(control.settle())
            returning = asyncio.create_task(control.wait_until_present(node))
            await control.look()
            assert not settling.done()
            assert not returning.done()
            async with attending(head, control, tmp_path / "a") as attends:
                await settling
                await returning
                assert node in control.membership.members
                attends.cancel()
                await until(control, 0)
            monkeypatch.setattr(subject, "_RETURNS_WITHIN_S", 0.0)
            await control.wait_until_left(node)
            assert control.has_left(node)

    asyncio.run(run())


class MembersFile:
    """The file of members, which can be read, or not."""

    is_readable = True

    def __init__(self) -> None:
        self.looks = 0

    def check_readable(self) -> None:
        self.looks += 1
        self.refusal(None)

    def revoked_serials(self) -> frozenset[str]:
        return frozenset()

    def refusal(self, _peer: object) -> str:
        if not self.is_readable:
            raise PermissionError(13, "Permission denied")
        return ""


def made_up_control(monkeypatch: pytest.MonkeyPatch, members: MembersFile) -> Any:
    """Return a control to which each call is one of the node `mini`."""
    monkeypatch.setattr(subject, "host_of_call", str)
    monkeypatch.setattr(subject, "peer_of_call", str)
    control: Any = Control(cast("Any", None), cast("Any", None), cast("Any", members), "head")
    mini = SimpleNamespace(node="mini", machine="mini", host="10.0.0.2", session=1, process="")
    control._member = lambda *_: mini  # pyright: ignore[reportUnknownLambdaType]
    return control


async def attend_once(control: Any, goes_on: asyncio.Event) -> None:
    """Attend until the call is cancelled, or may end."""

    async def requests() -> AsyncGenerator[cluster_pb2.AttendRequest]:
        yield first_message()
        await goes_on.wait()

    async for _ in control.attend(requests(), None):
        pass


def test_a_node_leaves_although_the_file_of_members_cannot_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        members, ends = MembersFile(), asyncio.Event()
        control = made_up_control(monkeypatch, members)
        calling = asyncio.create_task(attend_once(control, ends))
        await run_tasks_until(lambda: control.membership.members)
        members.is_readable = False
        ends.set()
        await calling
        assert (control.membership.members, control._silences) == ({}, {})

    asyncio.run(run())


def test_a_call_that_ends_before_its_node_has_joined_leaves_no_silence_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def run() -> None:
        control = made_up_control(monkeypatch, MembersFile())
        async with control._changed:
            calling = asyncio.create_task(attend_once(control, asyncio.Event()))
            await run_tasks_until(lambda: control._silences)
            calling.cancel()
            await asyncio.sleep(0)
        await asyncio.wait((calling,))
        assert (control.membership.members, control._silences) == ({}, {})

    asyncio.run(run())


def test_the_head_looks_at_its_nodes_while_the_file_of_members_cannot_be_read(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(subject, "_LOOK_S", 0.0)

    async def run() -> None:
        members, looks, guard = MembersFile(), list[str](), SimpleNamespace(end_refused=int)

        async def look() -> None:
            looks.append("look")

        control: Any = SimpleNamespace(look=look, send_revoked=list)
        members.is_readable = False
        sweeping = asyncio.create_task(cast("Any", subject)._end_removed(guard, control, members))
        await run_tasks_until(lambda: sweeping.done() or len(looks) == 3)
        assert len(caplog.messages) == 1
        assert "Permission denied" in caplog.messages[0]
        members.is_readable = True
        before = members.looks
        await run_tasks_until(lambda: sweeping.done() or members.looks > before)
        assert not sweeping.done()
        sweeping.cancel()

    asyncio.run(run())


def test_members_are_as_they_could_last_be_read(tmp_path: Path) -> None:
    members, file = Members(tmp_path), tmp_path / "members.json"
    file.write_text("{")
    file.chmod(0o600)
    with pytest.raises(ConfigError):
        members.list()
    file.unlink()
    assert members.list() == {}
    file.write_text("{")
    file.chmod(0o600)
    assert (members.list(), members.revoked_serials()) == ({}, frozenset())
    with pytest.raises(ConfigError):
        members.check_readable()
