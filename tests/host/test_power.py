"""The hold on a machine's sleep, with a stand-in for the operating system's program."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import Generator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import httpx
import pytest
from tests.eventually import eventually
from tests.processes import serving

from mlx_ring.agent.server import AgentService
from mlx_ring.agent.supervisor import Supervisor
from mlx_ring.core.environment import inherited_environment
from mlx_ring.host.power import KeepAwake, KeepAwakeMode, awake_program
from mlx_ring.rpc.protos import agent_pb2, worker_pb2

pytestmark = pytest.mark.processes

WAITS = (sys.executable, "-c", "import sys; sys.stdin.read()")
REFUSES = (sys.executable, "-c", "import sys; sys.exit(1)")


class Power:
    """A battery that can be unplugged."""

    def __init__(self) -> None:
        self.on_battery = False

    def __call__(self) -> bool:
        return self.on_battery


def test_the_program_runs_exactly_while_there_is_work() -> None:
    awake = KeepAwake("auto", lambda: WAITS, Power())
    assert not awake.is_held
    awake.hold(has_work=True)
    assert awake.is_held
    process = awake.process
    assert process is not None
    awake.hold(has_work=True)
    assert awake.process is process
    awake.hold(has_work=False)
    assert not awake.is_held
    assert process.returncode is not None
    awake.hold(has_work=True)
    assert awake.is_held
    awake.release()
    assert not awake.is_held


@pytest.mark.parametrize(("mode", "plugged_in", "on_battery"), [
    ("auto", True, False), ("always", True, True), ("never", False, False),
])  # fmt: skip
def test_the_mode_and_the_power_supply_decide(
    mode: KeepAwakeMode, plugged_in: object, on_battery: object
) -> None:
    power = Power()
    awake = KeepAwake(mode, lambda: WAITS, power)
    try:
        awake.hold(has_work=True)
        assert awake.is_held is plugged_in
        power.on_battery = True
        awake.hold(has_work=True)
        assert awake.is_held is on_battery
    finally:
        awake.release()


def test_a_system_that_refuses_is_asked_once(caplog: pytest.LogCaptureFixture) -> None:
    awake = KeepAwake("auto", lambda: REFUSES, Power())
    caplog.set_level("INFO", "mlx_ring.host.power")
    awake.hold(has_work=True)
    assert awake.process is not None
    awake.process.wait()
    for _ in range(3):
        awake.hold(has_work=True)
    assert [record.message for record in caplog.records] == [
        "The system refused to stay awake (exit code 1): it may sleep during an answer"
    ]
    assert not awake.is_held


def test_a_machine_without_such_a_program_answers_all_the_same() -> None:
    awake = KeepAwake("auto", tuple, Power())
    awake.hold(has_work=True)
    assert not awake.is_held
    awake = KeepAwake("auto", lambda: ("/no/such/program",), Power())
    awake.hold(has_work=True)
    assert not awake.is_held


@pytest.mark.parametrize(("system", "first"), [("darwin", "caffeinate"), ("linux", "systemd-inhibit")])
def test_the_display_may_sleep(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, system: str, first: str
) -> None:
    monkeypatch.setattr("sys.platform", system)
    programs = {"caffeinate", "systemd-inhibit"}

    def find(name: str) -> str | None:
        return str(tmp_path / name) if name in programs else None

    monkeypatch.setattr("shutil.which", find)
    command = awake_program()
    assert command[0] == first
    # `caffeinate -d` and a lock on `idle` keep the display on.
    assert "-d" not in command
    assert not any("idle" in word for word in command)
    programs.clear()
    assert awake_program() == ()


STAND_IN = """#!/bin/sh
trap '' TERM
echo held >> {file}
cat
echo released >> {file}
"""
"""Script that writes when the hold begins and, once its input has ended, when it ends. A signal may not cut that short."""


def test_a_head_holds_its_machine_awake_exactly_while_requests_run(tmp_path: Path) -> None:
    program, seen = tmp_path / "bin" / "systemd-inhibit", tmp_path / "seen"
    program.parent.mkdir()
    program.write_text(STAND_IN.format(file=seen))
    program.chmod(0o755)
    seen.touch()
    within = ("env", f"PATH={program.parent}{os.pathsep}{inherited_environment({})['PATH']}")
    body = {"prompt": "Answer me.", "max_tokens": 10**9, "ignore_eos": True, "stream": True}
    with serving("demo", "--keep-awake", "always", folder=tmp_path, within=within) as server:
        assert seen.read_text() == ""
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as answer:
            lines = answer.iter_lines()
            next(lines)
            eventually(seen.read_text, "held\n".__eq__)
        eventually(seen.read_text, "held\nreleased\n".__eq__)


class Node:
    """Stand-in for a node's workers, of which one has sequences or none."""

    def __init__(self) -> None:
        self.status = worker_pb2.WorkerStatus()
        self.workers = [SimpleNamespace(alive=True, status=self.status, state=worker_pb2.WorkerStatus)]

    @contextlib.contextmanager
    def changes(self) -> Generator[asyncio.Event]:
        yield asyncio.Event()

    async def refresh(self) -> None:
        """Do nothing: a status is current."""


def test_a_member_holds_its_machine_awake_while_its_workers_have_sequences(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    node, awake = Node(), KeepAwake("auto", lambda: WAITS, Power())
    service = AgentService("here", cast("Supervisor", node), 1.0, awake=awake)
    monkeypatch.setattr(service, "_event", agent_pb2.AgentEvent)

    async def watch() -> list[bool]:
        events = service.watch(agent_pb2.WatchRequest(heartbeat_s=1e-3), Mock())
        held: list[bool] = []
        for sequences in (0, 2, 1, 0, 1):
            node.status.sequences = sequences
            await anext(events)
            held.append(awake.is_held)
        await cast("Any", events).aclose()
        return [*held, awake.is_held]

    assert asyncio.run(watch()) == [False, True, True, False, True, False]
