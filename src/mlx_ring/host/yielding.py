"""Yielding to the user of this machine: what other programs need, when workers yield, and their priority.

An unprivileged process may lower its nice value, but not raise it again (setpriority(2)). With `RLIMIT_NICE` at 0, as it
usually is, it may not leave `SCHED_IDLE` either: Linux 6.18 refused both to a user other than root. Besides, neither counts
between sessions where Linux groups processes by session (sched(7), "The autogroup feature"): beside a loop of another
session, a worker with nice 19 or `SCHED_IDLE` still had half of a core. These can be undone, in the order of preference:

- the nice value of the session's autogroup (`/proc/PID/autogroup`), which may be raised up to 0 again. Each worker leads a
  session of its own. It counts for processes in the root control group of the CPU, as without systemd's CPU controller.
- `cpu.weight` of the control group, where the user may write it and only mlx-ring is in it, as in a service of the user's
  systemd. Elsewhere the user's systemd is asked for such a group. This has not been run with systemd.
- the nice value of each thread, for root or with `RLIMIT_NICE`.
- macOS: the background state of a process (`PRIO_DARWIN_BG` of setpriority(2)), which its owner may end.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Protocol, cast

import psutil

from mlx_ring.host.machine import ReadsUse, SystemUse, Use, is_own
from mlx_ring.host.process import ROOT, control_groups, may_raise_priority, own_control_group

log = logging.getLogger(__name__)

# ---- the decision


@dataclass(frozen=True, slots=True)
class Yielding:
    """State of a machine that yields."""

    reason: str
    """Such as "other programs use 1.6 of 2 cores"."""
    speed_share: float = 1.0
    """Share of its speed that plans count."""
    memory_share: float = 1.0
    """Share of its memory that plans count."""
    priority: str = ""
    """Means that lowers its workers' priority, such as "autogroup nice 10"; empty if nothing can."""


_BUSY_CORES, _STILL_BUSY_CORES = 0.5, 0.25
"""Cores that other programs use from which workers yield, and from which they continue to."""
_LOOKS = 2
"""Readings in a row that must be so."""
_PRESENT_S = 60.0
"""Time since the last key or movement for which a user counts as present."""
_LASTING_S, _LEFT_S = 60.0, 120.0
_STATED_SHARE = 0.5
"""Share of the speed on battery, and of the memory while it is short, which nothing measures."""
_LEAST_SHARE, _PARTS = 0.25, 4
"""Least share of the speed, and its parts: shares are a quarter, a half, three quarters."""
_MARGIN = 0.15
"""Difference between the measured share and the counted one from which that changes."""


@dataclass(slots=True)
class _Held:
    """Condition that begins and ends once it has lasted."""

    begins_s: float
    ends_s: float
    is_on: bool = False
    _since_s: float | None = None

    def look(self, is_so: bool, now_s: float) -> bool:  # noqa: FBT001 - the condition is its subject
        """Take note of the condition, and return whether it counts."""
        if is_so == self.is_on:
            self._since_s = None
            return self.is_on
        if self._since_s is None:
            self._since_s = now_s
        if now_s - self._since_s >= (self.ends_s if self.is_on else self.begins_s):
            self.is_on, self._since_s = is_so, None
        return self.is_on


