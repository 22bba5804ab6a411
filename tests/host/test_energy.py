"""Counters of energy, mean power, and energy per generated token."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mlx_ring.host.energy import (
    AppleCounter,
    EnergyMeter,
    EnergyPerToken,
    NvmlCounter,
    Part,
    PartEnergy,
    RaplCounter,
    find_counters,
)


class Steps:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def write_domain(root: Path, domain: str, name: str, microjoules: int, end: int = 999) -> Path:
    folder = root / "sys/class/powercap" / domain
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "name").write_text(f"{name}\n")
    (folder / "max_energy_range_uj").write_text(f"{end}\n")
    (folder / "energy_uj").write_text(f"{microjoules}\n")
    return folder / "energy_uj"


def test_rapl_adds_packages_and_memory_and_continues_where_a_counter_starts_anew(tmp_path: Path) -> None:
    first = write_domain(tmp_path, "intel-rapl:0", "package-0", 900)
    second = write_domain(tmp_path, "intel-rapl:1", "package-1", 0)
    memory = write_domain(tmp_path, "intel-rapl:0:1", "dram", 10)
    for domain, name in (
        ("intel-rapl:0:0", "core"),
        ("intel-rapl:2", "psys"),
        ("intel-rapl-mmio:0", "package-0"),
    ):
        write_domain(tmp_path, domain, name, 500)
    (tmp_path / "sys/class/powercap/intel-rapl").mkdir()
    counter = RaplCounter(tmp_path)
    assert counter.read() == {"cpu": 0.0, "memory": 0.0}
    first.write_text("50\n")  # 900 to 999, then 0 to 50
    second.write_text("7\n")
    memory.write_text("30\n")
    assert counter.read() == {"cpu": pytest.approx(157e-6), "memory": pytest.approx(20e-6)}
    assert counter.read()["cpu"] == pytest.approx(157e-6)


class Nvml:
    """NVIDIA's driver with some GPUs. Their energy is in millijoules, or an error that reading raises."""

    def __init__(self, *energy: int | Exception) -> None:
        self.energy = [*energy]

    def nvmlInit(self) -> None:  # noqa: N802 - the driver's name
        """Do nothing."""

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802 - the driver's name
        return len(self.energy)

    def nvmlDeviceGetHandleByIndex(self, number: int) -> int:  # noqa: N802 - the driver's name
        return number

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: int) -> int:  # noqa: N802 - the driver's name
        energy = self.energy[handle]
        if isinstance(energy, Exception):
            raise energy
        return energy


def test_nvml_adds_gpus_and_gives_no_sum_if_one_counts_nothing() -> None:
    assert NvmlCounter(Nvml(1500, 500)).read() == {"gpu": 2.0}
    with pytest.raises(RuntimeError, match="Not Supported"):
        NvmlCounter(Nvml(1500, RuntimeError("Not Supported")))


def apple(**used: float | None) -> Any:
    parts = dict.fromkeys(("cpu_total_mj", "gpu_mj", "gpu_sram_mj", "dram_mj", "ane_mj"))
    monitor = SimpleNamespace(get_cumulative_energy=lambda: SimpleNamespace(**parts | used))
    return SimpleNamespace(AppleEnergyMonitor=lambda: monitor)


def test_apple_parts_that_the_chip_does_not_count_are_left_out() -> None:
    whole = apple(cpu_total_mj=1000, gpu_mj=2000, gpu_sram_mj=500, dram_mj=0, ane_mj=9)
    assert AppleCounter(whole).read() == {"cpu": 1.0, "gpu": 2.5, "memory": 0.0}
    assert AppleCounter(apple(cpu_total_mj=1000, gpu_sram_mj=500)).read() == {"cpu": 1.0}
    with pytest.raises(FileNotFoundError, match="no energy"):
        AppleCounter(apple())


def fail(error: Exception) -> Callable[[], None]:
    def raises() -> None:
        raise error

    return raises


def test_counters_that_cannot_be_read_are_named_and_those_that_are_not_there_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = type("NVMLError_LibraryNotFound", (Exception,), {})
    for name in ("pynvml", "zeus_apple_silicon"):
        monkeypatch.setitem(sys.modules, name, None)
    assert find_counters(tmp_path) == ([], [])
    monkeypatch.setitem(sys.modules, "pynvml", SimpleNamespace(nvmlInit=fail(missing())))
    assert find_counters(tmp_path) == ([], [])
    monkeypatch.setitem(sys.modules, "pynvml", SimpleNamespace(nvmlInit=fail(OSError("driver mismatch"))))
    assert find_counters(tmp_path) == ([], ["OSError: driver mismatch"])
    monkeypatch.setitem(sys.modules, "pynvml", Nvml(1500))
    monkeypatch.setitem(sys.modules, "zeus_apple_silicon", apple(cpu_total_mj=5))
    file = write_domain(tmp_path, "intel-rapl:0", "package-0", 1)
    counters, problems = find_counters(tmp_path)
    assert ([type(each) for each in counters], problems) == ([RaplCounter, NvmlCounter, AppleCounter], [])

    def refuse(path: Path, *_: object) -> str:
        if path == file:
            raise PermissionError(13, "Permission denied", str(path))
        return "package-0" if path.name == "name" else "9"

    monkeypatch.setattr(Path, "read_text", refuse)
    counters, problems = find_counters(tmp_path)
    assert [type(each) for each in counters] == [NvmlCounter, AppleCounter]
    assert problems == [f"{file} can be read by root alone"]


