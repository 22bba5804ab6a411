"""`mlx-ring cluster`: start, stop and watch all machines of a file over the user's own ssh."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from mlx_ring.cli import report_console
from mlx_ring.cli.head_client import API_KEY, CACERT, DEFAULT_URL, ask_head, server_here
from mlx_ring.cli.on_host import app as on_host_app
from mlx_ring.cli.status_tables import show_status
from mlx_ring.core.errors import ConfigError, HostFailed, reason_of
from mlx_ring.core.folders import packages_folder, state_folder
from mlx_ring.settings.settings_sources import load_settings, names_in_dotenv, names_in_environment

if TYPE_CHECKING:
    from mlx_ring.cluster.lifecycle.verbs import Standing
    from mlx_ring.cluster.lifecycle.wheels import WheelStore
    from mlx_ring.settings.devices_file import DevicesFile

app = typer.Typer(help="Start, stop and watch the machines of a file over ssh.", no_args_is_help=True)
app.add_typer(on_host_app, name="on-host", hidden=True)

_QUESTION = "What is the capital of France?"
_ASK_S = 30.0
_MOST_LINES = 1_000_000
CONFIG = typer.Option(
    "--config", "-c", metavar="FILE", help="File of the machines: JSON, YAML, or an MLX hostfile."
)
MODEL = typer.Option(metavar="MODEL", help="Model to serve; the file's model by default.")
TIMEOUT = typer.Option(metavar="SECONDS", help="Maximum time to load the model, downloads included.")


@app.command("start")
def start(
    config: Annotated[Path, CONFIG],
    model: Annotated[str | None, MODEL] = None,
    timeout: Annotated[float, TIMEOUT] = 1800.0,
) -> None:
    """Start the head and the agents, and wait until the model answers.

    Nothing changes if everything runs as the file says. Otherwise, whatever runs is stopped first.
    """
    _start(config, model, timeout)


def _start(config: Path, model: str | None, timeout: float, *, anew: bool = False) -> None:
    """Start all machines; `anew` stops them first, but not before the file is known to be right."""
    from mlx_ring.cluster.lifecycle import verbs  # slow to import

    file = _read(config)
    if names := names_in_dotenv(Path.cwd()):
        _report(
            f"{Path.cwd() / '.env'} is not read for `cluster` ({', '.join(names)}): give settings under `serve` in {config}."
        )
    if names := names_in_environment():
        _report(
            f"The environment reaches no other machine ({', '.join(names)}): give settings under `serve` in {config}."
        )
    wanted, beside = _model(file, model, config), (Path.cwd(), config.resolve().parent)
    store = _store(file, beside, config)
    started = verbs.start(
        file, wanted, report=_report, timeout_s=timeout, store=store, folders=beside, anew=anew
    )
    show_status(started.status, report_console())
    print(f"\nServing {started.status.get('model')} at {started.url} on {file.coordinator.name}")


@app.command("stop")
def stop(config: Annotated[Path, CONFIG]) -> None:
    """Stop the head and the agents on all machines.

    If nothing runs, the exit code is 0.
    """
    from mlx_ring.cluster.lifecycle import verbs

    verbs.stop(_read(config), report=_report)
    print("The cluster is stopped.")


@app.command("restart")
def restart(
    config: Annotated[Path, CONFIG],
    node: Annotated[
        str | None, typer.Argument(metavar="NODE", help="Name of one machine in the file; all by default.")
    ] = None,
    *,
    model: Annotated[str | None, MODEL] = None,
    timeout: Annotated[float, TIMEOUT] = 1800.0,
    force: Annotated[
        bool, typer.Option("--force", help="Restart the machine even if no other has room for its layers.")
    ] = False,
) -> None:
    """Stop everything and start it again, or restart one machine while the others serve.

    Nothing stops if the file cannot be used, or a machine is out of reach. Only machines of another version may have
    stopped by then.
    """
    if node is None:
        if force:
            raise ConfigError("--force is for one machine: give its name, or leave it out.")
        _start(config, model, timeout, anew=True)
        return
    if model is not None:
        raise ConfigError(
            f"--model and {node} are given, but a machine restarts with the models that are served."
        )
    from mlx_ring.cluster.lifecycle import verbs

    verbs.restart_machine(_read(config), node, report=_report, timeout_s=timeout, force=force)


@app.command("status")
def status(
    config: Annotated[Path | None, CONFIG] = None,
    url: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help=f"Address of the head, without a file; {DEFAULT_URL} or another of this machine by default.",
        ),
    ] = None,
    api_key: Annotated[str | None, API_KEY] = None,
    cacert: Annotated[Path | None, CACERT] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the answer of `/cluster/status`.")] = False,
) -> None:
    """Show machines, stages, layers and memory.

    The exit code is 1 if the model cannot answer.
    """
    if config is not None and url is not None:
        raise ConfigError("--config and --url were both given; the file names the head.")
    if config is not None and api_key is not None:
        raise ConfigError(
            "--config and --api-key were both given; leave --api-key out, because `serve`'s api-key-file in the file gives the keys."
        )
    if config is None:
        state = ask_head(
            server_here(url, api_key=api_key, cacert=cacert),
            "/cluster/status",
            api_key=api_key,
            cacert=cacert,
            timeout_s=_ASK_S,
            hint="give --url, or -c with the machines' file",
        )
        failed = False
    else:
        state, failed = _ask_machines(_read(config), quietly=as_json)
    if state is not None:
        print(json.dumps(state, indent=1)) if as_json else show_status(state, report_console())
    if failed or state is None or state.get("status") != "ready":
        raise typer.Exit(1)


@app.command("test")
def try_out(
    config: Annotated[Path, CONFIG],
    prompt: Annotated[str, typer.Option(metavar="TEXT", help="Prompt to send.")] = _QUESTION,
    max_tokens: Annotated[int, typer.Option(metavar="N", help="Maximum tokens of the answer.")] = 64,
) -> None:
    """Send a prompt to the model, and print its answer and speed."""
    from mlx_ring.cluster.lifecycle import verbs

    body = {"messages": [{"role": "user", "content": prompt}], "max_tokens": max_tokens, "temperature": 0}
    answer = verbs.ask(_read(config), "POST", "/v1/chat/completions", body)
    print(answer["choices"][0]["message"]["content"])
    print(speed(answer), file=sys.stderr)


@app.command("logs")
def logs(
    config: Annotated[Path, CONFIG],
    lines: Annotated[int, typer.Option(metavar="N", help="Number of last lines of each file.")] = 20,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Print new lines until Ctrl-C.")] = False,
) -> None:
    """Print the last log lines of all machines, each with its machine's name."""
    from mlx_ring.cluster.lifecycle import verbs
    from mlx_ring.cluster.lifecycle.programs import ON_HOST
    from mlx_ring.cluster.lifecycle.shell import check_exit, command_on

    if not 1 <= lines <= _MOST_LINES:
        raise ConfigError(f"--lines is {lines}; it must be a whole number from 1 to {_MOST_LINES}.")
    flags = ("--lines", str(lines), *(("--follow",) if follow else ()))
    tails: list[tuple[Any, subprocess.Popen[str]]] = []
    failures: list[str] = []
    for _, found in verbs.found_programs(_read(config)):
        if isinstance(found, HostFailed):
            failures.append(str(found))
            continue
        words = (*found.program, *ON_HOST, "logs", "--state-dir", found.installation.state, *flags)
        tail = subprocess.Popen(
            command_on(found.machine, words),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )
        tails.append((found.machine, tail))
    if follow:
        # They would only be reported at the end, which is Ctrl-C.
        for failure in failures:
            _report(failure)
    _print_labelled([(machine.name, tail) for machine, tail in tails])
    for machine, tail in tails:
        try:
            check_exit(machine, tail.wait(), tail.stderr.read() if tail.stderr else "")
        except HostFailed as error:
            failures.append(str(error))
    if failures:
        raise HostFailed("\n".join(failures))


