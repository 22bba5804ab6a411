"""Machines that yield to their users while they serve: priority, status, metrics, and a smaller share of the layers."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.end_to_end.loopback_cluster import completion, end_head_members, running_head
from tests.end_to_end.test_drain import FLAGS, Cluster, Streams, expected, nodes, nodes_in_use
from tests.eventually import eventually
from tests.faults.injection import stopping_at_steps
from tests.machines import free_pair_of_ports
from tests.processes import Server, clean_environment, give_profile

from mlx_ring.agent.profiling import PROFILE_FILE
from mlx_ring.host.machine import Use
from mlx_ring.host.process import may_raise_priority

pytestmark = pytest.mark.machines

IDLE, BUSY = Use(2.0, 0.0), Use(2.0, 1.6)
REASON = "other programs use 1.6 of 2 cores"
REPOSITORY = Path(__file__).parents[2]


@dataclass
class Yielding:
    """A machine that yields to its user, whose use of it the test sets."""

    folder: Path
    process: subprocess.Popen[bytes]

    def use(self, use: Use) -> None:
        write_use(self.folder, use)

    def kill(self) -> None:
        """End it without a farewell."""
        agent = psutil.Process(self.process.pid)
        for each in (agent, *agent.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()

    @property
    def node(self) -> str:
        return (self.folder / "state" / "node" / "node-id").read_text().strip()

    def log(self) -> str:
        return (self.folder / "stderr.txt").read_text()


def write_use(folder: Path, use: Use) -> None:
    """Write it as a whole: the machine may read it at any moment."""
    new = folder / "new.json"
    new.write_text(json.dumps(asdict(use)))
    new.replace(folder / "use.json")


@contextmanager
def joining_with_a_user(port: int, token: str, folder: Path, factor: float) -> Generator[Yielding]:
    """Run a machine whose profile says that it is faster than this one by a factor."""
    state = folder / "state"
    give_profile(state)
    make_faster(state / PROFILE_FILE, factor)
    write_use(folder, IDLE)
    environment = clean_environment()
    paths = (environment.get("PYTHONPATH"), str(REPOSITORY))
    with (folder / "stderr.txt").open("wb") as errors:
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "tests.end_to_end.yielding_member", f"127.0.0.1:{port}", token),
                *(str(state), str(folder / "use.json")),
            ],
            cwd=folder,
            # Workers that stop at steps have a folder there, too.
            env=environment | {"PYTHONPATH": os.pathsep.join(filter(None, paths))},
            stdout=errors,
            stderr=subprocess.STDOUT,
        )
    try:
        yield Yielding(folder, process)
    finally:
        if process.poll() is None:
            itself = psutil.Process(process.pid)
            with_workers = [itself, *itself.children(recursive=True)]
            # The head has ended: nobody moves its layers.
            process.send_signal(signal.SIGINT)
            for left in psutil.wait_procs(with_workers, timeout=30)[1]:
                left.kill()
        process.wait()


def make_faster(file: Path, factor: float) -> None:
    kept = json.loads(file.read_text())
    profile = kept["profile"]
    for rate in profile["rates"]:
        for name in ("bandwidth", "flops"):
            rate[name] *= factor
        rate["row_s"] /= factor
    costs = {name: value for name, value in profile["costs"].items() if isinstance(value, float)}
    profile["costs"] |= {name: seconds / factor for name, seconds in costs.items()}
    file.write_text(json.dumps(kept))


@contextmanager
def cluster(folder: Path, factor: float, *flags: str) -> Generator[tuple[Server, Yielding]]:
    """Run a head, and a machine with a user."""
    with cluster_of_users(folder, 1, factor, *flags) as (server, joined):
        yield server, joined[0]


@contextmanager
def cluster_of_users(
    folder: Path, users: int, factor: float, *flags: str
) -> Generator[tuple[Server, Sequence[Yielding]]]:
    """Run a head, and machines with users."""
    joined: list[Yielding] = []
    with ExitStack() as stack:

        def read(line: str) -> None:
            _, found, token = line.partition("--token ")
            while found and len(joined) < users:
                own = folder / f"node-{len(joined) + 1}"
                joined.append(stack.enter_context(joining_with_a_user(port, token.split()[0], own, factor)))

        port = free_pair_of_ports()
        stack.callback(end_head_members, folder)
        head = running_head("demo", 1 + users, folder, port, *flags, on_line=read)
        yield stack.enter_context(head), joined


def other(server: Server) -> dict[str, Any]:
    (found,) = (node for node in nodes(server) if not node["is_head"])
    return found


def state_of(server: Server, machine: Yielding) -> dict[str, Any]:
    (found,) = (node for node in nodes(server) if node["id"] == machine.node)
    return found


def scheduling(pid: int) -> tuple[str, list[int]]:
    """Return what lowers a process's share of a core: its session's nice value, and its threads'."""
    session, tasks = Path(f"/proc/{pid}/autogroup"), Path(f"/proc/{pid}/task")
    nice = session.read_text().rpartition("nice")[2].strip() if session.exists() else ""
    return nice, sorted({os.getpriority(os.PRIO_PROCESS, int(task.name)) for task in tasks.iterdir()})


