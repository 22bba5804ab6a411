"""Three hosts on a LAN of their own: only the first has the model, and one is cut off while it serves."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import psutil
from tests.namespaces import Host, lan, skip_without_namespaces
from tests.processes import Server, give_profile, joining, serving

from mlx_ring.core.types import LayerRange
from mlx_ring.models.layer_tensors import tensors_of_stage
from mlx_ring.models.model_folder import read_model_folder

ASKED = {"prompt": "The quick brown fox", "max_tokens": 24, "temperature": 0, "ignore_eos": True}
ASK = """
import json, sys, httpx
answer = httpx.request(sys.argv[1], sys.argv[2], json=json.loads(sys.argv[3]), timeout=60)
print(json.dumps([answer.status_code, answer.json()]))
"""
WAIT = """
import sys, time, httpx
with httpx.Client(timeout=60) as client:
    while (client.get(sys.argv[1]).status_code == 200) != (sys.argv[2] == "ready"):
        time.sleep(0.05)
"""


def ask(host: Host, method: str, url: str, body: object = None) -> tuple[int, Any]:
    """From inside the host: its loopback is its own."""
    done = host.run(sys.executable, "-c", ASK, method, url, json.dumps(body))
    assert done.returncode == 0, done.stderr
    status, answer = json.loads(done.stdout)
    return status, answer


def wait_until(state: str, host: Host, server: Server) -> None:
    """Until it is "ready", or is "lost": asked by one process, for each takes a while to start."""
    done = host.run(sys.executable, "-c", WAIT, f"{server.url}/health/ready", state)
    assert done.returncode == 0, done.stderr


def completion(host: Host, server: Server) -> Any:
    status, answer = ask(host, "POST", f"{server.url}/v1/completions", ASKED)
    assert status == 200, answer
    return answer["choices"]


def without(folder: Path, host: Host) -> list[str]:
    """What runs a program in the host, where nothing lies in `folder`; the mount is that program's alone."""
    hide = f'mount -t tmpfs none {folder} && exec "$@"'
    return host.command("sh", "-c", hide, "sh")


def test_three_hosts_serve_a_model_that_one_has_and_go_on_without_the_one_that_is_cut_off(
    tiny_model: Path, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    skip_without_namespaces()
    with serving(tiny_model, folder=tmp_path) as server, ExitStack() as stack:
        alone = httpx.post(f"{server.url}/v1/completions", json=ASKED, timeout=60).json()["choices"]
        server.stop()
        hosts = stack.enter_context(lan(3))

        def on_line(line: str) -> None:
            found = re.search(r"join \S+ --token (\S+)", line)
            if found and not joined:
                # The first finds the head by itself, the second is told the address.
                for host, address in zip(hosts[1:], ((), (hosts[0].address,)), strict=True):
                    give_profile(tmp_path / host.namespace / "state")
                    node = joining(
                        *address,
                        *("--token", found[1]),
                        folder=tmp_path / host.namespace,
                        within=without(tiny_model, host),
                    )
                    joined.append(stack.enter_context(node))

        joined: list[object] = []
        head = hosts[0]
        (tmp_path / "head").mkdir()
        give_profile(tmp_path / "head-state")
        flags = ("--nodes", "3", "--strategy", "uniform", "--state-dir", str(tmp_path / "head-state"))
        cluster = stack.enter_context(
            serving(tiny_model, *flags, folder=tmp_path / "head", on_line=on_line, within=head.command())
        )
        assert completion(head, cluster) == alone
        status = ask(head, "GET", f"{cluster.url}/cluster/status")[1]
        check_shares(tiny_model, tmp_path, status["devices"])
        cut_at = time.monotonic()
        left = next(
            device for device in status["devices"] if device["node"] not in kept_by(tmp_path, hosts[:2])
        )
        hosts[2].cut()
        wait_until("lost", head, cluster)
        record_property("seconds until noticed", time.monotonic() - cut_at)
        wait_until("ready", head, cluster)
        assert completion(head, cluster) == alone
        after = ask(head, "GET", f"{cluster.url}/cluster/status")[1]
        assert [node["state"] for node in after["nodes"]].count("attending") == 2
        assert after["epoch"] > status["epoch"]
        assert psutil.pid_exists(left["pid"]), "nobody could tell it to end"
        hosts[2].mend()
        # It comes back, and what it still holds of the instance that was lost is ended.
        psutil.Process(left["pid"]).wait(60)
        assert completion(head, cluster) == alone


def kept_by(folder: Path, hosts: Sequence[Host]) -> set[str]:
    """Ids of the nodes on these hosts, the head's first."""
    states = [folder / "head-state", *(folder / host.namespace / "state" for host in hosts[1:])]
    return {(state / "node" / "node-id").read_text().strip() for state in states}


def check_shares(model: Path, folder: Path, devices: list[dict[str, Any]]) -> None:
    """Nodes hold on disk what their stages need, give or take a file system's blocks."""
    described = read_model_folder(model)
    for path in folder.glob("*/state/weights/*/model/model.safetensors"):
        node = (path.parents[4] / "state" / "node" / "node-id").read_text().strip()
        first, end = next(device["layers"] for device in devices if device["node"] == node)
        needed = sum(entry.nbytes for entry in tensors_of_stage(described, LayerRange(first, end)))
        held = path.stat().st_blocks * 512
        assert needed <= held <= needed + len(described.tensors) * 8192
        assert held < path.stat().st_size
