"""Machines that share layers, or are linked by collectives, over a second network that both ends trust."""

from __future__ import annotations

import re
import signal
import socket
from collections.abc import Callable, Generator
from contextlib import ExitStack
from pathlib import Path

import httpx
import psutil
import pytest
from tests.end_to_end.captures import Ports, capturing
from tests.end_to_end.lan_cluster import LanCluster, Machine, make_cluster
from tests.end_to_end.reference import WholeModel
from tests.eventually import eventually
from tests.interrupted import BODY, Interrupted, interrupt
from tests.namespaces import skip_without_namespaces
from tests.processes import Server, command_of, give_profile
from tests.tiny_model import write_tiny_model

pytestmark = [pytest.mark.machines, pytest.mark.timeout(600)]

TRUSTED = ("--trusted-interface", "fast0")
FLAGS = ("--max-model-len", "4096", "--step-deadline-s", "3", *TRUSTED)
PROMPT = [5, 77, 130, 9]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a model in which every token id has a text, so that answers show their tokens. It has a KV head for each of four ranks."""
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny", vocabulary=258, kv_heads=4)


@pytest.fixture(scope="module")
def whole(model: Path) -> WholeModel:
    """Return mlx-lm's reference."""
    return WholeModel(model)


@pytest.fixture(scope="module")
def cluster(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Generator[LanCluster]:
    """Make five machines. All but the last trust the second network once they have joined."""
    skip_without_namespaces()
    with ExitStack() as stack:
        folder = tmp_path_factory.mktemp("cluster")
        cluster = make_cluster(model, folder, stack, [None] * 5, fast=True, one_processor_each=True)
        for machine in cluster.machines:
            give_profile(machine.state, within=cluster.head.on_processor)
        cluster.join_flags = TRUSTED
        yield cluster


@pytest.fixture(scope="module")
def server(cluster: LanCluster) -> Server:
    """Run a head whose two machines share every layer."""
    return cluster.serve(2, "--tp", "2", *FLAGS, joining=[cluster.machines[1]])


def workers_of(machine: Machine) -> list[psutil.Process]:
    """Return the workers on a machine."""
    return [process for process in machine.processes if "mlx_ring.worker" in command_of(process)]


def collectives_of(machine: Machine) -> set[Ports]:
    """Return its connections on the second network, which only collectives use."""
    address = socket.inet_aton(machine.host.fast_address)[::-1].hex().upper()
    table = machine.host.run("cat", "/proc/net/tcp").stdout
    return {
        frozenset((int(local, 16), int(remote, 16)))
        for local, remote in re.findall(rf": {address}:(\w+) \w+:(\w+) 01 ", table)
    }


def tokens_of(cluster: LanCluster, server: Server, count: int = 8) -> list[int]:
    """Return the tokens of a greedy completion."""
    return cluster.tokens(server, {"prompt": PROMPT, "max_tokens": count})


def check_captured(cluster: LanCluster, server: Server, whole: WholeModel, machines: int = 2) -> None:
    """Check that tokens equal mlx-lm's, and that unencrypted traffic stays on the second network."""
    ends = [(machine, found) for machine in cluster.machines if (found := collectives_of(machine))]
    connections = set[Ports]().union(*(found for _, found in ends))
    assert len(ends) == machines
    assert sum(len(found) for _, found in ends) == 2 * len(connections)
    with ExitStack() as stack:
        captures = [stack.enter_context(capturing(machine)) for machine, _ in ends]
        tokens = tokens_of(cluster, server)
    assert whole.strays(PROMPT, tokens) == []
    for capture in captures:
        assert capture.bytes_on("fast0", connections) > len(tokens) * 100
        assert capture.bytes_elsewhere("fast0", connections) == 0


def test_two_machines_share_every_layer_over_the_network_that_both_trust(
    cluster: LanCluster, server: Server, whole: WholeModel
) -> None:
    check_captured(cluster, server, whole)
    (instance,) = cluster.get(server, "/cluster/status")["instances"]
    (stage,) = instance["stages"]
    trusted = {node["id"]: node["trusted"] for node in cluster.get(server, "/cluster/status")["nodes"]}
    assert trusted[cluster.machines[1].node] == ["fast0 (10.88.0.2)"]
    nodes = [machine.node for machine in cluster.machines[:2]]
    assert [rank["node"] for rank in stage["ranks"]] == nodes
    assert "go over fast0 (10.88.0.1) in the clear" in cluster.head.log("agent")


def kill_worker(cluster: LanCluster) -> None:
    """Kill a worker of the second machine."""
    workers_of(cluster.machines[1])[0].kill()


def stop_worker(cluster: LanCluster) -> None:
    """Stop a worker of the second machine without ending it."""
    workers_of(cluster.machines[1])[0].send_signal(signal.SIGSTOP)


def unplug_machine(cluster: LanCluster) -> None:
    """Cut the second machine off."""
    cluster.machines[1].host.cut()


def unplug_trusted_network(cluster: LanCluster) -> None:
    """Cut the second network. Both machines stay connected with the head, but collectives do not arrive."""
    cluster.machines[1].host.cut("fast0")


@pytest.mark.parametrize(
    "fault",
    [
        kill_worker,
        pytest.param(stop_worker, marks=pytest.mark.faults),
        pytest.param(unplug_machine, marks=pytest.mark.faults),
        unplug_trusted_network,
    ],
)
def test_an_answer_continues_when_a_rank_or_a_machine_is_lost(
    cluster: LanCluster, server: Server, whole: WholeModel, fault: Callable[[LanCluster], None]
) -> None:
    use_both_machines(cluster, server)
    before = [worker for machine in cluster.machines for worker in workers_of(machine)]

    def stream() -> Interrupted:
        with httpx.Client(base_url=server.url, timeout=120) as client:
            return interrupt(client, lambda: fault(cluster), body)

    body = {**BODY, "prompt": PROMPT, "logprobs": 0}
    try:
        answer = cluster.head.threads.submit(stream).result()
        assert len(answer.names) == body["max_tokens"]
        assert whole.strays(PROMPT, [cluster.names[name] for name in answer.names]) == []
    finally:
        for cable in ("eth0", "fast0"):
            cluster.machines[1].host.mend(cable)
    assert not psutil.wait_procs(before, timeout=60)[1], "nothing of the group is left"


def test_an_answer_continues_in_place_when_a_machine_was_cut_off_for_a_moment(
    cluster: LanCluster, server: Server, whole: WholeModel
) -> None:
    use_both_machines(cluster, server)
    before = cluster.get(server, "/cluster/status")
    suspicions = cluster.head.log("head").count("is suspect")

    def blip() -> None:
        cluster.machines[1].host.cut()
        eventually(lambda: cluster.head.log("head").count("is suspect") > suspicions)
        cluster.machines[1].host.mend()

    def stream() -> Interrupted:
        with httpx.Client(base_url=server.url, timeout=120) as client:
            return interrupt(client, blip, {**BODY, "prompt": PROMPT, "logprobs": 0})

    answer = cluster.head.threads.submit(stream).result()
    assert answer.comments == ()
    assert whole.strays(PROMPT, [cluster.names[name] for name in answer.names]) == []
    after = cluster.get(server, "/cluster/status")
    assert after["epoch"] == before["epoch"], "nothing was loaded again"
    assert [each["pid"] for each in after["devices"]] == [each["pid"] for each in before["devices"]]


def use_both_machines(cluster: LanCluster, server: Server) -> None:
    """Load the model on both machines. A lost machine that is back is used by the next load, as after the loss of a worker.

    A link that just failed is not measured again for some seconds, so that more than one load may be needed.
    """
    second = cluster.machines[1]
    eventually(lambda: is_ready(cluster, server) and second.node in trusting_nodes(cluster, server))
    while not workers_of(second):
        lost = epoch_of(cluster, server)
        workers_of(cluster.head)[0].kill()
        eventually(lambda lost=lost: epoch_of(cluster, server) > lost and is_ready(cluster, server))


def epoch_of(cluster: LanCluster, server: Server) -> int:
    return cluster.get(server, "/cluster/status")["epoch"]


def trusting_nodes(cluster: LanCluster, server: Server) -> set[str]:
    """Return the nodes that trust an interface, as the head knows them."""
    nodes = cluster.get(server, "/cluster/status")["nodes"]
    return {node["id"] for node in nodes if node["trusted"]}


def is_ready(cluster: LanCluster, server: Server) -> bool:
    answer = cluster.head.threads.submit(cluster.http.get, f"{server.url}/health/ready").result()
    return answer.status_code == 200


@pytest.mark.parametrize("link", ["ring", pytest.param("allreduce", marks=pytest.mark.thorough)])
def test_stages_on_two_machines_are_linked_over_the_trusted_network(
    cluster: LanCluster, server: Server, whole: WholeModel, link: str
) -> None:
    server.stop()
    linked = cluster.serve(2, "--strategy", "uniform", "--link", link, *FLAGS)
    check_captured(cluster, linked, whole)
    assert linked.stop() == 0


def test_two_machines_have_two_ranks_each(cluster: LanCluster, server: Server, whole: WholeModel) -> None:
    server.stop()
    four = cluster.serve(2, "--tp", "4", *FLAGS)
    check_captured(cluster, four, whole)
    (instance,) = cluster.get(four, "/cluster/status")["instances"]
    (stage,) = instance["stages"]
    nodes = [machine.node for machine in cluster.machines[:2]]
    assert sorted(rank["node"] for rank in stage["ranks"]) == sorted(nodes * 2)
    assert four.stop() == 0


def test_plan_in_which_two_machines_share_layers_is_served_as_planned(
    cluster: LanCluster, server: Server, whole: WholeModel
) -> None:
    server.stop()
    planned = cluster.serve(2, "--strategy", "tensor", *FLAGS)
    assert whole.strays(PROMPT, tokens_of(cluster, planned)) == []
    (instance,) = cluster.get(planned, "/cluster/status")["instances"]
    (stage,) = instance["stages"]
    nodes = [machine.node for machine in cluster.machines[:2]]
    assert [rank["node"] for rank in stage["ranks"]] == nodes
    assert instance["remarks"][0].startswith(f"{'+'.join(nodes)} compute every layer together: ")
    for rank in stage["ranks"]:
        assert rank["used"]["weight_bytes"] == pytest.approx(rank["promised"]["weight_bytes"], rel=0.05)
    assert planned.stop() == 0


def test_each_of_two_stages_is_shared_by_two_machines(
    cluster: LanCluster, server: Server, whole: WholeModel
) -> None:
    server.stop()
    hybrid = cluster.serve(4, "--tp-shares", "1,1", *FLAGS, joining=cluster.machines[2:4])
    check_captured(cluster, hybrid, whole, machines=4)
    (instance,) = cluster.get(hybrid, "/cluster/status")["instances"]
    nodes = [[rank["node"] for rank in stage["ranks"]] for stage in instance["stages"]]
    assert len({node for stage in nodes for node in stage}) == 4
    assert [len(stage) for stage in nodes] == [2, 2]
    assert hybrid.stop() == 0


def test_machine_without_a_trusted_interface_is_refused_in_a_group(
    cluster: LanCluster, server: Server
) -> None:
    server.stop()
    cluster.join_flags = ()
    nodes = 2 + sum(machine.has_joined for machine in cluster.machines[1:4])
    flags = ("--strategy", "uniform", "--link", "ring", *FLAGS)
    with pytest.raises(AssertionError, match=r"names none\. Start it with --trusted-interface"):
        cluster.serve(nodes, *flags, joining=cluster.machines[4:])
