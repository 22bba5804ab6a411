"""A cluster on loopback: a head, and machines that join it. Each has a state folder of its own."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

import psutil
from tests.processes import Server, give_profile, joining, serving

REQUEST = {"prompt": "The quick brown fox", "max_tokens": 24, "temperature": 0, "ignore_eos": True}
"""A greedy completion."""


def completion(server: Server) -> str:
    """Return the text of the greedy completion."""
    answer = server.http.post("/v1/completions", json=REQUEST)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"]


@contextmanager
def running_cluster(
    model: Path | str,
    nodes: int,
    folder: Path,
    port: int,
    *flags: str,
    join_flags: Sequence[str] = (),
    before_join: Callable[[], object] | None = None,
    on_line: Callable[[str], object] | None = None,
    speed: float = 1.0,
) -> Generator[Server]:
    """Run a head and the other machines of a cluster, which join once the head prints its token.

    Args:
        model: Folder or name of the model.
        nodes: Number of machines, including the head's.
        folder: Folder of the head, with a folder `node-1`, `node-2` and so on for each other machine.
        port: First of the head's two ports.
        flags: Further flags of `mlx-ring serve`.
        join_flags: Further flags of `mlx-ring join`.
        before_join: Called before the other machines join.
        on_line: Called with each line that the head prints until it is ready.
        speed: Speed of computing in the machines' profiles, relative to this machine's.
    """
    joined: list[object] = []
    with ExitStack() as stack:

        def read(line: str) -> None:
            if on_line is not None:
                on_line(line)
            found = re.search(r"join \S+ --token (\S+)", line)
            if found and not joined:
                if before_join is not None:
                    before_join()
                for number in range(1, nodes):
                    node = joining_head(port, found[1], folder / f"node-{number}", *join_flags, speed=speed)
                    joined.append(stack.enter_context(node))

        stack.callback(end_head_members, folder)
        yield stack.enter_context(running_head(model, nodes, folder, port, *flags, on_line=read, speed=speed))


def joining_head(
    port: int, token: str, folder: Path, *flags: str, speed: float = 1.0
) -> AbstractContextManager[subprocess.Popen[str]]:
    """Run a machine that joins the head on this port."""
    give_profile(folder / "state", speed=speed)
    return joining(f"127.0.0.1:{port}", "--token", token, *flags, folder=folder)


def running_head(
    model: Path | str,
    nodes: int,
    folder: Path,
    port: int,
    *flags: str,
    on_line: Callable[[str], None] | None = None,
    speed: float = 1.0,
) -> AbstractContextManager[Server]:
    """Run `mlx-ring serve` for this number of machines."""
    give_profile(folder / "state", speed=speed)
    arguments = ("--nodes", str(nodes), "--cluster-port", str(port), "--state-dir", str(folder / "state"))
    return serving(model, *arguments, *flags, folder=folder, on_line=on_line)


def end_head_members(folder: Path) -> None:
    """End the head's own agent, which a killed head leaves behind."""
    for process in head_members(folder):
        process.terminate()
        process.wait(30)


def head_members(folder: Path) -> list[psutil.Process]:
    """Return the agents of heads with their state in this folder."""
    found: list[psutil.Process] = []
    for process in psutil.process_iter(["cmdline"]):
        line: list[str] = process.info["cmdline"] or []
        if "mlx_ring.agent.head_member" in line and str(folder / "state") in line:
            found.append(process)
    return found
