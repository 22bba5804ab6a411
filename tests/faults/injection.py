"""A server whose workers can be stopped at a step, and faults of its workers, machines and links."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import tempfile
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import httpx
import psutil
from tests.end_to_end.lan_cluster import LanCluster, Machine
from tests.eventually import eventually
from tests.processes import Server, command_of, serving

from mlx_ring.core.folders import authority_folder

_HOOK = Path(__file__).parent / "step_hook"
_HOOK_WAIT_S = 600.0
CHUNK = 24
"""Most tokens of a chunk of a prompt."""
CUT_AT = 12
"""Number of an answer's tokens before a fault."""
_FLAGS = (
    *("--stages", "2", "--prefill-chunk", str(CHUNK), "--prefix-cache", "off", "--max-model-len", "1024"),
    *("--pooling", "mean"),
)


@contextlib.contextmanager
def stopping_at_steps() -> Generator[Path]:
    """Let workers that are started meanwhile stop at steps; return the folder of their sockets."""
    # A socket's path has about 100 characters at most, and a test's folder has more.
    with (
        tempfile.TemporaryDirectory(prefix="steps-", dir="/tmp") as folder,
        patch.dict("os.environ", {"PYTHONPATH": str(_HOOK), "STOP_AT_STEPS_IN": folder}),
    ):
        yield Path(folder)


@dataclass(frozen=True, slots=True)
class Rank:
    """A worker of the loaded instance."""

    stage: int
    rank: int
    node: str
    pid: int

    @property
    def process(self) -> psutil.Process:
        return psutil.Process(self.pid)


@dataclass(frozen=True, slots=True)
class AtStep:
    """State of a worker that stopped before a step: its sequences, by the length of their prompts."""

    sequences: Mapping[int, list[Mapping[str, int]]]

    def starts(self, prompt: int) -> list[int]:
        """Return the positions of the last rows of the prompt's sequences."""
        return [each["start"] for each in self.sequences.get(prompt, []) if "start" in each]

    def has_draft(self, prompt: int) -> bool:
        """Return True if the last row of one of the prompt's sequences had draft tokens."""
        return any(each.get("draft") for each in self.sequences.get(prompt, []))


class Stopped:
    """Connection with a worker that stops at steps. It continues when the connection is closed."""

    def __init__(self, folder: Path, pid: int) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(_HOOK_WAIT_S)
        self._socket.connect(str(folder / f"{pid}.sock"))
        self._lines = self._socket.makefile("rw")

    def set(self, prompt: int, start: int, *, or_without_drafts: int = 0) -> None:
        """Let the worker continue up to a row of the sequence with this prompt's length, from this position on.

        With `or_without_drafts`, the row must have draft tokens, or begin at that position.
        """
        condition = {"prompt": prompt, "start": start, "undrafted": or_without_drafts}
        self._lines.write(json.dumps(condition) + "\n")
        self._lines.flush()
        assert self._lines.readline() == "\n", "the worker has ended"

    def wait(self) -> AtStep:
        """Wait until the worker stops."""
        report = json.loads(self._lines.readline())
        sequences: dict[int, list[Mapping[str, int]]] = {}
        for each in report["sequences"]:
            sequences.setdefault(each["prompt"], []).append(each)
        return AtStep(sequences)

    def close(self) -> None:
        """Let the worker continue, if it still lives."""
        with contextlib.suppress(OSError):
            self._lines.close()
        self._socket.close()


def held_loads(folder: Path) -> contextlib.AbstractContextManager[Callable[[], None]]:
    """Let workers that load meanwhile wait with their weights; the function waits until one does."""
    return _held_at(folder / "load")


def held_input(folder: Path, pid: int) -> contextlib.AbstractContextManager[Callable[[], None]]:
    """Keep input that comes meanwhile from a worker; the function waits until some has come."""
    return _held_at(folder / f"input-{pid}")


def held_read(folder: Path, pid: int) -> contextlib.AbstractContextManager[Callable[[], None]]:
    """Let a worker that reads saved KV meanwhile wait before it does; the function waits until it is about to."""
    return _held_at(folder / f"read-{pid}")


@contextlib.contextmanager
def _held_at(fifo: Path) -> Generator[Callable[[], None]]:
    ends = list[int]()
    os.mkfifo(fifo)

    def wait() -> None:
        ends.append(eventually(partial(_writing_end, fifo), lambda end: end is not None) or 0)

    try:
        yield wait
    finally:
        fifo.unlink()
        for end in ends:
            os.close(end)


def _writing_end(fifo: Path) -> int | None:
    """Open a FIFO for writing; return None if no process reads it."""
    try:
        return os.open(fifo, os.O_WRONLY | os.O_NONBLOCK)
    except OSError:
        return None


def count_tasks(folder: Path, pid: int) -> int:
    """Return the number of asyncio tasks of a process."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(folder / f"{pid}.sock"))
        with connection.makefile("rw") as lines:
            lines.write('"tasks"\n')
            lines.flush()
            return int(lines.readline())


def make_fatal(folder: Path, *, prompt: int, start: int) -> None:
    """Let workers kill themselves before a row of a sequence with this prompt's length, from this position on."""
    (folder / "fatal.json").write_text(json.dumps({"prompt": prompt, "start": start}))


def make_schema_fatal(folder: Path, schema: str) -> None:
    """Let workers kill themselves before they compile a schema with this text."""
    (folder / "fatal.json").write_text(json.dumps({"schema": schema}))