class YieldDecision:
    """Decision when and how far a machine yields. Pure.

    Its workers yield at once, and until its user has left for a while. Plans count a smaller share once that has lasted.
    Shares fall and rise only after they have been so for a while, so that conditions that come and go change little.
    """

    def __init__(self, lasting_s: float = _LASTING_S, left_s: float = _LEFT_S) -> None:
        """Start without a user.

        Args:
            lasting_s: seconds of use after which plans count a smaller share.
            left_s: seconds without use after which the user has left.
        """
        self._lasting_s, self._left_s = lasting_s, left_s
        self._busy_looks = 0
        self._is_yielding = _Held(0.0, left_s)
        self._others: deque[tuple[float, float]] = deque()
        """Time and cores of other programs, for as long as `lasting_s`."""
        self._begun_s = 0.0
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._others.clear()
        self._load_share = 1.0
        self._may_rise = _Held(self._left_s, 0.0)
        self._on_battery = _Held(self._lasting_s, self._left_s)
        self._memory_short = _Held(self._lasting_s, self._left_s)

    def look(self, use: Use, now_s: float) -> Yielding | None:
        """Take note of the use; return the state, or None if the machine does not yield.

        Args:
            use: the use since the last look.
            now_s: present time in seconds, on any clock.
        """
        was_yielding = self._is_yielding.is_on
        reasons = [*self._reasons(use)]
        if not self._is_yielding.look(bool(reasons), now_s):
            self._begin_anew()
            return None
        if not was_yielding:
            self._begun_s = now_s
        on_battery = self._on_battery.look(use.is_on_battery, now_s)
        is_short = self._memory_short.look(use.is_memory_short, now_s)
        share = self._measured_share(use, now_s)
        return Yielding(
            " and ".join(reasons) or "its user was active a moment ago",
            min(share, _STATED_SHARE) if on_battery else share,
            _STATED_SHARE if is_short else 1.0,
        )

    def _reasons(self, use: Use) -> Iterator[str]:
        is_busy = use.others >= (_STILL_BUSY_CORES if self._is_yielding.is_on else _BUSY_CORES)
        self._busy_looks = self._busy_looks + 1 if is_busy else 0
        if self._busy_looks >= _LOOKS:
            yield f"other programs use {use.others:.1f} of {use.cores:g} cores"
        if use.is_on_battery:
            yield "it runs on its battery"
        if use.is_memory_short:
            yield "its memory is short"
        if use.idle_s is not None and use.idle_s < _PRESENT_S:
            yield "its user is active"

    def _measured_share(self, use: Use, now_s: float) -> float:
        """Return the share of the cores that other programs leave, in parts, once it has lasted."""
        self._others.append((now_s, use.others))
        while self._others[0][0] < now_s - self._lasting_s:
            self._others.popleft()
        if now_s - self._begun_s < self._lasting_s:
            return self._load_share
        left = 1.0 - sum(others for _, others in self._others) / len(self._others) / use.cores
        wanted = min(1.0, max(_LEAST_SHARE, round(left * _PARTS) / _PARTS))
        rises = wanted > self._load_share and left > self._load_share + _MARGIN
        falls = wanted < self._load_share and left < self._load_share - _MARGIN
        if self._may_rise.look(rises, now_s) or falls:
            self._load_share = wanted
            self._may_rise = _Held(self._left_s, 0.0)
        return self._load_share


# ---- the priority

_NICE = 10
"""Nice value with which a worker gets a tenth of a core that another program wants: enough to answer its head."""
_WEIGHT = 10
"""Weight of a control group of which others have 100."""
_DARWIN_PROCESS, _DARWIN_BACKGROUND = 4, 0x1000
"""`PRIO_DARWIN_PROCESS` and `PRIO_DARWIN_BG` of setpriority(2)."""
_WHOLE_NICE_RANGE = 20
_ASK_S = 5.0
"""Time for systemd to answer."""
_WRITE_TRIES, _WRITE_PAUSE_S = 5, 0.11
"""Linux takes ten nice values of autogroups a second."""


class LowersPriority(Protocol):
    """Means by which processes get a lower priority, which can be undone."""

    def prepare(self) -> None:
        """Make it possible, before there are processes. May take a moment."""
        ...

    def lower(self, pids: Collection[int]) -> str:
        """Lower the priority of those processes that have not got it yet; return by what, or an empty text."""
        ...

    def restore(self) -> None:
        """Give all of them their former priority, as far as they still run."""
        ...


