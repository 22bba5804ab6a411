"""Hosts on a LAN of their own, made of network namespaces.

Switch and cables lie in a namespace too, so that nothing appears or changes in the machine's own. Names hold this
process's id and a random part, so that several runs can work side by side. A watcher removes the namespaces with the
processes left in them, also when the tests are killed. It waits for the end of a pipe whose other end the tests hold.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import secrets
import shutil
import subprocess
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import pytest
from tests.processes import clean_environment, run_at_end

_STEP_S = 30.0
_NOTHING_PASSES = ("tbf", "rate", "8bit", "burst", "10", "limit", "1")
"""A queue for `tc` that is too short for any packet."""
_NEW_NETWORK = 0x40000000
"""CLONE_NEWNET."""
_REMOVE = """
trap '' INT TERM HUP
read -r _ || true
for name in "$@"; do
  for pid in $(ip netns pids "$name" 2>/dev/null); do kill -KILL "$pid" 2>/dev/null; done
done
for name in "$@"; do ip netns delete "$name" 2>/dev/null; done
true
"""


@dataclass(frozen=True, slots=True)
class Host:
    """A host: a network namespace with a loopback and `eth0`, and with `fast0` if there is a second switch."""

    namespace: str
    address: str
    address6: str
    fast_address: str = ""
    """Address on the second switch."""

    def command(self, *arguments: str) -> list[str]:
        """Return the command that runs `arguments` in this host."""
        return ["ip", "netns", "exec", self.namespace, *arguments]

    def run(
        self, *arguments: str, environment: Mapping[str, str] | None = None, timeout_s: float = 120.0
    ) -> subprocess.CompletedProcess[str]:
        """Run a program to its end, without this machine's settings of mlx-ring."""
        return subprocess.run(
            self.command(*arguments),
            env=clean_environment() | dict(environment or {}),
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )

    def start(
        self, *arguments: str, environment: Mapping[str, str] | None = None, errors: IO[str] | None = None
    ) -> subprocess.Popen[str]:
        """Start a program with pipes for input and output. It is killed with the hosts."""
        return subprocess.Popen(
            self.command(*arguments),
            env=clean_environment() | dict(environment or {}),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )

    @contextlib.contextmanager
    def threads(self, count: int = 1) -> Generator[ThreadPoolExecutor]:
        """Start threads in this host. Sockets that they open belong to it."""
        with ThreadPoolExecutor(count, initializer=_enter, initargs=(self.namespace,)) as pool:
            yield pool

    def cut(self, cable: str = "eth0") -> None:
        """Unplug a cable."""
        _ip("-n", self.namespace, "link", "set", cable, "down")

    def drop_packets(self, interface: str = "lo") -> None:
        """Drop every packet that leaves through an interface. Connections stay open."""
        self.run("tc", "qdisc", "add", "dev", interface, "root", *_NOTHING_PASSES).check_returncode()

    def deliver_packets(self, interface: str = "lo") -> None:
        """Let packets pass again."""
        self.run("tc", "qdisc", "del", "dev", interface, "root").check_returncode()

    def mend(self, cable: str = "eth0") -> None:
        """Plug a cable in again, and restore the IPv6 address, which was lost with it."""
        _ip("-n", self.namespace, "link", "set", cable, "up")
        if cable == "eth0":
            _ip("-n", self.namespace, "addr", "replace", f"{self.address6}/64", "dev", cable)

    def lose(self, other: Host) -> None:
        """Drop all packets between two hosts, which still reach every other one."""
        for host, peer in ((self, other), (other, self)):
            nobody = ("lladdr", "02:00:00:00:00:01", "nud", "permanent", "dev", "eth0")
            _ip("-n", host.namespace, "neigh", "replace", peer.address, *nobody)
            _ip("-n", host.namespace, "neigh", "replace", peer.address6, *nobody)

    def reset_connections(self, other: Host) -> None:
        """Reset all connections with another host."""
        done = self.run("ss", "--kill", "--tcp", "--numeric", "dst", other.address)
        assert done.stdout.count("\n") > 1, f"no connection was reset: {done.stderr}"


