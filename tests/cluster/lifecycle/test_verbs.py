"""Start and stop of a cluster, on machines whose commands are simulated."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from mlx_ring.cluster.lifecycle import verbs
from mlx_ring.cluster.lifecycle.arguments import Machine
from mlx_ring.cluster.lifecycle.installation import Installation
from mlx_ring.cluster.lifecycle.programs import ReadyMachine
from mlx_ring.cluster.lifecycle.wheels import WheelStore
from mlx_ring.core.errors import HostFailed, HostUnreached
from mlx_ring.host.running import Running
from mlx_ring.settings.devices_file import Device, DevicesFile

STORE = WheelStore(Path("packages"))
FILE = DevicesFile((Device("a", "a", is_coordinator=True), Device("b", "b"), Device("c", "c")))


class Machines:
    """Simulated machines that record commands and fail with the given errors, by machine and verb; None is success."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, failing: Mapping[tuple[str, str], Sequence[HostFailed | None]]
    ) -> None:
        self.commands: list[tuple[str, str]] = []
        self._failing = {key: list(errors) for key, errors in failing.items()}
        self.running: tuple[Running, ...] = (Running("agent", 2, 1.0, "other"),)
        self.answers = ["{}"]
        """Answers of the head; the last one is repeated."""
        self.waits = 0
        """Number of times that the head does not answer yet."""
        monkeypatch.setattr(verbs, "_AGAIN_S", 0.0)
        for name in ("find_machines", "make_ready", "find_program", "any_program", "run_on"):
            monkeypatch.setattr(verbs, name, getattr(self, name))
        machines = self

        def on_host(ready: ReadyMachine, verb: str, *_words: str, **_more: object) -> str:
            return machines.on_host(ready.machine, verb)

        monkeypatch.setattr(ReadyMachine, "on_host", on_host)

    def find_machines(self, devices: Sequence[Device]) -> list[Machine]:
        return [Machine(one, one.name, is_here=False) for one in devices]

    def make_ready(self, machine: Machine, store: WheelStore, report: Callable[[str], None]) -> ReadyMachine:
        del store, report
        return ReadyMachine(machine, ("mlx-ring",), Installation({}, "/s", machine.name, self.running))

    def find_program(self, machine: Machine) -> str:
        return self.on_host(machine, "about")

    def any_program(self, machine: Machine, found: str) -> ReadyMachine:
        del found
        return self.make_ready(machine, STORE, print)

    def run_on(self, machine: Machine, words: Sequence[str]) -> str:
        return f"token of {machine.name} by {words[0]}"

    def on_host(self, machine: Machine, verb: str) -> str:
        self.commands.append((machine.name, verb))
        failures = self._failing.get((machine.name, verb), [])
        if failures and (failure := failures.pop(0)) is not None:
            raise failure
        if verb == "ask":
            return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if verb == "wait-until-ready" and self.waits:
            self.waits -= 1
            return ""
        said = {"run": "7\n", "wait-until-ready": "http://a\n", "model": "demo\n"}
        return said.get(verb, "")


def test_a_restarted_machine_that_stays_away_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    machines = Machines(monkeypatch, {})
    why = "its battery is below --min-battery"
    machines.running = (Running("head", 2, 1.0, "other"), Running("agent", 3, 1.0, "other", away=why))
    monkeypatch.setattr(machines, "answers", ['{"nodes": []}'])
    with pytest.raises(HostFailed, match=f"^b: it has restarted, and stays away, because {why}"):
        verbs.restart_machine(FILE, "b", report=lambda _: None, timeout_s=60.0, force=False)
    assert ("b", "run") in machines.commands


def start() -> verbs.StartedCluster:
    return verbs.start(FILE, "demo", report=lambda _: None, store=STORE, timeout_s=60.0)