class SystemPriority:
    """Priority as this operating system lowers it. It blocks for some tenths of a second with many processes."""

    def __init__(self, root: Path = ROOT, bus: str = "SESSION") -> None:
        """Start with nothing lowered; `root` is that of the file system, `bus` the D-Bus of the user's systemd."""
        self._root, self._bus = root, bus
        self._lowered: dict[int, tuple[str, Callable[[], None]]] = {}
        """Means for each process, and the function that undoes it."""
        self._group: tuple[Path, str] | None = None
        """File of the control group's weight, and its former content, while it is lowered."""

    def prepare(self) -> None:
        """Ask the user's systemd for a control group of this process, if it shares one with other programs."""
        if sys.platform == "linux" and self._weight_file() is not None and not self._is_alone(os.getpid()):
            try:
                _ask_for_scope(self._bus)
            except Exception as error:  # noqa: BLE001 - systems differ in what they lack
                log.debug("This process stays in its control group: %s", error)

    def lower(self, pids: Collection[int]) -> str:
        """Lower the priority of those processes that have not got it yet; return by what, or an empty text."""
        for ended in self._lowered.keys() - set(pids):
            del self._lowered[ended]
        for pid in pids:
            if pid not in self._lowered and (done := self._lower(pid)) is not None:
                self._lowered[pid] = done
        return " and ".join(sorted({how for how, _ in self._lowered.values()}))

    def restore(self) -> None:
        """Give all of them their former priority, as far as they still run."""
        lowered, self._lowered = self._lowered, {}
        for _, undo in lowered.values():
            undo()
        if self._group is not None:
            file, weight = self._group
            self._group = None
            _write(file, weight)

    def _lower(self, pid: int) -> tuple[str, Callable[[], None]] | None:
        if sys.platform == "darwin":
            tries = (_lower_on_mac,)
        else:
            tries = (self._lower_session, self._lower_control_group, _lower_threads)
        for attempt in tries:
            with contextlib.suppress(OSError, ValueError):
                if (done := attempt(pid)) is not None:
                    return done
        return None

    def _lower_session(self, pid: int) -> tuple[str, Callable[[], None]] | None:
        """Lower the autogroup of a process that leads its session, where these count."""
        if not self._has_autogroups or self._weight_file() is not None or os.getsid(pid) != pid:
            return None
        file = self._root / "proc" / str(pid) / "autogroup"
        before = int(file.read_text().rpartition("nice")[2])
        _write_nice(file, max(before, _NICE))
        return f"autogroup nice {_NICE}", partial(_raise_again, file, max(0, before))

    @property
    def _has_autogroups(self) -> bool:
        file = self._root / "proc/sys/kernel/sched_autogroup_enabled"
        is_enabled = file.exists() and file.read_text().strip() == "1"
        return is_enabled and own_control_group(self._root, "cpu") in (None, "/")

    def _weight_file(self) -> Path | None:
        """Return the nearest weight of this process's control groups; None in the root group."""
        groups = control_groups(self._root, "")
        return next((file for folder in groups if (file := folder / "cpu.weight").exists()), None)

    def _lower_control_group(self, pid: int) -> tuple[str, Callable[[], None]] | None:
        """Lower the weight of the control group, if only processes of mlx-ring are in it."""
        file = self._weight_file()
        if file is None or not os.access(file, os.W_OK) or not self._is_alone(pid):
            return None
        if self._group is None:
            weight = file.read_text().strip()
            file.write_text(str(_WEIGHT))
            self._group = file, weight
        return f"cpu.weight {_WEIGHT}", lambda: None

    def _is_alone(self, pid: int) -> bool:
        """Report whether only processes of mlx-ring are in the control group with the nearest weight, and that one is."""
        file = self._weight_file()
        if file is None:
            return False
        inside = {
            int(line) for held in file.parent.rglob("cgroup.procs") for line in held.read_text().split()
        }
        own = {os.getpid()}
        for other in sorted(inside):
            with contextlib.suppress(psutil.NoSuchProcess):
                if is_own(psutil.Process(other), own):
                    own.add(other)
        return pid in inside and inside <= own


def _ask_for_scope(bus: str) -> None:
    """Ask systemd for a control group with this process (`StartTransientUnit` of org.freedesktop.systemd1(5))."""
    from jeepney import DBusAddress, MessageType, new_method_call  # pyright: ignore[reportUnknownVariableType] - it has no types
    from jeepney.io.blocking import open_dbus_connection

    name = "org.freedesktop.systemd1"
    manager = DBusAddress(f"/{name.replace('.', '/')}", name, f"{name}.Manager")
    properties: list[object] = [("PIDs", ("au", [os.getpid()])), ("CPUWeight", ("t", 100))]
    unit = (f"mlx-ring-{os.getpid()}.scope", "fail", properties, list[object]())
    with contextlib.closing(open_dbus_connection(bus)) as connection:
        call = new_method_call(manager, "StartTransientUnit", "ssa(sv)a(sa(sv))", unit)
        reply = connection.send_and_get_reply(call, timeout=_ASK_S)
    if reply.header.message_type == MessageType.error:
        raise RuntimeError(str(cast("object", reply.body)))


