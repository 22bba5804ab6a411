"""Announcement and discovery of a head on the LAN, with real packets between network namespaces."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import re
import socket
import subprocess
import sys
import threading
import uuid
from collections.abc import Generator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.machines import node_credentials
from tests.namespaces import Host, lan, skip_without_namespaces
from tests.processes import MLX_RING

from mlx_ring.cli.join import find_again
from mlx_ring.cluster.announcement import announcing, find_heads
from mlx_ring.cluster.security.authority import Authority
from mlx_ring.host.addresses import HeadAddress
from mlx_ring.host.head_announcement import FINGERPRINT_DIGITS, FoundHead, HeadAnnouncement
from mlx_ring.host.interfaces import LanAddress

LOOPBACK = (LanAddress("lo", 1, "127.0.0.1", "wired"),)
ANNOUNCE = """
import asyncio, sys
from mlx_ring.cluster.announcement import announcing, find_heads
from mlx_ring.host.head_announcement import FoundHead, HeadAnnouncement

async def announce():
    async with announcing(HeadAnnouncement("home", sys.argv[1], "0.1.0", "0123456789abcdef"), 50051, look_every_s=0.1):
        print("announcing", flush=True)
        await asyncio.to_thread(sys.stdin.readline)

asyncio.run(announce())
"""
COMMANDS = ("ip -o addr", "ip -o link", "ip route", "ip -6 route", "ip rule", "sysctl -a --pattern ^net")


@contextmanager
def announced(host: Host, node: str = "mini-7f3a") -> Generator[subprocess.Popen[str]]:
    """Announce a head from this host for as long as the context is open."""
    process = host.start(sys.executable, "-c", ANNOUNCE, node)
    assert process.stdout is not None
    assert process.stdout.readline() == "announcing\n"
    try:
        yield process
    finally:
        process.communicate("\n", timeout=60)


def found_from(host: Host) -> list[dict[str, Any]]:
    done = host.run(*MLX_RING, "heads", "--json", "--timeout", "3")
    assert done.returncode == (0 if json.loads(done.stdout) else 1), done.stderr
    return json.loads(done.stdout)


def settings_of(prefix: Sequence[str]) -> list[str]:
    """Return the network's settings without counters and ages."""
    settings: list[str] = []
    for command in COMMANDS:
        text = subprocess.run([*prefix, *command.split()], capture_output=True, text=True, check=False).stdout
        lines = re.sub(r"(valid_lft|preferred_lft|expires) \w+", "", text).splitlines()
        settings += sorted(f"{command}: {line}" for line in lines if "_count" not in line)
    return settings


def without(settings: Sequence[str], changed: AbstractSet[str]) -> list[str]:
    """Remove the lines about interfaces that other programs have created or removed meanwhile."""
    return [line for line in settings if not changed & set(re.split(r"[^\w-]+", line))]


def found_on_loopback(cluster: str, seconds: float) -> list[FoundHead]:
    """Return the announced heads of `cluster`. Others on this machine may be of other runs."""
    return [one for one in find_heads(seconds, lambda: LOOPBACK) if one.announcement.cluster == cluster]


@pytest.mark.slow
def test_a_head_is_found_with_its_announcement_until_it_ends() -> None:
    async def act() -> None:
        head = HeadAnnouncement(f"home-{uuid.uuid4().hex}", "mini-7f3a", "0.1.0", "0123456789abcdef")
        async with announcing(head, 6000, lambda: LOOPBACK):
            (found,) = await asyncio.to_thread(found_on_loopback, head.cluster, 3.0)
        assert (found.announcement, found.port) == (head, 6000)
        assert await asyncio.to_thread(found_on_loopback, head.cluster, 0.5) == []

    asyncio.run(act())


