"""Three hosts with different memory and processors serve a model that only the first has, under attack by strangers."""

from __future__ import annotations

import json
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from tests.cgroups import skip_without_groups
from tests.end_to_end.lan_attacks import attacks, open_ports
from tests.end_to_end.lan_cluster import LanCluster, Machine, make_cluster
from tests.end_to_end.network_settings import settings
from tests.end_to_end.reference import WholeModel
from tests.machines import node_credentials
from tests.namespaces import skip_without_namespaces
from tests.port_attacks import (
    with_certificate,
    without_certificate,
)
from tests.processes import MLX_RING, Server, clean_environment

from mlx_ring.cluster.security.authority import Authority
from mlx_ring.rpc.tls.credentials import Credentials, load_credentials

pytestmark = [pytest.mark.machines, pytest.mark.timeout(600)]

GIB = 1 << 30
LIMITS = ((4 * GIB, 1.0), (3 * GIB, 0.8), (2 * GIB, 0.5))
"""Bytes of memory and cores of processor time: of the head's machine and two nodes. A fourth machine, without limits, is a stranger's."""
CONTEXT = 1024
FLAGS = ("--strategy", "memory", "--max-model-len", str(CONTEXT))
PROMPTS = ([5, 77, 130], list(range(2, 60)), [200, 9] * 100)
TOKENS = 48


@dataclass(slots=True)
class Running:
    """The cluster of this module."""

    cluster: LanCluster
    server: Server
    before: Sequence[str]
    """Settings of the network and the kernel before it ran."""
    received: Sequence[int]
    """Bytes that each machine received while the model was loaded."""

    @property
    def nodes(self) -> Sequence[Machine]:
        """Machines that joined the head."""
        return self.cluster.machines[1:3]

    @property
    def stranger(self) -> Machine:
        return self.cluster.machines[3]

    def status(self) -> Any:
        return self.cluster.get(self.server, "/cluster/status")

    def tokens(self, body: dict[str, Any]) -> list[int]:
        return self.cluster.tokens(self.server, body)


@pytest.fixture(scope="module")
def whole(large_model: Path) -> WholeModel:
    """Return mlx-lm's reference."""
    return WholeModel(large_model)