def _print_labelled(tails: Sequence[tuple[str, subprocess.Popen[str]]]) -> None:
    """Print lines of all machines as they arrive."""
    width = max((len(name) for name, _ in tails), default=0)
    lock = threading.Lock()

    def copy(name: str, tail: subprocess.Popen[str]) -> None:
        for line in tail.stdout or ():
            with lock:
                print(f"{name:<{width}} | {line}", end="", flush=True)

    threads = [threading.Thread(target=copy, args=entry, daemon=True) for entry in tails]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            thread.join()
    except BaseException:
        for _, tail in tails:
            tail.terminate()
        raise


def speed(answer: Mapping[str, Any]) -> str:
    """Return the token counts and rates of an answer as text."""
    usage, timed = answer["usage"], answer["performance"]
    rates = [
        f"{timed[key]:.1f} tokens/s {what}"
        for key, what in (
            ("prompt_tokens_per_second", "of the prompt"),
            ("generation_tokens_per_second", "of the answer"),
        )
        if timed.get(key) is not None
    ]
    return f"{usage['prompt_tokens']} + {usage['completion_tokens']} tokens" + "".join(
        f", {rate}" for rate in rates
    )


def _read(config: Path) -> DevicesFile:
    from mlx_ring.settings.devices_file import lists_devices, load_content, read_devices

    try:
        text = config.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config is {config}, which cannot be read: {reason_of(error)}.") from error
    content = load_content(text, str(config))
    if not lists_devices(content):
        raise ConfigError(
            f"{config} has no `devices`, and is no hostfile: docs/cluster.md shows both. "
            "A file of `machines` is for `mlx-ring plan`."
        )
    file = read_devices(content, str(config))
    for note in file.notes:
        _report(f"{config}: {note}")
    return file


