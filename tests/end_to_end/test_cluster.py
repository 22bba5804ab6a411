"""Several machines on loopback, each with a state folder of its own, serve as one server."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Generator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.end_to_end.loopback_cluster import (
    completion,
    head_members,
    joining_head,
    running_cluster,
    running_head,
)
from tests.eventually import eventually
from tests.interrupted import BODY, complete, interrupt
from tests.machines import free_pair_of_ports
from tests.processes import Server, client_of, listening_addresses, run_cli, serving

from mlx_ring.cluster.quarantine import LOSSES
from mlx_ring.models.model_source import find_model

UNIFORM = ("--strategy", "uniform")
TWO_MACHINES = (*UNIFORM, "--link-compression", "off")
"""Flags of every head of `TwoMachines`."""


@dataclass(slots=True)
class TwoMachines:
    """A cluster of two machines. Its tests may end the head and start another."""

    model: Path
    folder: Path
    port: int
    stack: ExitStack
    server: Server
    before_join: str
    """Answer of `/health/ready` before the second machine joined."""
    missing_before_join: int
    """Number of machines that the status awaited then."""
    node_ports: range
    """Ports of the machine that joins."""
    flags: Sequence[str] = ()
    """Flags of the last head, besides `TWO_MACHINES`."""

    @property
    def state(self) -> Path:
        """State folder of the heads."""
        return self.folder / "state"

    def kill_head(self) -> None:
        """Kill the head, which leaves its agent and the workers running."""
        self.server.process.kill()
        self.server.process.wait()

    def start_head(self, *flags: str) -> Server:
        """Start a head with the state of the previous one."""
        started = running_head(self.model, 2, self.folder, self.port, *TWO_MACHINES, *flags)
        self.server, self.flags = self.stack.enter_context(started), flags
        return self.server


@pytest.fixture(scope="module")
def single_machine_text(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the completion of a single machine."""
    with serving(tiny_model, folder=tmp_path_factory.mktemp("single")) as server:
        return completion(server)


