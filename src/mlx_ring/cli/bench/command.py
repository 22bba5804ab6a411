"""The flags of `mlx-ring bench`, and its course from the first look at the server to the report."""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

_FORMATS = (".svg", ".png")


@dataclass(frozen=True, slots=True)
class Outputs:
    """Where the results go besides the terminal."""

    json: Path | None
    plot: Path | None
    progress: bool


def bench(
    url: Annotated[
        str, typer.Option(help="Where the server is: mlx-ring or any with OpenAI's API.")
    ] = "http://127.0.0.1:8100",
    model: Annotated[
        str | None, typer.Option(help="The model to ask; the first that is served otherwise.")
    ] = None,
    api_key: Annotated[str | None, typer.Option(help="Sent as a bearer token.", metavar="KEY")] = None,
    requests: Annotated[int, typer.Option(min=1, max=1_000_000, help="Requests to send.")] = 32,
    concurrency: Annotated[int, typer.Option(min=1, max=4096, help="Requests under way at once.")] = 4,
    rate: Annotated[
        float | None,
        typer.Option(
            min=0.001, help="Requests a second, arriving at random, instead of a fixed concurrency."
        ),
    ] = None,
    prompt_tokens: Annotated[
        str, typer.Option(metavar="N|A-B", help="Length of a prompt, or a range of lengths.")
    ] = "128",
    output_tokens: Annotated[
        str, typer.Option(metavar="N|A-B", help="Length of an answer, or a range of lengths.")
    ] = "64",
    shared_prefix: Annotated[
        int, typer.Option(min=0, help="Tokens that all prompts begin with, as part of their length.")
    ] = 0,
    endpoint: Annotated[
        str, typer.Option(metavar="completions|chat", help="What to ask; chat sends words, not token ids.")
    ] = "completions",
    temperature: Annotated[float, typer.Option(min=0.0, max=2.0, help="0 is greedy.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Another seed gives other prompts and arrivals.")] = 0,
    warmup: Annotated[int, typer.Option(min=0, max=1000, help="Requests before the measured ones.")] = 1,
    timeout: Annotated[
        float, typer.Option(min=0.1, metavar="SECONDS", help="Longest silence of the server.")
    ] = 600.0,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write everything that was measured.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw latencies and throughput (.svg or .png).")
    ] = None,
    progress: Annotated[bool, typer.Option(help="Show how far it is, on a terminal.")] = True,
) -> None:
    """Load a server and tell how it does: time to first token, time between tokens, throughput."""
    # What follows brings in an HTTP client; the other commands do without.
    from mlx_ring.cli.bench.client import RequestOptions  # noqa: PLC0415
    from mlx_ring.cli.bench.course import run_bench  # noqa: PLC0415
    from mlx_ring.cli.bench.workload import Workload  # noqa: PLC0415
    from mlx_ring.core.errors import ConfigError  # noqa: PLC0415

    if endpoint not in ("completions", "chat"):
        raise ConfigError(f"--endpoint is {endpoint}; it must be completions or chat.")
    if plot is not None and plot.suffix.lower() not in _FORMATS:
        raise ConfigError(f"--plot is {plot}; the file's name must end in .svg or .png.")
    for name, path in (("--json", json_file), ("--plot", plot)):
        if path is not None and not path.absolute().parent.is_dir():
            raise ConfigError(f"{name} is {path}; there is no folder {path.absolute().parent}.")
    workload = Workload(
        requests=requests,
        prompt_tokens=_range("--prompt-tokens", prompt_tokens),
        output_tokens=_range("--output-tokens", output_tokens),
        shared_prefix=shared_prefix,
        concurrency=concurrency,
        rate=rate,
        seed=seed,
    )
    if shared_prefix >= workload.prompt_tokens.low:
        raise ConfigError(
            f"--shared-prefix is {shared_prefix}; it must be shorter than the shortest prompt, "
            f"which has {workload.prompt_tokens.low} tokens."
        )
    options = RequestOptions("chat" if endpoint == "chat" else "completions", temperature)
    outputs = Outputs(json_file, plot, progress and sys.stderr.isatty())
    report = asyncio.run(
        run_bench(url, model, api_key, workload, options, warmup=warmup, timeout_s=timeout, outputs=outputs)
    )
    if json_file is not None:
        json_file.write_text(json.dumps(report, indent=1) + "\n")
    raise typer.Exit(_exit_code(report))


def _range(name: str, text: str) -> Any:
    from mlx_ring.cli.bench.workload import Range  # noqa: PLC0415
    from mlx_ring.core.errors import ConfigError  # noqa: PLC0415

    try:
        return Range.parse(text)
    except ValueError:
        raise ConfigError(
            f"{name} is {text}; it must be a whole number from 1, or a range like 64-256."
        ) from None


def _exit_code(report: dict[str, Any]) -> int:
    """1 where any request failed, so that a script notices."""
    return 1 if report["summary"]["errors"] else 0
