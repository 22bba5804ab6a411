"""What counts as a worker's silence, with processes that are stopped, starved and at work."""

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

from mlx_ring.agent.supervisor import UnresponsiveTime

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
    """Return the seconds of silence after one more look without an answer."""
    _let_pass(pause_s)
    unresponsive.unanswered()
    return unresponsive.seconds


def grows(unresponsive: UnresponsiveTime) -> None:
    before = unresponsive.seconds
    eventually(lambda: seconds_after(unresponsive), lambda seconds: seconds > before + 0.2)


def test_a_stopped_process_is_silent() -> None:
    with running(*_BUSY) as pid:
        unresponsive = UnresponsiveTime(pid)
        os.kill(pid, signal.SIGSTOP)
        grows(unresponsive)


def test_a_process_that_waits_for_something_is_silent() -> None:
    with running("sleep", "600") as pid:
        grows(UnresponsiveTime(pid))


def test_a_process_that_computes_and_does_not_answer_is_silent() -> None:
    """In looks far enough apart that the clock of processors, which ticks every 10 ms, shows it."""
    with running(*_BUSY) as pid:
        unresponsive = UnresponsiveTime(pid)
        eventually(lambda: seconds_after(unresponsive, 0.3))


def test_a_process_that_gets_no_processor_is_not_silent() -> None:
    skip_without_groups()
    with limited(1 << 30, 0.005, period_us=1_000_000) as group, running(*group.command(*_BUSY)) as pid:
        unresponsive = UnresponsiveTime(pid)
        _let_pass(0.5)
        unresponsive.unanswered()
        unresponsive.answered()
        _let_pass(1.0)
        unresponsive.unanswered()
        assert unresponsive.seconds == 0


def test_an_answer_ends_the_silence() -> None:
    with running("sleep", "600") as pid:
        unresponsive = UnresponsiveTime(pid)
        grows(unresponsive)
        unresponsive.answered()
        assert unresponsive.seconds == 0


def test_time_in_which_nobody_could_look_counts_as_two_seconds_at_most(
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


def test_time_of_threads_that_have_ended_counts() -> None:
    with running(sys.executable, "-c", _SHORT_LIVED) as pid:
        unresponsive = UnresponsiveTime(pid)
        eventually(lambda: seconds_after(unresponsive, 0.3), lambda seconds: seconds >= 1)


def test_who_is_starved_for_ever_is_silent_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
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
    """Time in which the other process runs, or would: what is looked at is how much of it that gets."""
    threading.Event().wait(seconds)
