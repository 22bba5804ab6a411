"""Ends ranks that wait in vain: a machine that is cut off from its head, and from the others of a group, hears that from nobody.

A rank that waits in a collective uses a processor whole; one that has nothing to do uses none, and is kept for the next head.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import psutil

from mlx_ring.agent.supervisor import Worker
from mlx_ring.rpc.joined_ranks import joined_ranks

log = logging.getLogger(__name__)

_ALONE_S = 30.0
"""Without a word from the head. What is under way then is answered to nobody."""
_LOOK_S = 5.0
_BUSY_SHARE = 0.05
"""Of a processor, which others may want too; one that has nothing to do uses none."""


class Ends(Protocol):
    """Who has workers, and ends those of an instance."""

    @property
    def workers(self) -> tuple[Worker, ...]: ...
    async def stop(self, instance: str) -> int: ...


async def end_orphans(
    supervisor: Ends, heard_s: Callable[[], float], alone_s: float = _ALONE_S, look_s: float = _LOOK_S
) -> None:
    """For ever.

    Args:
        supervisor: of this machine's workers.
        heard_s: when the head was last heard of, on `time.monotonic`'s clock.
        alone_s: for so long it must have said nothing.
        look_s: from look to look.
    """
    while True:
        await asyncio.sleep(look_s)
        if time.monotonic() - heard_s() < alone_s:
            continue
        joined = [worker for worker in supervisor.workers if joined_ranks(worker.assignment)]
        for instance in await _busy_instances(joined, look_s):
            log.error(
                "nothing was heard of the head for %.0f s, and ranks of %s wait for others: they end",
                time.monotonic() - heard_s(),
                instance,
            )
            await supervisor.stop(instance)


async def _busy_instances(workers: Sequence[Worker], seconds: float) -> set[str]:
    """Those of which a worker computes."""
    before = {worker.child.pid: _cpu_s(worker) for worker in workers}
    await asyncio.sleep(seconds)
    return {
        worker.instance
        for worker in workers
        if _cpu_s(worker) - before[worker.child.pid] > _BUSY_SHARE * seconds
    }


def _cpu_s(worker: Worker) -> float:
    with contextlib.suppress(psutil.Error):
        return sum(psutil.Process(worker.child.pid).cpu_times()[:2])
    return 0.0
