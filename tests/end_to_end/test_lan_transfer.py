"""Transfers of weights over a LAN: one that is cut off, and one from a node whose copy is corrupt."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from contextlib import ExitStack
from pathlib import Path

import pytest
from tests.end_to_end.lan_cluster import LanCluster, Machine, make_cluster
from tests.end_to_end.reference import WholeModel
from tests.eventually import eventually
from tests.namespaces import skip_without_namespaces
from tests.processes import give_profile

from mlx_ring.core.types import LayerRange
from mlx_ring.models.layer_tensors import tensors_of_stage
from mlx_ring.models.model_folder import read_model_folder

pytestmark = [pytest.mark.machines, pytest.mark.timeout(600)]

PROMPT = [5, 77, 130, 9]
TOKENS = 24
FLAGS = ("--strategy", "uniform", "--max-model-len", "512")


@pytest.fixture(scope="module")
def whole(large_model: Path) -> WholeModel:
    return WholeModel(large_model)


@pytest.fixture(scope="module")
def cluster(large_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Generator[LanCluster]:
    skip_without_namespaces()
    with ExitStack() as stack:
        cluster = make_cluster(large_model, tmp_path_factory.mktemp("cluster"), stack, [None] * 3)
        for machine in cluster.machines:
            give_profile(machine.state)
        yield cluster


def cut_during_the_transfer(cluster: LanCluster, node: Machine, ended: threading.Event) -> tuple[int, int]:
    """Unplug the head's cable when the node has some of its weights, until the head has noticed.

    Return the bytes that the node had received when the plan was made, mostly of link probes, and when it was cut off.
    """
    weights = cluster.model.joinpath("model.safetensors").stat().st_size
    eventually(lambda: cluster.received_before or ended.is_set())
    before = cluster.received_before[cluster.machines.index(node)] if cluster.received_before else 0
    eventually(lambda: node.received_bytes - before > weights / 8 or ended.is_set())
    cluster.head.host.cut()
    when_cut = node.received_bytes
    eventually(lambda: "is disconnected: it sent nothing" in cluster.head.log("head") or ended.is_set())
    cluster.head.host.mend()
    return before, when_cut


def test_transfer_resumes_after_the_cable_was_unplugged(
    cluster: LanCluster, whole: WholeModel, record_property: Callable[[str, object], None]
) -> None:
    node, ended = cluster.machines[1], threading.Event()
    cut = cluster.head.threads.submit(cut_during_the_transfer, cluster, node, ended)
    try:
        server = cluster.serve(2, *FLAGS, joining=[node])
    finally:
        ended.set()
    before, when_cut = cut.result()
    share, received = cluster.share_of(node), node.received_bytes - before
    summary = f"{(when_cut - before) / 1e6:.0f} MB, then {received / 1e6:.0f} of {share / 1e6:.0f} MB"
    record_property("received", summary)
    assert 0 < when_cut - before < share < received < 1.5 * share, summary
    tokens = cluster.tokens(server, {"prompt": PROMPT, "max_tokens": TOKENS})
    assert whole.strays(PROMPT, tokens) == []
    assert server.stop() == 0


def test_node_that_sends_corrupt_weights_is_named_and_the_head_sends_them_instead(
    cluster: LanCluster, whole: WholeModel, large_model: Path
) -> None:
    old, new = cluster.machines[1:]
    server = cluster.serve(2, *FLAGS)
    assert [len(stage.layers) for stage in cluster.planned] == [9, 9]
    cluster.join(new)
    eventually(lambda: f"is connected, at {new.host.address}" in cluster.head.log("head"))
    assert server.stop() == 0
    # Three nodes have six layers each, in the order of their ids. Of its nine, the old node sends three or six away.
    sent = LayerRange(12, 18) if old.node < new.node else LayerRange(9, 12)
    corrupt(large_model, old, sent)
    server = cluster.serve(3, *FLAGS)
    assert f"{old.node} sends this node no more weights" in new.log("agent")
    assert "with another SHA-256 than the manifest's" in new.log("agent")
    tokens = cluster.tokens(server, {"prompt": PROMPT, "max_tokens": TOKENS})
    assert whole.strays(PROMPT, tokens) == []
    assert server.stop() == 0


def corrupt(model: Path, machine: Machine, layers: LayerRange) -> None:
    """Flip a bit of each tensor of these layers in the machine's copy."""
    (file,) = machine.state.glob("weights/*/model/model.safetensors")
    with file.open("r+b") as stream:
        for entry in tensors_of_stage(read_model_folder(model), layers):
            if "layers." not in entry.name:
                continue
            stream.seek(entry.offset)
            (byte,) = stream.read(1)
            stream.seek(entry.offset)
            stream.write(bytes([byte ^ 1]))
