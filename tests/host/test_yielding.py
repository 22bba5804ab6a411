"""Machines that yield to their users: the decision step by step, and the priority of real processes."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable, Collection, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.eventually import eventually, run_tasks_until
from tests.host.logind import logind

from mlx_ring.host.machine import SystemUse, Use, is_own_program, mac_idle_s, stalls
from mlx_ring.host.process import may_raise_priority
from mlx_ring.host.yielding import SystemPriority, YieldDecision, Yielding, YieldWatch

LASTING_S, LEFT_S = 60.0, 120.0
IDLE, BUSY = Use(2, 0.0), Use(2, 1.6)
ON_BATTERY, SHORT = Use(2, 0.0, is_on_battery=True), Use(2, 0.0, is_memory_short=True)


class Machine:
    """Machine that is looked at each second of a clock that only the test turns."""

    def __init__(self) -> None:
        self.decision, self.now_s = YieldDecision(LASTING_S, LEFT_S), 0.0
        self.state: Yielding | None = None

    def use(self, use: Use, seconds: float = 1.0) -> Yielding | None:
        for _ in range(int(seconds)):
            self.now_s += 1.0
            self.state = self.decision.look(use, self.now_s)
        return self.state


def shares(state: Yielding | None) -> tuple[float, float] | None:
    return None if state is None else (state.speed_share, state.memory_share)


def test_a_moment_of_load_changes_nothing() -> None:
    machine = Machine()
    for _ in range(100):
        assert machine.use(BUSY) is None
        assert machine.use(IDLE) is None
    assert machine.use(Use(2, 0.4), 100) is None


def test_workers_yield_at_once_and_plans_count_less_later() -> None:
    machine = Machine()
    assert machine.use(BUSY, 2) == Yielding("other programs use 1.6 of 2 cores")
    assert shares(machine.use(BUSY, LASTING_S - 1)) == (1.0, 1.0)
    assert shares(machine.use(BUSY, 2)) == (0.25, 1.0)


def test_the_share_is_what_other_programs_leave() -> None:
    for others, share in ((0.6, 0.75), (1.0, 0.5), (2.0, 0.25)):
        machine = Machine()
        assert shares(machine.use(Use(2, others), 100)) == (share, 1.0)
    assert shares(Machine().use(Use(16, 0.6), 100)) == (1.0, 1.0)


def test_the_user_has_left_after_a_while_only() -> None:
    machine = Machine()
    machine.use(BUSY, 100)
    state = machine.use(IDLE, LEFT_S)
    assert state is not None
    assert (state.reason, state.speed_share) == ("its user was active a moment ago", 0.25)
    assert machine.use(IDLE, 2) is None
    assert shares(machine.use(BUSY, 2)) == (1.0, 1.0)


def test_pauses_of_the_user_change_no_share() -> None:
    machine = Machine()
    machine.use(BUSY, 100)
    found = {shares(machine.use(use)) for _ in range(20) for use in (*(IDLE,) * 50, *(BUSY,) * 50)}
    assert found == {(0.25, 1.0)}


def test_the_share_rises_if_other_programs_need_less_for_a_while() -> None:
    machine = Machine()
    machine.use(BUSY, 100)
    assert shares(machine.use(Use(2, 0.6), LEFT_S)) == (0.25, 1.0)
    assert shares(machine.use(Use(2, 0.6), LASTING_S)) == (0.75, 1.0)
    assert shares(machine.use(BUSY, LASTING_S)) == (0.25, 1.0)


def test_battery_and_memory_have_stated_shares_once_they_last() -> None:
    machine = Machine()
    assert machine.use(ON_BATTERY) == Yielding("it runs on its battery")
    assert shares(machine.use(ON_BATTERY, LASTING_S)) == (0.5, 1.0)
    assert shares(machine.use(SHORT, LASTING_S + 1)) == (0.5, 0.5)
    state = machine.use(Use(2, 1.6, is_on_battery=True, is_memory_short=True), 3)
    assert state is not None
    assert state.reason == (
        "other programs use 1.6 of 2 cores and it runs on its battery and its memory is short"
    )


def test_a_user_without_load_lowers_the_priority_alone() -> None:
    machine = Machine()
    assert machine.use(Use(8, 0.1, idle_s=3.0), 200) == Yielding("its user is active")
    assert machine.use(Use(8, 0.1, idle_s=600.0), LEFT_S + 1) is None


USES = st.builds(
    Use,
    cores=st.just(4.0),
    others=st.sampled_from((0.0, 0.3, 0.6, 1.5, 3.0, 4.0)),
    is_on_battery=st.booleans(),
    is_memory_short=st.booleans(),
    idle_s=st.sampled_from((None, 1.0, 1000.0)),
)


def needs_something(use: Use) -> bool:
    is_present = use.idle_s is not None and use.idle_s < 60
    return use.others >= 0.25 or use.is_on_battery or use.is_memory_short or is_present


@given(st.lists(st.tuples(USES, st.integers(1, 200)), min_size=1, max_size=12))
def test_whatever_comes_and_goes_changes_little(phases: list[tuple[Use, int]]) -> None:
    machine, before, unneeded_s = Machine(), None, 0.0
    ends = rises = 0
    for use, seconds in phases:
        for _ in range(seconds):
            state = machine.use(use)
            unneeded_s = 0.0 if needs_something(use) else unneeded_s + 1.0
            if state is None:
                if before is not None:
                    ends += 1
                    assert unneeded_s >= LEFT_S
            else:
                assert state.speed_share in (0.25, 0.5, 0.75, 1.0)
                assert state.memory_share in (0.5, 1.0)
                assert before is not None or (state.speed_share, state.memory_share) == (1.0, 1.0)
                if before is not None:
                    rises += (
                        state.speed_share > before.speed_share or state.memory_share > before.memory_share
                    )
            before = state
    assert ends <= machine.now_s / LEFT_S
    # Load, battery and memory rise independently.
    assert rises <= 3 * (machine.now_s / LEFT_S)


# ---- priority


def scheduling(pid: int) -> tuple[str, tuple[int, ...]]:
    """Return what decides on a process's share of a core: its session's nice value, and its threads'."""
    session, tasks = Path(f"/proc/{pid}/autogroup"), Path(f"/proc/{pid}/task")
    nice = session.read_text().rpartition("nice")[2].strip() if session.exists() else ""
    return nice, tuple(sorted(os.getpriority(os.PRIO_PROCESS, int(task.name)) for task in tasks.iterdir()))


