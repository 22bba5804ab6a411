"""Several machines as one server: on loopback, each with a state of its own."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.eventually import eventually
from tests.machines import free_pair_of_ports
from tests.processes import Server, client_of, give_profile, joining, run_cli, serving

from mlx_ring.cluster.quarantine import LOSSES

ASKED = {"prompt": "The quick brown fox", "max_tokens": 24, "temperature": 0, "ignore_eos": True}


def completion(server: Server) -> str:
    answer = server.http.post("/v1/completions", json=ASKED)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"]


@contextmanager
def cluster(
    model: Path, nodes: int, folder: Path, port: int, *flags: str, alone: Callable[[], object] | None = None
) -> Generator[Server]:
    """A head and as many machines as are missing, which join when it prints how; `alone` is called before they do."""
    with ExitStack() as stack:

        def on_line(line: str) -> None:
            found = re.search(r"join \S+ --token (\S+)", line)
            if found and not joined:
                if alone is not None:
                    alone()
                for number in range(1, nodes):
                    give_profile(folder / f"node-{number}" / "state")
                    node = joining(f"127.0.0.1:{port}", "--token", found[1], folder=folder / f"node-{number}")
                    joined.append(stack.enter_context(node))

        joined: list[object] = []
        stack.callback(end_head_member, folder)
        yield stack.enter_context(head(model, nodes, folder, port, *flags, on_line=on_line))


def head(
    model: Path,
    nodes: int,
    folder: Path,
    port: int,
    *flags: str,
    on_line: Callable[[str], None] | None = None,
) -> AbstractContextManager[Server]:
    """`mlx-ring serve` for so many machines."""
    give_profile(folder / "state")
    arguments = ("--nodes", str(nodes), "--cluster-port", str(port), "--state-dir", str(folder / "state"))
    return serving(model, *arguments, *flags, folder=folder, on_line=on_line)


def end_head_member(folder: Path) -> None:
    """The head's own agent, where a head that was killed has left it."""
    for process in head_members(folder):
        process.terminate()
        process.wait(30)


def head_members(folder: Path) -> list[psutil.Process]:
    """Agents of heads with their state in this folder."""
    found: list[psutil.Process] = []
    for process in psutil.process_iter(["cmdline"]):
        line: list[str] = process.info["cmdline"] or []
        if "mlx_ring.agent.head_member" in line and str(folder / "state") in line:
            found.append(process)
    return found


