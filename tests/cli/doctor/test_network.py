"""Checks of the network, against real sockets."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys

import pytest
from tests.namespaces import lan, skip_without_namespaces
from tests.processes import clean_environment

from mlx_ring.cli.doctor.network import check_lan, check_name, check_port, check_round_trip, firewall_is_on
from mlx_ring.host.interfaces import Kind, LanAddress

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


def test_who_holds_a_port_is_named() -> None:
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


def test_a_name_leads_somewhere_or_not() -> None:
    assert check_name("localhost").level == "ok"
    assert check_name("192.0.2.7").value == "192.0.2.7"
    assert check_name("fe80::1%lo").level == "ok"
    assert check_name("127.0.0.1").level == "note"
    for wrong in ("nowhere.invalid", "x" * 80, "a..b"):
        finding = check_name(wrong)
        assert (finding.level, finding.value[:16]) == ("broken", "does not resolve")


def test_the_way_to_a_listener_is_timed_and_a_closed_one_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert check_round_trip("127.0.0.1", port).value.endswith(" ms")
    finding = check_round_trip("127.0.0.1", port)
    assert (finding.level, finding.value) == ("broken", "refused: nobody listens there")


def test_a_machine_that_is_off_is_told_apart_from_one_that_refuses() -> None:
    skip_without_namespaces()
    script = "from mlx_ring.cli.doctor.network import check_round_trip as c; print(c('10.77.0.9', 50051))"
    with lan(1) as (host,):
        done = host.run(sys.executable, "-c", script)
    assert "level='broken'" in done.stdout, done.stderr
    assert "refused" not in done.stdout


@pytest.mark.parametrize(
    ("kinds", "level"), [([], "warning"), (["wireless"], "warning"), (["wired", "tunnel"], "ok")]
)
def test_a_machine_wants_a_wire(kinds: list[Kind], level: str) -> None:
    assert check_lan([LanAddress("x", 1, "10.0.0.1", kind) for kind in kinds]).level == level


@pytest.mark.parametrize(
    ("name", "told", "active"),
    [
        ("ufw", "Status: active\n\nTo   Action\n", True),
        ("ufw", "Status: inactive\n", False),
        ("firewalld", "running\n", True),
        ("firewalld", "not running\n", False),
        ("iptables", "-P INPUT ACCEPT\n-A INPUT -p icmp -j DROP\n", True),
        ("iptables", "-P INPUT ACCEPT\n", False),
        ("nftables", "chain input {\n type filter hook input priority filter; policy drop;\n}", True),
        ("nftables", "chain input {\n type filter hook input priority filter; policy accept;\n}", False),
        ("macOS's firewall", "Firewall is enabled. (State = 1)", True),
        ("macOS's firewall", "Firewall is disabled. (State = 0)", False),
    ],
)
def test_a_firewall_s_own_words_say_whether_it_is_on(name: str, told: str, active: bool) -> None:  # noqa: FBT001 - a parameter
    assert firewall_is_on(name, told) is active