@pytest.fixture(scope="module")
def shared_cluster(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Generator[TwoMachines]:
    """Run the cluster that tests share."""
    folder, port, answers = tmp_path_factory.mktemp("cluster"), free_pair_of_ports(), list[Any]()
    flags = (*TWO_MACHINES, "--port", str(api := free_pair_of_ports()))

    def read_readiness() -> None:
        with client_of(f"http://127.0.0.1:{api}") as client:
            readiness = eventually(
                lambda: client.get("/health/ready").text, lambda text: "being loaded" not in text
            )
            answers.extend((readiness, client.get("/cluster/status").json()["missing_machines"]))

    first = free_pair_of_ports()
    ports = range(first, first + 16)
    with ExitStack() as stack:
        server = stack.enter_context(
            running_cluster(
                *(tiny_model, 2, folder, port, *flags),
                join_flags=("--node-ports", f"{ports[0]}-{ports[-1]}"),
                before_join=read_readiness,
            )
        )
        cluster = TwoMachines(tiny_model, folder, port, stack, server, *answers, node_ports=ports)
        yield cluster
        if cluster.server.process.poll() is None:
            assert cluster.server.stop() == 0


@pytest.fixture
def cluster(shared_cluster: TwoMachines) -> TwoMachines:
    """Return the shared cluster once a head serves with both machines."""
    if shared_cluster.server.process.poll() is not None:
        shared_cluster.start_head()
    eventually(
        shared_cluster.server.status,
        lambda status: is_ready(status) and sorted(stages_by_node(status).values()) == [1, 1],
    )
    return shared_cluster


def stages_by_node(status: dict[str, Any]) -> dict[str, int]:
    """Return the number of stages of each connected node."""
    return {node["id"]: len(node["stages"]) for node in status["nodes"] if node["state"] == "attending"}


def pids_of(status: dict[str, Any]) -> set[int]:
    """Return the process ids of the workers."""
    return {device["pid"] for device in status["devices"]}


def is_ready(status: dict[str, Any]) -> bool:
    return status["instances"][0]["state"] == "ready"


def ready_after(server: Server, status: dict[str, Any]) -> dict[str, Any]:
    """Wait until the model is loaded again since this status, and return the new status."""
    return eventually(server.status, lambda now: now["epoch"] > status["epoch"] and is_ready(now))


def test_readiness_says_how_many_machines_have_to_join(shared_cluster: TwoMachines) -> None:
    assert "once 1 more machine has joined: run `mlx-ring join` there" in shared_cluster.before_join
    assert shared_cluster.missing_before_join == 1


def test_a_machine_that_joins_fetches_the_model_and_both_answer_like_one(
    cluster: TwoMachines, single_machine_text: str
) -> None:
    assert completion(cluster.server) == single_machine_text
    status = cluster.server.status()
    assert [device["stage"] for device in status["devices"]] == [0, 1]
    assert len({device["node"] for device in status["devices"]}) == 2
    assert (status["missing_machines"], status["absent_nodes"]) == (0, [])
    (stored,) = [folder / "state" / "weights" for folder in cluster.folder.glob("node-*")]
    assert any(stored.rglob("model.safetensors")), "the model was fetched"


def test_a_machine_listens_on_its_node_ports_alone(cluster: TwoMachines) -> None:
    (agent,) = nodes_of(cluster.folder / "node-1")
    listening = {
        port
        for process in (agent, *agent.children(recursive=True))
        for _, port in listening_addresses(process)
    }
    assert len(listening) >= 3, "the agent has two, and its worker one"
    assert listening <= {*cluster.node_ports}


def test_late_node_is_shown_used_by_the_next_plan_and_removable(
    cluster: TwoMachines, single_machine_text: str
) -> None:
    server, state = cluster.server, ("--state-dir", str(cluster.state))
    before = server.status()
    check_status(before)
    check_what_if(server)
    token = run_cli("token", "create", *state, folder=cluster.folder).stdout.strip()
    with joining_head(cluster.port, token, cluster.folder / "node-late"):
        joined = eventually(server.status, lambda status: len(status["nodes"]) == 3)
        assert sorted(stages_by_node(joined).values()) == [0, 1, 1]
        assert joined["epoch"] == before["epoch"], "nothing was loaded again for it"
        # A lost worker is named, and replaced where it was.
        kept, lost = (device["pid"] for device in before["devices"])
        os.kill(lost, signal.SIGKILL)
        # The broken stream is noticed first, then the agent reports the reason.
        assert before["devices"][1]["node"] in server.wait_for_health(503, "SIGKILL").text
        patched = ready_after(server, before)
        assert stages_by_node(patched) == stages_by_node(joined)
        assert kept in pids_of(patched), "the other worker stays"
        assert completion(server) == single_machine_text
        # The loss of all workers causes a new plan.
        for pid in pids_of(patched):
            os.kill(pid, signal.SIGKILL)
        used = ready_after(server, patched)
        assert sorted(stages_by_node(used).values()) == [1, 1, 1]
        assert completion(server) == single_machine_text
        (late,) = set(stages_by_node(used)) - set(stages_by_node(before))
        pids = {device["node"]: device["pid"] for device in used["devices"]}
        assert run_cli("node", "remove", late, *state, folder=cluster.folder).returncode == 0
        left = ready_after(server, used)
        assert sorted(stages_by_node(left).values()) == [1, 2], "another machine has its stage, too"
        assert len(pids_of(left) & pids_of(used)) == 2
        for pid in pids_of(left):
            os.kill(pid, signal.SIGKILL)
        assert sorted(stages_by_node(ready_after(server, left)).values()) == [1, 1]
        (removed,) = [node for node in left["nodes"] if node["state"] == "gone"]
        assert (removed["id"], removed["reason"]) == (late, "it was removed from the cluster")
        assert not psutil.pid_exists(pids[late])
        assert completion(server) == single_machine_text
        (why,) = [link["why"] for link in server.status()["links"] if link["carries_activations"]]
        assert why == "--link-compression is off"


def check_status(status: dict[str, Any]) -> None:
    """Check that every node shows promised and used memory, and predicted times."""
    (instance,) = status["instances"]
    assert instance["promise"]["strategy"] == "uniform"
    for stage in instance["stages"]:
        assert stage["loading"]["phase"] == "ready"
        assert stage["memory"]["promised"]["total_bytes"] > stage["memory"]["used"]["weight_bytes"] > 0
        assert stage["times"]["decode"][0]["predicted_ms"] > 0
    for node in status["nodes"]:
        assert node["memory"]["promised_bytes"] <= node["memory"]["usable_bytes"]
        assert node["profile"]["rates"]
        assert set(node["versions"]) == {"mlx-ring", "mlx", "mlx-lm"}
    assert [node["is_head"] for node in status["nodes"]] == [True, False]


def check_what_if(server: Server) -> None:
    """Check that questions start from the loaded plan, and plan other models as the head would."""
    (instance,) = server.status()["instances"]
    (now, added) = server.http.post("/cluster/what-if", json={"add": ["m3-ultra-512"]}).json()["outcomes"]
    layers = [f"{start}-{end - 1}" for start, end in (stage["layers"] for stage in instance["stages"])]
    assert [stage.rpartition(" ")[2] for stage in now["stages"]] == layers
    assert (now["model"], now["is_measured"], now["left_out"]) == (instance["model"], True, [])
    assert len(added["stages"]) == 3, "the head's strategy is uniform"
    (other,) = server.http.post("/cluster/what-if", json={"model": "0.5b-4bit"}).json()["outcomes"]
    assert len(other["stages"]) == 2


def test_node_with_repeated_losses_is_quarantined_until_readmitted(cluster: TwoMachines) -> None:
    server, state = cluster.server, ("--state-dir", str(cluster.state))
    status = server.status()
    (victim,) = [
        node["id"] for node in status["nodes"] if node["state"] == "attending" and not node["is_head"]
    ]
    # A loss in an earlier test counts, too.
    while stages_by_node(status).get(victim):
        (pid,) = [device["pid"] for device in status["devices"] if device["node"] == victim]
        os.kill(pid, signal.SIGKILL)
        status = ready_after(server, status)
    (node,) = [node for node in status["nodes"] if node["id"] == victim]
    assert (node["state"], node["stages"]) == ("quarantined", [])
    assert node["reason"].startswith(f"It was lost {LOSSES} times ")
    assert "SIGKILL" in node["reason"]
    assert f"mlx-ring node readmit {victim}" in (cluster.folder / "logs" / "head.log").read_text()
    readmitted = run_cli("node", "readmit", victim, *state, folder=cluster.folder)
    assert readmitted.returncode == 0, readmitted.stderr
    assert stages_by_node(server.status())[victim] == 0
    for pid in pids_of(status):
        os.kill(pid, signal.SIGKILL)
    assert stages_by_node(ready_after(server, status))[victim] == 1


def test_next_head_with_other_settings_replaces_the_workers(cluster: TwoMachines) -> None:
    before = cluster.server.status()
    cluster.kill_head()
    after = cluster.start_head("--max-model-len", "64").status()
    assert not pids_of(before) & pids_of(after)
    assert not any(map(psutil.pid_exists, pids_of(before)))


def test_next_head_adopts_the_workers_of_a_killed_head(
    cluster: TwoMachines, single_machine_text: str
) -> None:
    before = cluster.server.status()
    cluster.kill_head()
    adopting = cluster.start_head(*cluster.flags)
    after = adopting.status()
    assert completion(adopting) == single_machine_text
    assert adopting.stop() == 0
    _, left = psutil.wait_procs(head_members(cluster.folder), timeout=30)
    assert not left, "the head's own agent ends with it"
    assert pids_of(after) == pids_of(before)
    assert after["instance"] == before["instance"]
    assert after["epoch"] == before["epoch"] + 1
    assert not any(map(psutil.pid_exists, pids_of(after)))


def test_a_head_that_stands_still_for_five_seconds_loses_nobody(cluster: TwoMachines) -> None:
    server, body = cluster.server, {**BODY, "max_tokens": 64}
    before, expected = server.status(), complete(server.http, body)
    head = psutil.Process(server.process.pid)

    def stand_still() -> None:
        head.suspend()
        threading.Event().wait(5.0)
        head.resume()

    answer = interrupt(server.http, stand_still, body)
    assert (answer.text, answer.comments) == (expected, ())
    # Nodes that missed the head's messages connect again.
    after = eventually(server.status, lambda status: len(stages_by_node(status)) == 2)
    assert (after["epoch"], pids_of(after)) == (before["epoch"], pids_of(before))


def test_other_machines_serve_while_an_agent_is_stopped(
    cluster: TwoMachines, single_machine_text: str
) -> None:
    server, before = cluster.server, cluster.server.status()
    (own,) = head_members(cluster.folder)
    (other,) = nodes_of(cluster.folder)
    other.suspend()
    try:
        eventually(lambda: server.status()["instances"][0]["reason"], lambda why: "Suspect" in (why or ""))
        alone = ready_after(server, before)
        assert len(stages_by_node(alone)) == 1
        assert completion(server) == single_machine_text
    finally:
        other.resume()
    eventually(server.status, lambda status: len(stages_by_node(status)) == 2)
    own.suspend()
    # Another loss may load the model again before: the busy machine's node may be silent, too.
    eventually(own.is_running, lambda runs: not runs)
    assert completion(server) == single_machine_text
    (replacing,) = eventually(lambda: head_members(cluster.folder))
    replacing.suspend()
    assert server.stop() == 0
    assert not replacing.is_running()


def nodes_of(folder: Path) -> list[psutil.Process]:
    """Return the agents of machines that have joined with a state in this folder."""
    return [
        process
        for process in psutil.process_iter(["cmdline"])
        if "join" in (process.info["cmdline"] or []) and process.cwd().startswith(str(folder))
    ]


@pytest.mark.faults
def test_next_head_replaces_workers_whose_links_are_collectives(tmp_path: Path) -> None:
    trusted = ("--trusted-interface", "lo" if sys.platform == "linux" else "lo0")
    model, port, flags = (
        find_model("demo-moe").folder.path,
        free_pair_of_ports(),
        (*UNIFORM, "--link", "ring"),
    )
    with running_cluster(model, 2, tmp_path, port, *flags, *trusted, join_flags=trusted) as server:
        expected, before = completion(server), server.status()
        server.process.kill()
        server.process.wait()
        with running_head(model, 2, tmp_path, port, *flags, *trusted) as restarted:
            assert completion(restarted) == expected
            after = restarted.status()
            assert after["epoch"] > before["epoch"]
            assert not any(map(psutil.pid_exists, pids_of(before)))
            assert restarted.stop() == 0
