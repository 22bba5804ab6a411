"""Course of a load test: look at the server, send the load, follow every answer, and report."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import time
from collections.abc import Callable, Coroutine, Generator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from mlx_ring.cli.bench.client import BenchClient, RequestOptions, Target, probe
from mlx_ring.cli.bench.summary import STOPPED, Record, as_json, draw_plot, print_summary, summarize
from mlx_ring.cli.bench.workload import Job, Workload, make_jobs
from mlx_ring.core.errors import ConfigError


@dataclass(slots=True)
class Run:
    """Results of a load, complete or not."""

    records: list[Record] = field(default_factory=list[Record])
    """Records of all requests sent, also unfinished ones."""
    duration_s: float = 0.0
    """Time from the start to the last end of an answer."""


def unheard(_record: Record) -> None:
    """Ignore an answer."""


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
        client: the client that sends.
        target: the server and model.
        jobs: the requests.
        options: the options of all requests.
        concurrency: the maximum number of concurrent requests; None sends each request at its arrival time.
        run: the results, filled as answers arrive, so that a stopped load can report them.
        on_answer: a callback for the end of each request.
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


_LOOK_S = 0.25
"""Seconds between two updates of the progress display, which must not disturb the load."""


@dataclass(frozen=True, slots=True)
class Outputs:
    """Files for the results besides the terminal."""

    json: Path | None = None
    plot: Path | None = None
    progress: bool = False


async def run_bench(
    client: BenchClient,
    model: str | None,
    workload: Workload,
    options: RequestOptions,
    *,
    warmup: int,
    outputs: Outputs,
) -> dict[str, Any]:
    """Measure, print, write and draw; return the content of the JSON file. Ctrl-C ends the load, not the report.

    Raises:
        NotReady, ConfigError: there is nothing to measure, or a file cannot be written.
    """
    target, notes = await _meet(client, model, workload, options)
    before = await _state(client)
    await _warm_up(client, target, workload, options, warmup)
    run = Run()
    with _progress(run, workload.requests, shown=outputs.progress) as look:
        interrupted = await _until_interrupted(_load(client, target, workload, options, run), look)
    after = await _state(client)
    summary = summarize(run.records, run.duration_s)
    print_summary(Console(soft_wrap=True), summary, run.records, notes)
    report = as_json(
        asdict(workload) | asdict(options) | {"model": target.model, "warmup": warmup},
        {
            "prompts": "words" if target.vocabulary is None else "token ids",
            "ignore_eos": target.ignores_eos,
            "tells_usage": target.reports_usage,
            "version": before["version"],
            "scheduling": before["scheduling"],
            "cache_before": before["cache"],
            "cache_after": after["cache"],
        },
        run.records,
        summary,
        notes=notes,
        interrupted=interrupted,
    )
    if outputs.json is not None:
        with _writing("--json", outputs.json):
            outputs.json.write_text(json.dumps(report, indent=1) + "\n")
    if outputs.plot is not None:
        with _writing("--plot", outputs.plot):
            draw_plot(outputs.plot, _title(target, workload), run.records, summary)
    return report


async def _meet(
    client: BenchClient, model: str | None, workload: Workload, options: RequestOptions
) -> tuple[Target, list[str]]:
    """Server under test, and the way to send requests."""
    target = await client.discover(model)
    longest = workload.prompt_tokens.high + workload.output_tokens.high
    if target.context is not None and longest > target.context:
        raise ConfigError(
            f"--prompt-tokens and --output-tokens ask for up to {longest} tokens; the context of {target.model} "
            f"has {target.context}."
        )
    if target.vocabulary is not None and options.endpoint == "completions":
        return target, []
    return await probe(client, target, options)


async def _warm_up(
    client: BenchClient, target: Target, workload: Workload, options: RequestOptions, requests: int
) -> None:
    """Send requests from another seed, so that no cache holds the measured prompts.

    If the load has a rate, send them one at a time.
    """
    if requests:
        gentle = replace(workload, requests=requests, rate=None, seed=~workload.seed)
        await _load(client, target, gentle, options, Run())


async def _load(
    client: BenchClient, target: Target, workload: Workload, options: RequestOptions, run: Run
) -> None:
    jobs = list(make_jobs(workload, target.vocabulary, words=target.words))
    concurrency = workload.concurrency if workload.rate is None else None
    await run_load(client, target, jobs, options, concurrency=concurrency, run=run)


async def _state(client: BenchClient) -> dict[str, Any]:
    """Return mlx-ring's scheduling and cache data; other servers have none."""
    status, health = await client.look("/cluster/status"), await client.look("/health")
    return {
        "version": health.get("version"),
        "scheduling": status.get("scheduling"),
        "cache": await client.look("/cache/stats") or None,
    }


async def _until_interrupted(load: Coroutine[Any, Any, None], look: Callable[[], None]) -> bool:
    """Run the load to its end, or to a Ctrl-C: that is what is returned. Look at it now and then."""
    task = asyncio.ensure_future(load)
    loop = asyncio.get_running_loop()
    interrupted = asyncio.Event()

    def stop() -> None:
        interrupted.set()
        task.cancel()

    loop.add_signal_handler(signal.SIGINT, stop)
    try:
        while not task.done():
            await asyncio.wait((task,), timeout=_LOOK_S)
            look()
        with contextlib.suppress(asyncio.CancelledError):
            await task
    finally:
        task.cancel()
        loop.remove_signal_handler(signal.SIGINT)
    return interrupted.is_set()


@contextlib.contextmanager
def _progress(run: Run, total: int, *, shown: bool) -> Generator[Callable[[], None]]:
    """Show a progress bar, and yield the function that updates it."""
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(
        *columns, console=console, transient=True, disable=not shown, auto_refresh=False
    ) as progress:
        task = progress.add_task("requests", total=total)

        def look() -> None:
            if shown:
                ended, failed, shares = _how_far(run)
                text = f"{ended}/{total} requests" + (f", {failed} failed" if failed else "")
                progress.update(task, description=text, completed=shares, refresh=True)

        yield look


def _how_far(run: Run) -> tuple[int, int, float]:
    """Return how many requests ended and failed, and the progress of all, with partial answers counted by tokens."""
    ended = failed = 0
    shares = 0.0
    for record in run.records:
        over = record.ended_s > 0
        ended += over
        failed += record.error is not None
        shares += 1.0 if over else min(1.0, len(record.arrivals_s) / max(1, record.asked_tokens))
    return ended, failed, shares


@contextlib.contextmanager
def _writing(flag: str, path: Path) -> Generator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{flag} is {path}; it cannot be written: {error.strerror or error}.") from None


def _title(target: Target, workload: Workload) -> str:
    load = f"{workload.concurrency} at once" if workload.rate is None else f"{workload.rate:g} requests/s"
    return (
        f"{target.model}: {workload.requests} requests, {load}, prompts of {workload.prompt_tokens} tokens, "
        f"answers of {workload.output_tokens}"
    )
