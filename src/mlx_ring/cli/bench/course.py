"""A bench from the first look at the server to the report."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable, Coroutine, Generator
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from mlx_ring.cli.bench.client import BenchClient, RequestOptions, Target
from mlx_ring.cli.bench.load import Run, run_load, unheard
from mlx_ring.cli.bench.plot import draw_plot
from mlx_ring.cli.bench.report import as_json, print_summary
from mlx_ring.cli.bench.summary import Record, summarise
from mlx_ring.cli.bench.workload import Workload, make_jobs

if TYPE_CHECKING:
    from mlx_ring.cli.bench.command import Outputs

_WARM_UP_NUMBERS = 1 << 30
"""Warm-up requests have prompts of their own, so that no cache knows the measured ones."""


async def run_bench(
    url: str,
    model: str | None,
    api_key: str | None,
    workload: Workload,
    options: RequestOptions,
    *,
    warmup: int,
    timeout_s: float,
    outputs: Outputs,
) -> dict[str, Any]:
    """Measure, print, draw; returns what goes into the JSON. Ctrl-C ends the load, not the report.

    Raises:
        NotReady, ConfigError: there is nothing to measure.
    """
    client = BenchClient(url, api_key=api_key, timeout_s=timeout_s)
    try:
        target = await client.discover(model)
        if options.endpoint == "chat":
            target = replace(target, vocabulary=None)
        before = await _state(client)
        if warmup:
            await _load(client, target, replace(workload, requests=warmup), options, Run(), _WARM_UP_NUMBERS)
        run = Run()
        with _progress(workload.requests, shown=outputs.progress) as on_answer:
            await _until_interrupted(_load(client, target, workload, options, run, 0, on_answer=on_answer))
        after = await _state(client)
    finally:
        await client.close()
    summary = summarise(run.records, run.duration_s)
    print_summary(Console(soft_wrap=True), summary)
    if outputs.plot is not None:
        draw_plot(outputs.plot, _title(target, workload), run.records, summary)
    settings = asdict(workload) | asdict(options) | {"model": target.model, "warmup": warmup}
    server = {
        "scheduling": before["scheduling"],
        "cache_before": before["cache"],
        "cache_after": after["cache"],
    }
    return as_json(settings, server, run.records, summary)


async def _load(
    client: BenchClient,
    target: Target,
    workload: Workload,
    options: RequestOptions,
    run: Run,
    first: int,
    on_answer: Callable[[Record], None] = unheard,
) -> None:
    jobs = list(make_jobs(workload, target.vocabulary, first=first))
    concurrency = workload.concurrency if workload.rate is None else None
    await run_load(client, target, jobs, options, concurrency=concurrency, run=run, on_answer=on_answer)


async def _state(client: BenchClient) -> dict[str, Any]:
    """What mlx-ring says of its scheduling and caches; other servers say nothing."""
    status = await client.look("/cluster/status")
    return {"scheduling": status.get("scheduling"), "cache": await client.look("/cache/stats")}


async def _until_interrupted(load: Coroutine[Any, Any, None]) -> None:
    """Run the load to its end, or to a Ctrl-C."""
    task = asyncio.ensure_future(load)
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, task.cancel)
    try:
        with contextlib.suppress(asyncio.CancelledError):
            await task
    finally:
        loop.remove_signal_handler(signal.SIGINT)


@contextlib.contextmanager
def _progress(total: int, *, shown: bool) -> Generator[Callable[[Record], None]]:
    """A bar on the terminal that goes on with each answer."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    progress = Progress(*columns, console=Console(stderr=True), transient=True, disable=not shown)
    with progress:
        task = progress.add_task("requests", total=total)

        def on_answer(_record: Record) -> None:
            progress.advance(task)

        yield on_answer


def _title(target: Target, workload: Workload) -> str:
    load = f"{workload.concurrency} at once" if workload.rate is None else f"{workload.rate:g} requests/s"
    return (
        f"{target.model}: {workload.requests} requests, {load}, prompts of {workload.prompt_tokens} tokens, "
        f"answers of {workload.output_tokens}"
    )