@pytest.fixture(scope="module")
def alone(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """What one machine answers."""
    with serving(tiny_model, folder=tmp_path_factory.mktemp("alone")) as server:
        return completion(server)


def test_three_machines_answer_as_one_does_and_a_lost_one_is_named(
    tiny_model: Path, tmp_path: Path, alone: str
) -> None:
    api, port, waiting = free_pair_of_ports(), free_pair_of_ports(), list[str]()

    def ask_readiness() -> None:
        with client_of(f"http://127.0.0.1:{api}") as client:
            readiness = eventually(
                lambda: client.get("/health/ready").text, lambda text: "being loaded" not in text
            )
        waiting.append(readiness)

    flags = ("--strategy", "uniform", "--port", str(api))
    with cluster(tiny_model, 3, tmp_path, port, *flags, alone=ask_readiness) as server:
        assert "once 2 more machines have joined: run `mlx-ring join` there" in waiting[0]
        assert completion(server) == alone
        status = server.status()
        assert len({node["id"] for node in status["nodes"]}) == len(status["nodes"]) == 3
        assert [device["stage"] for device in status["devices"]] == [0, 1, 2]
        stored = [folder / "state" / "weights" for folder in tmp_path.glob("node-*")]
        assert all(any(folder.rglob("model.safetensors")) for folder in stored), "the model was fetched"
        victim = status["devices"][1]
        os.kill(victim["pid"], signal.SIGKILL)
        # The broken stream is noticed first, the agent then tells why.
        health = eventually(lambda: server.http.get("/health/ready"), lambda answer: "SIGKILL" in answer.text)
        assert health.status_code == 503
        assert victim["node"] in health.text
        assert server.stop() == 0
        _, left = psutil.wait_procs(head_members(tmp_path), timeout=30)
        assert not left, "the head's own agent ends with it"


def test_a_head_that_is_killed_leaves_workers_that_the_next_one_goes_on_with(
    tiny_model: Path, tmp_path: Path, alone: str
) -> None:
    port = free_pair_of_ports()
    with cluster(tiny_model, 2, tmp_path, port, "--strategy", "uniform") as server:
        before = server.status()
        server.process.kill()
        server.process.wait()
        with head(tiny_model, 2, tmp_path, port, "--strategy", "uniform") as second:
            after = second.status()
            assert completion(second) == alone
            assert second.stop() == 0
    assert {device["pid"] for device in after["devices"]} == {device["pid"] for device in before["devices"]}
    assert after["instance"] == before["instance"]
    assert after["epoch"] == before["epoch"] + 1


def test_workers_of_other_settings_are_not_gone_on_with(tiny_model: Path, tmp_path: Path) -> None:
    port = free_pair_of_ports()
    with cluster(tiny_model, 2, tmp_path, port, "--strategy", "uniform") as server:
        before = server.status()
        server.process.kill()
        server.process.wait()
        flags = ("--strategy", "uniform", "--max-model-len", "32")
        with head(tiny_model, 2, tmp_path, port, *flags) as second:
            after = second.status()
            assert second.stop() == 0
    old, new = ({device["pid"] for device in status["devices"]} for status in (before, after))
    assert not old & new
    assert not any(map(psutil.pid_exists, old | new))


def stages_by_node(status: dict[str, Any]) -> dict[str, int]:
    """Of nodes that are there."""
    return {node["id"]: len(node["stages"]) for node in status["nodes"] if node["state"] == "attending"}


def is_ready(status: dict[str, Any]) -> bool:
    return status["instances"][0]["state"] == "ready"


def test_a_node_that_joins_while_it_serves_is_shown_used_next_time_and_can_be_removed(
    tiny_model: Path, tmp_path: Path, alone: str
) -> None:
    port, state = free_pair_of_ports(), tmp_path / "state"
    with cluster(tiny_model, 2, tmp_path, port, "--strategy", "uniform") as server, ExitStack() as later:
        before = server.status()
        check_status(before)
        made = run_cli("token", "create", "--state-dir", str(state), folder=tmp_path)
        token = made.stdout.strip()
        give_profile(tmp_path / "node-late" / "state")
        later.enter_context(joining(f"127.0.0.1:{port}", "--token", token, folder=tmp_path / "node-late"))
        joined = eventually(server.status, lambda status: len(status["nodes"]) == 3)
        assert sorted(stages_by_node(joined).values()) == [0, 1, 1]
        assert joined["epoch"] == before["epoch"], "nothing was loaded again for it"
        # The next plan is made because a worker is lost.
        os.kill(next(device["pid"] for device in before["devices"] if device["stage"] == 1), signal.SIGKILL)
        used = eventually(
            server.status, lambda status: status["epoch"] > before["epoch"] and is_ready(status)
        )
        assert sorted(stages_by_node(used).values()) == [1, 1, 1]
        assert completion(server) == alone
        (late,) = set(stages_by_node(used)) - set(stages_by_node(before))
        pids = {device["node"]: device["pid"] for device in used["devices"]}
        assert run_cli("node", "remove", late, "--state-dir", str(state), folder=tmp_path).returncode == 0
        left = eventually(server.status, lambda status: status["epoch"] > used["epoch"] and is_ready(status))
        assert sorted(stages_by_node(left).values()) == [1, 1]
        (gone,) = [node for node in left["nodes"] if node["state"] == "gone"]
        assert (gone["id"], gone["reason"]) == (late, "it was removed from the cluster")
        assert not psutil.pid_exists(pids[late])
        assert completion(server) == alone
        assert server.stop() == 0


def check_status(status: dict[str, Any]) -> None:
    """Promised and used, predicted and measured, on every node."""
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


def test_a_node_that_fails_again_and_again_is_left_out_until_it_is_readmitted(
    tiny_model: Path, tmp_path: Path
) -> None:
    state = tmp_path / "state"
    with cluster(tiny_model, 2, tmp_path, free_pair_of_ports(), "--strategy", "uniform") as server:
        (victim,) = [node["id"] for node in server.status()["nodes"] if not node["is_head"]]
        for _ in range(LOSSES):
            status = eventually(server.status, is_ready)
            (pid,) = [device["pid"] for device in status["devices"] if device["node"] == victim]
            os.kill(pid, signal.SIGKILL)
            eventually(server.status, lambda now, before=status: now["epoch"] > before["epoch"])
        without = eventually(server.status, is_ready)
        (held,) = [node for node in without["nodes"] if node["id"] == victim]
        assert (held["state"], held["stages"]) == ("quarantined", [])
        assert "SIGKILL" in held["reason"]
        log = (tmp_path / "logs" / "head.log").read_text()
        assert f"mlx-ring node readmit {victim}" in log
        readmitted = run_cli("node", "readmit", victim, "--state-dir", str(state), folder=tmp_path)
        assert readmitted.returncode == 0, readmitted.stderr
        assert stages_by_node(server.status())[victim] == 0
        os.kill(without["devices"][0]["pid"], signal.SIGKILL)
        again = eventually(server.status, lambda now: now["epoch"] > without["epoch"] and is_ready(now))
        assert stages_by_node(again)[victim] == 1
        assert server.stop() == 0
