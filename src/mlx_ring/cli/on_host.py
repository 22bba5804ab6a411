"""`mlx-ring cluster on-host`: commands that `mlx-ring cluster` runs on each machine. Users run `mlx-ring cluster`."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from mlx_ring.cli.flags import setting_option
from mlx_ring.host.running import end_running, running_here

app = typer.Typer(no_args_is_help=True)

_STATE = setting_option("state_dir")
_START_S = 600.0


def _state(state_dir: str | None) -> Path:
    from mlx_ring.cluster.lifecycle.host_side import state_here

    return state_here(state_dir)


@app.command("about")
def describe_installation(
    state_dir: Annotated[str | None, _STATE] = None,
    identity: Annotated[bool, typer.Option("--identity", help="Create an id for this machine.")] = False,
) -> None:
    """Print versions, the node's id and running processes as JSON."""
    from mlx_ring.cluster.lifecycle.host_side import installation_here  # imports gRPC, which is slow

    print(installation_here(_state(state_dir), identity=identity).to_json())


@app.command("model")
def model(
    name: str,
    folders: Annotated[list[Path] | None, typer.Argument(metavar="FOLDER")] = None,
    state_dir: Annotated[str | None, _STATE] = None,
) -> None:
    """Print the absolute path of a model's folder, looked up in these folders and at home. Print other names unchanged."""
    from mlx_ring.cluster.lifecycle.host_side import whole_path

    del state_dir
    print(whole_path(name, [*(folders or []), Path.home()]))


@app.command("run")
def run(
    arguments: Annotated[list[str], typer.Argument(metavar="-- serve|join …")],
    state_dir: Annotated[str | None, _STATE] = None,
    timeout: Annotated[float, typer.Option(metavar="SECONDS")] = _START_S,
) -> None:
    """Start a process that outlives the connection, and print its id."""
    from mlx_ring.cluster.lifecycle.host_side import run_detached

    print(run_detached(_state(state_dir), arguments, timeout))


@app.command("enrol")
def enrol(head: str, state_dir: Annotated[str | None, _STATE] = None) -> None:
    """Join the cluster, with the token from standard input."""
    from mlx_ring.agent.enrolment import join
    from mlx_ring.core.folders import node_folder

    join(head, sys.stdin.read().strip(), node_folder(_state(state_dir)))


@app.command("wait-for-port")
def wait_for_port(
    pid: int,
    port: int,
    state_dir: Annotated[str | None, _STATE] = None,
    timeout: Annotated[float, typer.Option(metavar="SECONDS")] = _START_S,
) -> None:
    """Wait until a process listens on a port."""
    from mlx_ring.cluster.lifecycle.host_side import wait_for_port as wait

    wait(_state(state_dir), pid, port, timeout)


@app.command("wait-until-ready")
def wait_until_ready(
    pid: int,
    state_dir: Annotated[str | None, _STATE] = None,
    timeout: Annotated[float, typer.Option(metavar="SECONDS")] = _START_S,
) -> None:
    """Wait until a head answers requests, and print its address; print nothing on a timeout."""
    from mlx_ring.cluster.lifecycle.host_side import wait_until_ready as wait

    state = _state(state_dir)
    if wait(state, pid, timeout):
        print(next((found.url for found in running_here(state) if found.pid == pid), ""))


@app.command("ask")
def ask(
    method: str,
    path: str,
    state_dir: Annotated[str | None, _STATE] = None,
    api_key_file: Annotated[str | None, typer.Option(metavar="FILE")] = None,
) -> None:
    """Send a request to the head, with the body from standard input, and print the answer."""
    from mlx_ring.cluster.lifecycle.host_side import ask_head, keys_here

    state = _state(state_dir)
    print(ask_head(state, method, path, sys.stdin.read(), keys_here(state, api_key_file)))


@app.command("logs")
def logs(
    state_dir: Annotated[str | None, _STATE] = None,
    lines: Annotated[int, typer.Option(metavar="N")] = 50,
    follow: Annotated[bool, typer.Option("--follow")] = False,
) -> None:
    """Print the last lines of the log files."""
    from mlx_ring.cluster.lifecycle.host_side import log_command

    command = log_command(_state(state_dir), lines, follow=follow)
    os.execvp(command[0], command)  # noqa: S606 - no shell is wanted


@app.command("stop")
def stop(state_dir: Annotated[str | None, _STATE] = None) -> None:
    """Stop the head and the agent, and print a line for each."""
    for line in end_running(_state(state_dir)):
        print(line)
