"""Processes of workers: the GPU of each one in a group, a spare one, and the end of each.

A spare is started before it is needed, has imported its libraries, and waits for its arguments. A worker's imports take
most of the time in which a small lost stage is loaded again. The spare makes them while the node is idle, after a load,
so that no load waits for it. It gets its arguments through its lifeline, and is then a worker like any other.

The agent also ends ranks that wait in vain: a machine that is cut off from its head and group gets no message about it.
A rank that waits in a collective uses a whole processor; an idle one uses none, and is kept for the next head.

A process inherits its environment and the scheduling of its threads at its start. If a worker needs others than the
spare has, the spare is ended, and a process is started as without one.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import psutil

from mlx_ring.core.environment import has_cuda_build, library_variable
from mlx_ring.host.child import READY_LINE, ChildProcess
from mlx_ring.host.interfaces import LOOPBACK
from mlx_ring.host.machine import ProcessPorts
from mlx_ring.host.process import usable_memory
from mlx_ring.rpc.backends import backend_of, joined_ranks, requested_backend
from mlx_ring.rpc.protos import worker_pb2
from mlx_ring.settings.process_settings import SpareMode

_VISIBLE = "CUDA_VISIBLE_DEVICES"
_DRIVER = Path("/proc/driver/nvidia/gpus")
"""Folder in which Linux's driver lists GPUs; MLX supports CUDA on Linux only."""


def own_gpu(
    assignment: worker_pb2.StageAssignment, driver: Path = _DRIVER, visible: str | None = None
) -> dict[str, str]:
    """Return the environment that leaves the worker one GPU; empty with fewer GPUs than workers.

    Args:
        assignment: of a worker that MLX joins with others.
        driver: the folder of NVIDIA's driver.
        visible: those that this process may use, as CUDA reads them; the environment's otherwise.
    """
    named = library_variable(_VISIBLE) if visible is None else visible
    count = len(list(driver.iterdir())) if driver.is_dir() else 0
    gpus = [gpu.strip() for gpu in named.split(",")] if named else [str(number) for number in range(count)]
    workers = assignment.stages * assignment.tp_size
    if not count or len(gpus) < workers:
        return {}
    return {_VISIBLE: gpus[assignment.stage * assignment.tp_size + assignment.rank]}


def listening_arguments(
    assignment: worker_pb2.StageAssignment, credentials: Path | None, listen: str, ports: ProcessPorts
) -> list[str]:
    """Return the arguments that say where a worker listens for other machines, and for the ranks that MLX joins it with.

    Args:
        assignment: the worker's.
        credentials: folder of the node's credentials; without it, no other machine connects.
        listen: address for other machines.
        ports: its ports for other machines.

    Raises:
        AddressInUse: all of the ports are taken.
    """
    reach = [] if credentials is None else ["--credentials", str(credentials), "--listen", ports.at(listen)]
    if not joined_ranks(assignment):
        return reach
    host = assignment.group_host or LOOPBACK
    group = f"{LOOPBACK}:0" if host == LOOPBACK else ports.at(host)
    return [*reach, "--in-group", requested_backend(assignment), "--group-listen", group]


log = logging.getLogger(__name__)

SPARE_BYTES = 50 << 20
"""Memory of a spare on Linux x86-64: 76 MB are resident, and 43 MB would be free without it beside other workers."""
_MOST_SHARE = 0.01
"""Largest share of the node's memory that a spare may take if the setting is `auto`."""
_GRACE_S = 0.5
"""Time for a spare to end by itself, which takes a moment unless it is stopped."""
_EMPTY_S = 60.0
"""Time without workers after which a node ends its spare."""


@dataclass(frozen=True, slots=True)
class Inherited:
    """State that a worker process inherits at its start."""

    environment: Mapping[str, str]
    is_joined: bool
    """True for a rank that MLX joins with others, whose threads are scheduled in another way."""


