"""Child processes: their end, its reported reason, and their output."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import psutil
import pytest

from mlx_ring.core.environment import inherited_environment
from mlx_ring.host.child import ChildProcess

UNTIL_LIFELINE = "import os, sys; print('up', flush=True)\nwhile os.read(int(sys.argv[-1]), 1): pass\n"
IGNORES_SIGTERM = """
import signal
from mlx_ring.host.process import dump_stacks_on_signal

def hang():
    print('up', flush=True)
    while True:
        signal.pause()

dump_stacks_on_signal()
signal.signal(signal.SIGTERM, signal.SIG_IGN)
hang()
"""
ENDS_ON_SIGTERM = "import signal; print('up', flush=True); signal.pause()"


class ReceivedLines(logging.Handler):
    """Lines that a child wrote; `first` is set on the first one."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []
        self.first = asyncio.Event()

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)
        self.first.set()


def with_child(
    folder: Path,
    code: str,
    use: Callable[[ChildProcess, ReceivedLines], Awaitable[None]],
    word: Callable[[str], str] = str,
) -> None:
    """Run `code` as a child's module (its last argument is the lifeline), and use it."""

    async def run() -> None:
        (folder / "child_under_test.py").write_text(code)
        received = ReceivedLines()
        logging.getLogger("mlx_ring.host.child").addHandler(received)
        child = await ChildProcess.start(
            "child_under_test",
            [],
            name="worker-1-0",
            rank=0,
            environment=inherited_environment({"PYTHONPATH": str(folder)}),
            word=word,
        )
        try:
            await use(child, received)
        finally:
            await child.stop(grace_s=0.0)
            logging.getLogger("mlx_ring.host.child").removeHandler(received)

    asyncio.run(run())


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("", "exit code 0"),
        ("raise SystemExit(3)", "exit code 3"),
        ("raise ValueError('no such thing')", "exit code 1: ValueError: no such thing"),
        ("import os; os.kill(os.getpid(), 9)", "ended by signal 9 (SIGKILL)"),
        ("import signal; signal.raise_signal(signal.SIGTERM)", "ended by signal 15 (SIGTERM)"),
    ],
)
def test_the_end_is_reported_with_its_reason(code: str, reason: str, tmp_path: Path) -> None:
    async def use(child: ChildProcess, _received: ReceivedLines) -> None:
        assert await child.wait() == reason
        assert child.exit_reason == reason

    with_child(tmp_path, code, use)


def test_a_child_is_ended_by_sigterm(tmp_path: Path) -> None:
    async def use(child: ChildProcess, received: ReceivedLines) -> None:
        await received.first.wait()
        assert child.exit_reason == ""
        assert await child.stop() == "ended by signal 15 (SIGTERM)"
        assert not psutil.pid_exists(child.pid)

    with_child(tmp_path, ENDS_ON_SIGTERM, use)


def test_a_child_that_ignores_sigterm_writes_its_stacks_and_is_killed(tmp_path: Path) -> None:
    async def use(child: ChildProcess, received: ReceivedLines) -> None:
        await received.first.wait()
        assert await child.stop(grace_s=0.1) == "ended by signal 9 (SIGKILL)"
        assert not psutil.pid_exists(child.pid)
        assert any(record.getMessage().endswith("in hang") for record in received.records)

    with_child(tmp_path, IGNORES_SIGTERM, use)


def test_output_of_a_child_and_its_c_code_is_logged_with_name_and_rank(tmp_path: Path) -> None:
    async def use(child: ChildProcess, received: ReceivedLines) -> None:
        await child.wait()
        assert [record.getMessage() for record in received.records] == ["from C", "\ufffd broken"]
        assert {record.__dict__["child_process"] for record in received.records} == {"worker-1-0"}
        assert {record.__dict__["child_rank"] for record in received.records} == {"0"}

    with_child(tmp_path, "import os; os.write(2, b'from C\\n'); os.write(1, b'\\xff broken')", use)


def test_output_of_a_child_can_be_rewritten_or_dropped(tmp_path: Path) -> None:
    async def use(child: ChildProcess, received: ReceivedLines) -> None:
        assert await child.wait() == "exit code 1: NOTICE"
        assert [record.getMessage() for record in received.records] == ["NOTICE"]

    with_child(
        tmp_path,
        "print('notice'); raise SystemExit('chatter')",
        use,
        lambda line: line.upper() if line == "notice" else "",
    )


def test_a_tagged_line_is_passed_on_unchanged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = "2026-01-01T00:00:00.000 INFO node=a process=worker-1-0 rank=0 epoch=1 x: done"

    async def use(child: ChildProcess, received: ReceivedLines) -> None:
        await child.wait()
        assert received.records == []

    with_child(tmp_path, f"print({line!r})", use)
    assert capsys.readouterr().err == line + "\n"


def test_a_line_longer_than_any_buffer_does_not_block_the_child(tmp_path: Path) -> None:
    async def use(child: ChildProcess, received: ReceivedLines) -> None:
        assert await child.wait() == "exit code 0"
        assert sum(record.getMessage().count("x") for record in received.records) == 3 << 20

    with_child(tmp_path, "print('x' * (3 << 20))", use)


def test_a_ctrl_c_in_the_terminal_does_not_reach_the_child(tmp_path: Path) -> None:
    async def use(child: ChildProcess, _received: ReceivedLines) -> None:
        assert await child.wait() == "exit code 0"

    code = "import os; raise SystemExit(0 if os.getpgrp() == os.getpid() == os.getsid(0) else 1)"
    with_child(tmp_path, code, use)


def test_a_child_ends_with_its_parent_even_if_that_is_killed(tmp_path: Path) -> None:
    (tmp_path / "child_under_test.py").write_text(UNTIL_LIFELINE)
    parent = """
import asyncio, os
from mlx_ring.host.child import ChildProcess
async def run():
    child = await ChildProcess.start("child_under_test", [], name="c", rank=None, environment=dict(os.environ))
    print(child.pid, flush=True)
    await child.wait()
asyncio.run(run())
"""

    async def run() -> None:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-c",
            parent,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            env=inherited_environment({"PYTHONPATH": str(tmp_path)}),
        )
        assert process.stdout is not None
        child = psutil.Process(int(await process.stdout.readline()))
        process.kill()
        await process.wait()
        _, alive = psutil.wait_procs([child], timeout=30)
        assert not alive

    asyncio.run(run())


def test_a_cancelled_task_kills_a_child_that_ignores_sigterm(tmp_path: Path) -> None:
    """Stop a child in a cancelled task, where `asyncio.timeout` of some Pythons reports no timeout."""

    async def use(child: ChildProcess, received: ReceivedLines) -> None:
        await received.first.wait()

        async def wait_and_clean_up() -> str:
            try:
                await child.wait()
            finally:
                await child.stop(grace_s=0.1)
            return ""

        cleaning = asyncio.create_task(wait_and_clean_up())
        await asyncio.sleep(0)
        cleaning.cancel()
        await asyncio.wait((cleaning,))
        assert child.exit_reason == "ended by signal 9 (SIGKILL)"

    with_child(tmp_path, IGNORES_SIGTERM, use)
