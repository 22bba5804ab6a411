"""`mlx-ring cluster` as a person types it, over a real sshd: two hosts, one of them without mlx-ring."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from tests.eventually import eventually
from tests.machines import free_pair_of_ports
from tests.namespaces import lan, skip_without_namespaces
from tests.processes import MLX_RING, clean_environment, command_of, give_profile
from tests.ssh_hosts import SshHost, skip_without_sshd, ssh_hosts

from mlx_ring.host.running import running_here

pytestmark = pytest.mark.machines

Run = Callable[..., subprocess.CompletedProcess[str]]

DEVICES: Mapping[str, Any] = {
    "devices": [
        {
            "device_id": "first",
            "hostname": "10.77.0.1",
            "role": "coordinator",
            "capabilities": {"memory_gb": 16},
        },
        {
            "device_id": "second",
            "hostname": "10.77.0.2",
            "role": "worker",
            "capabilities": {"memory_gb": 2},
            "gpu_memory_utilization": 0.7,
        },
    ],
    "model": {"name": "demo"},
    "sharding": {"strategy": "custom", "custom_proportions": [0.75, 0.25]},
    "serve": {
        "max-model-len": 256,
        "log-level": "debug",
        "gpu-memory-utilization": 0.8,
        "spare-worker": "off",
    },
}
"""A file of devices in which each gets the layers that the file says."""

DEVICES_WITH_ADDRESSES: Mapping[str, Any] = {
    **DEVICES,
    "devices": [{**device, "address": device["hostname"]} for device in DEVICES["devices"]],
    "sharding": {"strategy": "uniform"},
}
"""A file that names the interfaces for tensors and leaves the layers to the planner."""


KEEPING: Mapping[str, Any] = {
    **DEVICES["serve"],
    "journal": "16MiB",
    "kv-disk": "64MiB",
    "shutdown-timeout-s": 1,
}
"""Settings with which answers outlive the head."""
STREAMS = 8


@dataclass(slots=True)
class Hosts:
    """Two hosts on a LAN. `mlx-ring cluster start` on the first has sent mlx-ring to the second."""

    first: SshHost
    second: SshHost
    folder: Path
    first_start: subprocess.CompletedProcess[str] = field(init=False)
    """The start that has sent mlx-ring."""
    first_start_s: float = field(init=False)

    def __iter__(self) -> Generator[SshHost]:
        yield from (self.first, self.second)

    def write(self, devices: Mapping[str, Any]) -> None:
        """Write the file of devices."""
        (self.folder / "cluster.json").write_text(json.dumps(devices))

    def cluster(self, host: SshHost, verb: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run `mlx-ring cluster` on a host, in an empty working directory."""
        (self.folder / "empty").mkdir(exist_ok=True)
        file = ("-c", str(self.folder / "cluster.json"))
        return host.run(*MLX_RING, "cluster", verb, *file, *arguments, folder=self.folder / "empty")

    def stop(self) -> None:
        """Stop whatever runs on the hosts."""
        if any(map(ours, self)):
            output_of(self.cluster(self.first, "stop"))

    def start(self, devices: Mapping[str, Any]) -> str:
        """Start a cluster on stopped hosts, and return the output."""
        self.stop()
        self.write(devices)
        return output_of(self.cluster(self.first, "start"))


def output_of(done: subprocess.CompletedProcess[str]) -> str:
    """Return the output of a command, which must have succeeded."""
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def ours(host: SshHost) -> list[psutil.Process]:
    """Return every process of mlx-ring in the host."""
    found: list[psutil.Process] = []
    for pid in host.processes():
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            if any("mlx_ring" in word or "mlx-ring" in word for word in command_of(process)):
                found.append(process)
    return found


def only_second_runs(hosts: Hosts) -> bool:
    """Return true if only the second host has processes: the agent that waits for the next head."""
    return not ours(hosts.first) and bool(ours(hosts.second))


def head_of(host: SshHost) -> int | None:
    """Return the process id of the head that runs in the host."""
    return next((found.pid for found in running_here(host.state) if found.kind == "head"), None)


