"""Warnings of logind and of IOKit, each with a stand-in, and the battery."""

from __future__ import annotations

import _ctypes
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue

import psutil
import pytest
from tests.eventually import eventually
from tests.host.iokit import (
    CAN_SLEEP,
    HAS_POWERED_ON,
    REGISTERED,
    UNREGISTERED,
    WILL_NOT_SLEEP,
    WILL_POWER_ON,
    WILL_SLEEP,
    mac,
)
from tests.host.logind import Logind, logind

from mlx_ring.host import power
from mlx_ring.host.power import LogindWarnings, MacWarnings, OnWarning, SystemWarnings, Warned, battery_left

LIMIT_S = 30


class Listener:
    """Warnings of the system, in order."""

    def __init__(self, make: Callable[[OnWarning], SystemWarnings]) -> None:
        self._received: SimpleQueue[Warned] = SimpleQueue()
        self.warnings = make(self._received.put)
        self.warnings.open()

    def next(self) -> Warned:
        return self._received.get(timeout=LIMIT_S)

    @property
    def has_more(self) -> bool:
        return not self._received.empty()


def on_bus(address: str) -> Callable[[OnWarning], LogindWarnings]:
    return lambda on_warning: LogindWarnings(on_warning, address)


def wait_for_lock(system: Logind) -> None:
    assert system.is_locked.acquire(timeout=LIMIT_S)


def test_the_system_waits_until_it_may_sleep_and_for_a_new_lock_each_time(tmp_path: Path) -> None:
    with logind(tmp_path, 7_000_000) as system:
        listener = Listener(on_bus(system.address))
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
        listener = Listener(on_bus(system.address))
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
        listener = Listener(on_bus(system.address))
        wait_for_lock(system)
        if sleeps:
            system.warn("PrepareForSleep", begins=True)
            assert listener.next() == "sleep"
    assert listener.next() == "awake"
    assert "There are no more warnings" in caplog.text
    assert not listener.has_more


def test_without_a_bus_there_are_no_warnings(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG", power.__name__)
    listener = Listener(on_bus(f"unix:path={tmp_path}/none"))
    eventually(lambda: "This machine gives no warnings of sleep" in caplog.text)
    assert listener.warnings.delay_s == 0.0
    listener.warnings.let_go()
    listener.warnings.close()
    assert not listener.has_more


def test_a_mac_waits_for_the_answer_to_each_message_that_announces_sleep(tmp_path: Path) -> None:
    with mac(tmp_path) as system:
        listener = Listener(system.warnings)
        assert system.calls(2) == REGISTERED
        for number in (7, 1 << 40):
            system.send(WILL_SLEEP, number)
            assert listener.next() == "sleep"
            assert listener.warnings.delay_s == 26.0
            listener.warnings.let_go()
            listener.warnings.let_go()
            system.send(WILL_POWER_ON, 1)
            system.send(HAS_POWERED_ON, 2)
            assert listener.next() == "awake"
            listener.warnings.let_go()
            assert system.calls(1) == (f"allow {number}",)
        system.send(WILL_SLEEP, 3)
        assert listener.next() == "sleep"
        listener.warnings.close()
        assert system.calls(5) == ("allow 3", *UNREGISTERED)
        assert not listener.has_more


def test_a_mac_may_sleep_when_it_is_idle(tmp_path: Path) -> None:
    with mac(tmp_path) as system:
        listener = Listener(system.warnings)
        assert system.calls(2) == REGISTERED
        system.send(CAN_SLEEP, 5)
        assert system.calls(1) == ("allow 5",)
        assert not listener.has_more
        system.send(WILL_NOT_SLEEP, 6)
        assert listener.next() == "awake"
        listener.warnings.close()
        assert system.calls(4) == UNREGISTERED


def test_a_mac_whose_run_loop_ends_is_awake_and_need_not_wait(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with mac(tmp_path) as system:
        listener = Listener(system.warnings)
        system.send(WILL_SLEEP, 5)
        assert listener.next() == "sleep"
        system.end()
        assert listener.next() == "awake"
        assert system.calls(7) == (*REGISTERED, "allow 5", *UNREGISTERED)
        assert "There are no more warnings" in caplog.text
        listener.warnings.let_go()


def test_a_mac_that_sleeps_after_the_end_of_the_event_loop_need_not_wait(tmp_path: Path) -> None:
    def fail(_what: Warned) -> None:
        raise RuntimeError("Event loop is closed")

    with mac(tmp_path) as system:
        warnings = system.warnings(fail)
        warnings.open()
        system.send(WILL_SLEEP, 5)
        assert system.calls(3) == (*REGISTERED, "allow 5")
        warnings.close()
        assert system.calls(4) == UNREGISTERED


@pytest.mark.parametrize("kind", ["no library", "another library", "refusal"])
def test_without_iokit_there_are_no_warnings(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level("DEBUG", power.__name__)
    monkeypatch.setenv("STAND_IN_REFUSES", "1")
    with mac(tmp_path) as system:
        paths = {
            "no library": (tmp_path / "none", tmp_path / "none"),
            "another library": (Path(_ctypes.__file__), Path(_ctypes.__file__)),
            "refusal": (system.path, system.path),
        }[kind]
        listener = Listener(lambda on_warning: MacWarnings(on_warning, *paths))
        eventually(lambda: "This machine gives no warnings of sleep" in caplog.text)
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