@dataclass(slots=True)
class Served:
    """A server, and how to reach it."""

    server: Server
    hook: Path
    """Folder of the workers' sockets."""
    http: httpx.Client
    threads: ThreadPoolExecutor
    """Threads in the server's host."""

    def get(self, path: str) -> httpx.Response:
        return self.threads.submit(self.http.get, self.server.url + path).result()

    def status(self) -> dict[str, Any]:
        return self.get("/cluster/status").raise_for_status().json()

    def ranks(self) -> list[Rank]:
        """Return the workers of the loaded instance; none while there is none."""
        return [
            Rank(stage["stage"], rank["rank"], rank["node"], rank["pid"])
            for instance in self.status()["instances"]
            if instance["state"] == "ready"
            for stage in instance["stages"]
            for rank in stage["ranks"]
        ]

    def wait_until_ready(self) -> list[Rank]:
        """Wait until an instance serves, and return its workers."""
        return eventually(self.ranks)

    def metric(self, name: str) -> float:
        """Return the sum of a metric's values."""
        values = re.findall(rf"^mlx_ring_{name}(?:{{.*}})? (\S+)$", self.get("/metrics").text, re.MULTILINE)
        return sum(map(float, values))

    def can_lose(self, rank: Rank) -> bool:
        """Return True if the machine of a rank may be lost."""
        return rank.node == ""

    def restore(self, victim: Rank, fault: Fault) -> None:
        """Bring back what a fault has removed."""

    def forget_losses(self) -> None:
        """Let the head put no machine into quarantine because of the losses so far."""


@contextlib.contextmanager
def serving_stages(model: Path, folder: Path, hook: Path, *flags: str) -> Generator[Served]:
    """Serve a model in two stages on one machine."""
    with (
        serving(model, *_FLAGS, *flags, folder=folder) as server,
        ThreadPoolExecutor(16) as threads,
    ):
        yield Served(server, hook, server.http, threads)
        assert server.stop() == 0
        assert server.all_ended()


@dataclass(slots=True)
class ServedCluster(Served):
    """A head and its machines, to which faults happen."""

    cluster: LanCluster

    def machine_of(self, rank: Rank) -> Machine:
        return self.cluster.machine_of(rank.node)

    def can_lose(self, rank: Rank) -> bool:
        return rank.node != self.cluster.head.node

    def restore(self, victim: Rank, fault: Fault) -> None:
        machine = self.machine_of(victim)
        machine.host.mend()
        if fault.ends_agent:
            self.join(machine)
        eventually(lambda: machine.node in self._attending())
        self.forget_losses()

    def forget_losses(self) -> None:
        (authority_folder(self.cluster.head.state) / "losses.json").unlink(missing_ok=True)

    def join(self, machine: Machine) -> None:
        """Run the agent of a machine whose agent was killed."""
        self.cluster.join(machine, *self.cluster.join_flags)

    def _attending(self) -> set[str]:
        """Return the connected nodes."""
        return {node["id"] for node in self.status()["nodes"] if node["state"] == "attending"}


def _kill(_served: Served, victim: Rank) -> None:
    victim.process.kill()


def _stop(_served: Served, victim: Rank) -> None:
    victim.process.send_signal(signal.SIGSTOP)


def _machine(served: Served, victim: Rank) -> Machine:
    assert isinstance(served, ServedCluster)
    return served.machine_of(victim)


def _cut(served: Served, victim: Rank) -> None:
    _machine(served, victim).host.cut()


def _kill_agent(served: Served, victim: Rank) -> None:
    """Kill an agent, and wait for the end of its worker, which could otherwise finish its step before."""
    processes = _machine(served, victim).processes
    next(process for process in processes if "join" in command_of(process)).kill()
    eventually(partial(_has_ended, victim.process))


def _has_ended(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def _kill_machine(served: Served, victim: Rank) -> None:
    """Kill all processes of a machine, and start its agent again at once."""
    assert isinstance(served, ServedCluster)
    machine = served.machine_of(victim)
    for process in machine.processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    served.join(machine)


def _reset_links(served: Served, victim: Rank) -> None:
    """Reset the connections between the victim and other workers."""
    assert isinstance(served, ServedCluster)
    others = {rank.pid for rank in served.ranks()} - {victim.pid}
    found = {
        ends: pid
        for machine in served.cluster.machines
        for *ends_, pid in _connections(machine)
        for ends in [tuple(ends_)]
    }
    host, number = served.machine_of(victim).host, 0
    for (ours, theirs), pid in found.items():
        if pid == victim.pid and found.get((theirs, ours)) in others:
            port = ours.rpartition(":")[2]
            ended = host.run("ss", "-K", "-tn", "sport", "=", f":{port}", "dst", theirs)
            assert ended.returncode == 0, ended.stderr
            number += 1
    assert number, "no connection between workers was found"


def _connections(machine: Machine) -> Generator[tuple[str, str, int]]:
    """Yield the established connections of a host: its address, the other one, and the process."""
    for line in machine.host.run("ss", "-tnpH", "state", "established").stdout.splitlines():
        columns = line.split()
        if found := re.search(r"pid=(\d+)", line):
            yield columns[2], columns[3], int(found[1])


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault of the victim, of its machine or of its connections."""

    inject: Callable[[Served, Rank], None]
    loses_machine: bool = False
    """True if the head loses the victim's machine."""
    ends_agent: bool = False
    """True if the machine's agent must be started again."""
    interrupts: bool = True
    """True if answers must be taken over by another instance."""


FAULTS: Mapping[str, Fault] = {
    "worker killed": Fault(_kill),
    "worker stopped": Fault(_stop),
    "cable cut": Fault(_cut, loses_machine=True),
    "link reset": Fault(_reset_links),
    "agent killed": Fault(_kill_agent, loses_machine=True, ends_agent=True),
    "machine down and up": Fault(_kill_machine, loses_machine=True),
}
"""Faults by name. The cable is plugged in again, and the agent started again, when the answers have ended."""
