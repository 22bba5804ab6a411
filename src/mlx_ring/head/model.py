"""A model that this head serves, loaded or not: its replicas, and the API's view of them.

How a model samples where a request does not say.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from mlx_ring.api.service import InstanceInfo, State
from mlx_ring.core.engine_stats import Meter
from mlx_ring.core.errors import NotReady, RingError
from mlx_ring.core.types import ADVISED_SAMPLING, DEFAULT_SAMPLING, Sampling
from mlx_ring.engine.kv_budget import KEPT_TOKENS
from mlx_ring.engine.router import Router
from mlx_ring.head.instance_view import LOADING, InstanceService
from mlx_ring.head.replica import Replica
from mlx_ring.head.served_model import ServedModel, describe_model
from mlx_ring.models.pooling import Pooling, read_pooling
from mlx_ring.settings.config import Settings


def sampling_defaults(config: Mapping[str, Any]) -> Sampling:
    """Return the parameters that the model's makers advise, and the defaults where their file gives no number."""
    advised: dict[str, Any] = {}
    for name in ADVISED_SAMPLING:
        value: object = config.get(name)
        if isinstance(value, (int, float)) and not isinstance(value, bool) and value >= 0:
            is_whole = isinstance(getattr(DEFAULT_SAMPLING, name), int)
            advised[name] = int(value) if is_whole else float(value)
    if config.get("do_sample") is False:
        advised["temperature"] = 0.0
    return replace(DEFAULT_SAMPLING, **advised)


Ready = Callable[[ServedModel, InstanceInfo, float], None]
"""Which model serves, its instance, and the seconds that loading took."""


JUST_NOW_S = 0.5


class HostedModel:
    """Keeps the contract `ModelService`."""

    def __init__(
        self,
        settings: Settings,
        served: ServedModel,
        on_crash: Callable[[Exception], None],
        missing: Callable[[], int],
    ) -> None:
        """`on_crash` is told of errors that are the program's own; `missing` machines must join before anything is loaded."""
        self._on_crash = on_crash
        self._missing = missing
        self.settings = settings
        """The head's, as they hold for this model."""
        self.served = served
        self.replicas: list[Replica] = []
        self.meters: list[Meter] = []
        """Of its replicas, by their numbers, also of those that are gone."""
        self.is_awaited = False
        """Whether it is about to be loaded, so that nobody need ask for it."""
        self.waiting = 0
        """Requests that wait for it to be loaded."""
        self.last_asked = time.monotonic()
        """When a request came, by the monotonic clock."""
        self.created = int(time.time())
        self.default_sampling: Sampling = sampling_defaults(served.folder.generation_config)
        self.pooling: Pooling = read_pooling(served.folder.path, settings.pooling)
        self._metadata = describe_model(served.folder)
        self._tasks: list[asyncio.Task[None]] = []
        self._router = Router(lambda: [each.engine for each in self._serving()])
        self._failure: RingError | None = None

    # ---- as the API sees it

    @property
    def model_id(self) -> str:
        return self.served.names[0]

    @property
    def aliases(self) -> Sequence[str]:
        return self.served.names[1:]

    @property
    def tokenizer(self) -> Any:
        return self.served.tokenizer

    @property
    def context_length(self) -> int:
        """What every instance takes that serves now."""
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
        return self._metadata

    @property
    def state(self) -> State:
        if not self.replicas:
            return "loading" if self.is_awaited else "unloaded"
        error = self.error
        if error is None:
            return "ready"
        return "loading" if isinstance(error, NotReady) else "unavailable"

    @property
    def engine(self) -> Router:
        self.last_asked = time.monotonic()
        return self._router

    @property
    def error(self) -> RingError | None:
        """Why it cannot answer now. One that is not loaded can: it will be when it is asked."""
        if not self.replicas:
            return self._coming() if self.is_awaited else self._failure
        errors = [replica.service.error for replica in self.replicas]
        return None if None in errors else errors[0]

    def _coming(self) -> NotReady:
        missing = self._missing()
        if not missing:
            return NotReady(LOADING)
        return NotReady(
            f"The model is loaded when {missing} more {'machine has' if missing == 1 else 'machines have'} joined: "
            "start 'mlx-ring join' there."
        )

    @property
    def rejected(self) -> Mapping[str, int]:
        """By error, requests that were refused before they were taken."""
        return self._router.rejected

    def meter(self, replica: int) -> Meter:
        """Of the replica with that number, whichever has it."""
        while len(self.meters) <= replica:
            self.meters.append(Meter())
        return self.meters[replica]

    @property
    def instances(self) -> Sequence[InstanceService]:
        return [replica.service for replica in self.replicas]

    def _serving(self) -> list[InstanceService]:
        return [service for service in self.instances if service.error is None]

    @property
    def open_requests(self) -> int:
        """Sequences that run or wait, in all its instances, and requests that wait for it."""
        stats = [service.engine.stats().scheduler for service in self._serving()]
        return self.waiting + sum(each.running + each.waiting for each in stats)

    @property
    def is_idle(self) -> bool:
        """Whether nobody has asked for it just now: a request that waited for it may not have begun."""
        return time.monotonic() - self.last_asked >= JUST_NOW_S

    # ---- coming and going

    async def run(self, replicas: Sequence[Replica], ready: Ready) -> None:
        """Load, and return once every replica has served; they are kept serving until `stop`.

        Args:
            replicas: new ones.
            ready: told of each instance that serves.

        Raises:
            RingError: one of them could not be loaded; then none is left.
        """
        self.replicas, self._failure = list(replicas), None
        firsts: list[asyncio.Future[None]] = []
        for replica in self.replicas:
            first: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            firsts.append(first)
            work = self._keep(replica, first, ready)
            self._tasks.append(asyncio.create_task(work, name=f"replica of {self.model_id}"))
        try:
            await asyncio.gather(*firsts)
        except BaseException as error:
            for first in firsts:
                first.cancel()
            await self.stop("The model could not be loaded.")
            if isinstance(error, RingError):
                self._failure = error
            raise

    async def _keep(self, replica: Replica, first: asyncio.Future[None], ready: Ready) -> None:
        def told(load_s: float) -> None:
            ready(self.served, replica.service.info, load_s)
            if not first.done():
                first.set_result(None)

        try:
            await replica.run(told)
        except Exception as error:
            if not isinstance(error, RingError):
                self._on_crash(error)
            if first.done():
                raise
            first.set_exception(error)

    async def stop(self, reason: str) -> None:
        """End every instance, with what it answers, and free what they hold."""
        tasks, self._tasks = self._tasks, []
        for service in self._serving():
            service.engine.fail(NotReady(reason))
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self.replicas = []
