"""A cluster of hosts on a LAN. Each may have limits of memory and processors; only the first has the model."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import httpx
import psutil
from tests.cgroups import ControlGroup, limited, mount_command
from tests.namespaces import Host, lan
from tests.processes import Server, serving
from tests.processes import joining as join_cluster
from transformers import AutoTokenizer

from mlx_ring.api.openai.schemas import TokenTexts
from mlx_ring.core.types import LayerRange
from mlx_ring.models.layer_tensors import tensors_of_stage
from mlx_ring.models.model_folder import read_model_folder

_WAIT_S = 120.0
_ROW = re.compile(r"(\S+) +(\d+)-(\d+) +([\d.]+) ([MG])B +([\d.]+) ([MG])B +([\d.]+) ([MG])B +([\d.]+) ")
_SPEED = re.compile(r": ([\d.]+) tokens/s for one stream")
_UNITS = {"M": 1e6, "G": 1e9}


@dataclass(frozen=True, slots=True)
class PlannedStage:
    """A stage in the plan that `serve` prints."""

    node: str
    layers: range
    weight_bytes: float
    memory_bytes: float
    usable_bytes: float
    token_ms: float


@dataclass(frozen=True, slots=True)
class Machine:
    """A host, with a folder for the state and logs of its processes."""

    host: Host
    folder: Path
    group: ControlGroup | None
    threads: ThreadPoolExecutor
    """Threads inside the host."""
    on_processor: tuple[str, ...] = ()
    """Command that runs a program on the one processor that the host may use; empty if it may use all."""

    @property
    def state(self) -> Path:
        return self.folder / "state"

    @property
    def node(self) -> str:
        """Id of its node, once it has joined."""
        return (self.state / "node" / "node-id").read_text().strip()

    @property
    def has_joined(self) -> bool:
        return (self.state / "node" / "certificate.pem").exists()

    @property
    def processes(self) -> list[psutil.Process]:
        """All processes that run in it."""
        listed = ["ip", "netns", "pids", self.host.namespace]
        found = subprocess.run(listed, capture_output=True, text=True, check=True).stdout
        return [psutil.Process(int(pid)) for pid in found.split() if psutil.pid_exists(int(pid))]

    @property
    def received_bytes(self) -> int:
        """Bytes that it has received over its cable."""
        table = self.host.run("cat", "/proc/net/dev").stdout
        return next(int(line.split()[1]) for line in table.splitlines() if line.strip().startswith("eth0:"))

    def log(self, process: str) -> str:
        """Return the log of one of its processes."""
        file = self.folder / "logs" / f"{process}.log"
        return file.read_text() if file.exists() else ""

    def command(self, hidden: Path | None) -> list[str]:
        """Return the command that runs a program in it with an empty folder `hidden`. Mounts are that program's alone."""
        hide = [] if hidden is None else [f"mount -t tmpfs none {shlex.quote(str(hidden))}"]
        prepare = [*([] if self.group is None else [mount_command()]), *hide, 'exec "$@"']
        inside = self.host.command(*self.on_processor, "sh", "-c", " && ".join(prepare), "sh")
        return inside if self.group is None else self.group.command(*inside)


