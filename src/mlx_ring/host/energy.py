"""Energy that this machine uses, by the counters of its own parts, and energy per generated token.

Linux counts its processors' (RAPL, which root alone may read), NVIDIA's driver its GPUs', and a Mac with Apple silicon all
parts of the chip. No counter includes screens, disks, fans and the losses of the power supply. A part without a counter is
left out, and nothing is estimated.
"""

from __future__ import annotations

import importlib
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, get_args

from mlx_ring.host.process import ROOT

log = logging.getLogger(__name__)

Part = Literal["cpu", "gpu", "memory"]
PARTS: tuple[Part, ...] = get_args(Part)
_POWER_S = 2.0
"""Time of which the mean power is returned, if readings are that frequent: GPUs count in steps of up to 0.1 s."""
_WINDOW_S, _SAMPLE_S, _STALE_S = 60.0, 1.0, 120.0
"""Time of which the energy per token is returned, least time between its samples, and age from which one is too old."""


@dataclass(frozen=True, slots=True)
class PartEnergy:
    """Energy that a part of the machine has used."""

    part: Part
    joules: float
    """Energy since the first reading."""
    watts: float | None = None
    """Mean power of the last seconds; None at the first reading."""


class Counter(Protocol):
    """Counter of parts of a machine."""

    def read(self) -> Mapping[Part, float]:
        """Return joules since any fixed moment, by part; raise any exception if the counter fails."""
        ...


class RaplCounter:
    """Running average power limit: counters of x86 processors and their memory, in `/sys/class/powercap`."""

    def __init__(self, root: Path = ROOT) -> None:
        """Find the counters. Raises OSError if there are none, or if this user may not read them."""
        self._files: list[tuple[Part, Path, int]] = []
        """Part, file in microjoules, and the value at which it starts anew."""
        self._last: dict[Path, int] = {}
        self._total: dict[Part, int] = {}
        for domain in sorted((root / "sys/class/powercap").glob("intel-rapl:*")):
            name = (domain / "name").read_text("utf-8").strip()
            part: Part | None = "cpu" if name.startswith("package") else "memory" if name == "dram" else None
            if part is not None:
                end = int((domain / "max_energy_range_uj").read_text("utf-8"))
                self._files.append((part, domain / "energy_uj", end))
        if not self._files:
            raise FileNotFoundError("this system has no counters of its processors' energy")
        self.read()

    def read(self) -> Mapping[Part, float]:
        for part, file, end in self._files:
            now = int(file.read_text("utf-8"))
            self._total[part] = self._total.get(part, 0) + (now - self._last.get(file, now)) % (end + 1)
            self._last[file] = now
        return {part: microjoules / 1e6 for part, microjoules in self._total.items()}


class NvmlCounter:
    """Counters of NVIDIA's GPUs, from Volta on. If one GPU has none, the energy of all is unknown."""

    def __init__(self, nvml: Any) -> None:
        """Open the driver's library, the module `pynvml`. Raises its errors."""
        nvml.nvmlInit()
        self._nvml = nvml
        self._gpus = [nvml.nvmlDeviceGetHandleByIndex(number) for number in range(nvml.nvmlDeviceGetCount())]
        if not self._gpus:
            raise FileNotFoundError("the driver has no GPU")
        self.read()

    def read(self) -> Mapping[Part, float]:
        millijoules = sum(self._nvml.nvmlDeviceGetTotalEnergyConsumption(gpu) for gpu in self._gpus)
        return {"gpu": millijoules / 1e3}


class AppleCounter:
    """Counters of Apple's chips, by the module `zeus_apple_silicon`. They need no root."""

    def __init__(self, zeus: Any) -> None:
        """Subscribe to the counters. Raises the module's errors."""
        self._monitor = zeus.AppleEnergyMonitor()
        if not self.read():
            raise FileNotFoundError("this chip counts no energy")

    def read(self) -> Mapping[Part, float]:
        used = self._monitor.get_cumulative_energy()
        named: dict[Part, tuple[float | None, ...]] = {
            "cpu": (used.cpu_total_mj,),
            "gpu": (used.gpu_mj, used.gpu_sram_mj),
            "memory": (used.dram_mj,),
        }
        return {
            part: sum(value or 0 for value in values) / 1e3
            for part, values in named.items()
            if values[0] is not None
        }