class SpareWorker:
    """At most one spare of a node."""

    def __init__(
        self,
        mode: SpareMode,
        start: Callable[[Inherited, Callable[[str], str]], Awaitable[ChildProcess]],
        wait_until_idle: Callable[[], Awaitable[None]],
    ) -> None:
        """Start without a spare.

        Args:
            mode: setting of the node.
            start: starts a spare, whose lines the given function receives; it returns the text to log.
            wait_until_idle: returns once the node's workers do not load or compute.
        """
        self._mode = mode
        self._start, self._wait_until_idle = start, wait_until_idle
        self._like: Inherited | None = None
        """State of the last worker, which the next one probably has too."""
        self._child: ChildProcess | None = None
        self._child_like: Inherited | None = None
        self._task: asyncio.Task[None] | None = None
        self._ending = False
        """True if the task ends the spare."""

    @property
    def is_settled(self) -> bool:
        """True if no spare is being made or ended."""
        return self._task is None or self._task.done()

    @property
    def is_ready(self) -> bool:
        """True if a spare waits for its arguments."""
        return self.pid is not None and self.is_settled

    @property
    def pid(self) -> int | None:
        """Process ID of the spare; None if there is none."""
        return None if self._child is None or self._child.exit_reason else self._child.pid

    async def take(
        self, inherited: Inherited, arguments: Sequence[str], *, name: str, rank: int
    ) -> ChildProcess | None:
        """Give a spare its arguments, and return it; None if there is none, or none that is alike."""
        self._like = inherited
        child, self._child = self._child, None
        if child is None or child.exit_reason:
            return None
        if (
            self._child_like == inherited
            and _can_run(child.pid)
            and child.send_line(json.dumps([*arguments]))
        ):
            child.rename(name, rank)
            return child
        await child.stop(_GRACE_S, asks_where=False)
        return None

    def prepare(self) -> None:
        """Make a spare once the node is idle, if the setting and the memory allow it; keep the one that waits."""
        if self._mode == "off" or self._like is None:
            return
        if self.pid is None:
            self._replace_task(self._make(self._like))
        elif self._ending and self._task is not None:
            self._task.cancel()

    def make_at_once(self, like: Inherited) -> None:
        """Make a spare for a worker that is about to come, whatever the setting."""
        self._replace_task(self._make(like, at_once=True))

    def end_soon(self) -> None:
        """End the spare unless the node gets a worker soon."""
        if self._mode != "off":
            self._replace_task(self._end_later())
            self._ending = True

    async def stop(self) -> None:
        """End the spare, and make no other before the next load."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait((self._task,))
        child, self._child = self._child, None
        if child is not None:
            await child.stop(_GRACE_S, asks_where=False)

    def _replace_task(self, work: Coroutine[object, object, None]) -> None:
        if self._task is not None:
            self._task.cancel()
        self._task, self._ending = asyncio.create_task(work, name="spare worker"), False

    async def _end_later(self) -> None:
        await asyncio.sleep(_EMPTY_S)
        child, self._child = self._child, None
        if child is not None:
            await child.stop(_GRACE_S, asks_where=False)

    async def _make(self, like: Inherited, *, at_once: bool = False) -> None:
        if not at_once:
            await self._wait_until_idle()
            if not self._allows(SPARE_BYTES):
                return
        ready = asyncio.Event()

        def on_line(line: str) -> str:
            if line != READY_LINE:
                return line
            ready.set()
            return ""

        child = await self._start(like, on_line)
        self._child, self._child_like = child, like
        end, waiting = asyncio.create_task(child.wait()), asyncio.create_task(ready.wait())
        try:
            await asyncio.wait((end, waiting), return_when=asyncio.FIRST_COMPLETED)
        finally:
            end.cancel()
            waiting.cancel()
        if self._child is not child or not ready.is_set() or at_once:
            return
        if not self._allows(nbytes := _memory_of(child.pid)):
            self._mode, self._child = "off", None
            log.info("No spare worker is kept: it takes %.0f MB", nbytes / 1e6)
            await child.stop(_GRACE_S, asks_where=False)
            return
        log.info("A spare worker waits, pid %d", child.pid)

    def _allows(self, nbytes: int) -> bool:
        if self._mode == "on":
            return True
        # On an NVIDIA GPU, a process that only waits holds 0.5 GB of the GPU's memory.
        return not has_cuda_build() and nbytes <= _MOST_SHARE * usable_memory().total_bytes


def _can_run(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() not in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


def _memory_of(pid: int) -> int:
    """Return the bytes that would be free without the process, if the system reports them; else all that it has."""
    try:
        process = psutil.Process(pid)
        try:
            full = process.memory_full_info()
            return int(getattr(full, "pss", full.uss))
        except psutil.AccessDenied:
            return process.memory_info().rss
    except psutil.NoSuchProcess:
        return 0


# ---- the end of a worker

_RDMA_GRACE_S = 10.0
"""Time for a rank that uses RDMA to end: its peers' ends must reach it first."""
_RETURNS_WITHIN_S, _LOOK_S = 5.0, 0.25
_NOT_BACK_SHARE = 0.5
_MAY_STAY = (
    "It uses RDMA: macOS may keep the memory that it has wired until the machine restarts (docs/macos.md)."
)


