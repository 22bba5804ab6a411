"""Actions of `mlx-ring cluster` on all machines of a devices file."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlx_ring.cluster.lifecycle.arguments import (
    Machine,
    agent_arguments,
    find_machines,
    head_arguments,
    head_host,
    unlisted_nodes,
)
from mlx_ring.cluster.lifecycle.host_side import whole_path
from mlx_ring.cluster.lifecycle.programs import ReadyMachine, any_program, find_program, make_ready
from mlx_ring.cluster.lifecycle.shell import on_all, run_on
from mlx_ring.cluster.lifecycle.wheels import WheelStore
from mlx_ring.core.errors import ConfigError, HostFailed, HostUnreached
from mlx_ring.host.addresses import HeadAddress
from mlx_ring.host.running import Running, started_with
from mlx_ring.settings.devices_file import DevicesFile

_TOKEN_LIFE = "1h"  # noqa: S105 - a lifetime, not a secret
_SLICE_S = 10.0
_ANSWER_S = 3660.0
"""Time limit for an answer: layers of a large model take long to move."""
_STOP_S = 120.0
_MOST_UNREACHED = 3
_AGAIN_S = 2.0
_LOOK_S = 0.5
Report = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class StartedCluster:
    """A cluster that serves."""

    url: str
    """The head's URL on the coordinator."""
    was_running: bool
    status: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Standing:
    """State of one machine."""

    machine: Machine
    node: str
    running: tuple[Running, ...]
    failure: str = ""


def start(
    file: DevicesFile,
    model: str,
    *,
    report: Report,
    timeout_s: float,
    store: WheelStore,
    folders: Sequence[Path] = (),
    anew: bool = False,
) -> StartedCluster:
    """Start the cluster as the file says, unless it already runs so; otherwise stop what runs first.

    Args:
        file: the machines.
        model: the model to serve; a folder is on the coordinator, relative to the home folder there.
        report: the callback that reports progress.
        timeout_s: the time limit for loading.
        store: the packages for machines of other systems.
        folders: more folders that may hold the model if the coordinator is this machine.
        anew: True to stop and start everything even if it runs so.

    Raises:
        HostFailed: a machine out of reach, or a failed start, after which nothing is left running.
    """
    # Report errors in the file before any machine is touched.
    head_arguments(file, model, "", {device.name: device.name for device in file.devices})
    readies = on_all(
        find_machines(file.devices), lambda machine: make_ready(machine, store=store, report=report)
    )
    run = _Run(file, _on_coordinator(readies, model, folders), readies)
    if not anew and run.is_as_configured():
        report("Everything runs already, as the file says.")
        return StartedCluster(run.wait(report, timeout_s), was_running=True, status=run.status(report))
    _end(readies, report)
    try:
        run.start(report, timeout_s)
        url = run.wait(report, timeout_s)
    except BaseException:
        # The reason of the failed start matters more than a failed stop.
        try:
            _end(readies, lambda _line: None)
        except HostFailed as error:
            report(f"Not everything was stopped: {error}")
        raise
    # It serves by now, so a failed status request must not end it.
    return StartedCluster(url, was_running=False, status=run.status(report))


def stop(file: DevicesFile, *, report: Report) -> None:
    """Stop the head, then all agents; leave machines where nothing runs as they are.

    Raises:
        HostFailed: a sentence for each machine out of reach, after the others were stopped.
    """
    _head_first(find_machines(file.devices), lambda machine: _stop(machine, report))


