"""Emulated LAN of network namespaces and a switch, whose delay and rate can be changed while it runs.

Needs root, iproute2 and a C compiler. Everything is removed afterwards, even if this process is killed.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

# Namespaces are removed as those of tests are.
sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.namespaces import removed_afterwards

_SOURCE = Path(__file__).with_name("switch.c")
_WAIT_S = 30
_ECHO = """
import socket
with socket.create_server(("0.0.0.0", 9)) as server:
    print("ready", flush=True)
    connection = server.accept()[0]
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    while data := connection.recv(4096):
        connection.sendall(data)
"""
_ASK = """
import socket, sys, time
with socket.create_connection((sys.argv[1], 9)) as connection:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for _ in range(int(sys.argv[2])):
        started = time.perf_counter()
        connection.sendall(b"x")
        connection.recv(1)
        print(time.perf_counter() - started)
"""


@dataclass(frozen=True)
class Host:
    """Network namespace with a loopback and `eth0`."""

    namespace: str
    address: str

    def command(self, *arguments: str) -> list[str]:
        """Return the command that runs `arguments` in this host."""
        return ["ip", "netns", "exec", self.namespace, *arguments]

    def sent_bytes(self) -> int:
        """Return the number of bytes sent so far."""
        path = "/sys/class/net/eth0/statistics/tx_bytes"
        return int(
            subprocess.run(self.command("cat", path), capture_output=True, text=True, check=True).stdout
        )


class Lan:
    """LAN with the hosts 10.78.0.1, 10.78.0.2 and so on."""

    def __init__(self, hosts: Sequence[Host], switch: subprocess.Popen[str]) -> None:
        self.hosts = hosts
        self._switch = switch

    def set(self, *, round_trip_ms: float, mbit_s: float) -> None:
        """Set the delay and rate between all hosts; 0 is no delay, or no limit."""
        commands, answers = _pipes(self._switch)
        commands.write(f"{round_trip_ms * 500} {mbit_s}\n")
        commands.flush()
        if answers.readline() != "set\n":
            raise SystemExit("The switch has ended.")

    def round_trip_ms(self, times: int = 200) -> float:
        """Return the median round trip of one byte from the first host to the second."""
        one, other = self.hosts[:2]
        echo = subprocess.Popen(
            other.command(sys.executable, "-c", _ECHO),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            _pipes(echo)[1].readline()
            command = one.command(sys.executable, "-c", _ASK, other.address, str(times))
            output = subprocess.run(
                command, capture_output=True, text=True, check=True, timeout=_WAIT_S
            ).stdout
        finally:
            echo.kill()
            echo.wait()
        return 1e3 * statistics.median(map(float, output.split()))


@contextlib.contextmanager
def emulated_lan(count: int) -> Generator[Lan]:
    """Create the given number of hosts, or exit with an error message."""
    for tool in ("ip", "cc"):
        if shutil.which(tool) is None:
            raise SystemExit(f"{tool} is not installed; an emulated LAN needs it.")
    if os.geteuid() != 0:
        raise SystemExit("An emulated LAN needs root: network namespaces and TAP devices.")
    run = f"rbench{os.getpid():x}{secrets.token_hex(1)}"
    hosts = [Host(f"{run}h{number}", f"10.78.0.{number}") for number in range(1, count + 1)]
    with removed_afterwards([host.namespace for host in hosts]), tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "switch"
        subprocess.run(["cc", "-O2", "-Wall", "-o", str(program), str(_SOURCE)], check=True)
        for host in hosts:
            _ip("netns", "add", host.namespace)
        with _switch(program, hosts) as switch:
            for number, host in enumerate(hosts, 1):
                inside = ("-n", host.namespace)
                _ip(*inside, "link", "set", "eth0", "address", f"02:00:00:00:00:{number:02x}")
                _ip(*inside, "addr", "add", f"{host.address}/24", "dev", "eth0")
                for name in ("lo", "eth0"):
                    _ip(*inside, "link", "set", name, "up")
            yield Lan(hosts, switch)


@contextlib.contextmanager
def _switch(program: Path, hosts: Sequence[Host]) -> Generator[subprocess.Popen[str]]:
    command = [str(program), *(host.namespace for host in hosts)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as switch:
        commands, answers = _pipes(switch)
        if answers.readline() != "ready\n":
            raise SystemExit("The switch did not start: TAP devices may not be allowed here.")
        # Other processes must not add to the delay.
        with contextlib.suppress(OSError):
            os.sched_setscheduler(switch.pid, os.SCHED_FIFO, os.sched_param(50))
        yield switch
        commands.close()


def _pipes(process: subprocess.Popen[str]) -> tuple[IO[str], IO[str]]:
    """Return the pipes to the process and from it."""
    if process.stdin is None or process.stdout is None:
        raise ValueError(process.args)
    return process.stdin, process.stdout


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, timeout=_WAIT_S)
