"""The agent of the head's own machine: started by an earlier head, or replaced because it hangs."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.eventually import run_tasks_until
from tests.processes import clean_environment

from mlx_ring.cluster import own_agent as subject
from mlx_ring.cluster.membership import Event, FormerMember, Membership, SessionEnded
from mlx_ring.cluster.own_agent import OwnAgent, stale_trust
from mlx_ring.core.errors import NotReady
from mlx_ring.host.addresses import HeadAddress
from mlx_ring.host.interfaces import trusted_interfaces
from mlx_ring.settings.config import Settings


@pytest.mark.parametrize(
    ("trusted", "named", "said"),
    [
        (
            (),
            ("127.0.0.1",),
            r"It trusts nothing with collectives, and this head names \w+ \(127\.0\.0\.1\)\.",
        ),
        (
            ("127.0.0.1",),
            (),
            r"It trusts \w+ \(127\.0\.0\.1\) with collectives, and this head names nothing\.",
        ),
    ],
)
def test_an_agent_with_other_trusted_interfaces_is_reported(
    trusted: tuple[str, ...], named: tuple[str, ...], said: str
) -> None:
    assert re.search(said, stale_trust(trusted_interfaces(trusted), named))
    assert stale_trust(trusted_interfaces(trusted), trusted) == ""


AGENT = """
import sys, time
from pathlib import Path
from mlx_ring.core.folders import AGENT_LOCK, node_folder
from mlx_ring.host.private_files import try_lock
from mlx_ring.host.running import agent_note, recorded
state = Path(sys.argv[1])
assert try_lock(node_folder(state) / AGENT_LOCK, agent_note(int(sys.argv[2]))) is not None
with recorded(state, "agent"):
    print("ready", flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize(("port", "is_ended"), [(50051, 0), (50061, 1)])
def test_an_agent_that_a_killed_head_started_for_another_port_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, port: int, is_ended: int
) -> None:
    started: list[HeadAddress] = []
    original = subject.ensure_head_member

    def ensure(settings: Settings, state: Path, node: str, head: HeadAddress) -> None:
        # The lock decides, but no further agent starts.
        with monkeypatch.context() as patch:
            patch.setattr(subprocess, "Popen", lambda *_, **__: started.append(head))  # pyright: ignore[reportUnknownLambdaType, reportUnknownArgumentType]
            original(settings, state, node, head)

    async def run() -> None:
        control: Any = Absent()
        await OwnAgent(Settings(state_dir=tmp_path), control, HeadAddress("127.0.0.1", port)).ensure()

    command = [sys.executable, "-c", AGENT, str(tmp_path), "50051"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=clean_environment()) as agent:
        assert agent.stdout is not None
        assert agent.stdout.readline() == b"ready\n"
        monkeypatch.setattr(subject, "ensure_head_member", ensure)
        try:
            asyncio.run(run())
            assert (agent.poll() is not None) == bool(is_ended)
        finally:
            agent.kill()
    assert started == ([HeadAddress("127.0.0.1", port)] if is_ended else [])


