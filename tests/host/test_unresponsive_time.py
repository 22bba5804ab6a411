"""Unresponsive time of a worker, with processes that are stopped, starved and busy."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Generator

import pytest
from tests.cgroups import limited, skip_without_groups
from tests.eventually import eventually

from mlx_ring.host.child import UnresponsiveTime

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux says what threads wait for")

_BUSY = ("sh", "-c", "while :; do :; done")


@contextlib.contextmanager
def running(*command: str) -> Generator[int]:
    process = subprocess.Popen(command)
    try:
        yield process.pid
    finally:
        process.kill()
        process.wait()


def seconds_after(unresponsive: UnresponsiveTime, pause_s: float = 0.0) -> float:
    """Return the unresponsive seconds after one more check without an answer."""
    _let_pass(pause_s)
    unresponsive.unanswered()
    return unresponsive.seconds


def expect_growth(unresponsive: UnresponsiveTime) -> None:
    before = unresponsive.seconds
    eventually(lambda: seconds_after(unresponsive), lambda seconds: seconds > before + 0.2)


def test_a_stopped_process_is_unresponsive() -> None:
    with running(*_BUSY) as pid:
        unresponsive = UnresponsiveTime(pid)
        os.kill(pid, signal.SIGSTOP)
        expect_growth(unresponsive)


def test_a_waiting_process_is_unresponsive() -> None:
    with running("sleep", "600") as pid:
        expect_growth(UnresponsiveTime(pid))


def test_a_busy_process_without_an_answer_is_unresponsive() -> None:
    # Checks are far enough apart for CPU clocks, which tick every 10 ms.
    with running(*_BUSY) as pid:
        unresponsive = UnresponsiveTime(pid)
        eventually(lambda: seconds_after(unresponsive, 0.3))


def test_a_process_without_cpu_time_is_not_unresponsive() -> None:
    skip_without_groups()
    with limited(1 << 30, 0.005, period_us=1_000_000) as group, running(*group.command(*_BUSY)) as pid:
        unresponsive = UnresponsiveTime(pid)
        _let_pass(0.5)
        unresponsive.unanswered()
        unresponsive.answered()
        _let_pass(1.0)
        unresponsive.unanswered()
        assert unresponsive.seconds == 0


def test_an_answer_resets_the_unresponsive_time() -> None:
    with running("sleep", "600") as pid:
        unresponsive = UnresponsiveTime(pid)
        expect_growth(unresponsive)
        unresponsive.answered()
        assert unresponsive.seconds == 0


def test_time_between_two_checks_counts_as_two_seconds_at_most(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with running(*_BUSY) as pid:
        os.kill(pid, signal.SIGSTOP)
        os.waitid(os.P_PID, pid, os.WSTOPPED)
        unresponsive = UnresponsiveTime(pid)
        now = time.monotonic()
        monkeypatch.setattr(time, "monotonic", lambda: now + 3600)
        unresponsive.unanswered()
        assert unresponsive.seconds == 2


_SHORT_LIVED = "import threading\nwhile True:\n  t = threading.Thread(target=lambda: sum(range(10**6))); t.start(); t.join()"


def test_cpu_time_of_ended_threads_counts() -> None:
    with running(sys.executable, "-c", _SHORT_LIVED) as pid:
        unresponsive = UnresponsiveTime(pid)
        eventually(lambda: seconds_after(unresponsive, 0.3), lambda seconds: seconds >= 1)


def test_a_process_that_is_starved_for_long_is_unresponsive(monkeypatch: pytest.MonkeyPatch) -> None:
    skip_without_groups()
    with limited(1 << 30, 0.005, period_us=1_000_000) as group, running(*group.command(*_BUSY)) as pid:
        unresponsive = UnresponsiveTime(pid)
        _let_pass(0.5)
        now = itertools.count(time.monotonic(), 2.0)
        monkeypatch.setattr(time, "monotonic", lambda: next(now))
        for _ in range(25):
            unresponsive.unanswered()
        assert unresponsive.seconds == 0
        for _ in range(25):
            unresponsive.unanswered()
        assert unresponsive.seconds > 3


def _let_pass(seconds: float) -> None:
    """Give the other process time to run. The test checks how much CPU time it gets."""
    threading.Event().wait(seconds)
