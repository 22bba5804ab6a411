"""A model of this head, loaded or not: its replicas, the one that answers a request, and the API's view of it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import count
from typing import Any

from mlx_ring.api.service import State
from mlx_ring.core.engine_stats import Meter
from mlx_ring.core.errors import NotReady, RingError
from mlx_ring.core.generation import OpenRequest, WaysBack
from mlx_ring.core.traces import Tracing
from mlx_ring.core.types import Sampling
from mlx_ring.core.worker_status import InstanceInfo
from mlx_ring.engine.kv_budget import KEPT_TOKENS
from mlx_ring.engine.live_request import LiveRequest
from mlx_ring.engine.request_traces import RequestTracer
from mlx_ring.engine.streams import Vocabulary
from mlx_ring.engine.takeover import HeldRequests, move_requests
from mlx_ring.head.instance_view import LOADING, InstanceService
from mlx_ring.head.placing import placed_stages
from mlx_ring.head.replica import Replica
from mlx_ring.head.router import Lease, Routed, Router, give_back
from mlx_ring.head.served_model import (
    ServedModel,
    describe_model,
    memory_for_weights,
    policy_of,
    sampling_defaults,
    start_name,
)
from mlx_ring.models.pooling import Pooling, read_pooling
from mlx_ring.planner.place import LoadedStages
from mlx_ring.settings.config import Settings

log = logging.getLogger(__name__)

Ready = Callable[[ServedModel, InstanceInfo, float], None]
"""Callback for an instance that serves: its model, the instance, and the seconds that loading took."""
JUST_NOW_S = 0.5
_PATIENCE = 2.0
"""Multiple of the predicted time after which requests no longer wait for their own instance while another one serves."""


class HostedModel:
    """A model as the API's `ModelService`."""

    def __init__(
        self,
        settings: Settings,
        served: ServedModel,
        on_crash: Callable[[Exception], None],
        missing: Callable[[], int],
        tracing: Tracing | None = None,
    ) -> None:
        """Start unloaded.

        Args:
            settings: settings of this model.
            served: the model.
            on_crash: callback for unexpected errors.
            missing: function that returns the number of machines still to join.
            tracing: destination of traces.
        """
        self._on_crash, self._missing = on_crash, missing
        self.settings = settings
        """Settings of this model."""
        self.served = served
        self.replicas: list[Replica] = []
        self.meters: list[Meter] = []
        """Meters of its replicas by number, including ended ones."""
        self.is_awaited = False
        """True if it is about to be loaded without a request."""
        self.waiting = 0
        """Number of requests that wait for it to be loaded."""
        self.last_requested = time.monotonic()
        """Time of the last request, by the monotonic clock."""
        self.created = int(time.time())
        self.default_sampling: Sampling = sampling_defaults(served.folder.generation_config)
        self.pooling: Pooling = read_pooling(served.folder.path, settings.pooling)
        self._metadata = describe_model(served.folder)
        self._tasks: dict[Replica, asyncio.Task[None]] = {}
        self.is_queued = False
        """True while it is being loaded on request, or waits for its turn."""
        self.is_moving = False
        """True while another replica takes the place of one."""
        self._leaving: Replica | None = None
        """Replica that gets no new requests, because another one takes its place."""
        self._patience: asyncio.TimerHandle | None = None
        self._stopping: asyncio.Task[None] | None = None
        """End of its last instances."""
        self._held = HeldRequests(
            Vocabulary.of(served.tokenizer),
            served.limits,
            policy_of(settings),
            within_s=settings.resume_within_s,
            meter=self.meter(0),
            tracer=None if tracing is None else RequestTracer(tracing, served.names[0], {}),
        )
        self._router = Router(self._engines)
        self._has_served = False
        self._failure: RingError | None = None

    # ---- as the API sees it

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights of one replica."""
        return memory_for_weights(self.served.folder, self.settings)

    @property
    def model_id(self) -> str:
        return self.served.names[0]

    @property
    def aliases(self) -> Sequence[str]:
        return self.served.names[1:]

    @property
    def start_name(self) -> str:
        return start_name(self.settings.model, self.served.local)

    @property
    def tokenizer(self) -> Any:
        return self.served.tokenizer

    @property
    def context_length(self) -> int:
        """Context length of all serving instances."""
        lengths = [each.engine.context_length for each in self._serving()]
        return min(lengths, default=self.served.limits.context_length)

    @property
    def kept_context_length(self) -> int:
        insisted = self.settings.max_model_len is not None or self.settings.kv_cache_memory is not None
        return self.context_length if insisted else min(self.context_length, KEPT_TOKENS)

    @property
    def vocab_size(self) -> int:
        return self.served.limits.vocab_size

    @property
    def hidden_size(self) -> int:
        return self.served.folder.hidden_size

    @property
    def metadata(self) -> Mapping[str, object]:
        loaded = (each.engine.limits.model for each in self._preferred())
        return {**self._metadata, "digest": next(loaded, "") or self.served.digest}

    @property
    def state(self) -> State:
        if not self.is_loaded:
            return "loading" if self.is_awaited or self.is_queued else "unloaded"
        if (error := self.error) is None:
            return "ready"
        return "loading" if isinstance(error, NotReady) else "unavailable"

    @property
    def is_loaded(self) -> bool:
        """True if it has replicas that are not being ended; they may be loaded again after a loss."""
        return bool(self.replicas) and (self._stopping is None or self._stopping.done())

    @property
    def engine(self) -> Lease:
        self.last_requested = time.monotonic()
        return self._router.leased()

    @property
    def error(self) -> RingError | None:
        """Reason why it cannot answer now; an unloaded model can, because it is loaded on request."""
        if not self.is_loaded:
            return self._coming() if self.is_awaited else self._failure
        errors = [replica.service.error for replica in self.replicas]
        return None if None in errors else errors[0]

    def _coming(self) -> NotReady:
        missing = self._missing()
        if not missing:
            return NotReady(LOADING)
        return NotReady(
            f"The model will be loaded once {missing} more {'machine has' if missing == 1 else 'machines have'} joined: "
            "run `mlx-ring join` there."
        )

    def _engines(self) -> Sequence[Routed]:
        """Return the engines that serve; while all are loaded again, the queue for the next one."""
        serving = [each.engine for each in self._preferred()]
        return serving or ([self._held] if self.keeps_requests else [])

    def _preferred(self) -> list[InstanceService]:
        """Return the instances that serve, if possible without the one that another one replaces."""
        leaving = None if self._leaving is None else self._leaving.service
        serving = self._serving()
        return [each for each in serving if each is not leaving] or serving

    @property
    def held_requests(self) -> Sequence[OpenRequest]:
        return self._held.requests()

    @property
    def keeps_requests(self) -> bool:
        is_waiting = self.settings.resume == "on" and self._has_served and self.error is not None
        return is_waiting and self._refusal is None

    def hold(self, lives: Iterable[LiveRequest], loss: RingError, *, may_wait: bool = True) -> None:
        """Give each request of a lost instance to the replica that is predicted to continue it first.

        It may also wait for its own instance: if that is faster, or while no other one serves.

        Args:
            lives: the requests, in their order.
            loss: the loss.
            may_wait: False if no request is to wait while another instance serves.
        """
        interrupted, serving = list(lives), self._preferred()
        homes = [live.home for live in interrupted]
        lost = next((each for each in self.replicas if any(map(each.service.runs, homes))), None)
        ways = WaysBack(self.model_id, (self.meter(0) if lost is None else lost.meter).record_way)
        back = lost.service if lost is not None and may_wait and self._leaving is None else None
        waiting, back_s = give_back(interrupted, back, serving, ways)
        if waiting or not serving:
            self._held.hold(waiting, loss)
        if not serving and (refusal := self._refusal) is not None:
            self._held.fail(refusal)
        if waiting and serving:
            self._end_patience()
            after_s = _PATIENCE * back_s + JUST_NOW_S
            self._patience = asyncio.get_running_loop().call_later(after_s, self._hand_over, loss)

    def _end_patience(self) -> None:
        if self._patience is not None:
            self._patience.cancel()

    def _hand_over(self, loss: RingError) -> None:
        """Let instances that serve continue what has waited for its own instance for much longer than predicted."""
        if self._serving() and len(self._held):
            log.warning("%s is not back as predicted: other replicas continue its requests", self.model_id)
            self.hold(self._held.take(), loss, may_wait=False)

    @property
    def _refusal(self) -> NotReady | None:
        """Error of interrupted requests while each replica was lost too often; None while they are continued."""
        refusals = [replica.service.recoveries.refusal for replica in self.replicas]
        return None if None in refusals or not refusals else refusals[0]

    @property
    def rejected(self) -> Mapping[str, int]:
        """Requests that were refused, by the error's name."""
        return self._router.rejected

    def meter(self, replica: int) -> Meter:
        """Return the meter of a replica's number."""
        while len(self.meters) <= replica:
            self.meters.append(Meter())
        return self.meters[replica]

    @property
    def unused_meter(self) -> Meter:
        """Meter that no replica uses."""
        used = {replica.meter for replica in self.replicas}
        return next(meter for meter in map(self.meter, count()) if meter not in used)

    @property
    def instances(self) -> Sequence[InstanceService]:
        return [replica.service for replica in self.replicas]

    def loaded_stages(self, names: Mapping[str, str]) -> tuple[LoadedStages, ...]:
        """Return the stages of each instance that serves, with the readable names of machines."""
        return tuple(
            placed_stages(placement, names)
            for service in self._serving()
            if (placement := service.placement) is not None
        )

    def _serving(self) -> list[InstanceService]:
        return [service for service in self.instances if service.error is None]

    @property
    def open_requests(self) -> int:
        """Number of sequences in all its instances, and of requests that wait for it."""
        stats = [service.engine.stats().scheduler for service in self._serving()]
        return self.waiting + len(self._held) + sum(each.running + each.waiting for each in stats)

    @property
    def is_idle(self) -> bool:
        """True if no request is prepared, or came just now, because one that waited may not have started."""
        return not self._router.is_leased and time.monotonic() - self.last_requested >= JUST_NOW_S

    # ---- loading and unloading

    async def run(self, replicas: Sequence[Replica], ready: Ready) -> None:
        """Load, and return once every replica has served, or was lost after another one had served.

        They keep serving until `stop`.

        Args:
            replicas: new replicas.
            ready: receives each instance that serves.

        Raises:
            RingError: a replica could not be loaded; then all are ended.
            CancelledError: it was stopped meanwhile.
        """
        # Another end may begin meanwhile.
        while self._stopping is not None and not self._stopping.done():
            await asyncio.wait((self._stopping,))
        self.replicas, self._failure = list(replicas), None
        firsts: list[asyncio.Future[None]] = []
        for replica in self.replicas:
            first: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            firsts.append(first)
            name, work = f"replica of {self.model_id}", self._keep(replica, first, ready)
            self._tasks[replica] = asyncio.create_task(work, name=name)
        try:
            await asyncio.gather(*firsts)
        except BaseException as error:
            for first in firsts:
                first.cancel()
            await self.stop("The model could not be loaded.")
            self._failure = error if isinstance(error, RingError) else self._failure
            raise

    async def _keep(
        self, replica: Replica, first: asyncio.Future[None], ready: Ready, *, others_count: bool = True
    ) -> None:
        def on_ready(load_s: float) -> None:
            self._has_served = True
            self._end_patience()
            held = self._held.take()
            interrupted = [live for live in held if live.interrupted_at is not None]
            replica.service.engine.take_over(held)
            replica.service.recoveries.record_resumed(interrupted)
            ready(self.served, replica.service.info, load_s)
            if not first.done():
                first.set_result(None)

        def others_serve() -> bool:
            if not others_count:
                return False
            if self._has_served and not first.done():
                first.set_result(None)
            return self._has_served

        try:
            await replica.run(on_ready, others_serve)
        except asyncio.CancelledError:
            first.cancel()
            raise
        except Exception as error:
            if not isinstance(error, RingError):
                self._on_crash(error)
            if first.done():
                raise
            first.set_exception(error)

    async def stop(self, reason: str) -> None:
        """End every instance and its requests, and free their memory, also if the caller is cancelled meanwhile.

        Requests that come before the end wait for the next load.
        """
        tasks, self._tasks = [*self._tasks.values()], {}
        self._has_served = False
        self._held.fail(NotReady(reason))
        for service in self._serving():
            service.engine.fail(NotReady(reason))
        for task in tasks:
            task.cancel()
        self._stopping = asyncio.create_task(self._end_all(tasks, [*self.replicas], self._stopping))
        await asyncio.shield(self._stopping)

    async def _end_all(
        self,
        tasks: Sequence[asyncio.Task[None]],
        replicas: Sequence[Replica],
        before: asyncio.Task[None] | None,
    ) -> None:
        await asyncio.gather(*tasks, return_exceptions=True)
        if before is not None:
            await asyncio.wait((before,))
        self.replicas = [each for each in self.replicas if each not in replicas]

    async def replace(
        self, old: Replica, new: Replica, ready: Ready, loaded: Callable[[], None] = lambda: None
    ) -> int:
        """Load a replica beside another one, let it continue all requests, and end the other one.

        Args:
            old: the replica that serves.
            new: the replica that takes its place.
            ready: receives the new instance.
            loaded: called when the new one serves. From then on, this waits for answers and moves of KV.

        Returns:
            The number of requests that have moved.

        Raises:
            RingError: the new one could not be loaded, or was lost meanwhile. The old one continues to serve.
        """
        first: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.replicas.append(new)
        self.is_moving, work = True, self._keep(new, first, ready, others_count=False)
        self._tasks[new] = asyncio.create_task(work, name=f"replica of {self.model_id}")
        try:
            await first
            loaded()
            return await self._retire(old, new)
        except RingError:
            if old.service.error is not None and new.service.error is None:
                # The old one was lost meanwhile, and the new one has its requests.
                return await self._retire(old, new)
            await self._retire(new, old)
            raise
        finally:
            self._leaving, self.is_moving = None, False

    async def _retire(self, leaving: Replica, staying: Replica) -> int:
        """End a replica once another one has taken over its requests, also those that come to it meanwhile."""
        self._leaving, moved, has_begun = leaving, 0, False
        while leaving.service.error is None:
            if staying.service.error is not None:
                raise staying.service.error
            if has_begun and not leaving.service.engine.lives:
                break
            moved += await move_requests(leaving.service.engine, staying.service.engine)
            has_begun = True
        staying.meter.moved += moved
        await self._end(leaving)
        return moved

    async def _end(self, replica: Replica) -> None:
        """End one replica, which has no requests any more."""
        task = self._tasks[replica]
        task.cancel()
        await asyncio.wait((task,))
        del self._tasks[replica]
        self.replicas.remove(replica)


def forget_load(tasks: dict[str, asyncio.Task[None]], hosted: HostedModel, done: asyncio.Task[None]) -> None:
    """Remove the task of a load that has ended."""
    tasks.pop(hosted.model_id, None)
    hosted.is_queued = False
    if not done.cancelled():
        # Retrieve the error: perhaps no request waits for it any more.
        done.exception()