def metric(server: Server, name: str, node: str) -> float:
    start = f'mlx_ring_{name}{{node="{node}"}} '
    lines = server.http.get("/metrics").text.splitlines()
    return float(next(line for line in lines if line.startswith(start)).removeprefix(start))


@pytest.mark.skipif(sys.platform != "linux", reason="it reads Linux's scheduling")
def test_workers_yield_while_the_user_works_and_the_head_knows(tmp_path: Path) -> None:
    with cluster(tmp_path, 1.0, *FLAGS) as (server, machine):
        text, node = completion(server), other(server)["id"]
        (pid,) = (device["pid"] for device in server.status()["devices"] if device["node"] == node)
        before = scheduling(pid)
        assert other(server)["yielding"] is None
        assert metric(server, "node_yields", node) == 0

        machine.use(BUSY)
        state = eventually(lambda: other(server)["yielding"], lambda found: found is not None)
        assert state["reason"] == REASON
        assert bool(state["priority"]) == (scheduling(pid) != before)
        assert state["priority"] or not may_raise_priority()
        assert metric(server, "node_yields", node) == 1
        assert completion(server) == text

        eventually(lambda: other(server)["yielding"]["speed_share"], lambda share: share == 0.25)
        assert metric(server, "node_speed_share", node) == 0.25
        assert scheduling(pid) != before or not state["priority"]

        machine.use(IDLE)
        eventually(lambda: other(server)["yielding"], lambda found: found is None)
        assert scheduling(pid) == before
        assert metric(server, "node_yields", node) == 0
        assert metric(server, "node_speed_share", node) == 1
        assert completion(server) == text
        log = machine.log()
        assert log.count(f"This machine yields to its user: {REASON}") == 1
        assert log.count("The user of this machine has left it") == 1


def test_layers_move_from_a_machine_whose_user_works_and_back(tmp_path: Path) -> None:
    flags = ("--strategy", "auto", *FLAGS[2:], "--learn-speeds", "off", "--replan", "auto")
    with cluster(tmp_path, 3.0, *flags) as (server, machine):
        text, node = completion(server), other(server)["id"]
        assert node in nodes_in_use(server)
        machine.use(BUSY)
        eventually(lambda: nodes_in_use(server), lambda used: node not in used)
        assert completion(server) == text
        machine.use(IDLE)
        eventually(lambda: nodes_in_use(server), lambda used: node in used)
        assert completion(server) == text


def test_no_answer_changes_while_machines_yield_leave_and_are_lost(tmp_path: Path) -> None:
    """Let a machine yield in the midst of a step, drain another one, replan, lose a worker, then the first machine."""
    flags = (*FLAGS, "--learn-speeds", "off", "--replan", "auto", "--step-deadline-s", "0")
    with (
        stopping_at_steps() as hook,
        cluster_of_users(tmp_path, 2, 1.0, *flags) as (server, (first, second)),
        ThreadPoolExecutor(2) as pool,
    ):
        texts = expected(server)
        assert {first.node, second.node} < nodes_in_use(server)
        stopped, streams, worker = Cluster(server, (), tmp_path, hook).stop_worker(texts)
        first.use(BUSY)
        eventually(
            lambda: state_of(server, first)["yielding"], lambda found: found and found["speed_share"] < 1
        )
        draining = pool.submit(server.http.post, "/cluster/drain", json={"node": second.node}, timeout=240)
        eventually(lambda: state_of(server, second)["state"], lambda state: state == "drained")
        replanning = pool.submit(server.http.post, "/cluster/replan", json={}, timeout=240)
        worker.kill()
        stopped.close()
        assert streams.finish() == texts
        assert draining.result().status_code == 200
        # Without a model that serves, there is nothing to compare.
        assert replanning.result().status_code in (200, 409)
        assert second.node not in nodes_in_use(server)

        assert server.http.post("/cluster/readmit", json={"node": second.node}).status_code == 200
        streams = Streams(server)
        first.kill()
        assert streams.finish() == texts
        assert first.node not in nodes_in_use(server)
