from __future__ import annotations

import os
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from mlx_ring.worker.compute_thread import prefer_latency, prefer_throughput


@pytest.mark.skipif(sys.platform != "linux", reason="the policies are Linux'")
def test_turns_are_the_calling_threads_and_those_of_threads_it_starts() -> None:
    def policies() -> list[int]:
        prefer_throughput()
        with ThreadPoolExecutor(1) as started:
            seen = [os.sched_getscheduler(0), started.submit(os.sched_getscheduler, 0).result()]
        prefer_latency()
        return [*seen, os.sched_getscheduler(0)]

    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(policies).result() == [os.SCHED_BATCH, os.SCHED_BATCH, os.SCHED_OTHER]
    assert os.sched_getscheduler(0) == os.SCHED_OTHER
