"""The compute thread: its queue of jobs, its scheduling, its waits, and the end of the process when its group fails.

Other threads do what may hang (`TimedThreads`).

`queue.SimpleQueue` cannot hold the jobs: up to Python 3.12 its `get` waits for ever if its timeout passes before it
begins to wait. That happens when a busy machine stops the thread for some hundred microseconds.
`queue.Queue` cannot be filled by a signal handler while its thread takes from it.

MLX's CPU backend runs its queue in a thread of its own, which the compute thread fills. If both share a core, every
operation wakes one of them and stops the other: hundreds of context switches for one token. Linux's batch policy does
not stop the running thread when another wakes.

Ranks that MLX joins must not use it. Their threads wait for other ranks in loops, and a rank that has its data would
wait until the others' time slices end. On one core each, two ranks decoded 1.3 times as fast as one with long time
slices, and 1.8 times with short ones.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Generic, Literal, NoReturn, TypeVar

from mlx_ring.core.errors import LinkLost, NotReady, RingError, ServingError
from mlx_ring.rpc.protos import worker_pb2

Job = TypeVar("Job")
Result = TypeVar("Result")


@dataclass(slots=True, eq=False)
class _TimedJob:
    limit_s: float
    run: Callable[[], object]
    expire: Callable[[], object]
    give_up: Callable[[], object] | None
    """Function to call once it is too old; None if it may have any age."""
    old_at: float
    """Time from which it is too old; infinite if it may have any age, or was given up."""


class TimedThreads:
    """Threads for jobs that may hang. Jobs have turns in order, and a limit of time from their turn on.

    The turn of a job ends with it, or with its time. So one that hangs keeps a thread, but not the turns of others.
    Jobs may have the same limit of age, so that many slow ones do not add up.
    """

    def __init__(self, name: str, threads: int, *, at_once: int) -> None:
        """Start without jobs; as many as `at_once` have their turn together."""
        self._threads, self._at_once = ThreadPoolExecutor(threads, name), at_once
        self._lock = threading.Lock()
        self._waiting, self._running = deque[_TimedJob](), set[_TimedJob]()
        self._is_watching = False
        """True while a timer runs until the next job is too old."""

    @property
    def is_idle(self) -> bool:
        """True if no job runs or waits, except those whose time was over."""
        with self._lock:
            return not (self._waiting or self._running)

    def put(
        self,
        limit_s: float,
        run: Callable[[], object],
        expire: Callable[[], object],
        give_up: Callable[[], object] | None = None,
    ) -> None:
        """Run a job in its turn; call `expire` if it has not ended after so many seconds.

        Call `give_up` if it has not ended so many seconds after this call; then it gets no turn any more.
        """
        old_at = math.inf if give_up is None else time.monotonic() + limit_s
        with self._lock:
            self._waiting.append(_TimedJob(limit_s, run, expire, give_up, old_at))
        self._begin()

    def expire_waiting(self) -> None:
        """Call `expire` of the jobs that wait for their turn, and forget them."""
        with self._lock:
            waiting, self._waiting = self._waiting, deque[_TimedJob]()
        for job in waiting:
            job.expire()

    def _begin(self) -> None:
        """Begin the next job, if one may begin."""
        with self._lock:
            if not self._waiting or len(self._running) >= self._at_once:
                return
            job = self._waiting.popleft()
            self._running.add(job)
        timer = _start_timer(job.limit_s, partial(self._end, job, job.expire))
        self._threads.submit(self._run, job, timer)

    def _run(self, job: _TimedJob, timer: threading.Timer) -> None:
        try:
            job.run()
        finally:
            timer.cancel()
            self._end(job)

    def _end(self, job: _TimedJob, act: Callable[[], object] = bool) -> None:
        """End a job's turn, after `act`."""
        act()
        with self._lock:
            self._running.discard(job)
        self._begin()
        # A job that never waited ends with its turn before it is too old, and others get their turns by then.
        self._give_up_old(watches=False)

    def _give_up_old(self, *, watches: bool) -> None:
        """Give up jobs that are too old, and do so again when the next one is.

        Args:
            watches: True for the timer that does this; no other one begins beside it.
        """
        with self._lock:
            if self._is_watching and not watches:
                return
            now = time.monotonic()
            jobs = (*self._running, *self._waiting)
            old = [job for job in jobs if job.old_at <= now]
            self._waiting = deque(job for job in self._waiting if job.old_at > now)
            for job in old:
                job.old_at = math.inf
            next_at = min((job.old_at for job in jobs), default=math.inf)
            self._is_watching = next_at < math.inf
        for job in old:
            if job.give_up is not None:
                job.give_up()
        if next_at < math.inf:
            _start_timer(next_at - now, partial(self._give_up_old, watches=True))


