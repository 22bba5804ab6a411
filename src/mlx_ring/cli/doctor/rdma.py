"""What a Mac needs for RDMA over Thunderbolt, which MLX's backend jaccl is made for, in the order in which it is mended."""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterator

from mlx_ring.cli.doctor.finding import Finding
from mlx_ring.cli.doctor.machine import ask

_FIRST_MACOS = (26, 2)
_NAME = "RDMA"
_RECOVERY = (
    "Shut the Mac down, hold its power button until it shows its options, open a Terminal in Recovery, run "
    "`rdma_ctl enable` and restart. Both machines need it."
)
_PORTS = "Connect the machines by a Thunderbolt 5 cable, at Thunderbolt 5 ports; of a Mac Studio's not at the one next to Ethernet."
_NEXT = "`mlx.distributed_config --backend jaccl` writes a hostfile that tells which device leads where."


def check_rdma() -> Iterator[Finding]:
    """Nothing but on a Mac: MLX has jaccl nowhere else."""
    if sys.platform == "darwin":
        yield judge_rdma(
            platform.mac_ver()[0], ask(["/usr/bin/rdma_ctl", "status"]), ask(["/usr/bin/ibv_devices"])
        )


def judge_rdma(macos: str, status: str, devices: str) -> Finding:
    """What is missing first.

    Args:
        macos: its version.
        status: what `rdma_ctl status` writes; empty where there is no such program.
        devices: what `ibv_devices` writes: a table, of which the first column are names.
    """
    version = tuple(int(part) for part in macos.split(".")[:2] if part.isdecimal())
    if version < _FIRST_MACOS:
        return Finding(
            "note",
            _NAME,
            f"macOS {macos} has none",
            "Update to macOS 26.2 or newer for RDMA over Thunderbolt 5.",
        )
    if status != "enabled":
        return Finding("note", _NAME, f"it is {status or 'not there'}", _RECOVERY)
    names = [line.split()[0] for line in devices.splitlines() if line.strip().startswith("rdma_")]
    if not names:
        return Finding("note", _NAME, "enabled, without a device", _PORTS)
    return Finding("ok", _NAME, f"{', '.join(names)}. {_NEXT}")