def find_counters(root: Path = ROOT) -> tuple[list[Counter], list[str]]:
    """Return this machine's counters, and why others cannot be read. A machine without such a part is no reason."""
    makers: tuple[Callable[[], Counter], ...] = (
        lambda: RaplCounter(root),
        lambda: NvmlCounter(importlib.import_module("pynvml")),
        lambda: AppleCounter(importlib.import_module("zeus_apple_silicon")),
    )
    found: list[Counter] = []
    problems: list[str] = []
    for make in makers:
        try:
            found.append(make())
        except (FileNotFoundError, ModuleNotFoundError):
            continue
        except PermissionError as error:
            problems.append(f"{error.filename} can be read by root alone")
        except Exception as error:  # noqa: BLE001 - the driver's and the modules' own kinds
            if type(error).__name__ != "NVMLError_LibraryNotFound":
                problems.append(f"{type(error).__name__}: {error}")
    return found, problems


class EnergyMeter:
    """Energy of this machine since the first reading."""

    def __init__(
        self, counters: Iterable[Counter] | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Read the given counters, by default all of this machine after `open`."""
        self._counters = None if counters is None else [*counters]
        self._clock = clock
        self._samples: deque[tuple[float, dict[Part, float]]] = deque()
        self._first: dict[Part, float] = {}

    def open(self) -> None:
        """Find this machine's counters, which may load a driver's library."""
        if self._counters is None:
            self._counters, problems = find_counters()
            for problem in problems:
                log.info("A part of this machine's energy is not counted: %s", problem)

    def read(self) -> tuple[PartEnergy, ...]:
        """Return the energy of every part that is counted. A counter that fails is not asked again.

        If one goes back, as after a reset of its device, all start anew.
        """
        now, joules = self._clock(), self._read_counters(self._counters or [])
        if self._samples and any(
            value < self._samples[-1][1].get(part, 0.0) for part, value in joules.items()
        ):
            self._samples.clear()
            self._first.clear()
        for part, value in joules.items():
            self._first.setdefault(part, value)
        while len(self._samples) > 1 and self._samples[1][0] <= now - _POWER_S:
            self._samples.popleft()
        begun_s, before = self._samples[0] if self._samples else (now, {})
        self._samples.append((now, joules))
        return tuple(
            PartEnergy(
                part,
                joules[part] - self._first[part],
                (joules[part] - before[part]) / (now - begun_s) if part in before and now > begun_s else None,
            )
            for part in PARTS
            if part in joules
        )

    def _read_counters(self, counters: list[Counter]) -> dict[Part, float]:
        joules: dict[Part, float] = {}
        for counter in [*counters]:
            try:
                joules |= counter.read()
            except Exception as error:  # noqa: BLE001 - a driver may be unloaded
                log.warning("%s failed, and is no longer read: %s", type(counter).__name__, error)
                counters.remove(counter)
        return joules


@dataclass(frozen=True, slots=True)
class _Sample:
    at_s: float
    joules: Mapping[str, Mapping[str, float]]
    """Energy of each machine's parts."""
    tokens: int


class EnergyPerToken:
    """Energy of all parts of the machines that compute, per generated token, during about the last minute.

    Energy of prompts and of idle time in between is included.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._samples: deque[_Sample] = deque()

    def update(self, machines: Mapping[str, Sequence[PartEnergy] | None], tokens: int) -> float | None:
        """Return joules per token, or None if no token was generated or a machine did not count meanwhile.

        The result is as exact as the calls are frequent: a call that follows a pause of two windows begins anew.

        Args:
            machines: energy of each machine that computes; None if the part that computes is not counted.
            tokens: number of tokens generated so far.
        """
        counted = {node: parts for node, parts in machines.items() if parts is not None}
        if not counted or len(counted) < len(machines):
            self._samples.clear()
            return None
        joules = {node: {used.part: used.joules for used in parts} for node, parts in counted.items()}
        now = _Sample(self._clock(), joules, tokens)
        if self._samples and not _continues(self._samples[-1], now):
            self._samples.clear()
        while len(self._samples) > 1 and self._samples[1].at_s <= now.at_s - _WINDOW_S:
            self._samples.popleft()
        if self._samples and self._samples[0].at_s < now.at_s - _STALE_S:
            self._samples.popleft()
        first = self._samples[0] if self._samples else now
        if first is now or now.at_s - self._samples[-1].at_s >= _SAMPLE_S:
            self._samples.append(now)
        used = [sum(now.joules[node].values()) - sum(first.joules[node].values()) for node in joules]
        # A machine whose next report has not arrived yet has used energy, too.
        if tokens <= first.tokens or min(used) <= 0:
            return None
        return sum(used) / (tokens - first.tokens)


def _continues(before: _Sample, now: _Sample) -> bool:
    """Return False if a machine came or went, or counts anew."""
    return (
        before.joules.keys() == now.joules.keys()
        and before.tokens <= now.tokens
        and all(_grows(before.joules[node], joules) for node, joules in now.joules.items())
    )


def _grows(before: Mapping[str, float], now: Mapping[str, float]) -> bool:
    return before.keys() == now.keys() and all(before[part] <= joules for part, joules in now.items())
