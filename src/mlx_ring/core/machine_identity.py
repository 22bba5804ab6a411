"""What a machine is, in the names that its makers gave it: nothing is measured, and MLX is not asked."""

from __future__ import annotations

import platform
import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from mlx_ring.core.process_limits import ROOT

_ASK_LIMIT_S = 5.0


@dataclass(frozen=True, slots=True)
class MachineIdentity:
    """Empty where the system does not say."""

    model: str
    processor: str
    gpus: tuple[str, ...] = ()
    """Beside the processor; Apple's are part of it."""


@cache
def machine_identity() -> MachineIdentity:
    """Of the machine here."""
    if platform.system() == "Darwin":
        return MachineIdentity(_ask_mac("hw.model"), _ask_mac("machdep.cpu.brand_string"))
    return linux_identity(ROOT)


def linux_identity(root: Path) -> MachineIdentity:
    """What Linux tells under a root of the file system."""
    cards = sorted((root / "proc/driver/nvidia/gpus").glob("*/information"))
    processor = _after_colon(root / "proc/cpuinfo", "model name") or platform.machine()
    return MachineIdentity(
        _text(root / "sys/class/dmi/id/product_name").strip(),
        processor,
        tuple(_after_colon(card, "Model") for card in cards),
    )


def _ask_mac(name: str) -> str:
    try:
        asked = subprocess.run(
            ["/usr/sbin/sysctl", "-n", name],
            capture_output=True,
            text=True,
            timeout=_ASK_LIMIT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return asked.stdout.strip()


def _after_colon(file: Path, name: str) -> str:
    """The value in the first line that begins with a name."""
    lines = (line.partition(":") for line in _text(file).splitlines())
    return next((value.strip() for key, _, value in lines if key.strip() == name), "")


def _text(file: Path) -> str:
    try:
        return file.read_text("utf-8", errors="replace")
    except OSError:
        return ""
