"""Supervision of workers as processes: start, watch and end them, and leave none behind."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Collection, Generator, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import grpc

from mlx_ring.agent.lending import LentChild, lent_at
from mlx_ring.agent.mpi.pmix import give_places
from mlx_ring.agent.worker_processes import Inherited, SpareWorker, end_worker, listening_arguments, own_gpu
from mlx_ring.core.environment import environment_with_grpc_logs, worker_environment
from mlx_ring.core.errors import WorkerLost, WorkerStuck
from mlx_ring.host.child import GRACE_S, SPARE_FLAG, ChildProcess, UnresponsiveTime
from mlx_ring.host.interfaces import Trust
from mlx_ring.host.machine import NodePorts, ProcessPorts
from mlx_ring.rpc.backends import backend_of, joined_ranks, rank_in_group, requested_backend
from mlx_ring.rpc.channels import open_aio_channel
from mlx_ring.rpc.methods import STATUS
from mlx_ring.rpc.protos import agent_pb2, worker_pb2
from mlx_ring.rpc.tls.handshakes import loggable_line
from mlx_ring.settings.process_settings import AgentSettings, WorkerSettings, as_arguments, select_settings

log = logging.getLogger(__name__)

WORKER_MODULE = "mlx_ring.worker"
_STATUS_WAIT_S = 0.25
"""Time to wait for the workers' answers before a report; later answers count, too."""
_LONGEST_QUESTION_S = 30.0
_HANGS_S = 20.0
"""Time after which a worker that loads, but neither answers nor computes, hangs. Imports compute, and so do kernels."""
_HANG_LOOK_S = 1.0
GROUP_PHASE = "group"
"""Phase of loading in which a rank waits for others, and may not answer; it has a limit of its own."""
_IDLE_LOOK_S, _MOST_IDLE_LOOKS = 1.0, 60
"""Time between two looks at workers whose steps must be the same in both, and the number of looks."""
SILENT_S = 2.0
"""Time without an answer after which a worker may have to be replaced, and is not expected to end by itself."""
_DEAF_GRACE_S = 0.5


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """Options of every worker of this node."""

    node: str
    run_dir: Path
    """Private to this agent; holds the sockets."""
    settings: AgentSettings
    credentials: Path | None = None
    """The node's credentials, for workers that other machines reach; None if no other machine does."""
    listen: str = "[::]"
    """Address for other machines."""
    ports: NodePorts = field(default_factory=lambda: NodePorts(()))
    trust: Trust = field(default_factory=Trust)
    """Interfaces over which collectives may reach other machines."""
    lent: Path | None = None
    """Folder where processes listen that are parents of workers behind the first of a group; None: this one is."""


