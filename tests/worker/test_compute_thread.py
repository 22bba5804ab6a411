"""Compute thread: its queue of jobs, and its scheduling policy."""

from __future__ import annotations

import _thread
import os
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace

import pytest
from tests.eventually import eventually

from mlx_ring.core.errors import LinkLost
from mlx_ring.worker import compute_thread
from mlx_ring.worker.compute_thread import (
    JobQueue,
    TimedThreads,
    group_failure,
    prefer_latency,
    prefer_throughput,
)


def test_jobs_are_taken_in_order_of_arrival() -> None:
    jobs = JobQueue[int]()
    for job in range(3):
        jobs.put(job)
    assert [jobs.get(), jobs.get_within(0.0), jobs.get()] == [0, 1, 2]
    assert jobs.get_within(0.0) is None


@pytest.mark.timeout(60)
def test_very_short_wait_always_ends() -> None:
    """Repeat often: `queue.SimpleQueue` fails this within a few thousand waits on Python 3.11 and 3.12."""
    for _ in range(50_000):
        assert JobQueue[int]().get_within(1e-7) is None


def test_waiting_thread_gets_jobs_from_another_thread() -> None:
    jobs, taken, count = JobQueue[int](), list[int](), 20_000

    def take() -> None:
        while len(taken) < count:
            job = jobs.get_within(1e-5) if len(taken) % 2 else jobs.get()
            if job is not None:
                taken.append(job)

    taker = threading.Thread(target=take, daemon=True)
    taker.start()
    for job in range(count):
        jobs.put(job)
    taker.join(60)
    assert taken == list(range(count))


def test_job_from_a_signal_handler_wakes_the_interrupted_thread() -> None:
    jobs = JobQueue[int]()
    before = signal.signal(signal.SIGALRM, lambda _number, _frame: jobs.put(7))
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        assert jobs.get() == 7
    finally:
        signal.signal(signal.SIGALRM, before)


def test_job_from_a_handler_is_taken_whose_signal_came_just_before_the_wait() -> None:
    """Note the signal as the interpreter does then: without an interruption of the wait."""
    jobs, waiting = JobQueue[int](), threading.get_ident()

    def note_signal() -> None:
        waits = {JobQueue.get.__code__, JobQueue.get_within.__code__}
        eventually(lambda: sys._current_frames()[waiting].f_code in waits)  # pyright: ignore[reportPrivateUsage]
        _thread.interrupt_main(signal.SIGUSR2)

    before = signal.signal(signal.SIGUSR2, lambda _number, _frame: jobs.put(7))
    thread = threading.Thread(target=note_signal)
    try:
        thread.start()
        assert jobs.get() == 7
    finally:
        thread.join()
        signal.signal(signal.SIGUSR2, before)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has these scheduling policies")
def test_scheduling_policy_applies_to_a_thread_and_those_that_it_starts() -> None:
    def policies() -> list[int]:
        prefer_throughput()
        with ThreadPoolExecutor(1) as started:
            seen = [os.sched_getscheduler(0), started.submit(os.sched_getscheduler, 0).result()]
        prefer_latency()
        return [*seen, os.sched_getscheduler(0)]

    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(policies).result() == [os.SCHED_BATCH, os.SCHED_BATCH, os.SCHED_OTHER]
    assert os.sched_getscheduler(0) == os.SCHED_OTHER


def test_only_a_connection_that_broke_in_the_ring_counts_as_a_lost_link() -> None:
    reset = group_failure(RuntimeError("[ring] connection to a peer was lost"))
    assert isinstance(reset, LinkLost)
    assert reset.ends == ()
    other = ValueError("[reshape] Cannot reshape array of size 3 into shape (2,).")
    assert group_failure(other) is other


def test_slow_jobs_do_not_add_up_beyond_the_age_at_which_they_are_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, timers = [0.0], list[threading.Timer]()

    class Timer(threading.Timer):
        def start(self) -> None:
            timers.append(self)

    monkeypatch.setattr(threading, "Timer", Timer)
    monkeypatch.setattr(compute_thread, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    began, expired, given_up, ends = list[int](), list[int](), list[int](), threading.Semaphore(0)

    def run(number: int) -> None:
        began.append(number)
        assert ends.acquire(timeout=60)

    threads = TimedThreads("slow", 1, at_once=1)
    for number in range(4):
        clock[0] = float(number)
        threads.put(
            10, partial(run, number), partial(expired.append, number), partial(given_up.append, number)
        )
    assert [timer.interval for timer in timers] == [10], "that of the first one's turn"
    clock[0] = 9.0
    ends.release()
    # The second one's turn begins, and it is two seconds from being too old.
    assert [timer.interval for timer in eventually(lambda: timers[1:], lambda more: len(more) == 2)] == [
        10,
        2,
    ]
    for clock[0] in (11.0, 12.0, 13.0):
        timers[-1].function()
    assert given_up == [1, 2, 3]
    ends.release()
    eventually(lambda: threads.is_idle, bool)
    assert (began, expired, len(timers)) == ([0, 1], [], 5)