def restart_machine(file: DevicesFile, name: str, *, report: Report, timeout_s: float, force: bool) -> None:
    """Restart one machine's agent while the cluster serves: its layers move to others first, and back where that is faster.

    Args:
        file: the machines.
        name: name of the machine in the file.
        report: the callback that reports progress.
        timeout_s: the time limit for its return, and for the models.
        force: True to take its layers even if no other machine has room. Answers then wait until it is back.

    Raises:
        ConfigError: the file has no such machine, or it has the head.
        HostFailed: a machine out of reach or that stays away, no head that runs, or layers for which the others have no room.
    """
    device = next((each for each in file.devices if each.name == name), None)
    if device is None:
        names = ", ".join(each.name for each in file.devices)
        raise ConfigError(f"{name} is no machine of the file: it has {names}.")
    if device.is_coordinator:
        raise ConfigError(f"{name} has the head, so that all would end: restart the cluster without a name.")
    # Programs are not sent here: that would end whatever runs with another version.
    both = [each for each in file.devices if each.is_coordinator or each is device]
    found = dict(on_all(find_machines(both), lambda machine: (machine.name, _program(machine))))
    head, other = found[file.coordinator.name], found[name]
    if not any(running.kind == "head" for running in head.installation.running):
        raise HostFailed(f"{head.machine.name}: no head runs there; `mlx-ring cluster start` starts it.")
    if head.installation.versions != other.installation.versions:
        raise HostFailed(f"{name}: it has other versions than the head: restart the cluster without a name.")
    models = _take_layers(head, file, other, report, force=force)
    joining, node = _Joining(file, head), other.installation.node
    try:
        _stop_with(other, report)
        joining.join(other, joining.token(1), report)
    except HostFailed:
        with contextlib.suppress(HostFailed):
            _ask(head, file, "POST", "/cluster/readmit", {"node": node})
        raise
    end = time.monotonic() + timeout_s
    _wait(lambda: _is_back(head, file, other), end, f"{name}: it is not back after {timeout_s:g} s")
    _ask(head, file, "POST", "/cluster/readmit", {"node": node})
    report(f"{name}: it is back")
    for model in models:
        _wait(
            lambda model=model: _serves(head, file, model),
            end,
            f"{model} does not serve after {timeout_s:g} s",
        )
        _give_layers(head, file, model, report)


def _take_layers(
    head: ReadyMachine, file: DevicesFile, other: ReadyMachine, report: Report, *, force: bool
) -> list[str]:
    """Move a machine's layers to others, and return the models that had some there."""
    name, node = other.machine.name, other.installation.node
    if node not in _connected(head, file):
        return []
    report(f"{name}: its layers move to other machines")
    try:
        answer = _ask(head, file, "POST", "/cluster/drain", {"node": node, "force": force})
    except HostUnreached:
        raise
    except HostFailed as error:
        if not force:
            raise HostFailed(
                f"{error}\nWith --force, {name} restarts all the same, and answers wait until it is back."
            ) from error
        report(f"{name}: it restarts with its layers: {error}")
        return []
    for moved in answer["moved"]:
        report(f"{name}: {moved['model']} has moved in {moved['seconds']:.1f} s")
    return [moved["model"] for moved in answer["moved"]]


def _give_layers(head: ReadyMachine, file: DevicesFile, model: str, report: Report) -> None:
    try:
        moved = _ask(head, file, "POST", "/cluster/replan", {"model": model})["moved"]
    except HostFailed as error:
        report(f"{model} keeps its split: {error}")
    else:
        report(
            f"{model} {'keeps its split, which is as fast' if moved is None else 'has moved to a faster split'}"
        )


def _wait(holds: Callable[[], bool], end: float, problem: str) -> None:
    """Wait until something holds, also over short failures of the network."""
    while True:
        with contextlib.suppress(HostUnreached):
            if holds():
                return
        if time.monotonic() > end:
            raise HostFailed(f"{problem}: see `mlx-ring cluster logs`, or give a longer --timeout.")
        time.sleep(_LOOK_S)


def _is_back(head: ReadyMachine, file: DevicesFile, other: ReadyMachine) -> bool:
    if other.installation.node in _connected(head, file):
        return True
    for running in _standing(other.machine).running:
        if running.away:
            raise HostFailed(
                f"{other.machine.name}: it has restarted, and stays away, because {running.away}. It joins by itself later."
            )
    return False


def _serves(head: ReadyMachine, file: DevicesFile, model: str) -> bool:
    instances = _ask(head, file, "GET", "/cluster/status")["instances"]
    return any(each["model"] == model and each["state"] == "ready" for each in instances)


def _connected(head: ReadyMachine, file: DevicesFile) -> set[str]:
    """Return the nodes that are connected with the head."""
    nodes = _ask(head, file, "GET", "/cluster/status")["nodes"]
    return {node["id"] for node in nodes if node["state"] != "gone"}


def standings(file: DevicesFile) -> list[Standing]:
    """Return the state of each machine; a machine out of reach is no error here."""
    return on_all(find_machines(file.devices), _standing)


