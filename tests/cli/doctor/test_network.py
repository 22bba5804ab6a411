"""Checks of the network against real sockets, and of a head's throughput."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import psutil
import pytest
from tests.machines import free_pair_of_ports, running_head
from tests.namespaces import lan, skip_without_namespaces
from tests.processes import clean_environment

from mlx_ring.agent.enrolment import join
from mlx_ring.cli.doctor import Finding, network
from mlx_ring.cli.doctor.network import (
    check_lan,
    check_name,
    check_port,
    check_round_trip,
    check_throughput,
    judge_link,
)
from mlx_ring.cluster.control import open_control
from mlx_ring.cluster.security.records import Members
from mlx_ring.core.folders import authority_folder
from mlx_ring.host.addresses import HeadAddress, is_denied_by_macos
from mlx_ring.host.interfaces import InterfaceKind, LanAddress
from mlx_ring.host.running import Running
from mlx_ring.rpc.link_probe import LinkMeasure

HOLD = """
import socket
server = socket.create_server(("127.0.0.1", 0))
print(server.getsockname()[1], flush=True)
input()
"""


def test_a_port_is_free_then_held_then_free_again() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        finding = check_port(port, "HTTP")
        assert (finding.level, finding.what) == ("broken", f"port {port}")
    assert check_port(port, "HTTP").level == "ok"


def test_the_process_that_holds_a_port_is_named() -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=clean_environment(),
    )
    with contextlib.closing(holder.stdout or sys.stdin) as output:
        port = int(output.readline())
        assert f"(pid {holder.pid})" in check_port(port, "HTTP").value
        holder.communicate("\n", timeout=30)


@pytest.fixture
def denied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the operating system hide all listeners, as from a user who did not start them."""
    monkeypatch.setattr(network, "_listeners", lambda: iter(((1, None),)))


def test_the_own_process_that_holds_a_port_is_found_where_only_root_may_list_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def deny(_kind: str) -> None:
        raise psutil.AccessDenied

    monkeypatch.setattr(psutil, "net_connections", deny)
    with socket.create_server(("127.0.0.1", 0)) as server:
        finding = check_port(server.getsockname()[1], "HTTP")
    assert (finding.level, f"(pid {os.getpid()})" in finding.value) == ("broken", True)