@dataclass(slots=True)
class LanCluster:
    """The machines; the first is the head's and has the model."""

    model: Path
    machines: Sequence[Machine]
    stack: ExitStack
    """Contexts of the processes, which end with it."""
    http: httpx.Client
    """Client for the head's threads."""
    planned: list[PlannedStage] = field(default_factory=list[PlannedStage])
    """Stages that the last `serve` has printed."""
    token_ms: float = 0.0
    """Time between two tokens of one stream, which it has printed, too."""
    received_before: Sequence[int] = ()
    """Bytes that each machine had received when the plan was printed, after links were measured and before the load."""
    token: str = ""
    join_flags: Sequence[str] = ()
    """Flags of machines that join from now on."""
    names: Mapping[str, int] = field(default_factory=dict[str, int])
    """Token ids by their names in the API."""

    @property
    def head(self) -> Machine:
        return self.machines[0]

    def serve(self, nodes: int, *flags: str, joining: Sequence[Machine] = ()) -> Server:
        """Run `mlx-ring serve` on the first machine; the machines `joining` join when it prints the token."""
        self.planned, self.received_before = [], ()
        waiting = list(joining)

        def on_line(line: str) -> None:
            found = re.search(r"join \S+ --token (\S+)", line)
            if found:
                self.token = found[1]
                while waiting:
                    self.join(waiting.pop(), *self.join_flags)
            if line.startswith("machine "):
                self.planned = []
                self.received_before = [machine.received_bytes for machine in self.machines]
            if row := _ROW.match(line):
                self.planned.append(_stage(row))
            if speed := _SPEED.search(line):
                self.token_ms = 1e3 / float(speed[1])

        arguments = ("--nodes", str(nodes), "--state-dir", str(self.head.state), *flags)
        return self.stack.enter_context(
            serving(
                self.model,
                *arguments,
                folder=self.head.folder,
                on_line=on_line,
                within=self.head.command(None),
            )
        )

    def join(self, machine: Machine, *flags: str) -> subprocess.Popen[str]:
        """Run `mlx-ring join` on a machine, with the token that `serve` has printed."""
        node = join_cluster(
            *(self.head.host.address, "--token", self.token, *flags),
            folder=machine.folder,
            within=machine.command(self.model),
        )
        return self.stack.enter_context(node)

    def get(self, server: Server, path: str) -> Any:
        """Return the head's answer for a path."""
        return self.head.threads.submit(self.http.get, server.url + path).result().json()

    def tokens(self, server: Server, body: dict[str, Any]) -> list[int]:
        """Return the tokens of a greedy completion that does not end early."""
        request = {"temperature": 0, "ignore_eos": True, "logprobs": 0, **body}

        def post() -> Any:
            answer = self.http.post(f"{server.url}/v1/completions", json=request)
            assert answer.status_code == 200, answer.text
            return answer.json()["choices"][0]["logprobs"]["tokens"]

        names = self.head.threads.submit(post).result()
        return [self.names[name] for name in names]

    def share_of(self, machine: Machine) -> int:
        """Return the bytes of its layers' weights in the last plan."""
        described = read_model_folder(self.model)
        return sum(
            entry.nbytes
            for stage in self.planned
            if stage.node == machine.node
            for entry in tensors_of_stage(described, LayerRange(stage.layers.start, stage.layers.stop))
        )

    def machine_of(self, node: str) -> Machine:
        return next(machine for machine in self.machines if machine.node == node)


def make_cluster(
    model: Path,
    folder: Path,
    stack: ExitStack,
    limits: Sequence[tuple[int, float] | tuple[int, float, int] | None],
    *,
    fast: bool = False,
    one_processor_each: bool = False,
) -> LanCluster:
    """Make hosts on a LAN, one for each of `limits`.

    Args:
        model: Folder of the model.
        folder: Folder of the machines' folders.
        stack: Contexts of everything that runs.
        limits: For each host, bytes of memory, cores of processor time and, optionally, the period of that time in
            microseconds. None means no limits.
        fast: Add a second switch, as `lan` does.
        one_processor_each: Let each host use one of this machine's processors. Its ranks then wait for others in the
            kernel. Otherwise they take the processors of other hosts' ranks.
    """
    groups = [
        None if limit is None else stack.enter_context(limited(limit[0], limit[1], *limit[2:]))
        for limit in limits
    ]
    hosts = stack.enter_context(lan(len(limits), fast=fast))
    machines: list[Machine] = []
    processors = sorted(os.sched_getaffinity(0))
    for number, (host, group) in enumerate(zip(hosts, groups, strict=True)):
        own = folder / f"machine-{number}"
        own.mkdir()
        pinned = ("taskset", "-c", str(processors[number % len(processors)])) if one_processor_each else ()
        machines.append(Machine(host, own, group, stack.enter_context(host.threads(4)), pinned))
    tokenizer = cast("Any", AutoTokenizer).from_pretrained(model)
    texts = TokenTexts(tokenizer)
    names = {texts[token].name: token for token in range(read_model_folder(model).vocab_size)}
    # Reading the system's certificates would take longer than a request.
    http = httpx.Client(verify=False, timeout=_WAIT_S, limits=httpx.Limits(max_keepalive_connections=0))  # noqa: S501 - in the clear as it is
    return LanCluster(model, machines, stack, stack.enter_context(http), names=names)


def _stage(row: re.Match[str]) -> PlannedStage:
    weights, memory, usable = (
        float(row[number]) * _UNITS[unit] for number, unit in ((4, row[5]), (6, row[7]), (8, row[9]))
    )
    return PlannedStage(row[1], range(int(row[2]), int(row[3]) + 1), weights, memory, usable, float(row[10]))