@contextmanager
def sleeper() -> Generator[int]:
    """Run a process that leads its session, as workers do."""
    child = subprocess.Popen(["sleep", "600"], start_new_session=True)
    try:
        yield child.pid
    finally:
        child.kill()
        child.wait()


OTHER_USER = 65534
USERS = (0, OTHER_USER) if os.getuid() == 0 else (os.getuid(),)


def as_user(user: int, work: Callable[[], object]) -> Any:
    """Return the result of work in a process of that user."""

    def run(results: Any) -> None:
        if user != os.getuid():
            os.setgroups([])
            os.setresgid(user, user, user)
            os.setresuid(user, user, user)
        results.send(work())

    context: Any = multiprocessing.get_context("fork")
    receiving, sending = context.Pipe(duplex=False)
    process = context.Process(target=run, args=(sending,))
    process.start()
    sending.close()
    try:
        return receiving.recv()
    finally:
        process.join()


def lower_and_restore() -> list[object]:
    with sleeper() as first, sleeper() as second:
        priority = SystemPriority()
        before = scheduling(first)
        how = priority.lower((first,))
        lowered = scheduling(first)
        again = priority.lower((first, second))
        if how:
            # Linux takes few nice values a second, and other processes may take the turns. Then it comes with the next look.
            eventually(lambda: priority.lower((first, second)) and scheduling(second) == lowered)
        both = scheduling(second)
        priority.restore()
        return [
            how,
            again == how,
            before != lowered,
            before != lowered == both,
            scheduling(first),
            scheduling(second),
            before,
        ]