@dataclass(slots=True)
class Stream:
    """A streamed answer. A client that was cut off sends its request again, with the id of its last event."""

    number: int
    tokens: list[str] = field(default_factory=list[str])
    last: str = ""
    has_ended: bool = False
    cuts: int = 0

    def read(self, http: httpx.Client) -> Stream:
        eventually(lambda: self._read_on(http))
        return self

    def _read_on(self, http: httpx.Client) -> bool:
        """Read until the end, or until the connection is cut. Before the first token, the head may be away."""
        body = {"prompt": f"Count to {self.number}", "max_tokens": 120, "ignore_eos": True, "logprobs": 0}
        drawn = {"seed": self.number} if self.number % 2 else {"temperature": 0}
        headers = {"last-event-id": self.last} if self.last else {}
        request = {**body, **drawn, "model": "demo", "stream": True}
        with (
            contextlib.suppress(httpx.TransportError),
            http.stream("POST", "/v1/completions", json=request, headers=headers) as answer,
        ):
            if answer.status_code != 503:
                assert answer.status_code == 200, answer.read()
                self._take(answer.iter_lines())
        self.cuts += not self.has_ended
        assert self.has_ended or self.last or not self.tokens, "an answer that was begun can be fetched"
        return self.has_ended

    def _take(self, lines: Iterator[str]) -> None:
        for line in lines:
            kind, _, value = line.partition(": ")
            if kind == "id":
                self.last = value
            elif line == "data: [DONE]":
                self.has_ended = True
            elif kind == "data":
                event = json.loads(value)
                assert "error" not in event, event
                for choice in event["choices"]:
                    self.tokens += (choice["logprobs"] or {}).get("tokens", ())


def restart_under_streams(hosts: Hosts, *machine: str) -> subprocess.CompletedProcess[str]:
    """Restart the cluster, or one machine, while clients stream; check that every answer is the undisturbed one."""
    url, numbers = "http://127.0.0.1:8100", range(STREAMS)
    with (
        hosts.first.host.threads(STREAMS) as clients,
        ThreadPoolExecutor(1) as pool,
        httpx.Client(base_url=url, timeout=120.0, verify=False) as http,  # noqa: S501 - in the clear as it is
    ):

        def read(number: int) -> Stream:
            return Stream(number).read(http)

        undisturbed = [stream.tokens for stream in clients.map(read, numbers)]
        restarting = pool.submit(hosts.cluster, hosts.first, "restart", *machine)
        while not restarting.done():
            streams = list(clients.map(read, numbers))
            assert [stream.tokens for stream in streams] == undisturbed
            assert not machine or not any(stream.cuts for stream in streams)
        return restarting.result()


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Generator[Hosts]:
    """Start the cluster of `DEVICES` once, which sends mlx-ring to the second host. The first test finds it running."""
    skip_without_namespaces()
    skip_without_sshd()
    folder = tmp_path_factory.mktemp("hosts")
    with ExitStack() as stack:
        first, second = stack.enter_context(ssh_hosts(stack.enter_context(lan(2)), folder))
        for host in (first, second):
            give_profile(host.state)
        made = Hosts(first, second, folder)
        made.write(DEVICES)
        began = time.monotonic()
        made.first_start = made.cluster(first, "start")
        made.first_start_s = time.monotonic() - began
        yield made
    # The packages that were sent are large.
    for host in made:
        shutil.rmtree(host.home)


