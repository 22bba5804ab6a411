"""`mlx-ring bench`: its flags and their checks. Each error is one sentence that names the flag."""

from __future__ import annotations

import asyncio
import math
import os
import re
import ssl
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import urlsplit

import typer

from mlx_ring.cli import INTERRUPTED
from mlx_ring.cli.bench.workload import Range, Workload
from mlx_ring.cli.head_client import CACERT, trust
from mlx_ring.core.errors import ConfigError
from mlx_ring.host.addresses import is_loopback
from mlx_ring.settings.settings_sources import checked_key, key_to_send, load_settings

_RANGE = re.compile(r"([0-9]+)(?:-([0-9]+))?", re.ASCII)
_MOST_TOKENS = 10_000_000


def whole(flag: str, text: str, low: int, high: int) -> int:
    """Read a whole number within bounds."""
    try:
        number = int(text)
    except ValueError:
        number = low - 1
    if not low <= number <= high:
        raise ConfigError(f"{flag} is {text}; it must be a whole number from {low} to {high}.")
    return number


def decimal(flag: str, text: str, low: float, high: float) -> float:
    """Read a number within bounds."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not low <= number <= high:
        raise ConfigError(f"{flag} is {text}; it must be a number from {low:g} to {high:g}.")
    return number


def token_range(flag: str, text: str) -> Range:
    """Read a number of tokens such as `128`, or a range such as `64-256`."""
    found = _RANGE.fullmatch(text.strip())
    low, high = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
    if not 1 <= low <= high <= _MOST_TOKENS:
        raise ConfigError(f"{flag} is {text}; it must be a whole number from 1, or a range like 64-256.")
    return Range(low, high)


def address(flag: str, text: str) -> str:
    """Check the address of an HTTP server."""
    try:
        parts = urlsplit(text)
        complete = parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0
    except ValueError:
        complete = False
    if not complete or not text.isprintable() or " " in text:
        raise ConfigError(f"{flag} is {text!r}; give one like http://127.0.0.1:8100.")
    return text


def one_of(flag: str, text: str, choices: Sequence[str]) -> str:
    if text not in choices:
        raise ConfigError(f"{flag} is {text}; it must be {' or '.join(choices)}.")
    return text


def output_file(flag: str, path: Path | None, suffixes: Sequence[str] = ()) -> Path | None:
    """Check before the load that a file can be written."""
    if path is None:
        return None
    if suffixes and path.suffix.lower() not in suffixes:
        raise ConfigError(f"{flag} is {path}; the file's name must end in {' or '.join(suffixes)}.")
    folder = path.absolute().parent
    if not folder.is_dir():
        raise ConfigError(f"{flag} is {path}; there is no folder {folder}.")
    if path.is_dir():
        raise ConfigError(f"{flag} is {path}; that is a folder, give a file.")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise ConfigError(f"{flag} is {path}; this user may not write it.")
    return path


def check_matplotlib(plot: Path) -> None:
    """Check before the load that the plot can be drawn.

    Raises:
        ConfigError: Matplotlib, which only the extra `plot` installs, is missing.
    """
    if find_spec("matplotlib") is None:
        raise ConfigError(
            f"--plot is {plot}, and Matplotlib is not installed: install it with pip install 'mlx-ring[plot]', "
            "or leave the flag out."
        )


if TYPE_CHECKING:
    from mlx_ring.cli.bench.client import RequestOptions
    from mlx_ring.cli.bench.course import Outputs

_FORMATS = (".svg", ".png")
_ENDPOINTS = ("completions", "chat")
_CONCURRENCY = "4"


def bench(
    url: Annotated[
        str, typer.Option(metavar="URL", help="Address of the server: mlx-ring or any OpenAI-compatible one.")
    ] = "http://127.0.0.1:8100",
    model: Annotated[
        str | None, typer.Option(metavar="NAME", help="Model to ask; the first one served by default.")
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(
            metavar="KEY",
            help="API key of the server; MLX_RING_API_KEY by default, for a server on this machine.",
        ),
    ] = None,
    cacert: Annotated[Path | None, CACERT] = None,
    requests: Annotated[str, typer.Option(metavar="N", help="Number of requests.")] = "32",
    concurrency: Annotated[
        str | None,
        typer.Option(metavar="N", help=f"Concurrent requests.  \\[default: {_CONCURRENCY}]"),
    ] = None,
    rate: Annotated[
        str | None,
        typer.Option(
            metavar="R", help="Requests per second with Poisson arrivals, instead of --concurrency."
        ),
    ] = None,
    prompt_tokens: Annotated[
        str, typer.Option(metavar="N|A-B", help="Tokens of a prompt, or a range.")
    ] = "128",
    output_tokens: Annotated[
        str, typer.Option(metavar="N|A-B", help="Tokens of an answer, or a range.")
    ] = "64",
    shared_prefix: Annotated[
        str,
        typer.Option(
            metavar="N", help="Length of the prefix that all prompts share, included in their length."
        ),
    ] = "0",
    endpoint: Annotated[
        str,
        typer.Option(
            metavar="KIND",
            help="Endpoint to use: completions, or chat, whose prompts are words, not token ids.",
        ),
    ] = "completions",
    temperature: Annotated[str, typer.Option(metavar="T", help="Sampling temperature; 0 is greedy.")] = "0",
    seed: Annotated[str, typer.Option(metavar="N", help="Seed of prompts, lengths and arrival times.")] = "0",
    warmup: Annotated[
        str, typer.Option(metavar="N", help="Number of warm-up requests, which are not measured.")
    ] = "1",
    timeout: Annotated[
        str, typer.Option(metavar="SECONDS", help="Maximum time of a request; it then counts as failed.")
    ] = "600",
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write all measurements as JSON.")
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Plot latencies and throughput (.svg or .png). Requires mlx-ring\\[plot]."
        ),
    ] = None,
    progress: Annotated[bool, typer.Option(help="Show progress on a terminal.")] = True,
) -> None:
    """Send load to a server; measure time to first token, time between tokens, and throughput.

    The exit code is 1 if a request failed. Ctrl-C stops the load and reports the results so far.
    """
    if rate is not None and concurrency is not None:
        raise ConfigError("--rate and --concurrency exclude each other; give one.")
    where = address("--url", url)
    workload = Workload(
        requests=whole("--requests", requests, 1, 1_000_000),
        prompt_tokens=token_range("--prompt-tokens", prompt_tokens),
        output_tokens=token_range("--output-tokens", output_tokens),
        shared_prefix=whole("--shared-prefix", shared_prefix, 0, 1_000_000),
        concurrency=whole("--concurrency", concurrency or _CONCURRENCY, 1, 4096),
        rate=None if rate is None else decimal("--rate", rate, 0.001, 10_000),
        seed=whole("--seed", seed, 0, 2**63 - 1),
    )
    if workload.shared_prefix >= workload.prompt_tokens.low:
        raise ConfigError(
            f"--shared-prefix is {shared_prefix}; it must be shorter than the shortest prompt, "
            f"which has {workload.prompt_tokens.low} tokens."
        )
    named = one_of("--endpoint", endpoint, _ENDPOINTS)
    degrees = decimal("--temperature", temperature, 0, 2)
    timeout_s = decimal("--timeout", timeout, 0.1, 86_400)
    warming = whole("--warmup", warmup, 0, 10_000)
    # The settings are those of this machine's servers. Others get only what a flag says.
    is_own = is_loopback(urlsplit(where).hostname or "")
    settings = load_settings({"api_key": api_key}) if is_own else None
    presented = checked_key(api_key) if settings is None else key_to_send(where, settings, api_key)
    files = output_file("--json", json_file), output_file("--plot", plot, _FORMATS)
    if plot is not None:
        check_matplotlib(plot)
    # These import an HTTP client, which is slow.
    from mlx_ring.cli.bench.client import RequestOptions
    from mlx_ring.cli.bench.course import Outputs

    options = RequestOptions("chat" if named == "chat" else "completions", degrees)
    outputs = Outputs(*files, progress=progress and sys.stderr.isatty())
    connect = Connect(
        where, presented, timeout_s, trust(cacert, None if settings is None else settings.ssl_certfile)
    )
    report = asyncio.run(_run(connect, model, workload, options, warming, outputs))
    raise typer.Exit(_exit_code(report))


@dataclass(frozen=True, slots=True)
class Connect:
    """Address, key, time limit and trusted certificates for a server."""

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
    from mlx_ring.cli.bench.client import BenchClient
    from mlx_ring.cli.bench.course import run_bench

    client = BenchClient(
        connect.url, api_key=connect.key, timeout_s=connect.timeout_s, trusted=connect.trusted
    )
    try:
        return await run_bench(client, model, workload, options, warmup=warmup, outputs=outputs)
    finally:
        await client.close()


def _exit_code(report: dict[str, Any]) -> int:
    """Return 1 if any request failed, so that a script notices."""
    if report["interrupted"]:
        return INTERRUPTED
    return 1 if report["summary"]["errors"] else 0