def _start_timer(seconds: float, act: Callable[[], object]) -> threading.Timer:
    timer = threading.Timer(seconds, act)
    timer.daemon = True
    timer.start()
    return timer


_WAIT_S = 0.5
"""Time after which a signal that came just before a wait is handled at the latest."""


class JobQueue(Generic[Job]):
    """Queue that any thread and signal handlers fill, and one thread empties."""

    def __init__(self) -> None:
        self._waiting: deque[Job] = deque()
        self._bell = threading.Lock()
        """Lock that is free if a job has come since the taker last waited."""

    def put(self, job: Job) -> None:
        """Add a job. Never waits."""
        self._waiting.append(job)
        try:
            self._bell.release()
        except RuntimeError:
            """It is free already."""

    def get(self) -> Job:
        """Take the next job, and wait for one if necessary.

        Python does not run the handler of a signal that arrives just before a wait, so each wait is short.
        """
        while (job := self.get_within(_WAIT_S)) is None:
            pass
        return job

    def get_within(self, seconds: float) -> Job | None:
        """Take the next job if one arrives within `seconds`."""
        end = time.monotonic() + seconds
        while not self._waiting:
            if not self._bell.acquire(timeout=max(0.0, end - time.monotonic())):
                return None
        return self._waiting.popleft()


@dataclass(frozen=True, slots=True)
class Wait:
    """Cause for which a thread waits."""

    kind: Literal["collective", "link", "device", "load"]
    backend: str = ""
    """MLX's backend of a collective."""
    peer: str = ""
    """Stages or ranks that it waits for; empty if none."""


_Held = tuple[Wait, float]
"""A wait, and the time of its start on `time.monotonic`'s clock."""


class Waits:
    """Waits of one thread, of which the innermost counts. Any thread may read it."""

    def __init__(self) -> None:
        self._held: _Held | None = None

    def during(self, wait: Wait) -> Waiting:
        """Return a context in which the thread waits for this."""
        return Waiting(self, wait)

    def replace(self, held: _Held | None) -> _Held | None:
        """Set the present wait, and return the one before."""
        before, self._held = self._held, held
        return before

    def status(self) -> worker_pb2.Wait | None:
        """Return the present wait; None if there is none."""
        held = self._held
        if held is None:
            return None
        wait, since = held
        return worker_pb2.Wait(
            kind=wait.kind, backend=wait.backend, peer=wait.peer, seconds=time.monotonic() - since
        )


class Waiting:
    """Context of one wait."""

    __slots__ = ("_before", "_wait", "_waits")

    def __init__(self, waits: Waits, wait: Wait) -> None:
        self._waits, self._wait = waits, wait

    def __enter__(self) -> None:
        self._before = self._waits.replace((self._wait, time.monotonic()))

    def __exit__(self, *_error: object) -> None:
        self._waits.replace(self._before)


log = logging.getLogger(__name__)

_PAUSE_S = 2.0
"""Time in which the failure's cause can be found first, when ranks lose each other."""


def end_process(error: Exception) -> NoReturn:
    """End the process after a pause.

    Other ranks may wait for this one in a collective, or may have continued without it.
    """
    log.error("This worker ends because its group is unusable: %s", error)
    time.sleep(_PAUSE_S)
    logging.shutdown()
    os._exit(1)


_LOOK_S = 0.5
"""Time between two looks at whether a result is still wanted."""


def complete(done: Future[Result], work: Callable[[], Result]) -> None:
    """Do work, and put its result or its error into `done`."""
    try:
        result = work()
    except RingError as error:
        done.set_exception(error)
    except Exception as error:
        log.exception("A job failed")
        done.set_exception(ServingError(f"{type(error).__name__}: {error}"))
    else:
        done.set_result(result)


def await_while(done: Future[Result], is_wanted: Callable[[], bool]) -> Result:
    """Return the result of work once it is done. Raises `NotReady` if it is no longer wanted before, or the work's error."""
    while True:
        try:
            return done.result(_LOOK_S)
        except TimeoutError:
            if not is_wanted():
                raise NotReady("The reader has left.") from None


def group_failure(error: Exception) -> Exception:
    """Return the error of a collective; `LinkLost` if MLX's ring lost a connection, because its rank has ended or not."""
    return (
        LinkLost(f"A connection of MLX's ring broke: {error}.") if str(error).startswith("[ring]") else error
    )


def prefer_throughput() -> None:
    """Use long time slices for the calling thread and threads that it starts.

    Only Linux supports this; elsewhere nothing happens.
    """
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def prefer_latency() -> None:
    """Use normal time slices, so that the thread reacts at once."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
