"""Several machines as one server: on loopback, each with a state of its own."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest
from tests.machines import free_pair_of_ports
from tests.processes import Server, joining, serving

ASKED = {"prompt": "The quick brown fox", "max_tokens": 24, "temperature": 0, "ignore_eos": True}


def completion(server: Server) -> str:
    answer = httpx.post(f"{server.url}/v1/completions", json=ASKED, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"]


@contextmanager
def cluster(model: Path, nodes: int, folder: Path, *flags: str) -> Generator[Server]:
    """A head and as many machines as are missing, which join when it prints how."""
    port = free_pair_of_ports()
    with ExitStack() as stack:

        def heard(line: str) -> None:
            found = re.search(r"join \S+ --token (\S+)", line)
            if found and not joined:
                for number in range(1, nodes):
                    node = joining(
                        f"127.0.0.1:{port}", "--token", found[1], folder=folder / f"node-{number}"
                    )
                    joined.append(stack.enter_context(node))

        joined: list[object] = []
        arguments = ("--nodes", str(nodes), "--cluster-port", str(port), "--state-dir", str(folder / "state"))
        yield stack.enter_context(serving(model, *arguments, *flags, folder=folder, heard=heard))


@pytest.fixture(scope="module")
def alone(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """What one machine answers."""
    with serving(tiny_model, folder=tmp_path_factory.mktemp("alone")) as server:
        return completion(server)


def test_three_machines_answer_as_one_does_and_a_lost_one_is_named(
    tiny_model: Path, tmp_path: Path, alone: str
) -> None:
    with cluster(tiny_model, 3, tmp_path, "--strategy", "uniform") as server:
        assert completion(server) == alone
        status = httpx.get(f"{server.url}/cluster/status", timeout=60).json()
        assert len(status["nodes"]) == len(set(status["nodes"])) == 3
        assert [device["stage"] for device in status["devices"]] == [0, 1, 2]
        stored = [folder / "state" / "weights" for folder in tmp_path.glob("node-*")]
        assert all(any(folder.rglob("model.safetensors")) for folder in stored), "the model was fetched"
        victim = status["devices"][1]
        os.kill(victim["pid"], signal.SIGKILL)
        with httpx.Client() as client:
            # The broken stream is noticed first, the agent then tells why.
            while "SIGKILL" not in (health := client.get(f"{server.url}/health/ready")).text:
                assert health.status_code in (200, 503)
        assert health.status_code == 503
        assert victim["node"] in health.text
        assert server.stop() == 0
        assert server.all_gone()