def _model(file: DevicesFile, given: str | None, config: Path) -> str:
    """Return the model given, else the file's.

    Raises:
        ConfigError: neither names one.
    """
    wanted = given or file.model
    if not wanted:
        raise ConfigError(f"{config} names no model: give --model.")
    return wanted


def _store(file: DevicesFile, folders: Sequence[Path], config: Path) -> WheelStore:
    """Return the store of packages for other systems.

    The file's folder of wheels is looked up in the working directory, then beside the file.
    """
    from mlx_ring.cluster.lifecycle.wheels import WheelStore

    kept = packages_folder(state_folder(load_settings({}, folder=Path(os.devnull)).state_dir))
    if not file.wheels:
        return WheelStore(kept)
    named = Path(file.wheels).expanduser()
    given = next((path for folder in folders if (path := folder / named).is_dir()), None)
    if given is None:
        raise ConfigError(
            f"{config}: wheels is {file.wheels}, which is no folder on this machine: give a folder with wheels."
        )
    return WheelStore(kept, given)


def _ask_machines(file: DevicesFile, *, quietly: bool) -> tuple[Any, bool]:
    """Return the head's status, and True if something does not run."""
    from mlx_ring.cluster.lifecycle import verbs
    from mlx_ring.cluster.lifecycle.arguments import unlisted_nodes

    standings = verbs.standings(file)
    for standing in standings:
        if standing.failure:
            print(f"mlx-ring: {standing.failure}", file=sys.stderr)
    if not quietly:
        _show_machines(standings)
    if not any(found.kind == "head" for standing in standings for found in standing.running):
        return None, True
    state = verbs.ask(file, "GET", "/cluster/status")
    # The id of a machine out of reach is unknown, so it may be any of the nodes.
    if not any(standing.failure for standing in standings):
        ids = {standing.node for standing in standings}
        for sentence in unlisted_nodes(state["nodes"], ids, file.coordinator.name).values():
            _report(sentence)
    return state, any(standing.failure or not standing.running for standing in standings)


def _show_machines(standings: Sequence[Standing]) -> None:
    table = Table("machine", "node", "runs", box=None, pad_edge=False)
    for standing in standings:
        runs = ", ".join(f"{found.kind} (process {found.pid})" for found in standing.running)
        table.add_row(
            standing.machine.name, standing.node, "unknown" if standing.failure else runs or "nothing"
        )
    report_console().print(table)
    print()


def _report(sentence: str) -> None:
    print(sentence, file=sys.stderr, flush=True)