@pytest.fixture(scope="module")
def running(large_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Generator[Running]:
    """Run the cluster of this module."""
    skip_without_namespaces()
    skip_without_groups()
    with ExitStack() as stack:
        cluster = make_cluster(large_model, tmp_path_factory.mktemp("cluster"), stack, [*LIMITS, None])
        before = settings(cluster)
        server = cluster.serve(3, *FLAGS, joining=cluster.machines[1:3])
        received = [
            machine.received_bytes - before
            for machine, before in zip(cluster.machines, cluster.received_before, strict=True)
        ]
        yield Running(cluster, server, before, received)


# ---- shares of the machines


def test_limits_of_memory_and_processors_appear_in_profile_and_plan(running: Running) -> None:
    usable = {stage.node: stage.usable_bytes for stage in running.cluster.planned}
    layers = {stage.node: len(stage.layers) for stage in running.cluster.planned}
    for machine, (memory_bytes, cores) in zip(running.cluster.machines, LIMITS, strict=False):
        profile = json.loads((machine.state / "profile.json").read_text())["profile"]
        assert profile["memory_bytes"] == memory_bytes
        assert "control group" in profile["memory_limited_by"]
        assert (profile["cpu_share"], profile["cores"]) == (pytest.approx(cores), 1)
        assert usable[machine.node] == pytest.approx(0.9 * memory_bytes, rel=0.02)
    head, second, third = (layers[machine.node] for machine in running.cluster.machines[:3])
    assert head > second > third
    assert head + second + third == 18


def test_nodes_receive_the_weights_of_their_layers_and_little_more(running: Running) -> None:
    for machine, received in zip(running.cluster.machines, running.received, strict=True):
        if machine in running.nodes:
            share = running.cluster.share_of(machine)
            # The rest is TLS, frames, the tokenizer and messages.
            assert share < received < 1.05 * share + 4e6
        else:
            assert received < 4e6


def test_tokens_equal_those_of_mlx_lm(running: Running, whole: WholeModel) -> None:
    with ThreadPoolExecutor(len(PROMPTS)) as threads:
        answers = threads.map(
            running.tokens, ({"prompt": prompt, "max_tokens": TOKENS} for prompt in PROMPTS)
        )
        for prompt, tokens in zip(PROMPTS, answers, strict=True):
            assert len(tokens) == TOKENS
            assert whole.strays(prompt, tokens) == []


def test_machines_use_the_memory_that_the_plan_promises(
    running: Running, record_property: Callable[[str, object], None]
) -> None:
    # The request has as many tokens as were promised.
    filling = {"prompt": [3 + number % 250 for number in range(CONTEXT - 8)], "max_tokens": 8}
    assert len(running.tokens(filling)) == 8
    within: dict[str, bool] = {}
    for stage in running.cluster.planned:
        machine = running.cluster.machine_of(stage.node)
        used = sum(process.memory_info().rss for process in machine.processes)
        summary = f"{len(stage.layers)} layers: {_sizes(machine)} of {stage.memory_bytes / 1e6:.0f} MB"
        within[summary] = abs(used - stage.memory_bytes) < max(0.1 * stage.memory_bytes, 150e6)
    record_property("used of promised", list(within))
    assert all(within.values()), within


def _sizes(machine: Machine) -> str:
    """Return the memory of each process on a machine, in MB."""
    return " + ".join(f"{process.memory_info().rss / 1e6:.0f}" for process in machine.processes)


# ---- attacks of strangers


def follow(running: Running, stopped: Callable[[], bool]) -> list[int]:
    """Return the tokens of a stream until `stopped` is true and there are more than 20, or until the stream ends."""
    body = {"prompt": PROMPTS[0], "max_tokens": CONTEXT - 8, "temperature": 0, "ignore_eos": True}
    names: list[str] = []
    url = f"{running.server.url}/v1/completions"
    with httpx.stream("POST", url, json={**body, "logprobs": 0, "stream": True}, timeout=120) as answer:
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            assert "error" not in event, event
            for choice in event["choices"]:
                names += (choice["logprobs"] or {"tokens": []})["tokens"]
            if stopped() and len(names) > 20:
                break
    return [running.cluster.names[name] for name in names]


@pytest.fixture(scope="module")
def contexts(running: Running, tmp_path_factory: pytest.TempPathFactory) -> dict[str, ssl.SSLContext]:
    """Return strangers' TLS contexts: with no certificate, with one of another cluster and with one of a member."""
    authority = Authority.open(running.cluster.head.state / "cluster")
    other = Authority.open(tmp_path_factory.mktemp("other"))
    joined = join_as_member(running)
    return {
        "nothing": without_certificate(authority.pem),
        "another cluster's": with_certificate(node_credentials(other, "mini-1")),
        "a member's": with_certificate(joined),
    }


def test_strangers_and_malformed_input_are_refused_and_logged_while_a_stream_continues(
    running: Running,
    whole: WholeModel,
    contexts: dict[str, ssl.SSLContext],
    record_property: Callable[[str, object], None],
) -> None:
    ports = open_ports(running.cluster.machines[:3])
    assert len(ports) == 2 + 3 * 3, "the head's two, and on each machine an agent's two and a worker's"
    rss_before = {
        process.pid: process.memory_info().rss for m in running.cluster.machines for process in m.processes
    }
    epoch = running.status()["epoch"]
    attacking: list[Future[object]] = []
    stream = running.cluster.head.threads.submit(
        follow, running, lambda: bool(attacking) and all(attack.done() for attack in attacking)
    )
    with running.stranger.host.threads(8) as threads:
        attacking += [threads.submit(attack) for port in ports for attack in attacks(port, contexts)]
        ends = [attack.result() for attack in attacking]
    record_property("ends of the attacks", sorted({str(end) for end in ends}))
    tokens = stream.result()
    assert len(tokens) > 20
    assert whole.strays(PROMPTS[0], tokens) == []
    assert running.status()["epoch"] == epoch
    grown = {pid: psutil.Process(pid).memory_info().rss - before for pid, before in rss_before.items()}
    assert max(grown.values()) < 300e6, ends
    for port in ports:
        log = port.machine.log(port.process)
        assert "Traceback" not in log
        assert "Refused a connection: it spoke plain HTTP" in log
        assert "Refused a connection: it did not speak TLS" in log
        if not port.for_strangers:
            assert "Refused a connection: it showed no certificate" in log
            assert "Refused a connection: its certificate belongs to another cluster" in log


def join_as_member(running: Running) -> Credentials:
    """Return a certificate of this cluster for the stranger, which requests it as any machine does."""
    cluster, folder = running.cluster, running.stranger.folder / "member"
    script = "import sys; from pathlib import Path; from mlx_ring.agent.enrolment import join; join(*sys.argv[1:3], Path(sys.argv[3]))"
    address = cluster.head.host.address
    done = running.stranger.host.run(sys.executable, "-c", script, address, cluster.token, str(folder))
    assert done.returncode == 0, done.stderr
    credentials = load_credentials(folder)
    assert credentials is not None
    return credentials


# ---- a head that is killed


def test_next_head_adopts_the_workers_and_no_weights_are_read_again(
    running: Running, whole: WholeModel, record_property: Callable[[str, object], None]
) -> None:
    before = running.status()
    pids = [device["pid"] for device in before["devices"]]
    read = [psutil.Process(pid).io_counters().read_chars for pid in pids]
    received = [machine.received_bytes for machine in running.nodes]
    running.server.process.kill()
    running.server.process.wait()
    killed = time.monotonic()
    running.server = running.cluster.serve(3, *FLAGS)
    record_property("seconds until ready again", time.monotonic() - killed)
    after = running.status()
    assert [device["pid"] for device in after["devices"]] == pids
    assert after["epoch"] > before["epoch"]
    for pid, chars in zip(pids, read, strict=True):
        assert psutil.Process(pid).io_counters().read_chars - chars < 4e6
    for machine, nbytes in zip(running.nodes, received, strict=True):
        assert machine.received_bytes - nbytes < 4e6
    tokens = running.tokens({"prompt": PROMPTS[1], "max_tokens": TOKENS})
    assert whole.strays(PROMPTS[1], tokens) == []


# ---- findings of `mlx-ring doctor`


def test_doctor_finds_six_faults_of_a_machine_and_its_network(running: Running, tmp_path: Path) -> None:
    machine = running.nodes[1]
    (tmp_path / "sitecustomize.py").write_text(LATE_CLOCK)
    old = tmp_path / "mlx_lm-0.1.0.dist-info"
    old.mkdir()
    (old / "METADATA").write_text("Metadata-Version: 2.1\nName: mlx-lm\nVersion: 0.1.0\n")
    holder = machine.host.start(sys.executable, "-c", HOLD_PORT)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "bound\n"
    command = [
        *("env", f"PYTHONPATH={tmp_path}", *MLX_RING, "doctor", "--json", running.cluster.head.host.address),
        *("--state-dir", str(machine.state), "--peer", "nowhere.invalid", "--peer", "10.77.0.99"),
    ]
    done = subprocess.run(
        [*machine.command(None), *command],
        cwd=tmp_path,
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    holder.communicate("\n", timeout=30)
    assert done.returncode == 1, done.stderr
    found = {one["what"]: one for one in json.loads(done.stdout)["findings"]}
    levels = {what: one["level"] for what, one in found.items() if one["level"] in ("warning", "broken")}
    assert levels == {
        "memory": "warning",
        "port 50051": "broken",
        "mlx-lm": "broken",
        "clock": "broken",
        "name nowhere.invalid": "broken",
        "way to 10.77.0.99:50051": "broken",
    }
    assert all(found[what]["fix"] for what in levels)


LATE_CLOCK = """
import time
now = time.time
time.time = lambda: now() + 7200
"""
HOLD_PORT = """
import socket
with socket.create_server(("", 50051)):
    print("bound", flush=True)
    input()
"""


# ---- settings after the run


def test_run_leaves_addresses_routes_and_kernel_settings_unchanged(running: Running) -> None:
    assert running.server.stop() == 0
    assert settings(running.cluster) == running.before