@pytest.mark.timeout(1200)
def test_one_file_starts_shows_tests_and_stops_two_machines(
    hosts: Hosts, record_property: Callable[[str, object], None]
) -> None:
    first, second = hosts
    assert "Serving demo at http://127.0.0.1:8100 on first" in output_of(hosts.first_start)
    assert "second: mlx-ring is not installed there; sending mlx-ring" in hosts.first_start.stderr
    record_property("seconds of a first start, with sending", hosts.first_start_s)
    if head_of(first) is None:
        hosts.start(DEVICES)
    logged = (first.state / "logs" / "serve.out").read_text()
    assert "Serving demo" in logged
    assert "--token" not in logged, "what stays in a file has no token"

    status = json.loads(output_of(hosts.cluster(first, "status", "--json")))
    assert [device["layers"] for device in status["devices"]] == [[0, 6], [6, 8]], (
        "0.75 and 0.25 of eight layers"
    )
    assert [device["node"] for device in status["devices"]] == [
        (host.state / "node" / "node-id").read_text().strip() for host in hosts
    ]
    check_settings_of_each_machine(status, second)
    without_file = output_of(first.run(*MLX_RING, "cluster", "status", folder=hosts.folder))
    assert without_file.startswith("demo is ready"), "without a file it asks this machine's head"

    before = [{process.pid for process in ours(host)} for host in hosts]
    for host in hosts:
        again = hosts.cluster(host, "start")
        assert "Everything runs already" in again.stderr, "the same file on another machine finds the head"
        assert output_of(again)
    assert [{process.pid for process in ours(host)} for host in hosts] == before

    tested = hosts.cluster(first, "test")
    assert "Paris" in output_of(tested)
    assert "tokens/s of the answer" in tested.stderr
    lines = output_of(hosts.cluster(first, "logs", "--lines", "200")).splitlines()
    assert {line.split(" | ")[0].strip() for line in lines} == {"first", "second"}
    assert any(line.startswith("second | ") and "process=agent" in line for line in lines)

    assert "The cluster is stopped" in output_of(hosts.cluster(first, "stop"))
    assert [process.cmdline() for host in hosts for process in ours(host)] == []
    assert "The cluster is stopped" in output_of(hosts.cluster(first, "stop")), "twice is fine"
    without_head = hosts.cluster(first, "test")
    assert without_head.returncode == 1
    assert (
        without_head.stderr == "mlx-ring: first: No head runs here: start it with `mlx-ring cluster start`.\n"
    )


def check_settings_of_each_machine(status: dict[str, Any], second: SshHost) -> None:
    """Check that each machine has the file's settings for it, and those for all."""
    memory = [node["memory"] for node in status["nodes"]]
    assert [one["utilization"] for one in memory] == [0.8, 0.7], "the one for all, and its own"
    assert memory[1]["usable_bytes"] == int(0.7 * 2 * 2**30)
    agent = next(found for found in running_here(second.state) if found.kind == "agent")
    arguments = psutil.Process(agent.pid).cmdline()
    assert arguments[arguments.index("--log-level") + 1] == "debug", "as the head"
    assert "--max-model-len" not in arguments, "the head's alone"


@pytest.mark.timeout(600)
def test_one_machine_restarts_while_the_other_serves(hosts: Hosts) -> None:
    first, second = hosts
    hosts.start(DEVICES_WITH_ADDRESSES)
    (before,) = [found.pid for found in running_here(second.state) if found.kind == "agent"]
    head = head_of(first)
    restarted = restart_under_streams(hosts, "second")
    assert output_of(restarted) == ""
    for sentence in (
        "second: its layers move to other machines",
        "second: demo has moved in",
        "second: it is back",
        "\ndemo ",
    ):
        assert sentence in restarted.stderr
    (after,) = [found.pid for found in running_here(second.state) if found.kind == "agent"]
    assert (after != before, head_of(first)) == (True, head)
    status = json.loads(output_of(hosts.cluster(first, "status", "--json")))
    assert [node["state"] for node in status["nodes"]] == ["attending", "attending"]


@pytest.mark.timeout(600)
def test_streams_continue_after_the_whole_cluster_restarts(hosts: Hosts) -> None:
    hosts.start({**DEVICES_WITH_ADDRESSES, "serve": KEEPING})
    before = head_of(hosts.first)
    assert "Serving demo" in output_of(restart_under_streams(hosts))
    assert head_of(hosts.first) not in (before, None)


@pytest.mark.timeout(600)
def test_stop_ends_the_agent_that_a_killed_head_leaves(
    hosts: Hosts, record_property: Callable[[str, object], None]
) -> None:
    first = hosts.first
    hosts.stop()
    began = time.monotonic()
    assert "Serving demo" in hosts.start(DEVICES_WITH_ADDRESSES)
    record_property("seconds of a start", time.monotonic() - began)
    head = head_of(first)
    assert head is not None
    os.kill(head, signal.SIGKILL)
    stopped = output_of(first.run(*MLX_RING, "stop", folder=hosts.folder))
    assert stopped.startswith("The agent has ended"), "what a killed head has left"
    psutil.wait_procs(ours(first), timeout=30)
    assert only_second_runs(hosts), "the other machine's agent waits for the next head"


