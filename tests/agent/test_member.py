"""An agent without its head: it asks again, and ends ranks that wait for others."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Generator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import grpc
import pytest
from tests.eventually import eventually, run_tasks_until
from tests.machines import free_pair_of_ports, node_credentials
from tests.processes import give_profile, joining
from tests.profiles import made_up_profile

from mlx_ring.agent import enrolment, member
from mlx_ring.agent.member import Registration, stay_registered
from mlx_ring.agent.supervisor import Worker
from mlx_ring.agent.worker_processes import end_orphaned_workers
from mlx_ring.cluster.control import open_control
from mlx_ring.cluster.security.authority import Authority
from mlx_ring.core.errors import PeerRefused
from mlx_ring.host import head_announcement
from mlx_ring.host.addresses import HeadAddress
from mlx_ring.host.head_announcement import HeadPlace
from mlx_ring.rpc.channels import FailureLog, open_aio_channel
from mlx_ring.rpc.methods import HAVE
from mlx_ring.rpc.protos import weights_pb2, worker_pb2
from mlx_ring.rpc.tls.credentials import Credentials, require_credentials
from mlx_ring.rpc.tls.peers import node_name, open_identity

SPINS, SLEEPS = "while True: pass", "import time; time.sleep(600)"


class Closing(asyncio.Protocol):
    """A head that closes its first connections in the handshake, as one that was frozen and then killed."""

    def __init__(self, closed: list[int]) -> None:
        self._closed = closed

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self._closed.append(len(data))
        self._transport.abort()


def test_a_head_that_closes_a_connection_in_the_handshake_is_asked_again(tmp_path: Path) -> None:
    async def run() -> None:
        address = HeadAddress("127.0.0.1", free_pair_of_ports())
        credentials = node_credentials(Authority.open(tmp_path), "mini-1")
        closed: list[int] = []
        listener = await asyncio.get_running_loop().create_server(
            lambda: Closing(closed), address.host, address.port
        )
        who = Registration("mini-1", 4000, made_up_profile(), 0.9)
        task = asyncio.create_task(
            stay_registered(HeadPlace(address), lambda: credentials, who, lambda _: None)
        )
        try:
            async with listener, asyncio.timeout(60):
                while len(closed) < 2:
                    await asyncio.wait((task,), timeout=0.05)
                    assert not task.done(), task.exception()
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    asyncio.run(run())


def test_a_full_disk_ends_neither_the_registration_nor_the_renewal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(enrolment, "_RENEWAL_S", 0.0)
    monkeypatch.setattr(member, "_FIRST_PAUSE_S", 0.0)
    address, tries = HeadAddress("127.0.0.1", 1), Counter[str]()

    def fail(which: str, *_: object) -> Any:
        tries[which] += 1
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(enrolment, "renew_if_due", partial(fail, "renewal"))
    who = Registration("mini-1", 4000, made_up_profile(), 0.9)

    async def run() -> None:
        tasks = [
            asyncio.create_task(enrolment.keep_renewed(HeadPlace(address), Path())),
            asyncio.create_task(
                stay_registered(HeadPlace(address), lambda: fail("registration"), who, lambda _: None)
            ),
        ]
        async with asyncio.timeout(60):
            while min(tries["renewal"], tries["registration"]) < 2:
                await asyncio.wait(tasks, timeout=0.05, return_when=asyncio.FIRST_COMPLETED)
                assert not any(task.done() for task in tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(run())


def test_failures_to_reach_the_head_are_logged_at_growing_distances(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = [0.0]
    failures = FailureLog(logging.getLogger("test"), lambda: clock[0])

    def lines(seconds: int) -> int:
        caplog.clear()
        for _ in range(seconds):
            clock[0] += 1.0
            failures.record("The head cannot be reached")
        return len(caplog.records)

    assert lines(5) == 3
    assert lines(3600) < 20
    failures.end()
    assert lines(1) == 1


@contextlib.contextmanager
def rank(program: str, instance: str, ranks: int = 2) -> Generator[Worker]:
    with subprocess.Popen([sys.executable, "-c", program]) as process:
        assignment = worker_pb2.StageAssignment(instance=instance, stages=1, tp_size=ranks)
        child: Any = SimpleNamespace(pid=process.pid)
        try:
            yield Worker(assignment, Path("socket"), child, cast("Any", None))
        finally:
            process.kill()


class FakeSupervisor:
    """A supervisor that records the instances it ends."""

    def __init__(self, *workers: Worker) -> None:
        self.workers = workers
        self.ended: list[str] = []
        self.has_ended = asyncio.Event()

    async def stop(self, instance: str) -> int:
        self.ended.append(instance)
        self.workers = tuple(worker for worker in self.workers if worker.instance != instance)
        self.has_ended.set()
        return 1


@pytest.mark.parametrize(("silent_s", "expected"), [(60.0, ["waits"]), (0.0, [])])
def test_only_ranks_that_wait_for_others_are_ended_and_only_without_a_head(
    silent_s: float, expected: list[str]
) -> None:
    with rank(SPINS, "waits") as waits, rank(SLEEPS, "idle") as idle, rank(SPINS, "alone", 1) as alone:

        async def run() -> list[str]:
            supervisor = FakeSupervisor(waits, idle, alone)
            ending = asyncio.create_task(
                end_orphaned_workers(supervisor, lambda: time.monotonic() - silent_s, 30.0, 0.3)
            )
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(30.0 if expected else 1.0):
                    await supervisor.has_ended.wait()
            ending.cancel()
            return supervisor.ended

        assert asyncio.run(run()) == expected


async def answer_plainly(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer like a program that speaks no TLS."""
    await reader.read(1)
    writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
    writer.close()