class Absent:
    """A control at which the head's own node was connected once, and does not return."""

    node = "n1"

    def __init__(self) -> None:
        self.membership = Membership()
        self._watchers: list[Callable[[Event], None]] = []

    def lose(self, *, is_final: bool = False) -> None:
        member: Any = SimpleNamespace(node=self.node)
        # The clock may have been set back since the agent was started.
        former = FormerMember(member, "it sent nothing for 3 s", 0.0)
        self.membership = Membership({}, {self.node: former})
        for watcher in self._watchers:
            watcher(SessionEnded(self.node, 1, former.reason, is_final=is_final))

    @contextmanager
    def watching(self, watcher: Callable[[Event], None]) -> Generator[None]:
        self._watchers.append(watcher)
        yield

    async def wait_for(self, _nodes: int, including: str) -> Membership:
        await asyncio.sleep(0)
        raise TimeoutError(including)

    async def wait_until_absent(self, _node: str) -> None:
        if not self.membership.former:
            await asyncio.get_running_loop().create_future()


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Return the agents that were started, which do nothing."""
    started: list[subprocess.Popen[bytes]] = []

    def ensure(*_: object) -> subprocess.Popen[bytes] | None:
        if started and started[-1].poll() is None:
            return None
        started.append(subprocess.Popen(["sleep", "600"]))
        return started[-1]

    monkeypatch.setattr(subject, "ensure_head_member", ensure)
    yield started
    for process in started:
        process.kill()
        process.wait()


@pytest.mark.parametrize(("is_lost", "alive"), [(1, [False, True]), (0, [True])])
def test_only_an_agent_that_was_connected_and_does_not_return_is_replaced(
    started: list[subprocess.Popen[bytes]], is_lost: int, alive: list[bool]
) -> None:
    async def run() -> list[bool]:
        control: Any = Absent()
        agent = OwnAgent(Settings(), control, HeadAddress("127.0.0.1", 50051))
        await agent.ensure()
        if is_lost:
            control.lose()
        await agent.ensure()
        were = [process.poll() is None for process in started]
        await agent.end()
        return were

    assert asyncio.run(run()) == alive
    assert all(process.poll() is not None for process in started)


def test_an_agent_that_goes_silent_is_replaced_when_no_model_awaits_it(
    started: list[subprocess.Popen[bytes]],
) -> None:
    answers = [True, True, False]

    async def run() -> None:
        control: Any = Absent()
        agent = OwnAgent(Settings(), control, HeadAddress("127.0.0.1", 50051))
        await agent.ensure()
        keeping = asyncio.create_task(agent.keep(lambda: answers.pop(0)))
        await asyncio.sleep(0)
        control.lose()
        await run_tasks_until(lambda: len(started) == 2)
        keeping.cancel()
        await agent.end()

    asyncio.run(run())
    assert not answers


def test_an_agent_that_cannot_be_started_is_started_later(
    started: list[subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(subject, "_RETRY_S", 0.0)
    ensure, failures = subject.ensure_head_member, [OSError(24, "Too many open files")] * 2

    def fail_at_first(*arguments: Any) -> subprocess.Popen[bytes] | None:
        if failures:
            raise failures.pop()
        return ensure(*arguments)

    monkeypatch.setattr(subject, "ensure_head_member", fail_at_first)

    async def run() -> None:
        control: Any = Absent()
        control.lose()
        agent = OwnAgent(Settings(), control, HeadAddress("127.0.0.1", 50051))
        with pytest.raises(NotReady, match=r"cannot be started: Too many open files\."):
            await agent.ensure()
        agent.replace_soon()
        await run_tasks_until(lambda: started)
        await agent.end()

    asyncio.run(run())
    assert "It is tried again in" in caplog.text


@pytest.mark.parametrize(("code", "expected"), [("1", 2), ("0", 1)])
def test_an_agent_that_crashed_is_started_again_but_not_one_that_was_asked_to_end(
    started: list[subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch, code: str, expected: int
) -> None:
    asked: list[bool] = []

    async def attends(_self: OwnAgent, _timeout_s: float) -> bool:
        await asyncio.sleep(0)
        return False

    async def run() -> None:
        control: Any = Absent()
        agent = OwnAgent(Settings(), control, HeadAddress("127.0.0.1", 50051))
        await agent.ensure()
        started[0].kill()
        started[0].wait()
        started[0].returncode = int(code)
        keeping = asyncio.create_task(agent.keep(lambda: bool(asked.append(True))))
        await asyncio.sleep(0)
        control.lose()
        for _ in range(20):
            await asyncio.sleep(0)
        await run_tasks_until(lambda: len(started) == expected)
        keeping.cancel()
        await agent.end()

    monkeypatch.setattr(OwnAgent, "attends", attends)
    asyncio.run(run())
    assert len(asked) == expected - 1
    assert len(started) == expected


def test_an_agent_that_says_that_it_leaves_is_not_replaced_while_it_ends_its_workers(
    started: list[subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []

    async def attends(_self: OwnAgent, _timeout_s: float) -> bool:
        await asyncio.sleep(0)
        return False

    async def run() -> None:
        control: Any = Absent()
        agent = OwnAgent(Settings(), control, HeadAddress("127.0.0.1", 50051))
        await agent.ensure()
        keeping = asyncio.create_task(agent.keep(lambda: bool(asked.append(True))))
        await asyncio.sleep(0)
        control.lose(is_final=True)
        for _ in range(20):
            await asyncio.sleep(0)
        assert started[0].poll() is None
        keeping.cancel()
        await agent.end()

    monkeypatch.setattr(OwnAgent, "attends", attends)
    asyncio.run(run())
    assert not asked
    assert len(started) == 1


def test_an_agent_that_has_just_started_is_the_only_one(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []

    def start_without_lock(*_: object) -> subprocess.Popen[bytes]:
        started.append(subprocess.Popen(["sleep", "600"]))
        return started[-1]

    async def run() -> None:
        control: Any = Absent()
        agent = OwnAgent(Settings(), control, HeadAddress("127.0.0.1", 50051))
        await asyncio.gather(agent.ensure(), agent.ensure())
        await agent.end()

    monkeypatch.setattr(subject, "ensure_head_member", start_without_lock)
    asyncio.run(run())
    assert [process.poll() is None for process in started] == [False]


def test_an_agent_that_two_models_miss_is_replaced_once_and_not_after_the_end() -> None:
    async def run() -> set[str]:
        control: Any = Absent()
        agent = OwnAgent(Settings(), control, HeadAddress("127.0.0.1", 50051))
        before = asyncio.all_tasks()
        agent.replace_soon()
        agent.replace_soon()
        begun = asyncio.all_tasks() - before
        assert len(begun) == 1
        await agent.end()
        return {task.get_name() for task in asyncio.all_tasks() - before}

    assert asyncio.run(run()) == set()