@pytest.mark.skipif(sys.platform != "linux", reason="it reads Linux's scheduling")
@pytest.mark.parametrize("user", USERS)
def test_the_priority_of_real_processes_is_lowered_and_given_back_to_any_user(user: int) -> None:
    """Let a user without rights get the priority back, or leave it as it is."""
    how, is_same, is_lower, is_lower_too, first, second, before = as_user(user, lower_and_restore)
    assert how or user != 0 or not may_raise_priority()
    assert is_same
    assert is_lower == is_lower_too == bool(how)
    assert first == second == before


@pytest.mark.skipif(sys.platform != "linux", reason="it reads Linux's scheduling")
def test_a_process_that_has_ended_hinders_no_other() -> None:
    priority = SystemPriority()
    with sleeper() as ended:
        how = priority.lower((ended,))
    with sleeper() as other:
        assert priority.lower((ended, other)) == how
        before = scheduling(other)
        priority.restore()
        assert (scheduling(other) != before) == bool(how)
    priority.restore()


def tree(root: Path, *, enabled: str = "1", cpu_path: str = "/") -> Path:
    """Write what Linux says of autogroups and control groups."""
    for name, text in (
        ("proc/sys/kernel/sched_autogroup_enabled", enabled),
        ("proc/self/cgroup", f"1:cpu:{cpu_path}\n0::/app.slice\n"),
        ("sys/fs/cgroup/cgroup.controllers", "cpu"),
    ):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    (root / "sys/fs/cgroup/app.slice").mkdir()
    return root


def test_a_control_group_of_mlx_ring_alone_gets_less_weight(tmp_path: Path) -> None:
    root, group = tree(tmp_path), tmp_path / "sys/fs/cgroup/app.slice"
    weight, inside = group / "cpu.weight", group / "cgroup.procs"
    weight.write_text("100")
    with sleeper() as worker, sleeper() as second:
        inside.write_text(f"{os.getpid()}\n{worker}\n{second}\n")
        priority = SystemPriority(root)
        assert priority.lower((worker, second)) == "cpu.weight 10"
        assert weight.read_text() == "10"
        assert priority.lower((worker,)) == "cpu.weight 10"
        assert priority.lower(()) == ""
        assert weight.read_text() == "10"
        priority.restore()
        assert weight.read_text() == "100"
        # The shell from which it was started is not its own.
        inside.write_text(f"1\n{os.getpid()}\n{worker}\n")
        assert "cpu.weight" not in priority.lower((worker,))
        assert weight.read_text() == "100"
        priority.restore()


def test_systemd_is_asked_for_a_control_group_where_other_programs_share_it(tmp_path: Path) -> None:
    root = tree(tmp_path)
    group = root / "sys/fs/cgroup/app.slice"
    inside = group / "cgroup.procs"
    with logind(tmp_path) as system:
        priority = SystemPriority(root, system.address)
        inside.write_text(f"1\n{os.getpid()}\n")
        priority.prepare()
        assert not system.units
        (group / "cpu.weight").write_text("100")
        inside.write_text(f"{os.getpid()}\n")
        priority.prepare()
        assert not system.units
        inside.write_text(f"1\n{os.getpid()}\n")
        priority.prepare()
        ((name, mode, properties, others),) = system.units
        assert (name, mode, others) == (f"mlx-ring-{os.getpid()}.scope", "fail", [])
        assert dict(properties) == {"PIDs": ("au", [os.getpid()]), "CPUWeight": ("t", 100)}
    priority.prepare()


# ---- the watch


