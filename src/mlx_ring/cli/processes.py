"""Servers of this machine: `mlx-ring ps` lists what they serve, `run` chats with one or starts it, and `stop` ends all."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Generator, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from mlx_ring.cli import DownloadBar, table_console
from mlx_ring.cli.flags import MAX_TOKENS, SEED, SYSTEM, TEMPERATURE, TOP_P, with_settings
from mlx_ring.cli.head_client import (
    API_KEY,
    CACERT,
    LIFELINE,
    URL,
    ask_head,
    names_at,
    pull_at,
    server_here,
    trust,
)
from mlx_ring.core.environment import inherited_environment
from mlx_ring.core.errors import ConfigError, RequestError
from mlx_ring.core.folders import state_folder
from mlx_ring.host.child import watch_lifeline
from mlx_ring.host.running import Running, end_running, remove_abandoned, running_here
from mlx_ring.models.model_folder import PullProgress
from mlx_ring.settings.config import Settings
from mlx_ring.settings.settings_sources import checked_key, key_to_send, load_settings

_ADDRESS = "Serving "
"""Start of the line in which `serve` prints its address."""
_END_WAIT_S = 60.0
_IN_GIGABYTES = 1000
"""Megabytes from which a size is written in gigabytes."""


@with_settings(("state_dir",))
def stop(*, flags: dict[str, object]) -> None:
    """End the head and the agent of this machine, their workers, and processes that a killed head left behind.

    Processes with another state folder keep running. If nothing runs, the exit code is 0.
    """
    settings = load_settings(flags)
    ended = end_running(state_folder(settings.state_dir))
    remove_abandoned(settings.run_dir or Path(tempfile.gettempdir()))
    print("\n".join(ended) or "No mlx-ring process runs here.")


# ---- what is served


@with_settings(("state_dir",))
def ps(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    api_key: Annotated[str | None, API_KEY] = None,
    cacert: Annotated[Path | None, CACERT] = None,
    *,
    flags: dict[str, object],
) -> None:
    """List the models that servers of this machine serve: where, in how much memory, and since when.

    Memory is that of weights and KV caches on all machines. An unloaded model is loaded by its next request.
    The exit code is 1 if a server cannot be asked.
    """
    running = running_here(state_folder(load_settings(flags).state_dir))
    rows: list[Mapping[str, Any]] = []
    silent: list[str] = []
    for head in (each for each in running if each.kind == "head"):
        try:
            rows += _served_by(head.url, head.pid, api_key, cacert)
        except (ConfigError, RequestError) as error:
            silent.append(f"Process {head.pid} cannot be asked: {error}")
    if as_json:
        print(json.dumps(rows, indent=1))
    elif rows:
        _show(rows)
    elif running and all(each.kind == "agent" for each in running):
        print(_of_a_member(running[0]))
    elif not silent:
        print("Nothing is served by this machine. Start with: mlx-ring run MODEL")
    for sentence in silent:
        print(sentence, file=sys.stderr)
    if silent:
        raise typer.Exit(1)


def _of_a_member(agent: Running) -> str:
    """Return what a machine does on which only an agent runs, in a sentence."""
    head = f"the head at {agent.url}" if agent.url else "the head that it joined"
    sentence = f"This machine serves nothing itself: it computes for {head}"
    if agent.away:
        return f"{sentence}, but is away just now: {agent.away.removesuffix('.')}."
    return f"{sentence}. Run mlx-ring ps there."


def _served_by(url: str, pid: int, api_key: str | None, cacert: Path | None) -> Iterator[Mapping[str, Any]]:
    status, listed = (
        ask_head(url, path, api_key=api_key, cacert=cacert, hint="it may be starting")
        for path in ("/cluster/status", "/v1/models")
    )
    for model in listed["data"]:
        ranks = [
            rank
            for instance in status["instances"]
            if instance["model"] == model["id"]
            for stage in instance["stages"]
            for rank in stage["ranks"]
        ]
        used: list[Mapping[str, int]] = [rank["used"] for rank in ranks if rank["used"]]
        yield {
            "model": model["id"],
            "aliases": model.get("aliases", []),
            "state": model["state"],
            "machines": sorted({rank["node"] for rank in ranks}),
            "memory_bytes": sum(each["weight_bytes"] + each["kv_bytes"] for each in used),
            "since": model["created"],
            "url": url,
            "pid": pid,
        }


def _show(rows: Sequence[Mapping[str, Any]]) -> None:
    from rich.table import Column, Table  # `stop` and `run` print no table

    table = Table(Column("model", overflow="fold"), "is", "on", box=None, pad_edge=False)
    table.add_column("memory", justify="right")
    table.add_column("since")
    table.add_column("server", no_wrap=True)
    table.add_column("process")
    for row in rows:
        table.add_row(
            row["model"],
            row["state"],
            ", ".join(row["machines"]),
            _size(row["memory_bytes"]) if row["machines"] else "",
            datetime.fromtimestamp(row["since"]).astimezone().strftime("%Y-%m-%d %H:%M"),
            row["url"],
            str(row["pid"]),
        )
    table_console().print(table)


def _size(count: int) -> str:
    megabytes = math.ceil(count / 1e6)
    return f"{megabytes} MB" if megabytes < _IN_GIGABYTES else f"{count / 1e9:.2f} GB"


# ---- a chat with a model, served for it if need be


def run(
    model: Annotated[
        str, typer.Argument(help="Built-in name, folder, GGUF file, short name or Hugging Face id.")
    ],
    question: Annotated[
        str | None,
        typer.Argument(help="Question to answer, instead of a chat; only the answer is printed."),
    ] = None,
    url: Annotated[str | None, URL] = None,
    system: Annotated[str | None, SYSTEM] = None,
    temperature: Annotated[float | None, TEMPERATURE] = None,
    top_p: Annotated[float | None, TOP_P] = None,
    max_tokens: Annotated[int | None, MAX_TOKENS] = None,
    seed: Annotated[int | None, SEED] = None,
    api_key: Annotated[str | None, API_KEY] = None,
    cacert: Annotated[Path | None, CACERT] = None,
) -> None:
    """Chat with a model, and serve it for that if nothing serves it.

    A running server loads the model; without one, a server is started here. When the chat ends, so does what was
    started for it. A model that is not on this machine is downloaded first. With a question, its answer alone is printed.
    """
    from mlx_ring.cli.chat import run_chat, sampling_of  # `ps` and `stop` need no chat

    sampling = sampling_of(temperature, top_p, max_tokens, seed)
    settings = load_settings({"api_key": api_key})
    checked_key(next(iter(settings.api_key), None))
    trusted = trust(cacert, settings.ssl_certfile)
    with _served(model, url, settings, api_key, cacert) as (place, name, key):
        code = run_chat(place, name, system, key, sampling=sampling, question=question, trusted=trusted)
    raise typer.Exit(code)


@contextlib.contextmanager
def _served(
    model: str, given: str | None, settings: Settings, key: str | None, cacert: Path | None
) -> Generator[tuple[str, str, str | None]]:
    """Yield the address of a server of the model, its name there, and the key to send.

    A server or a load that it needs ends with the context.
    """
    from mlx_ring.models.model_source import full_name

    url = server_here(given, model, api_key=key, cacert=cacert)
    try:
        served = names_at(url, api_key=key, cacert=cacert)
    except (ConfigError, RequestError) as error:
        if given is not None:
            raise
        if isinstance(error, RequestError):
            print(f"{error} So {model} is served for this chat alone.", file=sys.stderr, flush=True)
        own_key = next(iter(settings.api_key), None)
        with own_server(model, key, has_log_file=_can_write(settings.log_dir)) as place:
            yield place, next(iter(names_at(place, api_key=own_key, cacert=cacert))), own_key
        return
    sent = key_to_send(url, settings, key)
    wanted = {model, full_name(model)}
    found = next((name for name, each in served.items() if wanted & each.names), None)
    if found is not None and served[found].is_loaded:
        yield url, found, sent
        return
    from mlx_ring.cli.models import name_for  # a model that is loaded needs none of it

    there = found or name_for(url, model)
    if found is None:
        _download(there, url, key, cacert)
    print(f"Loading {model} on the server at {url}.", file=sys.stderr, flush=True)
    loaded = ask_head(
        url, "/models/load", {"model": there}, api_key=key, cacert=cacert, timeout_s=24 * 3600.0
    )
    name = str(loaded["id"])
    try:
        yield url, name, sent
    finally:
        was_loaded = name in served and served[name].is_loaded
        # Requests of others keep it loaded.
        with contextlib.suppress(ConfigError, RequestError):
            if not was_loaded:
                ask_head(url, "/models/unload", {"model": name}, api_key=key, cacert=cacert)


def _can_write(folder: Path) -> bool:
    """Report whether files can be written in a folder, which need not exist yet."""
    there = next(each for each in (folder, *folder.parents) if os.path.lexists(each))
    return there.is_dir() and os.access(there, os.W_OK)


def _download(model: str, url: str, key: str | None, cacert: Path | None) -> None:
    """Let a server download a model that it does not have, and show the progress."""
    with (
        DownloadBar(model) as bar,
        contextlib.closing(pull_at(url, model, api_key=key, cacert=cacert)) as events,
    ):
        for event in events:
            bar.report(PullProgress(event["status"], event["done_bytes"], event["total_bytes"]))


@contextlib.contextmanager
def own_server(model: str, key: str | None, *, has_log_file: bool = True) -> Generator[str]:
    """Serve a model in a process of its own, which ends with the context and with this process, and yield its address.

    Args:
        model: model to serve.
        key: API key that it accepts; those of the settings by default.
        has_log_file: False if its log lines go to stderr, where only errors are of use beside a chat.
    """
    from mlx_ring.cli.local_models import fetch_here  # imports what only downloads need

    fetch_here(model, must_fit=True)
    reading, writing = os.pipe()
    child = subprocess.Popen(
        [sys.executable, "-m", __name__, f"{LIFELINE}={reading}", "serve", model, "--port=0"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        pass_fds=(reading,),
        start_new_session=True,
        env=inherited_environment({} if key is None else {"MLX_RING_API_KEY": key})
        | {"MLX_RING_LOG_STDERR": "off"}
        | ({} if has_log_file else {"MLX_RING_LOG_LEVEL": "error"}),
    )
    os.close(reading)
    try:
        yield _address(child)
    finally:
        child.terminate()
        try:
            child.wait(_END_WAIT_S)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
        os.close(writing)


def _address(child: subprocess.Popen[str]) -> str:
    """Wait until a server prints its address, and return that. Raises `typer.Exit` if it ends before, which it has explained."""
    if child.stdout is None:
        raise typer.Exit(1)
    for line in child.stdout:
        if line.startswith(_ADDRESS):
            threading.Thread(target=child.stdout.read, name="output", daemon=True).start()
            return line.partition(" at ")[2].partition(" (")[0].strip()
    raise typer.Exit(child.wait() or 1)


def main() -> None:
    """Run a command that ends with its parent, for `run`."""
    parser = argparse.ArgumentParser(prog="mlx_ring.cli.processes", description=__doc__)
    parser.add_argument(LIFELINE, type=int, required=True, help="pipe that closes with the parent")
    options, typed = parser.parse_known_args()
    watch_lifeline(options.lifeline_fd, lambda: os.kill(os.getpid(), signal.SIGTERM))
    sys.argv = ["mlx-ring", *typed]
    from mlx_ring.cli.main import main as run_command  # it sets the process up before it imports the command

    run_command()


if __name__ == "__main__":
    main()
