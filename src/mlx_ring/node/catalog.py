"""Every model that a head serves: which are loaded, and who makes way for whom."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from mlx_ring.api.service import ModelService
from mlx_ring.core.config import Settings
from mlx_ring.core.errors import Conflict, NotReady, PlanError
from mlx_ring.engine.served_model import ServedModel, memory_for_weights, prepare_model
from mlx_ring.node.hosted_model import HostedModel, Ready
from mlx_ring.node.instance_service import LOADING
from mlx_ring.node.kv_shares import KvShares
from mlx_ring.node.machines import Declared, Machines
from mlx_ring.node.replica import Replica, Watcher

log = logging.getLogger(__name__)


class Catalog:
    """Keeps the contract `ModelCatalog`."""

    def __init__(
        self,
        settings: Settings,
        served: Sequence[tuple[Settings, ServedModel]],
        watcher: Watcher,
        ready: Ready,
    ) -> None:
        """Nothing is loaded before `begin`.

        Args:
            settings: the head's.
            served: the models that it begins with, each with the settings that hold for it.
            watcher: told how instances come up.
            ready: told of each instance that serves.
        """
        self._settings = settings
        self._watcher, self._ready = watcher, ready
        self._shares = KvShares(settings.kv_cache_memory)
        self._machines: Machines | None = None
        self._one_at_a_time = asyncio.Lock()
        self._loads: dict[str, asyncio.Task[None]] = {}
        """Under way, by model."""
        self.crashed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Ends with an error of the program's own."""
        self._hosted = [HostedModel(own, model, self._crash) for own, model in served]
        for hosted in self._hosted:
            hosted.is_awaited = True

    # ---- as the API sees it

    @property
    def models(self) -> Sequence[ModelService]:
        return self._hosted

    async def ready(self, model: ModelService) -> None:
        """Load a model that is not loaded, or wait for a load that is under way."""
        await self._loaded(self._own(model))

    async def load(self, name: str) -> ModelService:
        """Load a model by any of its names, one that was not served before included."""
        hosted = next((each for each in self._hosted if name in each.served.names), None)
        if hosted is None:
            hosted = await self._found(name)
        await self._loaded(hosted)
        return hosted

    async def unload(self, model: ModelService, *, force: bool) -> None:
        """Free what a model holds."""
        hosted = self._own(model)
        busy = hosted.open_requests
        if busy and not force:
            raise Conflict(
                f"{hosted.model_id} is answering {busy} request{'s' * (busy > 1)}: wait for them, "
                'or unload it with "force": true, which ends them.'
            )
        async with self._one_at_a_time:
            await hosted.stop(f"{hosted.model_id} was unloaded.")
        log.info("unloaded %s", hosted.model_id)

    def _own(self, model: ModelService) -> HostedModel:
        return next(each for each in self._hosted if each is model)

    async def _found(self, name: str) -> HostedModel:
        """A model that joins the list; another of the same name is the same model."""
        own = self._settings.model_copy(update={"model": name, "served_model_name": ()})
        served = await asyncio.to_thread(prepare_model, own, insists=False)
        for each in self._hosted:
            if served.names[0] in each.served.names:
                if each.served.folder.digest == served.folder.digest:
                    return each
                raise Conflict(
                    f"Another model is served as {served.names[0]} already: {each.served.folder.path}."
                )
        hosted = HostedModel(own, served, self._crash)
        self._hosted.append(hosted)
        return hosted

    # ---- loading

    async def begin(self, machines: Machines) -> None:
        """Load the models that the head begins with. The first must fit; others that do not wait until they are asked for.

        Raises:
            RingError: why the first cannot be loaded.
        """
        self._machines = machines
        first, *others = self._hosted
        await self._loaded(first)
        first.is_awaited = False
        for hosted in others:
            try:
                await self._loaded(hosted, may_evict=False)
            except PlanError as error:
                log.warning("%s is loaded when it is asked for: %s", hosted.model_id, error)
            hosted.is_awaited = False

    async def end(self) -> None:
        """End every load and every instance."""
        tasks = list(self._loads.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(hosted.stop("The server is shutting down.") for hosted in self._hosted))

    @property
    def declared(self) -> Sequence[Declared]:
        """What the head begins with, for machines on which an earlier head may have left it loaded."""
        return [Declared(hosted.served, hosted.settings) for hosted in self._hosted]

    async def _loaded(self, hosted: HostedModel, *, may_evict: bool = True) -> None:
        """Who waits may go: the load goes on for others, and for the next request."""
        if hosted.replicas and hosted.model_id not in self._loads:
            return
        task = self._loads.get(hosted.model_id)
        if task is None:
            task = asyncio.create_task(
                self._load(hosted, may_evict=may_evict), name=f"load {hosted.model_id}"
            )
            self._loads[hosted.model_id] = task
            task.add_done_callback(lambda done: self._forget(hosted, done))
        await asyncio.shield(task)

    def _forget(self, hosted: HostedModel, done: asyncio.Task[None]) -> None:
        self._loads.pop(hosted.model_id, None)
        if not done.cancelled():
            # Nobody may be waiting for it any more.
            done.exception()

    async def _load(self, hosted: HostedModel, *, may_evict: bool) -> None:
        async with self._one_at_a_time:
            while True:
                try:
                    self._check_room(hosted)
                    await self._run(hosted)
                except PlanError as error:
                    if not may_evict or not await self._evict_for(hosted):
                        raise
                    log.info("trying %s again, where there was no room for it: %s", hosted.model_id, error)
                else:
                    return

    async def _run(self, hosted: HostedModel) -> None:
        machines = self._machines
        if machines is None:
            raise NotReady(LOADING)

        def promised() -> Mapping[str, int]:
            return _sum(other.promised for other in self._hosted if other is not hosted)

        territories = await machines.territories(Declared(hosted.served, hosted.settings), promised())
        replicas = [
            Replica(
                hosted.settings, hosted.served, machines, self._shares, self._watcher, territory=territory
            )
            for territory in territories
        ]
        await hosted.run(replicas, self._ready, promised)

    def _check_room(self, hosted: HostedModel) -> None:
        """Whether the weights of all loaded models stay within what they may take together."""
        limit = self._settings.model_memory
        if limit is None:
            return
        held = sum(_weights(other) for other in self._hosted if other.replicas)
        wanted = _weights(hosted)
        if held + wanted > limit:
            raise PlanError(
                f"{hosted.model_id} has {wanted / 1e9:.2f} GB of weights, {held / 1e9:.2f} GB are loaded already, "
                f"and --model-memory allows {limit / 1e9:.2f} GB: unload a model, or allow more."
            )

    async def _evict_for(self, hosted: HostedModel) -> bool:
        """Whether a model made way: the one that has not been asked for longest, of those that answer nobody."""
        idle = [
            other
            for other in self._hosted
            if other is not hosted and other.replicas and not other.open_requests
        ]
        oldest = min(idle, key=lambda other: other.last_asked, default=None)
        if oldest is None:
            return False
        log.info(
            "unloading %s, which has not been asked for longest, for %s", oldest.model_id, hosted.model_id
        )
        await oldest.stop(f"{oldest.model_id} made way for another model.")
        return True

    def _crash(self, error: Exception) -> None:
        if not self.crashed.done():
            self.crashed.set_exception(error)


def _weights(hosted: HostedModel) -> int:
    """Bytes, of all its replicas."""
    copies = len(hosted.replicas) or hosted.settings.replicas or 1
    return copies * memory_for_weights(hosted.served.folder, hosted.settings.dtype)


def _sum(parts: Iterable[Mapping[str, int]]) -> Mapping[str, int]:
    total = Counter[str]()
    for part in parts:
        total.update(part)
    return total