def test_another_program_at_the_address_of_an_ended_head_does_not_end_a_member(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(member, "_DISTRUST_PAUSE_S", 0.1)
    address, state = HeadAddress("127.0.0.1", free_pair_of_ports()), tmp_path / "head"
    caplog.set_level(logging.INFO)

    async def attend(node: str) -> None:
        def credentials() -> Credentials:
            return require_credentials(tmp_path / "node")

        who = Registration(node, 4000, made_up_profile(), 0.9)
        attending = asyncio.create_task(stay_registered(HeadPlace(address), credentials, who, lambda _: None))
        try:
            async with open_control(state, address) as control:
                await control.wait_until_present(node)
                # The head knows the node before the node has its first answer.
                await run_tasks_until(lambda: "Connected to the head" in caplog.text)
            async with await asyncio.start_server(answer_plainly, address.host, address.port):
                while "did not speak TLS; asking again" not in caplog.text:
                    await asyncio.wait((attending,), timeout=0.05)
                    assert not attending.done(), attending.exception()
            async with open_control(state, address) as control:
                await control.wait_until_present(node)
        finally:
            attending.cancel()
            await asyncio.gather(attending, return_exceptions=True)

    async def run() -> None:
        async with asyncio.timeout(100):
            async with open_control(state, address) as control:
                token = control.make_token(life_s=600)
                await asyncio.to_thread(enrolment.join, str(address), token, tmp_path / "node")
            await attend(open_identity(tmp_path / "node").node)

    asyncio.run(run())
    assert "There is no trusted connection to the head at 127.0.0.1:" in caplog.text
    assert "to The head" not in caplog.text


def test_a_member_finds_its_head_at_another_address_and_distrusts_others_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("_LOOK_AFTER_S", "_LOOK_EVERY_S"):
        monkeypatch.setattr(head_announcement, name, 0.0)
    monkeypatch.setattr(member, "_DISTRUST_PAUSE_S", 0.1)
    old, wrong, new = (HeadAddress("127.0.0.1", free_pair_of_ports()) for _ in range(3))
    state, found = tmp_path / "head", [wrong, new]
    kept = asyncio.Queue[HeadAddress]()
    place = HeadPlace(old, lambda _: found.pop(0) if found else None, kept.put_nowait)

    async def run() -> None:
        async with asyncio.timeout(100):
            async with open_control(state, old) as control:
                token = control.make_token(life_s=600)
                await asyncio.to_thread(enrolment.join, str(old), token, tmp_path / "node")
            node = open_identity(tmp_path / "node").node
            who = Registration(node, 4000, made_up_profile(), 0.9)
            attending = asyncio.create_task(
                stay_registered(place, lambda: require_credentials(tmp_path / "node"), who, lambda _: None)
            )
            async with (
                await asyncio.start_server(answer_plainly, wrong.host, wrong.port),
                open_control(state, new) as control,
            ):
                waiting = asyncio.create_task(control.wait_until_present(node))
                await asyncio.wait((attending, waiting), return_when=asyncio.FIRST_COMPLETED)
                assert not attending.done(), attending.exception()
                assert control.membership.members[node].head_host == new.host
                assert await kept.get() == new
            attending.cancel()
            await asyncio.gather(attending, return_exceptions=True)
        assert kept.empty()

    asyncio.run(run())


def test_a_refusal_at_a_guessed_address_does_not_end_a_member(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("_LOOK_AFTER_S", "_LOOK_EVERY_S"):
        monkeypatch.setattr(head_announcement, name, 0.0)
    monkeypatch.setattr(member, "_DISTRUST_PAUSE_S", 0.1)
    old, other = (HeadAddress("127.0.0.1", free_pair_of_ports()) for _ in range(2))
    state = tmp_path / "head"
    place = HeadPlace(old, lambda _: other)

    async def run() -> None:
        async with asyncio.timeout(100):
            async with open_control(state, old) as control:
                token = control.make_token(life_s=600)
                await asyncio.to_thread(enrolment.join, str(old), token, tmp_path / "node")
            node = open_identity(tmp_path / "node").node
            # An older copy of the cluster's state, which does not know this machine.
            (state / "cluster" / "members.json").rename(tmp_path / "members.json")
            who = Registration(node, 4000, made_up_profile(), 0.9)
            attending = asyncio.create_task(
                stay_registered(place, lambda: require_credentials(tmp_path / "node"), who, lambda _: None)
            )
            async with open_control(state, other):
                while not place.refused:
                    await asyncio.sleep(0.05)
                    assert not attending.done(), attending.exception()
            (tmp_path / "members.json").replace(state / "cluster" / "members.json")
            async with open_control(state, old) as control:
                await control.wait_until_present(node)
            attending.cancel()
            await asyncio.gather(attending, return_exceptions=True)
        assert place.refused == {other}

    asyncio.run(run())


def test_a_member_that_has_never_reached_its_head_ends_with_the_reason(tmp_path: Path) -> None:
    async def run() -> None:
        address = HeadAddress("127.0.0.1", free_pair_of_ports())
        credentials = node_credentials(Authority.open(tmp_path), "mini-1")
        who = Registration("mini-1", 4000, made_up_profile(), 0.9)
        async with await asyncio.start_server(answer_plainly, address.host, address.port):
            with pytest.raises(PeerRefused, match="did not speak TLS"):
                await stay_registered(HeadPlace(address), lambda: credentials, who, lambda _: None)

    asyncio.run(run())


async def refusal_by_agent(address: str, node: str, credentials: Credentials) -> str:
    """Return why an agent refuses a call; empty if it is admitted."""
    async with open_aio_channel(address, credentials, node_name(node)) as channel:
        try:
            await HAVE.aio_unary_unary(channel)(weights_pb2.HaveRequest(), timeout=60, wait_for_ready=True)
        except grpc.aio.AioRpcError as error:
            return error.details() or ""
    return ""


def test_a_machine_that_restarts_without_its_head_refuses_a_removed_one(tmp_path: Path) -> None:
    address, agent_port = HeadAddress("127.0.0.1", free_pair_of_ports()), free_pair_of_ports()
    ports = ("--node-ports", f"{agent_port}-{agent_port + 3}", "--listen", "127.0.0.1")
    state = tmp_path / "node" / "state"
    give_profile(state)

    async def run() -> None:
        async with open_control(tmp_path / "head", address) as control:
            token = control.make_token(life_s=600)
            other = await asyncio.to_thread(enrolment.join, str(address), token, tmp_path / "other")
            with joining(str(address), "--token", token, *ports, folder=tmp_path / "node"):
                await control.wait_for(1)
                (node,) = control.membership.members
                control.members.remove(open_identity(tmp_path / "other").node)
                await asyncio.to_thread(eventually, (state / "node" / "revoked").exists)
        with joining(str(address), *ports, folder=tmp_path / "node"):
            said = await refusal_by_agent(f"127.0.0.1:{agent_port}", node, other)
            assert "it has been removed from the cluster" in said

    asyncio.run(run())