def ask(file: DevicesFile, method: str, path: str, body: object = None) -> Any:
    """Send the head a request on its own machine, because its HTTP port may be closed to others.

    Raises:
        HostFailed: a head out of reach, or an error as its answer.
    """
    machine = _coordinators(find_machines(file.devices))[0]
    return _ask(_program(machine), file, method, path, body)


def found_programs(file: DevicesFile) -> list[tuple[Machine, ReadyMachine | HostFailed]]:
    """Return each machine with the program there, or the error of one out of reach or without mlx-ring."""

    def find(machine: Machine) -> tuple[Machine, ReadyMachine | HostFailed]:
        try:
            return machine, _program(machine)
        except HostFailed as error:
            return machine, error

    return on_all(find_machines(file.devices), find)


def _program(machine: Machine) -> ReadyMachine:
    """Return the program there; raise `HostFailed` for a machine out of reach or without mlx-ring."""
    found = any_program(machine, find_program(machine))
    if found is None:
        raise HostFailed(
            f"{machine.name}: mlx-ring is not installed there; `mlx-ring cluster start` sends it."
        )
    return found


class _Joining:
    """Start of agents that join a head."""

    def __init__(self, file: DevicesFile, head: ReadyMachine) -> None:
        self._file, self._head = file, head

    def token(self, uses: int) -> str:
        """Make a token with which so many machines can join."""
        state = ("--state-dir", self._head.installation.state)
        more = ("--uses", str(uses), "--expires", _TOKEN_LIFE, "--name", "cluster start")
        return run_on(self._head.machine, (*self._head.program, "token", "create", *more, *state)).strip()

    def join(self, other: ReadyMachine, token: str, report: Report) -> None:
        """Start a machine's agent."""
        report(f"{other.machine.name}: joining")
        other.on_host("enrol", str(self._address(other)), stdin=token)
        other.on_host("run", "--", *self.agent_words(other))

    def agent_words(self, other: ReadyMachine) -> list[str]:
        """Return the arguments of a machine's agent."""
        return agent_arguments(
            self._file, other.machine.device, self._address(other), other.installation.state
        )

    def _address(self, other: ReadyMachine) -> HeadAddress:
        return HeadAddress(head_host(self._head.machine, other.machine), self._file.coordinator.port)