@dataclass(slots=True)
class Worker:
    """One worker process with its last status."""

    assignment: worker_pb2.StageAssignment
    socket: Path
    child: ChildProcess | LentChild
    channel: grpc.aio.Channel
    status: worker_pb2.WorkerStatus | None = None
    _joining: tuple[worker_pb2.Wait, float] | None = None
    """Its wait while it joins a group, and the start of it. The worker itself answers nothing then."""
    unresponsive: UnresponsiveTime = field(init=False)
    question: asyncio.Task[None] | None = None
    """Status request that it has not answered."""
    loading_phase: str = ""
    announced: worker_pb2.StageAssignment | None = None
    """Its assignment of a next plan."""
    prepared_epoch: int = 0
    """Epoch for which it was prepared last; it enters that epoch, and plan, once it is linked."""
    _head: int = 0

    def __post_init__(self) -> None:
        self.unresponsive = UnresponsiveTime(self.child.pid)

    @property
    def head(self) -> int:
        """Number of the newest head that it has served; 0 if none has a number."""
        return max(self._head, self.status.hello.fencing_id if self.status else 0)

    @property
    def epoch(self) -> int:
        """Epoch in which it was started or linked last. A head that adopts it counts on."""
        return max(self.assignment.epoch, self.status.hello.epoch if self.status else 0)

    def record_head(self, head: int) -> None:
        """Record that a head has started or prepared it."""
        self._head = max(self._head, head)

    @property
    def instance(self) -> str:
        return self.assignment.instance

    @property
    def stage(self) -> int:
        return self.assignment.stage

    @property
    def rank(self) -> int:
        return self.assignment.rank

    @property
    def address(self) -> str:
        return f"unix:{self.socket}"

    @property
    def label(self) -> str:
        """Name of the worker in messages."""
        return f"The worker of stage {self.stage}, rank {self.rank}, pid {self.child.pid}"

    @property
    def alive(self) -> bool:
        return not self.child.exit_reason

    @property
    def computes(self) -> bool:
        """True if it answered just now that it waits for its device, loads layers, or computes a step with its group."""
        waits = "" if self.status is None or self.unresponsive.seconds else self.status.waits.kind
        return waits in {"device", "load"} or (waits == "collective" and self.assignment.tp_size > 1)

    @property
    def grace_s(self) -> float:
        """Seconds that it may take to end; a rank that waits in a collective, or a stuck worker, receives no request."""
        is_deaf = self.assignment.tp_size > 1 or self.unresponsive.seconds >= SILENT_S
        return _DEAF_GRACE_S if is_deaf else GRACE_S

    async def stop(self) -> None:
        """End it. A rank of a group is not asked where it hangs: it waits for another that has ended."""
        held = self.status.device_memory_bytes if self.status else 0
        await end_worker(self.child, self.assignment, self.grace_s, held)

    def record_joining(self, assignment: worker_pb2.StageAssignment | None) -> None:
        """Record that it has begun to join its group; None: that it does not, or has joined."""
        self._joining = None
        if assignment is not None:
            peer = f"the group at {', '.join(assignment.group)}, which it joins"
            wait = worker_pb2.Wait(kind="collective", backend=backend_of(assignment), peer=peer)
            self._joining = (wait, time.monotonic())

    def state(self) -> agent_pb2.WorkerState:
        if self._joining is not None and self.status is not None:
            wait, since = self._joining
            self.status.waits.CopyFrom(wait)
            self.status.waits.seconds = time.monotonic() - since
        return agent_pb2.WorkerState(
            instance=self.instance,
            stage=self.stage,
            rank=self.rank,
            pid=self.child.pid,
            address=self.address,
            alive=self.alive,
            exit_reason=self.child.exit_reason,
            status=self.status,
            silent_s=self.unresponsive.seconds,
            assignment=self.assignment,
        )


