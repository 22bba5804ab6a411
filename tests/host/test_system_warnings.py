"""Warnings of logind, whose stand-in speaks D-Bus over a socket."""

from __future__ import annotations

from pathlib import Path
from queue import SimpleQueue

import psutil
import pytest
from tests.eventually import eventually
from tests.host.logind import logind

from mlx_ring.host.power import SystemWarnings, Warned, battery_left

LIMIT_S = 30


def test_the_system_waits_until_it_may_sleep_and_for_a_new_lock_each_time(tmp_path: Path) -> None:
    received: SimpleQueue[Warned] = SimpleQueue()
    with logind(tmp_path, 7_000_000) as system:
        warnings = SystemWarnings(received.put, system.address)
        warnings.open()
        assert warnings.delay_s == 7.0
        assert system.asked == [("sleep:shutdown", "mlx-ring", "Its layers move to other machines.", "delay")]
        assert [match.count("PrepareFor") for match in system.matches] == [1, 1]
        for number, signal, says in ((0, "PrepareForSleep", "sleep"), (1, "PrepareForShutdown", "shutdown")):
            system.warn(signal, begins=True)
            assert received.get(timeout=LIMIT_S) == says
            assert system.is_held(number)
            warnings.let_go()
            system.wait_for_release(number)
            system.warn(signal, begins=False)
            assert received.get(timeout=LIMIT_S) == "awake"
        assert len(system.asked) == 3
        assert system.is_held(2)
        warnings.close()
        system.wait_for_release(2)


def test_a_bus_that_breaks_ends_the_warnings(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    received: SimpleQueue[Warned] = SimpleQueue()
    with logind(tmp_path) as system:
        warnings = SystemWarnings(received.put, system.address)
        warnings.open()
    eventually(lambda: "There are no more warnings" in caplog.text, bool)
    warnings.close()
    assert received.empty()


def test_without_a_bus_there_are_no_warnings(tmp_path: Path) -> None:
    warnings = SystemWarnings(print, f"unix:path={tmp_path}/none")
    warnings.open()
    assert warnings.delay_s == 0.0
    warnings.let_go()
    warnings.close()


@pytest.mark.parametrize(("power", "left"), [("plugged", None), ("unknown", None), ("none", 0.12)])
def test_the_battery_counts_while_the_machine_runs_on_it(
    power: str, left: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    plugged = {"plugged": True, "unknown": None, "none": False}[power]
    battery = type("Battery", (), {"power_plugged": plugged, "percent": 12})
    monkeypatch.setattr(psutil, "sensors_battery", lambda: battery, raising=False)
    assert battery_left() == left