class _Run:
    """The machines of one file, all with the same program."""

    def __init__(self, file: DevicesFile, model: str, readies: Sequence[ReadyMachine]) -> None:
        self._file = file
        self._head = next(found for found in readies if found.machine.device.is_coordinator)
        self._others = [found for found in readies if found is not self._head]
        self._joining = _Joining(file, self._head)
        self._agent_words = {other.machine.name: self._joining.agent_words(other) for other in self._others}
        self._ids = {found.machine.name: found.installation.node for found in readies}
        self._head_words = head_arguments(file, model, self._head.installation.state, self._ids)
        self._reported: set[str] = set()
        """Nodes of other machines that were reported."""
        self._pid = next(started_with(self._head.installation.running, "head", self._head_words), 0)

    def is_as_configured(self) -> bool:
        """Return True if the head and all agents run with exactly these arguments."""
        return any(started_with(self._head.installation.running, "head", self._head_words)) and all(
            other.installation.cluster == self._head.installation.cluster
            and any(started_with(other.installation.running, "agent", self._agent_words[other.machine.name]))
            for other in self._others
        )

    def start(self, report: Report, timeout_s: float) -> None:
        """Start the head, then the agents."""
        report(f"{self._head.machine.name}: starting the head")
        limit = ("--timeout", f"{timeout_s:g}")
        self._pid = int(
            self._head.on_host("run", *limit, "--", *self._head_words, timeout_s=timeout_s + _SLICE_S)
        )
        if not self._others:
            return
        port = str(self._file.coordinator.port + 1)
        words = ("wait-for-port", *limit, str(self._pid), port)
        self._head.on_host(*words, timeout_s=timeout_s + _SLICE_S)
        token = self._joining.token(len(self._others))
        on_all(
            [other.machine for other in self._others],
            lambda machine: self._joining.join(self._other(machine), token, report),
        )

    def wait(self, report: Report, timeout_s: float) -> str:
        """Wait until the head answers and return its URL."""
        end = time.monotonic() + timeout_s
        words = ("wait-until-ready", "--timeout", f"{_SLICE_S:g}", str(self._pid))
        while not (url := self._url(words)):
            self._check_agents()
            with contextlib.suppress(HostFailed):
                self.status(report)
            if time.monotonic() > end:
                raise HostFailed(
                    f"{self._head.machine.name}: the model does not answer after {timeout_s:g} s: "
                    "see `mlx-ring cluster logs`, or give a longer --timeout."
                )
        return url

    def _url(self, words: Sequence[str]) -> str:
        """Return the head's URL, empty until it answers; retry after a short network failure."""
        for _ in range(_MOST_UNREACHED - 1):
            try:
                return self._head.on_host(*words).strip()
            except HostUnreached:
                time.sleep(_AGAIN_S)
        return self._head.on_host(*words).strip()

    def status(self, report: Report) -> Any:
        """Return the head's status of the cluster, and report machines in it that the file does not list, each once."""
        status = _ask(self._head, self._file, "GET", "/cluster/status")
        nodes, name = status.get("nodes", ()), self._head.machine.name
        for node, sentence in unlisted_nodes(nodes, self._ids.values(), name).items():
            if node not in self._reported:
                self._reported.add(node)
                report(sentence)
        return status

    def _other(self, machine: Machine) -> ReadyMachine:
        return next(other for other in self._others if other.machine is machine)

    def _check_agents(self) -> None:
        """Raise an error if an agent has ended; ignore machines that are out of reach just now."""
        for standing in on_all([other.machine for other in self._others], _standing):
            if not standing.failure and not any(found.kind == "agent" for found in standing.running):
                raise HostFailed(
                    f"{standing.machine.name}: the agent has ended: see `mlx-ring cluster logs`."
                )


def _on_coordinator(readies: Sequence[ReadyMachine], model: str, folders: Sequence[Path]) -> str:
    head = next(found for found in readies if found.machine.device.is_coordinator)
    if head.machine.is_here:
        return whole_path(model, [*folders, Path.home()])
    return head.on_host("model", "--", model).removesuffix("\n")


def _ask(found: ReadyMachine, file: DevicesFile, method: str, path: str, body: object = None) -> Any:
    keys = {name.replace("-", "_"): value for name, value in file.serve.items()}.get("api_key_file")
    text = "" if body is None else json.dumps(body)
    file_of_keys = str(keys) if keys else None
    return json.loads(found.ask_head(method, path, text, api_key_file=file_of_keys, timeout_s=_ANSWER_S))


def _coordinators(machines: Sequence[Machine]) -> list[Machine]:
    return [machine for machine in machines if machine.device.is_coordinator]


def _end(readies: Sequence[ReadyMachine], report: Report) -> None:
    by_name = {found.machine.name: found for found in readies}
    _head_first(
        [found.machine for found in readies], lambda machine: _stop_with(by_name[machine.name], report)
    )


def _head_first(machines: Sequence[Machine], work: Callable[[Machine], None]) -> None:
    """Do the work for the head first, which unloads the model everywhere, then for all others despite failures."""
    failures: list[str] = []
    for group in (
        _coordinators(machines),
        [machine for machine in machines if not machine.device.is_coordinator],
    ):
        try:
            on_all(group, work)
        except HostFailed as error:
            failures.append(str(error))
    if failures:
        raise HostFailed("\n".join(failures))


def _stop(machine: Machine, report: Report) -> None:
    found = any_program(machine, find_program(machine))
    if found is None:
        report(f"{machine.name}: mlx-ring is not installed there.")
        return
    _stop_with(found, report)


def _stop_with(found: ReadyMachine, report: Report) -> None:
    ending_s = max((running.ending_s for running in found.installation.running), default=0.0)
    for line in found.on_host("stop", timeout_s=_STOP_S + ending_s).splitlines():
        report(f"{found.machine.name}: {line}")


def _standing(machine: Machine) -> Standing:
    try:
        found = _program(machine)
    except HostFailed as error:
        return Standing(machine, "", (), str(error))
    return Standing(machine, found.installation.node, found.installation.running)
