"""Hosts on a LAN: only the first has the model. One is cut off while it serves, one joins over a link-local address."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from tests.end_to_end.loopback_cluster import REQUEST
from tests.eventually import eventually
from tests.namespaces import Host, lan, skip_without_namespaces
from tests.processes import Server, client_of, give_profile, joining, serving

from mlx_ring.core.types import LayerRange
from mlx_ring.models.layer_tensors import tensors_of_stage
from mlx_ring.models.model_folder import read_model_folder

pytestmark = pytest.mark.machines


@dataclass(frozen=True, slots=True)
class HeadClient:
    """Client of a head. It runs in threads of the head's host, because the head listens on that host's loopback."""

    threads: ThreadPoolExecutor
    http: httpx.Client

    def status(self) -> dict[str, Any]:
        """Return the answer of `/cluster/status`."""
        return self.threads.submit(self.http.get, "/cluster/status").result().raise_for_status().json()

    def completion(self) -> list[dict[str, Any]]:
        """Return the choices of the greedy completion."""
        return choices_of(self.threads.submit(self.http.post, "/v1/completions", json=REQUEST).result())

    def is_ready(self) -> bool:
        return self.threads.submit(self.http.get, "/health/ready").result().status_code == 200


def choices_of(answer: httpx.Response) -> list[dict[str, Any]]:
    """Return the choices of a completion, with the reasons why they ended."""
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"]


def command_without_folder(folder: Path, host: Host) -> list[str]:
    """Return the command that runs a program in the host with an empty `folder`. The mount is that program's alone."""
    hide = f'mount -t tmpfs none {folder} && exec "$@"'
    return host.command("sh", "-c", hide, "sh")


def test_three_hosts_serve_the_model_of_one_and_continue_without_a_host_that_is_cut_off(
    tiny_model: Path, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    skip_without_namespaces()
    with serving(tiny_model, folder=tmp_path) as single:
        expected = choices_of(single.http.post("/v1/completions", json=REQUEST))
        single.stop()
    with ExitStack() as stack:
        hosts = stack.enter_context(lan(3))
        # The first finds the head by itself, the second gets the address.
        server = running_hosts(stack, hosts, tiny_model, tmp_path, [(), (hosts[0].address,)])
        client = head_client(stack, hosts[0], server)
        assert client.completion() == expected
        status = client.status()
        check_shares(tiny_model, tmp_path, status["devices"])
        cut_at = time.monotonic()
        left = next(
            device for device in status["devices"] if device["node"] not in node_ids(tmp_path, hosts[:2])
        )
        worker = psutil.Process(left["pid"])
        hosts[2].cut()
        eventually(lambda: not client.is_ready())
        record_property("seconds until noticed", time.monotonic() - cut_at)
        eventually(client.is_ready)
        assert client.completion() == expected
        after = client.status()
        assert [node["state"] for node in after["nodes"]].count("attending") == 2
        assert after["epoch"] > status["epoch"]
        assert worker.is_running(), "no other host could end it"
        hosts[2].mend()
        # The host joins again, and its worker of the lost instance ends.
        worker.wait(60)
        assert client.completion() == expected


def test_a_host_joins_over_a_link_local_address_with_a_scope_as_in_a_url(
    tiny_model: Path, tmp_path: Path
) -> None:
    skip_without_namespaces()
    with ExitStack() as stack:
        hosts = stack.enter_context(lan(2, fast=True))
        # gRPC would decode the `%fa` of `%fast0`.
        address = f"[{link_local_address(hosts[0], 'fast0')}%25fast0]"
        server = running_hosts(stack, hosts, tiny_model, tmp_path, [(address,)], "--cluster-host", address)
        client = head_client(stack, hosts[0], server)
        assert client.completion()[0]["finish_reason"] == "length"
        status = client.status()
        joined = next(node for node in status["nodes"] if not node["is_head"])
        assert joined["stages"]
        assert re.fullmatch(r"fe80::[0-9a-f:]+%[0-9]+", joined["address"])
        assert [link["problem"] for link in status["links"]] == [None, None]


def link_local_address(host: Host, interface: str) -> str:
    """Return an interface's link-local address, once no other host is known to have it."""
    arguments = ("ip", "-6", "-oneline", "addr", "show", "dev", interface, "scope", "link", "-tentative")
    shown = eventually(lambda: host.run(*arguments).stdout)
    return shown.split()[3].partition("/")[0]


def running_hosts(
    stack: ExitStack,
    hosts: Sequence[Host],
    model: Path,
    folder: Path,
    addresses: Sequence[Sequence[str]],
    *more: str,
) -> Server:
    """Run a head on the first host with more flags; the others join at these addresses, without the model's folder."""
    joined: list[object] = []

    def on_line(line: str) -> None:
        found = re.search(r"join .*--token (\S+)", line)
        if found and not joined:
            for host, address in zip(hosts[1:], addresses, strict=True):
                give_profile(folder / host.namespace / "state")
                node = joining(
                    *address,
                    *("--token", found[1]),
                    folder=folder / host.namespace,
                    within=command_without_folder(model, host),
                )
                joined.append(stack.enter_context(node))

    (folder / "head").mkdir()
    give_profile(folder / "head-state")
    flags = ("--nodes", str(len(hosts)), "--strategy", "uniform", "--state-dir", str(folder / "head-state"))
    return stack.enter_context(
        serving(model, *flags, *more, folder=folder / "head", on_line=on_line, within=hosts[0].command())
    )


def head_client(stack: ExitStack, host: Host, server: Server) -> HeadClient:
    """Return a client of a head that runs on this host."""
    return HeadClient(stack.enter_context(host.threads()), stack.enter_context(client_of(server.url)))


def node_ids(folder: Path, hosts: Sequence[Host]) -> set[str]:
    """Return the ids of the nodes on these hosts. The first is the head's."""
    states = [folder / "head-state", *(folder / host.namespace / "state" for host in hosts[1:])]
    return {(state / "node" / "node-id").read_text().strip() for state in states}


def check_shares(model: Path, folder: Path, devices: list[dict[str, Any]]) -> None:
    """Check that nodes have on disk what their stages need, plus at most a file system's blocks."""
    described = read_model_folder(model)
    for path in folder.glob("*/state/weights/*/model/model.safetensors"):
        node = (path.parents[4] / "state" / "node" / "node-id").read_text().strip()
        first, end = next(device["layers"] for device in devices if device["node"] == node)
        needed = sum(entry.nbytes for entry in tensors_of_stage(described, LayerRange(first, end)))
        stored = path.stat().st_blocks * 512
        assert needed <= stored <= needed + len(described.tensors) * 8192
        assert stored < path.stat().st_size