@pytest.mark.parametrize(
    ("announced", "answering", "expected"),
    [
        (("127.0.0.2", "127.0.0.3"), ["127.0.0.3"], "127.0.0.3"),
        (("127.0.0.1", "127.0.0.3"), ["127.0.0.3"], "127.0.0.3"),
        (("127.0.0.2", "127.0.0.1"), ["127.0.0.2", "127.0.0.1"], None),
        (("127.0.0.2",), ["127.0.0.4"], None),
    ],
)
def test_a_head_that_answers_at_its_address_again_is_not_taken_elsewhere(
    announced: tuple[str, ...],
    answering: list[str],
    expected: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    authority = Authority.open(tmp_path / "head")
    node_credentials(authority, "mini-1").save(tmp_path / "node")
    digits = authority.fingerprint.hex()[:FINGERPRINT_DIGITS]
    with ExitStack() as stack:
        port = stack.enter_context(socket.create_server((answering[0], 0))).getsockname()[1]
        for address in answering[1:]:
            stack.enter_context(socket.create_server((address, port)))
        ours = FoundHead(HeadAnnouncement("home", "mini-7f3a", "0.1.0", digits), port, announced)
        others = [
            FoundHead(HeadAnnouncement("other", "pi-1", "0.1.0", mark), port, (answering[0],))
            for mark in ("", "0" * FINGERPRINT_DIGITS)
        ]
        monkeypatch.setattr("mlx_ring.cluster.announcement.find_heads", lambda: [*others, ours])
        found = find_again(tmp_path / "node", HeadAddress("127.0.0.1", port))
        assert found == (None if expected is None else HeadAddress(expected, port))
        refused = () if found is None else (found,)
        assert find_again(tmp_path / "node", HeadAddress("127.0.0.1", port), refused) is None


@pytest.mark.slow
def test_two_heads_on_one_machine_are_distinguished() -> None:
    async def act() -> list[int]:
        head = HeadAnnouncement(f"home-{uuid.uuid4().hex}", "mini-7f3a", "0.1.0", "")
        async with (
            announcing(head, 50051, lambda: LOOPBACK),
            announcing(head, 6000, lambda: LOOPBACK),
        ):
            found = await asyncio.to_thread(found_on_loopback, head.cluster, 3.0)
        return [one.port for one in found]

    assert asyncio.run(act()) == [6000, 50051]


def test_without_a_lan_a_head_logs_once_and_continues(
    caplog: pytest.LogCaptureFixture,
) -> None:
    checks, checked_often = itertools.count(1), threading.Event()

    def own() -> Sequence[LanAddress]:
        # A tunnel has another address at each check: there is still no LAN.
        number = next(checks)
        if number > 10:
            checked_often.set()
        return (LanAddress("tun0", 7, f"10.0.0.{number % 250 + 1}", "tunnel"),)

    async def act() -> None:
        async with announcing(HeadAnnouncement("home", "mini", "0.1.0", ""), 6000, own, look_every_s=0.001):
            assert await asyncio.to_thread(checked_often.wait, 60)

    with caplog.at_level(logging.INFO):
        asyncio.run(act())
    (record,) = caplog.records
    assert "not announced on the LAN (it is on no LAN)" in record.message
    assert find_heads(0.1, list) == []


def test_two_heads_are_listed_from_another_host_with_every_address() -> None:
    skip_without_namespaces()
    with lan(3) as (first, second, third), announced(first), announced(second, "mini-80c1"):
        found = found_from(third)
        assert [one["node"] for one in found] == ["mini-7f3a", "mini-80c1"]
        assert (found[0]["cluster"], found[0]["ca"], found[0]["port"]) == ("home", "0123456789abcdef", 50051)
        four, six, link = found[0]["addresses"]
        assert (four, six) == (first.address, first.address6)
        assert re.fullmatch(r"fe80::[0-9a-f:]+%eth0", link)
        table = third.run(*MLX_RING, "heads").stdout
        (row,) = [line.split() for line in table.splitlines() if "mini-80c1" in line]
        assert row == ["home", "mini-80c1", "0.1.0", "0123456789abcdef", f"{second.address}:50051"]
        assert f"[{second.address6}]:50051" in table.split()


def test_a_head_is_found_again_after_its_cable_was_unplugged() -> None:
    skip_without_namespaces()
    with lan(2) as (first, second), announced(first):
        assert len(found_from(second)) == 1
        first.cut()
        assert found_from(second) == []
        first.mend()
        # The head checks its addresses every 0.1 s; a search lasts three seconds.
        (found,) = found_from(second)
        assert first.address in str(found["addresses"])


def test_without_a_head_the_message_says_what_to_check() -> None:
    skip_without_namespaces()
    with lan(1) as (host,):
        done = host.run(*MLX_RING, "heads", "--timeout", "0.1")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("No head was found on this LAN. Check that")
    assert "UDP port 5353" in done.stderr


def test_announcing_and_finding_change_no_setting_of_the_network() -> None:
    skip_without_namespaces()
    with lan(2) as (first, second):
        # Wait until the kernel has settled its link-local addresses.
        first.run("sh", "-c", "while ip -6 addr show tentative | grep -q inet6; do sleep 0.1; done")
        prefixes = (first.command(), second.command(), list[str]())
        before, interfaces_before = [settings_of(prefix) for prefix in prefixes], set(socket.if_nameindex())
        with announced(first):
            assert len(found_from(second)) == 1
            during = [settings_of(prefix) for prefix in prefixes]
        after, interfaces_after = [settings_of(prefix) for prefix in prefixes], set(socket.if_nameindex())
    assert before[:2] == during[:2] == after[:2]
    others = {name for _, name in interfaces_before ^ interfaces_after}
    assert any("net.ipv4.conf.eth0.forwarding" in line for line in before[0])
    own = [without(settings[2], others) for settings in (before, during, after)]
    assert own[0] == own[1] == own[2]
