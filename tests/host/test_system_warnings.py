"""Warnings of logind, whose stand-in speaks D-Bus over a socket, and the battery."""

from __future__ import annotations

from pathlib import Path
from queue import SimpleQueue

import psutil
import pytest
from tests.eventually import eventually
from tests.host.logind import Logind, logind

from mlx_ring.host import power
from mlx_ring.host.power import SystemWarnings, Warned, battery_left

LIMIT_S = 30


class Listener:
    """Warnings of the system, in order."""

    def __init__(self, bus: str) -> None:
        self._received: SimpleQueue[Warned] = SimpleQueue()
        self.warnings = SystemWarnings(self._received.put, bus)
        self.warnings.open()

    def next(self) -> Warned:
        return self._received.get(timeout=LIMIT_S)

    @property
    def has_more(self) -> bool:
        return not self._received.empty()


def wait_for_lock(system: Logind) -> None:
    assert system.is_locked.acquire(timeout=LIMIT_S)


def test_the_system_waits_until_it_may_sleep_and_for_a_new_lock_each_time(tmp_path: Path) -> None:
    with logind(tmp_path, 7_000_000) as system:
        listener = Listener(system.address)
        wait_for_lock(system)
        assert listener.warnings.delay_s == 7.0
        assert system.asked == [("sleep:shutdown", "mlx-ring", "Its layers move to other machines.", "delay")]
        assert [match.count("PrepareFor") for match in system.matches] == [1, 1]
        for number, signal, says in ((0, "PrepareForSleep", "sleep"), (1, "PrepareForShutdown", "shutdown")):
            system.warn(signal, begins=True)
            assert listener.next() == says
            assert system.is_held(number)
            listener.warnings.let_go()
            system.wait_for_release(number)
            system.warn(signal, begins=False)
            assert listener.next() == "awake"
            wait_for_lock(system)
        assert len(system.asked) == 3
        listener.warnings.close()
        system.wait_for_release(2)


def test_a_machine_is_awake_also_if_logind_grants_no_lock_and_asks_again(tmp_path: Path) -> None:
    with logind(tmp_path) as system:
        listener = Listener(system.address)
        wait_for_lock(system)
        system.warn("PrepareForSleep", begins=True)
        assert listener.next() == "sleep"
        listener.warnings.let_go()
        system.refusals = 1
        system.warn("PrepareForSleep", begins=False)
        assert listener.next() == "awake"
        wait_for_lock(system)
        assert system.refusals == 0
        listener.warnings.close()


@pytest.mark.parametrize("sleeps", [False, True], ids=["awake", "asleep"])
def test_a_bus_that_breaks_ends_the_warnings_and_the_absence(
    sleeps: bool,  # noqa: FBT001 - a parameter of pytest
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with logind(tmp_path) as system:
        listener = Listener(system.address)
        wait_for_lock(system)
        if sleeps:
            system.warn("PrepareForSleep", begins=True)
            assert listener.next() == "sleep"
    assert listener.next() == "awake"
    assert "There are no more warnings" in caplog.text
    assert not listener.has_more


def test_without_a_bus_there_are_no_warnings(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG", power.__name__)
    listener = Listener(f"unix:path={tmp_path}/none")
    eventually(lambda: "This machine gives no warnings of sleep" in caplog.text)
    assert listener.warnings.delay_s == 0.0
    listener.warnings.let_go()
    listener.warnings.close()
    assert not listener.has_more


def give_battery(monkeypatch: pytest.MonkeyPatch, power_plugged: object) -> None:
    battery = type("Battery", (), {"power_plugged": power_plugged, "percent": 12})
    monkeypatch.setattr(psutil, "sensors_battery", lambda: battery, raising=False)


@pytest.mark.parametrize(("plugged", "left"), [("yes", None), ("unknown", None), ("no", 0.12)])
def test_the_battery_counts_while_the_machine_runs_on_it(
    plugged: str, left: float | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(power, "_SUPPLIES", tmp_path)
    give_battery(monkeypatch, {"yes": True, "unknown": None, "no": False}[plugged])
    assert battery_left() == left


def test_the_battery_of_a_mouse_does_not_count(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(power, "_SUPPLIES", tmp_path)
    give_battery(monkeypatch, power_plugged=False)
    (tmp_path / "hidpp_battery_0").mkdir()
    (tmp_path / "hidpp_battery_0" / "scope").write_text("Device\n")
    assert battery_left() is None
    (tmp_path / "BAT0").mkdir()
    assert battery_left() == 0.12