class Recorded:
    """Priority that records what is asked of it."""

    def __init__(self) -> None:
        self.lowered: Collection[int] = ()

    def prepare(self) -> None:
        """Need nothing."""

    def lower(self, pids: Collection[int]) -> str:
        self.lowered = pids
        return "autogroup nice 10"

    def restore(self) -> None:
        self.lowered = ()


class Uses:
    """Use that the test gives, and errors between."""

    def __init__(self, *uses: Use | None) -> None:
        self.uses: Iterator[Use | None] = iter(uses)
        self.last: Use | None = None

    def read(self) -> Use:
        self.last = next(self.uses, self.last)
        if self.last is None:
            raise OSError("The system does not say.")
        return self.last


def test_each_change_is_one_line_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    priority, pids = Recorded(), [7]
    watch = YieldWatch(lambda: pids, Uses(), YieldDecision(LASTING_S, LEFT_S), priority)
    for second in range(500):
        watch.look(BUSY if second < 200 else IDLE, float(second))
        if second == 3:
            assert priority.lowered == [7]
            pids.append(8)
    assert (watch.state, priority.lowered) == (None, ())
    busy = "other programs use 1.6 of 2 cores"
    assert [record.message for record in caplog.records] == [
        f"This machine yields to its user: {busy} (its workers get less of its cores by autogroup nice 10)",
        f"Plans count 25% of this machine's speed and 100% of its memory, because {busy}",
        "The user of this machine has left it: its workers have their priority again",
    ]


def test_the_watch_survives_errors_and_gives_the_priority_back_at_its_end() -> None:
    async def run() -> None:
        priority = Recorded()
        watch = YieldWatch(lambda: [7], Uses(None, BUSY), priority=priority, look_s=0.0)
        running = asyncio.create_task(watch.run())
        await run_tasks_until(lambda: watch.state is not None)
        assert priority.lowered == [7]
        running.cancel()
        await asyncio.wait((running,))
        assert priority.lowered == ()

    asyncio.run(run())


# ---- what the system says


def test_the_load_of_other_programs_counts_and_that_of_children_does_not() -> None:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as own:
        starts = subprocess.run(
            ["sh", "-c", '"$0" -c "while True: pass" >/dev/null 2>&1 & echo $!', sys.executable],
            capture_output=True,
            text=True,
            check=True,
        )
        other = int(starts.stdout)
        try:
            use = SystemUse()
            eventually(lambda: use.read().others, lambda others: others > 0.1)
            counted = {process.pid for process, is_own in use._is_own.items() if is_own}  # pyright: ignore[reportPrivateUsage]
            assert {os.getpid(), own.pid} <= counted
            assert other not in counted
        finally:
            os.kill(other, 9)
            own.kill()


def test_programs_of_mlx_ring_are_its_own() -> None:
    assert is_own_program(["/opt/venv/bin/python3", "-m", "mlx_ring.worker", "--socket", "x"])
    assert is_own_program(["/opt/venv/bin/python3", "/home/me/.local/bin/mlx-ring", "serve"])
    assert not is_own_program(["vim", "a", "b", "c", "mlx-ring"])
    assert not is_own_program([])


def test_what_the_systems_print_is_read() -> None:
    assert stalls("some avg10=12.50 avg60=1.00 avg300=0.00 total=9\nfull avg10=1.00 avg60=0.00\n") == 12.5
    assert stalls("") == 0.0
    assert mac_idle_s('    | |   "HIDIdleTime" = 4250000000\n') == 4.25
    assert mac_idle_s("") is None


@pytest.mark.parametrize(("stalled", "is_short"), [("3.00", False), ("25.00", True)])
def test_memory_is_short_while_processes_wait_for_it(tmp_path: Path, stalled: str, is_short: bool) -> None:  # noqa: FBT001 - the expectation
    file = tmp_path / "proc/pressure/memory"
    file.parent.mkdir(parents=True)
    file.write_text(f"some avg10={stalled} avg60=0.00 avg300=0.00 total=1\n")
    assert SystemUse(tmp_path).read().is_memory_short is is_short