class Supervisor:
    """Every worker of this node. A dead one stays listed, with its reason, until its instance is stopped."""

    def __init__(self, options: WorkerOptions) -> None:
        self._options = options
        self._workers: list[Worker] = []
        self._places: dict[str, list[ChildProcess]] = {}
        """MPI servers by instance, which assign its ranks their places and live as long as these."""
        self._watchers: set[asyncio.Event] = set()
        self._serial, self._tasks = count(), set[asyncio.Task[None]]()
        self._stops: set[asyncio.Task[int]] = set()
        self.spare = SpareWorker(options.settings.spare_worker, self._start_spare, self._until_idle)
        self.revoked: tuple[str, ...] = ()
        """Serials of certificates that workers refuse; sent with each question."""

    @property
    def trusted(self) -> Trust:
        """Interfaces over which collectives may reach other machines."""
        return self._options.trust

    @property
    def workers(self) -> tuple[Worker, ...]:
        return tuple(self._workers)

    def pids(self) -> tuple[int, ...]:
        return tuple(worker.child.pid for worker in self._workers if worker.alive)

    @contextlib.contextmanager
    def changes(self) -> Generator[asyncio.Event]:
        """Yield an event that is set at each change, for one watcher, which clears it."""
        changed = asyncio.Event()
        self._watchers.add(changed)
        try:
            yield changed
        finally:
            self._watchers.discard(changed)

    async def start(self, assignments: Iterable[worker_pb2.StageAssignment], head: int = 0) -> list[Worker]:
        """Start a process for each assignment of a head; nothing is loaded yet."""
        return [await self._start_one(assignment, head) for assignment in assignments]

    async def _start_one(self, assignment: worker_pb2.StageAssignment, head: int) -> Worker:
        options = self._options
        socket, ports = options.run_dir / f"worker-{next(self._serial)}.sock", ProcessPorts(options.ports)
        try:
            arguments = [
                *("--socket", str(socket), "--node", options.node),
                *("--stage", str(assignment.stage), "--rank", str(assignment.rank)),
                *_settings_arguments(options),
                *listening_arguments(assignment, options.credentials, options.listen, ports),
            ]
            child = await self._start_process(assignment, arguments)
        except BaseException:
            ports.give_back()
            raise
        worker = Worker(assignment, socket, child, open_aio_channel(f"unix:{socket}"))
        worker.record_head(head)
        self._workers.append(worker)
        task = asyncio.create_task(self._report_end(worker, ports), name=f"watch {child.name}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        layers = f"layers {assignment.first_layer} to {assignment.end_layer - 1} of {assignment.instance}"
        log.info("Started %s for %s, pid %d", child.name, layers, child.pid)
        self._notify()
        return worker

    async def _start_process(
        self, assignment: worker_pb2.StageAssignment, arguments: Sequence[str]
    ) -> ChildProcess | LentChild:
        """Start it as a child of this process, or of the lent process of its rank."""
        options, name = self._options, f"worker-{assignment.stage}-{assignment.rank}"
        place, is_joined = rank_in_group(assignment), bool(joined_ranks(assignment))
        if options.lent is None or not place:
            environment = _environment(options) | (own_gpu(assignment) if is_joined else {})
            inherited = Inherited(environment, is_joined)
            # MPI and other launchers give each of their ranks a place of its own.
            is_launched = options.lent is not None or (is_joined and requested_backend(assignment) == "mpi")
            spare = (
                None
                if is_launched
                else await self.spare.take(inherited, arguments, name=name, rank=assignment.rank)
            )
            return spare or await ChildProcess.start(
                WORKER_MODULE,
                arguments,
                name=name,
                rank=assignment.rank,
                environment=environment,
                word=loggable_line,
            )
        return await LentChild.start(
            lent_at(options.lent, place),
            WORKER_MODULE,
            arguments,
            name=name,
            rank=assignment.rank,
            blas_threads=options.settings.blas_threads,
        )

    def expect_worker(self) -> None:
        """Start a process for the first worker, which saves the time of its start once the worker is known."""
        self.spare.make_at_once(Inherited(_environment(self._options), is_joined=False))

    async def _start_spare(self, inherited: Inherited, on_line: Callable[[str], str]) -> ChildProcess:
        options = self._options
        return await ChildProcess.start(
            WORKER_MODULE,
            [
                *(SPARE_FLAG, *_settings_arguments(options)),
                *(["--joined"] if inherited.is_joined else []),
            ],
            name="spare-worker",
            rank=None,
            environment=inherited.environment,
            word=lambda line: loggable_line(on_line(line)),
        )

    async def _until_idle(self) -> None:
        """Wait until no worker loads or has computed for a moment. Workers that are always busy are not waited for."""
        before: Sequence[object] = ()
        for _ in range(_MOST_IDLE_LOOKS):
            await asyncio.sleep(_IDLE_LOOK_S)
            await self.refresh()
            statuses = [worker.status for worker in self._workers if worker.alive and worker.status]
            now = [(status.pid, status.last_step) for status in statuses]
            if now == before and all(status.phase == "ready" for status in statuses):
                return
            before = now

    async def give_places(self, instance: str, assignments: Iterable[worker_pb2.StageAssignment]) -> None:
        """Fill in what workers need that MPI is to join.

        Raises:
            RingError: it cannot join them.
        """
        places = await give_places(assignments, self._options.run_dir)
        self._places.setdefault(instance, []).extend(places)

    async def _report_end(self, worker: Worker, ports: ProcessPorts) -> None:
        reason = await worker.child.wait()
        ports.give_back()
        if worker in self._workers:
            log.error("%s (pid %d) %s", worker.child.name, worker.child.pid, reason)
        self._notify()

    async def stop(self, instance: str = "", pids: Collection[int] = (), *, up_to: int = 0) -> int:
        """End the workers of an instance, or all; return how many, once each is verified dead.

        It continues if the caller is cancelled, as by a lost head; otherwise a worker that ignores SIGTERM would stay.

        Args:
            instance: instance whose workers end; empty: every instance's, also those that are ending already.
            pids: only these processes; empty: all.
            up_to: highest epoch whose workers end, because a request may arrive when later ones run; 0: any.
        """
        leaving = [
            worker
            for worker in self._workers
            if instance in ("", worker.instance)
            and (not pids or worker.child.pid in pids)
            and (not up_to or worker.epoch <= up_to)
        ]
        earlier = [] if instance else [*self._stops]
        stopping = asyncio.create_task(self._stop(leaving, is_all=not instance), name=f"stop {instance}")
        self._stops.add(stopping)
        stopping.add_done_callback(self._stops.discard)
        return (await asyncio.gather(*map(asyncio.shield, [stopping, *earlier])))[0]

    async def _stop(self, leaving: Collection[Worker], *, is_all: bool) -> int:
        self._workers = [worker for worker in self._workers if worker not in leaving]
        for worker in leaving:
            log.info("Stopping %s, pid %d", worker.child.name, worker.child.pid)
        await asyncio.gather(*(worker.stop() for worker in leaving))
        left = {worker.instance for worker in self._workers}
        if is_all:
            await self.spare.stop()
        elif not left:
            self.spare.end_soon()
        places = [child for name in [*self._places] if name not in left for child in self._places.pop(name)]
        await asyncio.gather(*(child.stop() for child in places))
        for worker in leaving:
            if worker.question is not None:
                worker.question.cancel()
            await worker.channel.close()
            worker.socket.unlink(missing_ok=True)
        self._notify()
        return len(leaving)

    def revoke(self, serials: tuple[str, ...]) -> None:
        """Make every worker refuse these certificates, now or at its next question."""
        self.revoked = serials
        task = asyncio.create_task(self.refresh(), name="revocation")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def refresh(self) -> None:
        """Ask every worker how it is. One that does not answer in time keeps its last status, and its request."""
        await self._refresh(worker for worker in self._workers if worker.alive)

    async def _refresh(self, workers: Iterable[Worker]) -> None:
        asked = {self._ask(worker): worker for worker in workers}
        if not asked:
            return
        _, waiting = await asyncio.wait(asked, timeout=_STATUS_WAIT_S)
        for question in waiting:
            asked[question].unresponsive.unanswered()

    def _ask(self, worker: Worker) -> asyncio.Task[None]:
        """Return the request that the worker has not answered, or a new one."""
        if worker.question is None or worker.question.done():
            worker.question = asyncio.create_task(self._read_status(worker), name="status")
        return worker.question

    async def _read_status(self, worker: Worker) -> None:
        question = worker_pb2.StatusRequest(revoked=self.revoked)
        try:
            worker.status = await STATUS.aio_unary_unary(worker.channel)(
                question, timeout=_LONGEST_QUESTION_S
            )
        except grpc.RpcError:
            worker.unresponsive.unanswered()
            return
        was_silent = worker.unresponsive.seconds > 0
        worker.unresponsive.answered()
        if was_silent:
            self._notify()

    async def until_hung(self, worker: Worker, hangs_s: float = _HANGS_S) -> WorkerStuck:
        """Wait until a worker that is not ready hangs, and return the error."""
        while worker.unresponsive.idle_s < hangs_s:
            await asyncio.sleep(_HANG_LOOK_S)
            if worker.loading_phase == GROUP_PHASE:
                worker.unresponsive.answered()
            else:
                await self._refresh([worker])
        return WorkerStuck(f"{worker.label} has neither answered nor computed for {hangs_s:g} s; it hangs.")

    async def wait_until_up(self, worker: Worker) -> None:
        """Wait until a worker that was just started answers.

        Raises:
            WorkerLost: it has ended.
            WorkerStuck: it hangs.
        """
        call = STATUS.aio_unary_unary(worker.channel)
        up = asyncio.ensure_future(call(worker_pb2.StatusRequest(revoked=self.revoked), wait_for_ready=True))
        end = asyncio.ensure_future(worker.child.wait())
        hung = asyncio.ensure_future(self.until_hung(worker))
        try:
            await asyncio.wait((up, end, hung), return_when=asyncio.FIRST_COMPLETED)
            if hung.done():
                raise hung.result()
            if not up.done() or up.exception() is not None:
                raise WorkerLost(f"{worker.label} {await end} before it answered.")
            worker.status = up.result()
            worker.unresponsive.answered()
        finally:
            up.cancel()
            end.cancel()
            hung.cancel()

    def _notify(self) -> None:
        for changed in self._watchers:
            changed.set()


def _environment(options: WorkerOptions) -> dict[str, str]:
    """Return the environment of a worker; one that other machines reach reports the peers that it refuses."""
    environment = worker_environment(options.settings.blas_threads)
    return environment if options.credentials is None else environment_with_grpc_logs(environment)


def _settings_arguments(options: WorkerOptions) -> list[str]:
    return as_arguments(select_settings(WorkerSettings, options.settings))
