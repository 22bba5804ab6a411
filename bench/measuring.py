"""Measuring for the rows of `engine.py`: placement on cores, load, and targets for ratios."""

from __future__ import annotations

import asyncio
import statistics
import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from servers import Server

from mlx_ring.cli.bench.client import BenchClient, RequestOptions
from mlx_ring.cli.bench.course import Run, run_load
from mlx_ring.cli.bench.summary import Record, Summary, summarize
from mlx_ring.cli.bench.workload import Job, Range, Workload, make_jobs

_TIMEOUT_S = 1200.0


@dataclass
class Ratio:
    """Line of the table; one without bounds is a limit to compare others with."""

    row: str
    what: str
    rounds: list[float]
    at_least: float | None = None
    at_most: float | None = None

    @property
    def median(self) -> float:
        return statistics.median(self.rounds)

    @property
    def target(self) -> str:
        bounds = [(">=", self.at_least), ("<=", self.at_most)]
        return " ".join(f"{sign} {bound:g}" for sign, bound in bounds if bound is not None)

    @property
    def met(self) -> bool:
        low, high = self.at_least, self.at_most
        return (low is None or self.median >= low) and (high is None or self.median <= high)


@dataclass(frozen=True)
class Bench:
    """Options of a run: number of rounds, sizes and cores."""

    rounds: int
    quick: bool
    cores: Sequence[int]

    @property
    def one(self) -> list[int]:
        return list(self.cores[:1])

    @property
    def other(self) -> int | None:
        """The core next to the first worker's."""
        return self.cores[1] if len(self.cores) > 1 else None

    @property
    def shared(self) -> int | None:
        """The first worker's core."""
        return self.cores[0] if self.cores else None


def load(server: Server, jobs: Sequence[Job], concurrency: int | None, **options: Any) -> list[Record]:
    """Send jobs and record their events. Any error ends the benchmark."""

    async def run() -> list[Record]:
        client = BenchClient(server.url, api_key=None, timeout_s=_TIMEOUT_S)
        try:
            target = server.target or await client.discover(None)
            if any(isinstance(job.prompt, str) for job in jobs):
                target = replace(target, vocabulary=None)
            done = await run_load(
                client, target, jobs, RequestOptions(**options), concurrency=concurrency, run=Run()
            )
        finally:
            await client.close()
        return done.records

    records = asyncio.run(run())
    for record in records:
        if record.error is not None:
            raise SystemExit(f"{server.name}: {record.error}")
    return sorted(records, key=lambda record: record.number)


def summary_of(records: Sequence[Record]) -> Summary:
    begin = min(record.sent_s for record in records)
    return summarize(records, max(record.ended_s for record in records) - begin)


def decode_speed(record: Record) -> float:
    """Return the tokens per second after the first token."""
    return (record.output_tokens - 1) / (record.arrivals_s[-1] - record.arrivals_s[0])


def steady_speed(records: Sequence[Record]) -> float:
    """Return the output tokens per second while all streams ran: from the last first token to the first end."""
    begin = max(record.arrivals_s[0] for record in records)
    end = min(record.arrivals_s[-1] for record in records)
    tokens = sum(
        sum(begin < arrival <= end for arrival in record.arrivals_s)
        * record.output_tokens
        / len(record.arrivals_s)
        for record in records
    )
    return tokens / (end - begin)


def jobs_of(number: int, requests: int, prompt: int, output: int, vocabulary: int | None) -> list[Job]:
    workload = Workload(requests, Range(prompt, prompt), Range(output, output), seed=7)
    return list(make_jobs(workload, vocabulary, first=1000 * number))


@contextmanager
def running(*servers: Callable[[], Server]) -> Generator[list[Any]]:
    """Start all contestants before the first request, and stop all of them at the end."""
    started: list[Server] = []
    try:
        for start in servers:
            started.append(start())
            print(f"  {started[-1].name} is ready", file=sys.stderr)
        yield started
    finally:
        for server in started:
            server.stop()


def in_both_orders(
    bench: Bench, one: Callable[[], Server], other: Callable[[], Server]
) -> Iterator[tuple[int, Any, Any]]:
    """Yield each round's number and both contestants: first all rounds with `one` started first, then with `other`.

    Of two equal servers, the one started first is some per cent slower, because it gets other pages of memory. Round 0
    of each order warms up and does not count.
    """
    for swapped in (False, True):
        starts = (other, one) if swapped else (one, other)
        with running(*starts) as servers:
            first, second = reversed(servers) if swapped else servers
            for number in range(bench.rounds + 1):
                yield number, first, second


def note_round(number: int, values: dict[str, float]) -> None:
    listed = ", ".join(f"{name} {value:.4g}" for name, value in values.items())
    print(f"  round {number + 1}: {listed}", file=sys.stderr)


def ttft(record: Record) -> float:
    return record.arrivals_s[0] - record.sent_s