class Stoppable(Protocol):
    """A worker's process."""

    name: str

    async def stop(self, grace_s: float, *, asks_where: bool, before_kill: str) -> str:
        """End it, and return the reason."""
        ...


def wired_bytes() -> int | None:
    """Return the memory that a Mac has wired; None on other systems."""
    return getattr(psutil.virtual_memory(), "wired", None)


async def end_worker(
    child: Stoppable,
    assignment: worker_pb2.StageAssignment,
    grace_s: float,
    held_bytes: int,
    wired: Callable[[], int | None] = wired_bytes,
) -> None:
    """End a worker. A rank of a group is not asked where it hangs: it waits for another that has ended.

    One that uses RDMA gets more time, and memory that it leaves wired is reported. After SIGKILL, memory did not return
    before a restart (ml-explore/mlx#3910).

    Args:
        child: its process.
        assignment: of the worker.
        grace_s: seconds that it may take.
        held_bytes: memory of the GPU that it held.
        wired: returns the memory that the machine has wired.
    """
    asks_where = assignment.tp_size == 1
    if not joined_ranks(assignment) or backend_of(assignment) != "jaccl":
        await child.stop(grace_s, asks_where=asks_where, before_kill="")
        return
    before = wired()
    await child.stop(max(grace_s, _RDMA_GRACE_S), asks_where=asks_where, before_kill=_MAY_STAY)
    if before is None or not held_bytes:
        return
    end = time.monotonic() + _RETURNS_WITHIN_S
    while (left := held_bytes - (before - (wired() or 0))) > _NOT_BACK_SHARE * held_bytes:
        if time.monotonic() > end:
            log.warning(
                "%.1f GB that %s had wired have not returned: restart the machine to get them back (docs/macos.md)",
                *(left / 1e9, child.name),
            )
            return
        await asyncio.sleep(_LOOK_S)


# ---- ranks that wait in vain

_ALONE_S = 30.0
"""Seconds without a message from the head; the answers of running steps are not read then."""
_LOOK_FOR_ORPHANS_S = 5.0
_BUSY_SHARE = 0.05
"""Share of a processor above which a worker counts as busy; an idle one uses none."""


class _Child(Protocol):
    @property
    def pid(self) -> int: ...


class _Worker(Protocol):
    """Process of a worker, and its assignment."""

    @property
    def instance(self) -> str: ...
    @property
    def assignment(self) -> worker_pb2.StageAssignment: ...
    @property
    def child(self) -> _Child: ...


class Ends(Protocol):
    """Supervisor of workers that can end those of an instance."""

    @property
    def workers(self) -> Sequence[_Worker]: ...
    async def stop(self, instance: str) -> int: ...


async def end_orphaned_workers(
    supervisor: Ends,
    received_s: Callable[[], float],
    alone_s: float = _ALONE_S,
    look_s: float = _LOOK_FOR_ORPHANS_S,
) -> None:
    """End ranks that compute without a head, forever.

    Args:
        supervisor: supervisor of this machine's workers.
        received_s: returns the time of the head's last message, on the clock of `time.monotonic`.
        alone_s: seconds without a message after which ranks end.
        look_s: seconds between two checks.
    """
    while True:
        await asyncio.sleep(look_s)
        if time.monotonic() - received_s() < alone_s:
            continue
        joined = [worker for worker in supervisor.workers if joined_ranks(worker.assignment)]
        for instance in await _busy_instances(joined, look_s):
            log.error(
                "Received nothing from the head for %.0f s while ranks of %s wait for others: ending them",
                time.monotonic() - received_s(),
                instance,
            )
            await supervisor.stop(instance)


async def _busy_instances(workers: Sequence[_Worker], seconds: float) -> set[str]:
    """Return the instances with a worker that computes."""
    before = {worker.child.pid: _cpu_s(worker) for worker in workers}
    await asyncio.sleep(seconds)
    return {
        worker.instance
        for worker in workers
        if _cpu_s(worker) - before[worker.child.pid] > _BUSY_SHARE * seconds
    }


def _cpu_s(worker: _Worker) -> float:
    with contextlib.suppress(psutil.Error):
        return sum(psutil.Process(worker.child.pid).cpu_times()[:2])
    return 0.0