@pytest.mark.timeout(600)
def test_machine_that_is_cut_off_is_named_and_nothing_starts_without_it(hosts: Hosts) -> None:
    first, second = hosts
    if not only_second_runs(hosts):  # as the test above leaves it
        hosts.start(DEVICES_WITH_ADDRESSES)
        output_of(first.run(*MLX_RING, "stop", folder=hosts.folder))
    assert only_second_runs(hosts)
    second.host.cut()
    try:
        # Both wait for the same timeout of ssh, and neither changes anything.
        with ThreadPoolExecutor(2) as pool:
            stopping = pool.submit(hosts.cluster, first, "stop")
            starting = pool.submit(hosts.cluster, first, "start")
        unreachable, refused = stopping.result(), starting.result()
        assert ours(first) == []
    finally:
        second.host.mend()
        output_of(hosts.cluster(first, "stop"))
    assert ours(second) == []
    assert unreachable.returncode == 1
    assert unreachable.stderr.count("\n") == 1
    assert unreachable.stderr.startswith(
        "mlx-ring: second cannot be reached by `ssh 10.77.0.2`: ssh: connect to host"
    )
    assert refused.returncode == 1
    assert "second cannot be reached" in refused.stderr


@pytest.fixture
def run_here(tmp_path: Path) -> Run:
    """Return a function that runs `mlx-ring` in a home of its own."""

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*MLX_RING, *arguments],
            cwd=tmp_path,
            env={**clean_environment(), "HOME": str(tmp_path)},
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )

    return run


@pytest.mark.timeout(900)
def test_one_machine_is_started_and_stopped_by_a_file(tmp_path: Path, run_here: Run) -> None:
    state = tmp_path / "state"
    give_profile(state)
    (tmp_path / "cluster.yaml").write_text(
        f"devices: [{{device_id: me, hostname: localhost, state_dir: {state}}}]\n"
        "model: demo\nserve: {port: 0, max-model-len: 64}\n"
    )
    try:
        started = run_here("cluster", "start", "-c", "cluster.yaml")
        assert "Serving demo at http://127.0.0.1:" in output_of(started)
        assert "head (process" in output_of(run_here("cluster", "status", "-c", "cluster.yaml"))
    finally:
        stopped = run_here("stop", "--state-dir", str(state))
    assert "The head has ended" in output_of(stopped)
    assert run_here("cluster", "status", "-c", "cluster.yaml").returncode == 1


@pytest.mark.timeout(900)
def test_a_machine_that_the_file_no_longer_lists_is_named_and_takes_no_other_s_place(
    tmp_path: Path, run_here: Run
) -> None:
    port = free_pair_of_ports()
    states = {name: tmp_path / name for name in ("head", "old", "new")}
    for state in states.values():
        give_profile(state)

    def write(*names: str) -> None:
        devices = [
            {"device_id": name, "hostname": "localhost", "port": port, "state_dir": str(states[name])}
            for name in names
        ]
        serve = {"port": 0, "max-model-len": 64, "spare-worker": "off"}
        content = {"devices": devices, "model": "demo", "sharding": {"strategy": "uniform"}, "serve": serve}
        (tmp_path / "cluster.json").write_text(json.dumps(content))

    file = ("-c", "cluster.json")
    try:
        write("head", "old")
        first = run_here("cluster", "start", *file)
        output_of(first)
        assert "does not list" not in first.stderr + run_here("cluster", "status", *file).stderr
        write("head", "new")
        second = run_here("cluster", "start", *file)
        status = run_here("cluster", "status", "--json", *file)
        nodes = {node["id"]: node for node in json.loads(output_of(status))["nodes"]}
        old, new = ((states[name] / "node" / "node-id").read_text().strip() for name in ("old", "new"))
        assert nodes[new]["stages"], "it was waited for, although the old machine was there before it"
        remove = f"Remove it by `mlx-ring node remove {old}` on head, or add it to the file."
        assert f"{old} ({nodes[old]['name']} at " in second.stderr
        assert [done.stderr.count(remove) for done in (second, status)] == [1, 1]
        assert "Serving demo" in output_of(second)
        output_of(run_here("node", "remove", old, "--state-dir", str(states["head"])))
        eventually(
            lambda: run_here("cluster", "status", *file).stderr, lambda said: "does not list" not in said
        )
    finally:
        for state in states.values():
            run_here("stop", "--state-dir", str(state))
