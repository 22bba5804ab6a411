"""Three hosts whose workers run, while the connection between two of them breaks."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.end_to_end.lan_cluster import LanCluster, Machine, make_cluster
from tests.end_to_end.reference import WholeModel
from tests.eventually import eventually
from tests.faults.injection import CUT_AT, Stopped, held_loads, stopping_at_steps
from tests.interrupted import BODY, Interrupted, interrupt
from tests.namespaces import skip_without_namespaces
from tests.processes import Server, command_of, give_profile
from tests.tiny_model import write_tiny_model

pytestmark = [pytest.mark.machines, pytest.mark.timeout(300)]

PROMPT = [5, 77, 130, 9]
TOKENS = 24


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a model in which every token id has a text, so that answers show their tokens."""
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny", vocabulary=258)


@pytest.fixture(scope="module")
def hook() -> Generator[Path]:
    """Let loads be held; return the folder for it."""
    with stopping_at_steps() as folder:
        yield folder


@pytest.fixture(scope="module")
def cluster(model: Path, hook: Path, tmp_path_factory: pytest.TempPathFactory) -> Generator[LanCluster]:
    """Make three machines."""
    del hook
    skip_without_namespaces()
    with ExitStack() as stack:
        cluster = make_cluster(model, tmp_path_factory.mktemp("cluster"), stack, [None] * 3)
        for machine in cluster.machines:
            give_profile(machine.state)
        yield cluster


@pytest.fixture(scope="module")
def server(cluster: LanCluster) -> Server:
    """Run a head whose machines have a stage each."""
    flags = ("--strategy", "uniform", "--max-model-len", "4096")
    return cluster.serve(3, *flags, joining=cluster.machines[1:])


def serving_machines(cluster: LanCluster, server: Server) -> list[Machine]:
    """Wait until the model serves; return its machines in the order of the stages."""

    def instance() -> Any:
        return cluster.get(server, "/cluster/status")["instances"][0]

    stages = eventually(instance, lambda seen: seen["state"] == "ready")["stages"]
    return [cluster.machine_of(stage["node"]) for stage in stages]


def workers(cluster: LanCluster) -> set[int]:
    """Return the process ids of all workers."""
    processes = [process for machine in cluster.machines for process in machine.processes]
    return {process.pid for process in processes if "mlx_ring.worker" in command_of(process)}


def losses(cluster: LanCluster, server: Server) -> dict[str, float]:
    """Return the number of losses by error."""
    text = cluster.head.threads.submit(cluster.http.get, f"{server.url}/metrics").result().text
    lines = (line for line in text.splitlines() if line.startswith("mlx_ring_instance_losses_total{"))
    return {line.split('error="')[1].split('"')[0]: float(line.split()[-1]) for line in lines}


def first_worker(cluster: LanCluster, server: Server) -> int:
    """Return the process id of the first stage's worker."""
    (instance,) = cluster.get(server, "/cluster/status")["instances"]
    return instance["stages"][0]["ranks"][0]["pid"]


def interrupted(
    cluster: LanCluster,
    server: Server,
    hook: Path,
    fault: Callable[[], object],
    then: Callable[[], object] = lambda: None,
) -> Interrupted:
    """Cause a fault while a worker waits in the middle of an answer, let it continue, and call `then`.

    Check that the answer continues with the same tokens, and that requests are answered.
    """
    stopped = Stopped(hook, first_worker(cluster, server))
    stopped.set(len(PROMPT), len(PROMPT) + CUT_AT)

    def disturb() -> None:
        stopped.wait()
        fault()
        stopped.close()
        then()

    def stream() -> Interrupted:
        body = {**BODY, "prompt": PROMPT, "max_tokens": TOKENS, "logprobs": 0}
        with httpx.Client(base_url=server.url, timeout=120) as client:
            return interrupt(client, disturb, body)

    answer = cluster.head.threads.submit(stream).result()
    assert len(answer.names) == TOKENS
    assert WholeModel(cluster.model).strays(PROMPT, [cluster.names[name] for name in answer.names]) == []
    for _ in range(3):
        assert len(cluster.tokens(server, {"prompt": PROMPT, "max_tokens": 1})) == 1
    return answer


def check_blame(cluster: LanCluster, server: Server) -> None:
    """Check that all machines attend, and that losses count against the link alone."""
    states = {node["id"]: node["state"] for node in cluster.get(server, "/cluster/status")["nodes"]}
    assert states == {machine.node: "attending" for machine in cluster.machines}
    (file,) = cluster.head.state.rglob("losses.json")
    counted = json.loads(file.read_text())
    assert counted["losses"] == []
    assert len(counted["links"]) == losses(cluster, server)["LinkLost"]


def test_an_answer_continues_when_a_link_is_reset(cluster: LanCluster, server: Server, hook: Path) -> None:
    machines, before = serving_machines(cluster, server), workers(cluster)
    interrupted(cluster, server, hook, lambda: machines[2].host.reset_connections(machines[1].host))
    assert serving_machines(cluster, server) == machines
    assert workers(cluster) == before, "they stay, and connect again"
    assert losses(cluster, server)["LinkLost"] == 1
    check_blame(cluster, server)


def test_an_answer_continues_around_two_machines_between_which_packets_are_dropped(
    cluster: LanCluster, server: Server, hook: Path
) -> None:
    (first, second, third), before = serving_machines(cluster, server), workers(cluster)
    answer = interrupted(cluster, server, hook, lambda: second.host.lose(third.host))
    assert answer.comments
    after = serving_machines(cluster, server)
    assert after[0] == first
    assert (after[1] == second) != (after[2] == third), "one of both stages has moved"
    assert not {second.node, third.node} <= {machine.node for machine in after}
    assert len(before & workers(cluster)) == 2, "the other workers stay"
    (problem, *_) = [
        link["problem"]
        for link in cluster.get(server, "/cluster/status")["links"]
        if {link["from"], link["to"]} == {second.node, third.node}
    ]
    assert problem
    assert losses(cluster, server)["LinkLost"] == 2
    assert sum(losses(cluster, server).values()) == 2
    check_blame(cluster, server)


def test_all_workers_stay_if_a_machine_is_back_before_others_have_loaded_its_stage(
    cluster: LanCluster, server: Server, hook: Path
) -> None:
    machines, before = serving_machines(cluster, server), workers(cluster)
    lost = next(machine for machine in machines if machine != cluster.head)
    with held_loads(hook) as wait_for_load:

        def mend_once_it_is_lost() -> None:
            wait_for_load()
            lost.host.mend()

        answer = interrupted(cluster, server, hook, lost.host.cut, mend_once_it_is_lost)
    assert answer.comments
    assert losses(cluster, server)["NodeLost"] == 1
    assert serving_machines(cluster, server) == machines
    eventually(lambda: workers(cluster), lambda now: now == before)