@pytest.mark.usefixtures("denied")
@pytest.mark.parametrize("purpose", ["HTTP", "members of the cluster"])
def test_a_port_with_a_hidden_holder_is_a_note_with_the_command_to_ask(
    purpose: network.Purpose, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gives_no_answer(_port: int, _purpose: str) -> None:
        return None

    monkeypatch.setattr(network, "_answers_as_head", gives_no_answer)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        finding = check_port(port, purpose)
    assert (finding.level, finding.value) == ("note", "held by a process that this user cannot see")
    assert f"`sudo lsof -nP -iTCP:{port} -sTCP:LISTEN`" in finding.fix


@pytest.mark.usefixtures("denied")
def test_a_head_that_is_recorded_on_this_machine_holds_its_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        finding = check_port(port, "HTTP", [Running("head", 4711, 0.0, "", f"http://10.0.0.1:{port}")])
    assert (finding.level, finding.value) == ("ok", "mlx-ring listens there already (pid 4711)")


class Health(BaseHTTPRequestHandler):
    """Answers in turn as a head whose model is not ready, and as another program."""

    answers: ClassVar[list[tuple[int, bytes]]] = []

    def do_GET(self) -> None:
        status, body = self.answers.pop(0)
        self.send_response(status)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - name in http.server's interface
        """Write nothing."""


@pytest.mark.usefixtures("denied")
def test_a_hidden_head_is_recognized_by_its_health_and_another_server_is_not() -> None:
    health = {"status": "loading", "world_size": 1, "pipeline": None, "version": "1"}
    Health.answers = [(503, json.dumps(health).encode()), (200, b'{"status": "ok"}'), (200, b"<html>")]
    with ThreadingHTTPServer(("127.0.0.1", 0), Health) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        levels = [check_port(server.server_port, "HTTP").level for _ in range(3)]
        server.shutdown()
    assert levels == ["ok", "broken", "broken"]


@pytest.mark.usefixtures("denied")
def test_a_hidden_head_is_recognized_at_both_ports_of_its_cluster(tmp_path: Path) -> None:
    async def act() -> list[Finding]:
        async with running_head(tmp_path / "head") as head:
            port = head.address.port
            return [
                await asyncio.to_thread(check_port, port, "members of the cluster"),
                await asyncio.to_thread(check_port, port + 1, "machines that join"),
            ]

    assert [found.value for found in asyncio.run(act())] == ["mlx-ring listens there already"] * 2


def test_a_name_that_does_not_resolve_is_broken() -> None:
    assert check_name("localhost").level == "ok"
    assert check_name("192.0.2.7").value == "192.0.2.7"
    assert check_name("fe80::1%lo").level == "ok"
    assert check_name("127.0.0.1").level == "note"
    for wrong in ("nowhere.invalid", "x" * 80, "a..b"):
        finding = check_name(wrong)
        assert (finding.level, finding.value[:16]) == ("broken", "does not resolve")


def test_a_round_trip_is_timed_and_a_closed_port_refuses_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert check_round_trip("127.0.0.1", port).value.endswith(" ms")
    finding = check_round_trip("127.0.0.1", port)
    assert (finding.level, finding.value) == ("broken", "refused: nothing listens there")


def test_an_unreachable_machine_is_not_reported_as_refusing() -> None:
    skip_without_namespaces()
    script = "from mlx_ring.cli.doctor.network import check_round_trip as c; print(c('10.77.0.9', 50051))"
    with lan(1) as (host,):
        done = host.run(sys.executable, "-c", script)
    assert "level='broken'" in done.stdout, done.stderr
    assert "refused" not in done.stdout


@pytest.mark.parametrize(
    ("number", "address", "denied"),
    [
        (65, "192.168.10.7", True),
        (65, "fe80::7%en0", True),
        (65, "mini.local", True),
        (65, "8.8.8.8", False),
        (65, "127.0.0.1", False),
        (113, "192.168.10.7", False),
        (None, "192.168.10.7", False),
    ],
)
def test_errno_65_at_an_address_of_the_lan_means_local_network_privacy(
    number: int | None, address: str, *, denied: bool
) -> None:
    """Judge recorded errors of macOS (nicobailon/pi-mcp-adapter#543), not run."""
    assert is_denied_by_macos(number, address) is denied


@pytest.mark.parametrize(
    ("kinds", "level"), [([], "warning"), (["wireless"], "warning"), (["wired", "tunnel"], "ok")]
)
def test_a_machine_without_a_wired_address_gets_a_warning(kinds: list[InterfaceKind], level: str) -> None:
    assert check_lan([LanAddress("x", 1, "10.0.0.1", kind) for kind in kinds]).level == level


def test_throughput_is_measured_with_a_head_and_refused_to_a_removed_machine(
    tmp_path: Path,
) -> None:
    async def act() -> tuple[Finding, Finding]:
        head = HeadAddress("127.0.0.1", free_pair_of_ports())
        async with open_control(tmp_path / "head", head) as control:
            folder = tmp_path / "node"
            await asyncio.to_thread(join, str(head), control.make_token(life_s=60.0), folder)
            measured = await asyncio.to_thread(check_throughput, head, folder)
            members = Members(authority_folder(tmp_path / "head"))
            (node,) = set(members.list()) - {control.node}
            members.remove(node)
            return measured, await asyncio.to_thread(check_throughput, head, folder)

    measured, refused = asyncio.run(act())
    assert measured.level in ("ok", "warning")
    assert " MB/s (" in measured.value
    assert (refused.level, "removed" in refused.value) == ("broken", True)
    assert "mlx-ring token create" in refused.fix


def test_throughput_without_membership_is_a_note_with_the_fix(tmp_path: Path) -> None:
    found = check_throughput(HeadAddress("127.0.0.1", 1), tmp_path)
    assert (found.level, bool(found.fix)) == ("note", True)


@pytest.mark.parametrize(
    ("bandwidth", "round_trip_s", "level"),
    [(110e6, 0.3e-3, "ok"), (11e6, 0.3e-3, "warning"), (110e6, 20e-3, "warning")],
)
def test_a_slow_link_is_a_warning(bandwidth: float, round_trip_s: float, level: str) -> None:
    measure = LinkMeasure(round_trip_s, round_trip_s, bandwidth, frames=100, nbytes=1 << 20)
    finding = judge_link("throughput", measure)
    assert finding.level == level
    assert bool(finding.fix) == (level == "warning")
