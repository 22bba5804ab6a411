"""Sends a load and follows every answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from mlx_ring.cli.bench.client import BenchClient, RequestOptions, Target
from mlx_ring.cli.bench.summary import STOPPED, Record
from mlx_ring.cli.bench.workload import Job


@dataclass(slots=True)
class Run:
    """What was seen, all of it or as far as it got."""

    records: list[Record] = field(default_factory=list[Record])
    """Of all requests that were sent, the unfinished ones among them."""
    duration_s: float = 0.0
    """From the start to the last end of an answer."""


def unheard(_record: Record) -> None:
    """For loads whose answers nobody waits for."""


async def run_load(
    client: BenchClient,
    target: Target,
    jobs: Sequence[Job],
    options: RequestOptions,
    *,
    concurrency: int | None,
    run: Run,
    on_answer: Callable[[Record], None] = unheard,
) -> Run:
    """Send every job.

    Args:
        client: how to ask.
        target: whom.
        jobs: what.
        options: what all requests share.
        concurrency: so many are under way at once, each followed by the next; None sends each when it arrives.
        run: filled as answers come, so that a load that is stopped has something to tell.
        on_answer: told of each at its end.
    """
    started = time.perf_counter()
    waiting = iter(jobs)

    async def ask(job: Job) -> None:
        record = Record(job.number, time.perf_counter() - started, asked_tokens=job.output_tokens)
        run.records.append(record)
        await client.ask(target, job, options, record, started)
        if record.error != STOPPED:
            run.duration_s = max(run.duration_s, record.ended_s)
        on_answer(record)

    async def lane() -> None:
        for job in waiting:
            await ask(job)

    async with asyncio.TaskGroup() as group:
        if concurrency is None:
            for job in jobs:
                await asyncio.sleep(max(0.0, job.arrives_s - (time.perf_counter() - started)))
                group.create_task(ask(job))
        else:
            for _ in range(min(concurrency, len(jobs))):
                group.create_task(lane())
    return run
