from __future__ import annotations

import signal
import threading

import pytest

from mlx_ring.worker.compute_thread import JobQueue


def test_jobs_are_taken_in_the_order_in_which_they_came() -> None:
    jobs = JobQueue[int]()
    for job in range(3):
        jobs.put(job)
    assert [jobs.get(), jobs.get_within(0.0), jobs.get()] == [0, 1, 2]
    assert jobs.get_within(0.0) is None


@pytest.mark.timeout(60)
def test_a_wait_ends_however_short_it_is_and_however_late_it_begins() -> None:
    """`queue.SimpleQueue` fails this within a few thousand turns on Python 3.11 and 3.12."""
    for _ in range(50_000):
        assert JobQueue[int]().get_within(1e-7) is None


def test_whoever_waits_is_woken_by_what_comes_from_another_thread() -> None:
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


def test_a_signal_handler_wakes_the_thread_that_it_interrupts() -> None:
    jobs = JobQueue[int]()
    before = signal.signal(signal.SIGALRM, lambda _number, _frame: jobs.put(7))
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        assert jobs.get() == 7
    finally:
        signal.signal(signal.SIGALRM, before)
