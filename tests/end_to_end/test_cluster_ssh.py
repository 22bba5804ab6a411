"""`mlx-ring cluster` as a person types it, over a real sshd: two hosts, of which one has nothing of mlx-ring."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Generator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.namespaces import lan, skip_without_namespaces
from tests.processes import MLX_RING, clean_environment
from tests.ssh_hosts import SshHost, skip_without_sshd, ssh_hosts

from mlx_ring.host.running import running_here

DEVICES: dict[str, Any] = {
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
    "serve": {"max-model-len": 256, "log-level": "debug", "gpu-memory-utilization": 0.8},
}


def with_addresses() -> dict[str, object]:
    """The same with the interface for tensors named, and layers as the plan has it."""
    devices = [{**device, "address": device["hostname"]} for device in DEVICES["devices"]]
    return {**DEVICES, "devices": devices, "sharding": {"strategy": "uniform"}}


@pytest.fixture
def hosts(tmp_path: Path) -> Generator[list[SshHost]]:
    skip_without_namespaces()
    skip_without_sshd()
    with ExitStack() as stack:
        made = stack.enter_context(ssh_hosts(stack.enter_context(lan(2)), tmp_path))
        (tmp_path / "cluster.json").write_text(json.dumps(DEVICES))
        yield made
    # What was sent is large.
    for host in made:
        shutil.rmtree(host.home)


def cluster(host: SshHost, folder: Path, verb: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """In a working directory that has nothing in it."""
    (folder / "elsewhere").mkdir(exist_ok=True)
    file = ("-c", str(folder / "cluster.json"))
    return host.run(*MLX_RING, "cluster", verb, *file, *arguments, folder=folder / "elsewhere")


def done_well(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def ours(host: SshHost) -> list[psutil.Process]:
    """Every process of mlx-ring in the host."""
    found: list[psutil.Process] = []
    for pid in host.processes():
        try:
            process = psutil.Process(pid)
            if any("mlx_ring" in word or "mlx-ring" in word for word in process.cmdline()):
                found.append(process)
        except psutil.NoSuchProcess:
            continue
    return found


@pytest.mark.timeout(1200)
def test_one_file_starts_shows_tries_and_stops_two_machines(
    hosts: list[SshHost], tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    first, second = hosts
    began = time.monotonic()
    started = cluster(first, tmp_path, "start")
    assert "Serving demo at http://127.0.0.1:8100 on first" in done_well(started)
    assert "second: mlx-ring is not installed there; sending mlx-ring" in started.stderr
    told_to_file = (first.state / "logs" / "serve.out").read_text()
    assert "Serving demo" in told_to_file
    assert "--token" not in told_to_file, "what stays in a file has no token"
    record_property("seconds of a first start, with sending", time.monotonic() - began)

    told = json.loads(done_well(cluster(first, tmp_path, "status", "--json")))
    assert [device["layers"] for device in told["devices"]] == [[0, 6], [6, 8]], (
        "0.75 and 0.25 of eight layers"
    )
    assert [device["node"] for device in told["devices"]] == [
        (host.state / "node" / "node-id").read_text().strip() for host in hosts
    ]
    check_what_the_file_says_for_each_machine(told, second)
    shown = done_well(cluster(second, tmp_path, "status"))
    assert "head (process" in shown, "the same file on another machine finds the head"
    alone = done_well(first.run(*MLX_RING, "cluster", "status", folder=tmp_path))
    assert alone.startswith("demo is ready"), "without a file it asks this machine's head"

    before = {host.folder.name: {process.pid for process in ours(host)} for host in hosts}
    again = cluster(first, tmp_path, "start")
    assert "Everything runs already" in again.stderr
    assert done_well(again)
    from_there = cluster(second, tmp_path, "start")
    assert "Everything runs already" in from_there.stderr, "wherever it is typed"
    assert done_well(from_there)
    assert {host.folder.name: {process.pid for process in ours(host)} for host in hosts} == before

    tried = cluster(first, tmp_path, "test")
    assert "Paris" in done_well(tried)
    assert "tokens/s of the answer" in tried.stderr
    lines = done_well(cluster(first, tmp_path, "logs", "--lines", "200")).splitlines()
    assert {line.split(" | ")[0].strip() for line in lines} == {"first", "second"}
    assert any(line.startswith("second | ") and "process=agent" in line for line in lines)

    assert "The cluster is stopped" in done_well(cluster(first, tmp_path, "stop"))
    assert [process.cmdline() for host in hosts for process in ours(host)] == []
    assert "The cluster is stopped" in done_well(cluster(first, tmp_path, "stop")), "twice is fine"
    missing = cluster(first, tmp_path, "test")
    assert missing.returncode == 1
    assert missing.stderr == "mlx-ring: first: No head runs here: start it with `mlx-ring cluster start`.\n"

    (tmp_path / "cluster.json").write_text(json.dumps(with_addresses()))
    began = time.monotonic()
    assert "Serving demo" in done_well(cluster(first, tmp_path, "start"))
    record_property("seconds of a start", time.monotonic() - began)
    check_what_a_killed_head_leaves(first, second, tmp_path)
    check_a_machine_that_is_cut_off(first, second, tmp_path)


def check_what_the_file_says_for_each_machine(told: dict[str, Any], second: SshHost) -> None:
    memory = [node["memory"] for node in told["nodes"]]
    assert [one["utilization"] for one in memory] == [0.8, 0.7], "the one for all, and its own"
    assert memory[1]["usable_bytes"] == int(0.7 * 2 * 2**30)
    agent = next(found for found in running_here(second.state) if found.kind == "agent")
    words = psutil.Process(agent.pid).cmdline()
    assert words[words.index("--log-level") + 1] == "debug", "as the head"
    assert "--max-model-len" not in words, "the head's alone"


def check_what_a_killed_head_leaves(first: SshHost, second: SshHost, folder: Path) -> None:
    head = next(found for found in running_here(first.state) if found.kind == "head")
    os.kill(head.pid, signal.SIGKILL)
    left = done_well(first.run(*MLX_RING, "stop", folder=folder))
    assert left.startswith("The agent is ended"), "what a killed head has left"
    psutil.wait_procs(ours(first), timeout=30)
    assert ours(first) == []
    assert ours(second), "the other machine's agent waits for the next head"


def check_a_machine_that_is_cut_off(first: SshHost, second: SshHost, folder: Path) -> None:
    second.host.cut()
    unreachable = cluster(first, folder, "stop")
    assert unreachable.returncode == 1
    assert unreachable.stderr.count("\n") == 1
    assert unreachable.stderr.startswith(
        "mlx-ring: second cannot be reached by `ssh 10.77.0.2`: ssh: connect to host"
    )
    refused = cluster(first, folder, "start")
    assert refused.returncode == 1
    assert "second cannot be reached" in refused.stderr
    assert ours(first) == []
    second.host.mend()
    done_well(cluster(first, folder, "stop"))
    assert ours(second) == []


@pytest.mark.timeout(900)
def test_one_machine_alone_is_started_and_stopped_by_a_file_too(tmp_path: Path) -> None:
    state = tmp_path / "state"
    (tmp_path / "cluster.yaml").write_text(
        f"devices: [{{device_id: me, hostname: localhost, state_dir: {state}}}]\n"
        "model: demo\nserve: {port: 0, max-model-len: 64}\n"
    )

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

    try:
        assert "Serving demo at http://127.0.0.1:" in done_well(run("cluster", "start", "-c", "cluster.yaml"))
        assert "head (process" in done_well(run("cluster", "status", "-c", "cluster.yaml"))
    finally:
        stopped = run("stop", "--state-dir", str(state))
    assert "The head is ended" in done_well(stopped)
    assert run("cluster", "status", "-c", "cluster.yaml").returncode == 1