def _lower_threads(pid: int) -> tuple[str, Callable[[], None]] | None:
    """Lower the nice value of each thread, if this process may raise it again."""
    before = os.getpriority(os.PRIO_PROCESS, pid)
    if before >= _NICE or not _may_raise_to(before):
        return None
    for thread in _threads(pid):
        os.setpriority(os.PRIO_PROCESS, thread, _NICE)

    def undo() -> None:
        for thread in _threads(pid):
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, thread, before)

    return f"nice {_NICE}", undo


def _may_raise_to(nice: int) -> bool:
    """Report whether this process may set that nice value for a process with a higher one."""
    import resource  # not on every system

    limit = resource.getrlimit(resource.RLIMIT_NICE)[0]
    return may_raise_priority() or limit == resource.RLIM_INFINITY or limit >= _WHOLE_NICE_RANGE - nice


def _threads(pid: int) -> list[int]:
    try:
        return [int(task.name) for task in Path(f"/proc/{pid}/task").iterdir()]
    except OSError:
        return []


def _lower_on_mac(pid: int) -> tuple[str, Callable[[], None]]:
    os.setpriority(_DARWIN_PROCESS, pid, _DARWIN_BACKGROUND)

    def undo() -> None:
        with contextlib.suppress(OSError):
            os.setpriority(_DARWIN_PROCESS, pid, 0)

    return "background state", undo


def _write(file: Path, text: str) -> None:
    with contextlib.suppress(OSError):
        file.write_text(text)


def _raise_again(file: Path, nice: int) -> None:
    with contextlib.suppress(OSError):  # its process has ended
        _write_nice(file, nice)


def _write_nice(file: Path, nice: int) -> None:
    """Write the nice value of an autogroup, which Linux takes only so often.

    Raises:
        OSError: it cannot be written, as of a process that has ended.
    """
    for _ in range(_WRITE_TRIES):
        try:
            file.write_text(str(nice))
        except BlockingIOError:
            time.sleep(_WRITE_PAUSE_S)
        else:
            return
    raise OSError(f"{file} takes no nice value.")


# ---- the watch

_LOOK_S = 1.0


@dataclass(slots=True)
class YieldWatch:
    """Watch of this machine's use, which lowers the priority of workers while its user needs it."""

    pids: Callable[[], Collection[int]]
    """Returns the process ids of the workers."""
    reads: ReadsUse | None = None
    """Reader of the use; None: the system's."""
    decision: YieldDecision = field(default_factory=YieldDecision)
    priority: LowersPriority = field(default_factory=SystemPriority)
    look_s: float = _LOOK_S
    """Seconds between two looks."""
    state: Yielding | None = None
    """State of this machine; None if it does not yield."""

    async def run(self) -> None:
        """Watch until it is cancelled, then restore the priority."""
        try:
            await asyncio.to_thread(self.priority.prepare)
            reads = self.reads or await asyncio.to_thread(SystemUse)
            while True:
                await asyncio.sleep(self.look_s)
                await asyncio.to_thread(self._look, reads)
        except Exception:
            log.exception("This machine does not yield to its user any more")
        finally:
            self.state = None
            self.priority.restore()

    def _look(self, reads: ReadsUse) -> None:
        try:
            use = reads.read()
        except (OSError, psutil.Error) as error:
            log.debug("The use of this machine is not known: %s", error)
            return
        self.look(use, time.monotonic())

    def look(self, use: Use, now_s: float) -> None:
        """Take note of the use at a time in seconds, change the priority, and log a line if the state has changed."""
        before, state = self.state, self.decision.look(use, now_s)
        if state is None:
            if before is not None:
                self.priority.restore()
                log.warning("The user of this machine has left it: its workers have their priority again")
            self.state = None
            return
        self.state = state = replace(state, priority=self.priority.lower(self.pids()))
        shares = state.speed_share, state.memory_share
        if before is None:
            log.warning("This machine yields to its user: %s (%s)", state.reason, _what_is_lower(state))
        elif shares != (before.speed_share, before.memory_share):
            log.warning(
                "Plans count %.0f%% of this machine's speed and %.0f%% of its memory, because %s",
                *(100 * share for share in shares),
                state.reason,
            )


def _what_is_lower(state: Yielding) -> str:
    if state.priority:
        return f"its workers get less of its cores by {state.priority}"
    return "no priority was changed"
