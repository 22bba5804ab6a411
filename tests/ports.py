"""Free ports of loopback for servers that start later."""

from __future__ import annotations

import contextlib
import random
import re
import socket
from collections.abc import Generator
from functools import cache
from pathlib import Path

from mlx_ring.core.environment import inherited_environment

_FIRST, _PARTS = 12_000, 16
_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


def free_ports(count: int) -> list[int]:
    """Return consecutive free ports that nothing takes before the test listens on them.

    The system gives none of them to a socket that connects or asks for any port. Each process of a run has ports of its
    own, and returns none again before it has returned all others.
    """
    while True:
        ports = [next(_own_ports()) for _ in range(count)]
        if ports != list(range(ports[0], ports[0] + count)):
            continue
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            for port in ports:
                stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
            return ports


@cache
def _own_ports() -> Generator[int]:
    end = int(_RANGE.read_text().split()[0]) if _RANGE.exists() else 32_768
    digits = re.search(r"\d+$", inherited_environment({}).get("PYTEST_XDIST_WORKER", ""))
    part, size = (int(digits[0]) + 1 if digits else 0) % _PARTS, (end - _FIRST) // _PARTS
    begin = random.SystemRandom().randrange(size)
    while True:
        yield _FIRST + part * size + begin
        begin = (begin + 1) % size
