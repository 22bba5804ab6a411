"""The flags of `mlx-ring bench`."""

from __future__ import annotations

import asyncio
import ssl
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mlx_ring.cli.bench import flags
from mlx_ring.cli.bench.workload import Workload
from mlx_ring.cli.main import INTERRUPTED
from mlx_ring.cli.trust import CACERT, trust
from mlx_ring.core.errors import ConfigError

if TYPE_CHECKING:
    from mlx_ring.cli.bench.client import RequestOptions
    from mlx_ring.cli.bench.course import Outputs

_FORMATS = (".svg", ".png")
_ENDPOINTS = ("completions", "chat")
_CONCURRENCY = "4"


def bench(
    url: Annotated[
        str, typer.Option(help="Where the server is: mlx-ring or any with OpenAI's API.")
    ] = "http://127.0.0.1:8100",
    model: Annotated[
        str | None, typer.Option(metavar="NAME", help="The model to ask; the first that is served otherwise.")
    ] = None,
    api_key: Annotated[str | None, typer.Option(metavar="KEY", help="Sent as a bearer token.")] = None,
    cacert: Annotated[Path | None, CACERT] = None,
    requests: Annotated[str, typer.Option(metavar="N", help="Requests to send.")] = "32",
    concurrency: Annotated[
        str | None,
        typer.Option(metavar="N", help=f"Requests under way at once.  \\[default: {_CONCURRENCY}]"),
    ] = None,
    rate: Annotated[
        str | None,
        typer.Option(
            metavar="R", help="Requests a second, arriving at random (Poisson), instead of --concurrency."
        ),
    ] = None,
    prompt_tokens: Annotated[
        str, typer.Option(metavar="N|A-B", help="Length of a prompt, or a range of lengths.")
    ] = "128",
    output_tokens: Annotated[
        str, typer.Option(metavar="N|A-B", help="Length of an answer, or a range of lengths.")
    ] = "64",
    shared_prefix: Annotated[
        str, typer.Option(metavar="N", help="Tokens that all prompts begin with, as part of their length.")
    ] = "0",
    endpoint: Annotated[
        str, typer.Option(metavar="completions|chat", help="What to ask; chat sends words, not token ids.")
    ] = "completions",
    temperature: Annotated[str, typer.Option(metavar="T", help="0 is greedy.")] = "0",
    seed: Annotated[
        str, typer.Option(metavar="N", help="Another seed gives other prompts, lengths and arrivals.")
    ] = "0",
    warmup: Annotated[str, typer.Option(metavar="N", help="Requests before the measured ones.")] = "1",
    timeout: Annotated[
        str, typer.Option(metavar="SECONDS", help="Longest that a request may take; after that it failed.")
    ] = "600",
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write everything that was measured.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw latencies and throughput (.svg or .png).")
    ] = None,
    progress: Annotated[bool, typer.Option(help="Show how far it is, on a terminal.")] = True,
) -> None:
    """Load a server and tell how it does: time to first token, time between tokens, throughput.

    The exit code is 1 where a request failed. Ctrl-C ends the load and reports what was measured so far.
    """
    if rate is not None and concurrency is not None:
        raise ConfigError("--rate and --concurrency exclude each other; give one.")
    where = flags.address("--url", url)
    workload = Workload(
        requests=flags.whole("--requests", requests, 1, 1_000_000),
        prompt_tokens=flags.token_range("--prompt-tokens", prompt_tokens),
        output_tokens=flags.token_range("--output-tokens", output_tokens),
        shared_prefix=flags.whole("--shared-prefix", shared_prefix, 0, 1_000_000),
        concurrency=flags.whole("--concurrency", concurrency or _CONCURRENCY, 1, 4096),
        rate=None if rate is None else flags.decimal("--rate", rate, 0.001, 10_000),
        seed=flags.whole("--seed", seed, 0, 2**63 - 1),
    )
    if workload.shared_prefix >= workload.prompt_tokens.low:
        raise ConfigError(
            f"--shared-prefix is {shared_prefix}; it must be shorter than the shortest prompt, "
            f"which has {workload.prompt_tokens.low} tokens."
        )
    named = flags.one_of("--endpoint", endpoint, _ENDPOINTS)
    degrees = flags.decimal("--temperature", temperature, 0, 2)
    timeout_s = flags.decimal("--timeout", timeout, 0.1, 86_400)
    warming = flags.whole("--warmup", warmup, 0, 10_000)
    key = flags.key("--api-key", api_key)
    files = flags.output_file("--json", json_file), flags.output_file("--plot", plot, _FORMATS)
    # What follows brings in an HTTP client; the other commands do without.
    from mlx_ring.cli.bench.client import RequestOptions  # noqa: PLC0415
    from mlx_ring.cli.bench.course import Outputs  # noqa: PLC0415

    options = RequestOptions("chat" if named == "chat" else "completions", degrees)
    outputs = Outputs(*files, progress=progress and sys.stderr.isatty())
    connect = Connect(where, key, timeout_s, trust(cacert))
    report = asyncio.run(_run(connect, model, workload, options, warming, outputs))
    raise typer.Exit(_exit_code(report))


@dataclass(frozen=True, slots=True)
class Connect:
    """How to reach a server."""

    url: str
    key: str | None
    timeout_s: float
    trusted: ssl.SSLContext


async def _run(
    connect: Connect,
    model: str | None,
    workload: Workload,
    options: RequestOptions,
    warmup: int,
    outputs: Outputs,
) -> dict[str, Any]:
    from mlx_ring.cli.bench.client import BenchClient  # noqa: PLC0415
    from mlx_ring.cli.bench.course import run_bench  # noqa: PLC0415

    client = BenchClient(
        connect.url, api_key=connect.key, timeout_s=connect.timeout_s, trusted=connect.trusted
    )
    try:
        return await run_bench(client, model, workload, options, warmup=warmup, outputs=outputs)
    finally:
        await client.close()


def _exit_code(report: dict[str, Any]) -> int:
    """1 where any request failed, so that a script notices."""
    if report["interrupted"]:
        return INTERRUPTED
    return 1 if report["summary"]["errors"] else 0
