"""Hosts made of network namespaces reach each other, and nothing is left of them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from tests.namespaces import lan, skip_without_namespaces

SOURCES = Path(__file__).resolve().parent.parent
LISTEN = """
import socket, sys
family = socket.AF_INET6 if ":" in sys.argv[1] else socket.AF_INET
with socket.create_server((sys.argv[1], 5000), family=family):
    print("listening", flush=True)
    input()
"""
CONNECT = "import socket, sys; socket.create_connection((sys.argv[1], 5000)).close()"
HOLD = """
import sys
from tests.namespaces import lan
with lan(1) as (host,):
    print(host.namespace, host.start("sleep", "1000").pid, flush=True)
    sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def skip_unless_allowed() -> None:
    skip_without_namespaces()


def namespaces() -> str:
    return subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("kind", ["address", "address6"])
def test_hosts_reach_each_other_and_are_removed_afterwards(kind: str) -> None:
    with lan(2) as (first, second):
        target: str = getattr(second, kind)
        listener = second.start(sys.executable, "-c", LISTEN, target)
        assert listener.stdout is not None
        assert listener.stdout.readline() == "listening\n"
        done = first.run(sys.executable, "-c", CONNECT, target)
        listener.communicate("\n", timeout=30)
        assert done.returncode == 0, done.stderr
        assert first.namespace in namespaces()
    assert first.namespace not in namespaces()


def test_killed_tests_leave_no_hosts_and_no_processes() -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD], cwd=SOURCES, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None
    namespace, pid = holder.stdout.readline().split()
    inside, watcher = (
        psutil.Process(int(pid)),
        next(child for child in psutil.Process(holder.pid).children() if "watcher" in child.cmdline()),
    )
    holder.kill()
    holder.communicate()
    _, alive = psutil.wait_procs([inside, watcher], timeout=30)
    assert alive == []
    assert namespace not in namespaces()
