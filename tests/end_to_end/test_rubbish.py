"""A machine that sends rubbish, half a frame, or says that a frame of two gigabytes follows: refused, and nobody else is harmed."""

from __future__ import annotations

import contextlib
import socket
import ssl
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import psutil
import pytest
from tests.end_to_end.test_cluster import cluster, completion, head_members
from tests.machines import free_pair_of_ports
from tests.processes import Server
from tests.rubbish import beginning_of_call, message, noise, plain, secured, until_closed

from mlx_ring.core.cluster_folders import node_folder
from mlx_ring.rpc.channels import AGENT_MESSAGE_BYTES, open_channel
from mlx_ring.rpc.methods import ATTEND, HAVE, LINK, STEPS
from mlx_ring.rpc.link_probe import PROBE
from mlx_ring.rpc.tls.credentials import load_credentials
from mlx_ring.rpc.tls.names import HEAD_NAME, node_name

TWO_GB = (1 << 31) - 1
SLACK_BYTES = 100 << 20


@dataclass(frozen=True, slots=True)
class Port:
    """One that other machines reach, and a method that a node may call there."""

    what: str
    number: int
    path: str
    process: psutil.Process


@dataclass(frozen=True, slots=True)
class Serving:
    """A cluster of two machines."""

    server: Server
    certificate: Path
    """Of the second, with which it attacks."""
    ports: tuple[Port, ...]
    text: str


@pytest.fixture(scope="module")
def serving_two(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder, port = tmp_path_factory.mktemp("rubbish"), free_pair_of_ports()
    with cluster(tiny_model, 2, folder, port, "--strategy", "uniform") as server:
        head = psutil.Process(server.process.pid)
        (agent,) = head_members(folder)
        (worker,) = [child for child in agent.children() if "mlx_ring.worker" in child.cmdline()]
        probes, control = sorted(listened(agent), key=lambda number: answers_probes(folder, number))[::-1]
        ports = (
            Port("cluster", port, ATTEND.path, head),
            Port("agent", control, HAVE.path, agent),
            Port("probes", probes, PROBE.path, agent),
            Port("link", listened(worker)[0], LINK.path, worker),
            Port("steps", listened(worker)[0], STEPS.path, worker),
        )
        yield Serving(server, node_folder(folder / "node-1" / "state"), ports, completion(server))
        assert server.stop() == 0
