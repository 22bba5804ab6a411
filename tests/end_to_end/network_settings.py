"""Settings of the network and the kernel, on this machine and on the hosts of a cluster."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from typing import Any, cast

from tests.end_to_end.lan_cluster import LanCluster


def settings(cluster: LanCluster) -> list[str]:
    """Return addresses, routes and the kernel's settings, of this machine and of every host."""
    hosts = [machine.host.command() for machine in cluster.machines]
    return [
        f"{host}: {setting}"
        for host, within in [("here", []), *((" ".join(host), host) for host in hosts)]
        for setting in [*_network(within), *_kernel(within)]
    ]


def _network(within: Sequence[str]) -> list[str]:
    found: list[str] = []
    for family in ("-4", "-6"):
        for kind in ("addr", "route"):
            listed = json.loads(_output(*within, "ip", "-j", family, kind))
            # The remaining time of a leased address changes.
            found += [
                json.dumps(one, sort_keys=True)
                for one in listed
                if not _drop(one, "valid_life_time", "preferred_life_time")
            ]
    return found


def _drop(value: Any, *names: str) -> None:
    """Remove entries with these names at any depth."""
    if isinstance(value, dict):
        entries = cast("dict[str, Any]", value)
        for name in names:
            entries.pop(name, None)
        for one in entries.values():
            _drop(one, *names)
    if isinstance(value, list):
        for one in cast("list[Any]", value):
            _drop(one, *names)


_COUNTERS = (
    *("fs.dentry-state", "fs.file-nr", "fs.inode-nr", "fs.inode-state", "fs.quota", "fs.aio-nr"),
    *("kernel.random.", "kernel.ns_last_pid", "kernel.pty.nr", "kernel.keys", "kernel.perf", "kernel.sched"),
    *("net.netfilter.nf_conntrack_count", "kernel.tainted", "vm.stat", "fs.mount-nr"),
)
"""Names of the kernel's counters, which are no settings."""


def _kernel(within: Sequence[str]) -> list[str]:
    lines = _output(*within, "sysctl", "-a").splitlines()
    return [line for line in lines if not line.startswith(_COUNTERS)]


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60).stdout