def skip_without_namespaces() -> None:
    """Skip the test, with the reason, where this process may not make namespaces."""
    if reason := _obstacle():
        pytest.skip(reason)


@contextlib.contextmanager
def lan(count: int, *, fast: bool = False) -> Generator[Sequence[Host]]:
    """Make hosts on one switch: 10.77.0.1, 10.77.0.2 and so on, and fd77::1, fd77::2 and so on.

    With `fast` they are also on a second switch, as on Thunderbolt cables: 10.88.0.1 and so on.
    """
    run = f"ring{os.getpid():x}{secrets.token_hex(2)}"
    switch = f"{run}s"
    hosts = [
        Host(
            f"{run}h{number}",
            f"10.77.0.{number}",
            f"fd77::{number:x}",
            f"10.88.0.{number}" if fast else "",
        )
        for number in range(1, count + 1)
    ]
    with removed_afterwards([switch, *(host.namespace for host in hosts)]):
        _make_switch(switch)
        for number, host in enumerate(hosts):
            _make_host(host, switch, f"port{number}")
        if fast:
            _add_fast_switch(switch, hosts)
        yield hosts


def _enter(namespace: str) -> None:
    """Move the calling thread into a host for good."""
    with Path(f"/run/netns/{namespace}").open("rb") as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), _NEW_NETWORK):
            raise OSError(ctypes.get_errno(), f"{namespace} cannot be entered")


def removed_afterwards(namespaces: Sequence[str]) -> AbstractContextManager[None]:
    """Have a watcher end the processes of namespaces and remove them at the end, or when this process ends."""
    return run_at_end(_REMOVE, *namespaces)


def _make_switch(namespace: str) -> None:
    _ip("netns", "add", namespace)
    _add_switch(namespace, "switch")


def _add_switch(namespace: str, name: str) -> None:
    _ip("-n", namespace, "link", "add", name, "type", "bridge", "mcast_snooping", "0")
    _ip("-n", namespace, "link", "set", name, "up")


def _add_fast_switch(namespace: str, hosts: Sequence[Host]) -> None:
    _add_switch(namespace, "fast")
    for number, host in enumerate(hosts):
        port, inside = f"fast{number}", ("-n", host.namespace)
        plug = ("type", "veth", "peer", "name", "fast0", "netns", host.namespace)
        _ip("-n", namespace, "link", "add", port, *plug)
        _ip("-n", namespace, "link", "set", port, "master", "fast", "up")
        _ip(*inside, "addr", "add", f"{host.fast_address}/24", "dev", "fast0")
        _ip(*inside, "link", "set", "fast0", "up")


def _make_host(host: Host, switch: str, port: str) -> None:
    _ip("netns", "add", host.namespace)
    _ip("-n", switch, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", host.namespace)
    _ip("-n", switch, "link", "set", port, "master", "switch", "up")
    inside = ("-n", host.namespace)
    # No other host can have the address: skip the wait for duplicates.
    subprocess.run(
        host.command("sh", "-c", "echo 0 > /proc/sys/net/ipv6/conf/eth0/accept_dad"),
        check=True,
        capture_output=True,
        text=True,
        timeout=_STEP_S,
    )
    _ip(*inside, "addr", "add", f"{host.address}/24", "dev", "eth0")
    _ip(*inside, "addr", "add", f"{host.address6}/64", "dev", "eth0")
    for link in ("lo", "eth0"):
        _ip(*inside, "link", "set", link, "up")


@functools.cache
def _obstacle() -> str:
    """Return the reason why no host can be made on this machine; empty if one can."""
    if shutil.which("ip") is None:
        return "ip (iproute2) is not installed: no hosts can be made of network namespaces"
    try:
        with lan(1):
            return ""
    except subprocess.CalledProcessError as error:
        return f"hosts of network namespaces are not allowed here: {error.stderr.strip()}"


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True, timeout=_STEP_S)