def test_a_machine_that_cannot_be_stopped_does_not_keep_others_running(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machines = Machines(monkeypatch, {("a", "stop"): [HostFailed("a is lost.")]})
    with pytest.raises(HostFailed, match=r"^a is lost\.$"):
        start()
    assert {name for name, verb in machines.commands if verb == "stop"} == {"a", "b", "c"}


def test_a_restart_stops_nothing_while_a_machine_is_out_of_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    machines = Machines(monkeypatch, {})

    def unreached(machine: Machine, **_more: object) -> ReadyMachine:
        raise HostUnreached(f"{machine.name} cannot be reached.")

    monkeypatch.setattr(verbs, "make_ready", unreached)
    with pytest.raises(HostFailed, match="b cannot be reached"):
        verbs.start(FILE, "demo", report=lambda _: None, store=STORE, timeout_s=60.0, anew=True)
    assert not machines.commands


def test_a_restart_stops_what_runs_as_the_file_says(monkeypatch: pytest.MonkeyPatch) -> None:
    def is_as_configured(_run: object) -> bool:
        return True

    monkeypatch.setattr("mlx_ring.cluster.lifecycle.verbs._Run.is_as_configured", is_as_configured)
    machines = Machines(monkeypatch, {})
    assert start().was_running
    assert not [verb for _name, verb in machines.commands if verb == "stop"]
    verbs.start(FILE, "demo", report=lambda _: None, store=STORE, timeout_s=60.0, anew=True)
    assert {name for name, verb in machines.commands if verb == "stop"} == {"a", "b", "c"}


def test_the_reason_of_a_failed_start_is_reported_even_if_stopping_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    failing = {("b", "run"): [HostFailed("b has no room.")], ("c", "stop"): [None, HostFailed("c is lost.")]}
    machines = Machines(monkeypatch, failing)
    reports: list[str] = []
    with pytest.raises(HostFailed, match=r"^b has no room\.$"):
        verbs.start(FILE, "demo", report=reports.append, store=STORE, timeout_s=60.0)
    assert machines.commands.count(("b", "stop")) == 2
    assert reports[-1] == "Not everything was stopped: c is lost."


def test_a_short_network_failure_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    unreached = HostUnreached("away.")
    machines = Machines(
        monkeypatch, {("a", "wait-until-ready"): [unreached, unreached], ("b", "about"): [unreached]}
    )
    assert start().url == "http://a"
    assert machines.commands.count(("a", "stop")) == 1, "before the start"


def test_a_head_out_of_reach_three_times_in_a_row_ends_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    unreached = HostUnreached("away.")
    machines = Machines(monkeypatch, {("a", "wait-until-ready"): [unreached] * 3})
    with pytest.raises(HostUnreached):
        start()
    assert machines.commands.count(("b", "stop")) == 2


def test_a_serving_cluster_survives_a_failed_status_request(monkeypatch: pytest.MonkeyPatch) -> None:
    machines = Machines(monkeypatch, {("a", "ask"): [HostFailed("The key is wrong.")]})
    with pytest.raises(HostFailed, match="The key is wrong"):
        start()
    assert machines.commands.count(("a", "stop")) == 1, "before the start"


def test_a_start_names_a_machine_that_the_file_does_not_list_once_while_it_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machines = Machines(monkeypatch, {})
    old: dict[str, Any] = {
        "id": "old",
        "name": "old.local",
        "address": "10.0.0.3",
        "is_head": False,
        "state": "attending",
        "stages": [],
    }
    listed = old | {"id": "b"}
    # It gets layers while the start waits.
    answers = [json.dumps({"nodes": [listed, {**old, "stages": stages}]}) for stages in ([], ["demo/1"])]
    monkeypatch.setattr(machines, "waits", 2)
    monkeypatch.setattr(machines, "answers", answers)
    reports: list[str] = []
    verbs.start(FILE, "demo", report=reports.append, store=STORE, timeout_s=60.0)
    (named,) = [said for said in reports if "belongs to the cluster" in said]
    assert named == (
        "old (old.local at 10.0.0.3) belongs to the cluster, but the file does not list it. It may get layers. "
        "Remove it by `mlx-ring node remove old` on a, or add it to the file."
    )
    assert machines.commands.count(("a", "ask")) == 3, "twice while it waits, and once at the end"