class Ramp:
    """A counter that follows the clock, until it fails."""

    def __init__(self, clock: Steps, part: Part, watts: float) -> None:
        self.part: Part = part
        self.clock, self.watts = clock, watts
        self.fails = False

    def read(self) -> Mapping[Part, float]:
        if self.fails:
            raise OSError("the driver was unloaded")
        return {self.part: 1000.0 + self.watts * self.clock.now_s}


def test_power_is_the_mean_of_the_last_seconds_and_energy_begins_with_the_first_reading() -> None:
    clock = Steps()
    cpu, gpu = Ramp(clock, "cpu", 30.0), Ramp(clock, "gpu", 100.0)
    meter = EnergyMeter([gpu, cpu], clock)
    assert meter.read() == (PartEnergy("cpu", 0.0), PartEnergy("gpu", 0.0))
    assert meter.read() == (PartEnergy("cpu", 0.0), PartEnergy("gpu", 0.0))  # at the same moment
    for _ in range(20):
        clock.now_s += 0.5
        assert {used.part: used.watts for used in meter.read()} == {"cpu": 30.0, "gpu": 100.0}
    cpu.watts = 33.0  # as if the last half second had taken more
    joules = 3.0 * (clock.now_s + 0.5) + 30.0 * 0.5
    clock.now_s += 0.5
    assert meter.read()[0].watts == pytest.approx((joules + 30.0 * 1.5) / 2.0)
    gpu.fails = True
    assert [used.part for used in meter.read()] == ["cpu"]
    gpu.fails = False
    assert [used.part for used in meter.read()] == ["cpu"]


def test_counter_that_goes_back_starts_anew() -> None:
    clock = Steps()
    cpu, gpu = Ramp(clock, "cpu", 30.0), Ramp(clock, "gpu", 100.0)
    meter = EnergyMeter([cpu, gpu], clock)
    meter.read()
    clock.now_s = 10.0
    assert [used.joules for used in meter.read()] == [300.0, 1000.0]
    gpu.watts = 1.0
    clock.now_s = 11.0
    assert meter.read() == (PartEnergy("cpu", 0.0), PartEnergy("gpu", 0.0))
    clock.now_s = 12.0
    assert meter.read() == (PartEnergy("cpu", 30.0, 30.0), PartEnergy("gpu", 1.0, 1.0))


def test_own_counters_are_read_once_they_are_open(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Steps()
    monkeypatch.setattr("mlx_ring.host.energy.find_counters", lambda: ([Ramp(clock, "cpu", 5.0)], ["no GPU"]))
    meter = EnergyMeter(clock=clock)
    assert meter.read() == ()
    meter.open()
    meter.open()
    assert meter.read() == (PartEnergy("cpu", 0.0),)


def parts(joules: float, memory: float = 0.0) -> tuple[PartEnergy, ...]:
    return (PartEnergy("cpu", joules), PartEnergy("memory", memory))


def test_energy_per_token_is_that_of_all_parts_of_all_machines_during_the_last_minute() -> None:
    clock = Steps()
    each = EnergyPerToken(clock)
    assert each.update({"a": parts(5.0), "b": parts(0.0)}, 7) is None
    for second in range(1, 200):
        clock.now_s = float(second)
        # From the 100th second on, they use three times the energy for the same tokens.
        factor = second if second < 100 else 100 + 3 * (second - 100)
        used = each.update(
            {"a": parts(5.0 + 20 * factor, 4.0 * factor), "b": parts(6.0 * factor)}, 7 + 10 * second
        )
        assert used is not None
        if second < 100 or second > 160:
            assert used == pytest.approx(3.0 if second < 100 else 9.0)


@pytest.mark.parametrize(
    "machines",
    [{}, {"a": None}, {"a": parts(90.0), "b": None}, {"a": parts(90.0), "b": parts(1.0)}, {"a": parts(2.0)}],
    ids=["none", "uncounted", "one_uncounted", "another", "restarted"],
)
def test_energy_per_token_begins_anew_when_the_machines_or_their_counters_change(
    machines: dict[str, tuple[PartEnergy, ...] | None],
) -> None:
    clock = Steps()
    each = EnergyPerToken(clock)
    each.update({"a": parts(10.0)}, 0)
    clock.now_s = 5.0
    assert each.update({"a": parts(60.0)}, 10) == 5.0
    clock.now_s = 10.0
    assert each.update(machines, 20) is None


def test_energy_without_tokens_is_not_divided() -> None:
    clock = Steps()
    each = EnergyPerToken(clock)
    each.update({"a": parts(10.0)}, 3)
    clock.now_s = 30.0
    assert each.update({"a": parts(60.0)}, 3) is None
    clock.now_s = 31.0
    assert each.update({"a": parts(70.0)}, 4) == 60.0  # the idle time before it counts, too


def test_energy_per_token_of_a_long_pause_without_samples_is_unknown() -> None:
    clock = Steps()
    each = EnergyPerToken(clock)
    each.update({"a": parts(0.0)}, 0)
    clock.now_s = 8 * 3600.0
    assert each.update({"a": parts(20 * clock.now_s)}, 100) is None
    clock.now_s += 2.0
    assert each.update({"a": parts(20 * clock.now_s + 80.0)}, 140) == pytest.approx(3.0)


def test_energy_per_token_is_unknown_until_every_machine_has_reported_again() -> None:
    clock = Steps()
    each = EnergyPerToken(clock)
    each.update({"a": parts(1.0), "b": parts(4.0)}, 0)
    clock.now_s = 0.5
    assert each.update({"a": parts(1.0), "b": parts(4.0)}, 10) is None
    assert each.update({"a": parts(11.0), "b": parts(4.0)}, 10) is None
    assert each.update({"a": parts(11.0), "b": parts(14.0)}, 10) == 2.0
