"""Models of a head: loading, unloading, and fetching while it serves.

Each fetch runs in its own process, so that the head can end at any moment.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from mlx_ring.api.ops.status import ClusterParts
from mlx_ring.api.service import LinkInfo, ModelService
from mlx_ring.core.engine_stats import Meter
from mlx_ring.core.errors import Conflict, NotReady, PlanError, RingError
from mlx_ring.core.traces import Tracing
from mlx_ring.head.kv_memory import KvShares
from mlx_ring.head.model import HostedModel, Ready, forget_load
from mlx_ring.head.move_order import MoveOrder, RoomAmongModels, Turn, check_room, promised_bytes
from mlx_ring.head.moves import Moves
from mlx_ring.head.nodes import Declared, Machines
from mlx_ring.head.plan_requests import measured_cluster, plan_request, readable_names
from mlx_ring.head.replanning import Replanning
from mlx_ring.head.replica import Replica, Watcher
from mlx_ring.head.served_model import ServedModel, policy_of, prepare_model
from mlx_ring.head.single_node import measure_alone
from mlx_ring.head.status import (
    ClusterView,
    InstanceView,
    computing_energy,
    instance_status,
    node_statuses,
)
from mlx_ring.head.step_down import hung_backend_statuses
from mlx_ring.head.step_speeds import step_speeds
from mlx_ring.host.energy import EnergyPerToken
from mlx_ring.host.machine import node_name
from mlx_ring.host.private_files import release
from mlx_ring.models.fetching import Fetches
from mlx_ring.models.model_folder import PullProgress, Report
from mlx_ring.models.model_source import (
    LocalModel,
    exact_name,
    full_name,
    hold_folder,
    interrupted_downloads,
    list_local_models,
    must_be_fetched,
    remove_model,
)
from mlx_ring.planner.model_sizes import sizes_of
from mlx_ring.planner.place import RunningCluster
from mlx_ring.planner.profiles import ClusterProfile, ModelProfile
from mlx_ring.rpc.hello import hello_versions, make_hello
from mlx_ring.settings.config import Settings

log = logging.getLogger(__name__)

_LEARN_EVERY_S = 10.0


class Catalog:
    """Models of a head as the API's `ModelCatalog`."""

    def __init__(
        self,
        settings: Settings,
        served: Sequence[tuple[Settings, ServedModel]],
        watcher: Watcher,
        ready: Ready,
        tracing: Tracing | None = None,
    ) -> None:
        """Prepare the models; `begin` loads them.

        Args:
            settings: settings of the head.
            served: the first models, each with its settings.
            watcher: observer of loading.
            ready: receives each instance that serves.
            tracing: destination of traces.
        """
        self._settings, self._tracing = settings, tracing
        self._watcher, self._ready = watcher, ready
        self._speeds, self._energy = step_speeds(settings), EnergyPerToken()
        self._shares = KvShares(settings.kv_cache_memory)
        self._machines: Machines | None = None
        self._has_served = self._has_ended = False
        self._order = MoveOrder()
        self._loads: dict[str, asyncio.Task[None]] = {}
        """Loads in progress, by model."""
        self._fetches = Fetches()
        self.crashed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Future that fails with an unexpected error."""
        self._hosted = [HostedModel(own, model, self._crash, self._missing, tracing) for own, model in served]
        self.moves = Moves(self._begun, lambda: self._hosted, self._replacement, self._order, ready)
        self.replanning = Replanning(
            settings.replan, lambda: self._machines, lambda: self._hosted, self.moves
        )
        self.only = self._hosted[0] if len(self._hosted) == 1 else None
        for hosted in self._hosted:
            hosted.is_awaited = True

    # ---- as the API sees it

    @property
    def models(self) -> Sequence[ModelService]:
        return self._hosted

    @property
    def links(self) -> Sequence[LinkInfo]:
        return () if self._machines is None else self._machines.links

    def running(self, model: ModelService | None) -> RunningCluster:
        """Return the connected machines, the head's first, how it plans for them, and the loaded stages of a model.

        Other models are unloaded for one that is not loaded, so their memory counts as free for it.
        """
        hosted = self._hosted[0] if model is None else self._own(model)
        view = None if self._machines is None else self._machines.cluster_view()
        loaded = () if model is None or view is None else hosted.loaded_stages(readable_names(view))
        others = [other for other in self._hosted if other is not hosted] if loaded else []
        machines = (
            ClusterProfile(())
            if view is None
            else measured_cluster(hosted.settings, view, self._begun().link_profiles, promised_bytes(others))
        )
        request = plan_request(hosted.settings, hosted.served, machines.nodes)
        if request.strategy == "custom":
            # Shares are for the machines of the first plan.
            request = replace(request, strategy="auto")
        connected = {node.name for node in machines.nodes}
        if any(name not in connected for stages in loaded for _, ranks in stages for name, _ in ranks):
            loaded = ()
        return RunningCluster(machines, request, loaded, hosted.settings.replicas, policy_of(hosted.settings))

    async def measure(self) -> None:
        await measure_alone(self._begun(), lambda: any(hosted.open_requests for hosted in self._hosted))

    def join_commands(self, life_s: float) -> Sequence[str]:
        """Make a token with which one machine can join within this time, and return the commands for it."""
        return self._begun().join_commands(life_s)

    def _begun(self) -> Machines:
        if self._machines is None:
            raise NotReady("The server is starting. Try again in a moment.")
        return self._machines

    def sizes(self, model: ModelService, machines: ClusterProfile) -> ModelProfile:
        """Return a model's profile, for planning on these machines."""
        served = self._own(model).served
        return sizes_of(served.folder, served.names[0], machines)

    def _look(self) -> tuple[ClusterView, list[InstanceView], float | None]:
        """Return the machines, the instances and the joules per token of the last minute, of which this is a sample."""
        cluster_view = ClusterView(node_name()) if self._machines is None else self._machines.cluster_view()
        views = (service.view(hosted.model_id) for hosted in self._hosted for service in hosted.instances)
        known = [view for view in views if view is not None]
        tokens = sum(meter.generated_tokens for hosted in self._hosted for meter in hosted.meters)
        return cluster_view, known, self._energy.update(computing_energy(cluster_view, known), tokens)

    async def keep_learning(self) -> None:
        """Learn from time to time how long the machines' steps take, and sample their energy."""
        while True:
            await asyncio.sleep(_LEARN_EVERY_S)
            await self._learn()

    async def _learn(self) -> None:
        cluster_view, views, _ = self._look()
        try:
            await asyncio.to_thread(self._speeds.learn, views, [*cluster_view.membership.members.values()])
        except Exception:
            log.exception("Nothing is learned of the last steps")

    def cluster(self) -> ClusterParts:
        """Return every node, and every instance with the state of its stages."""
        cluster_view, views, joules_per_token = self._look()
        ratios = self._speeds.by_node(cluster_view.membership.members.values())
        nodes = node_statuses(cluster_view, views, dict(hello_versions(make_hello())), ratios)
        return ClusterParts(
            nodes=nodes,
            missing_machines=cluster_view.missing,
            absent_nodes=cluster_view.absent,
            instances=[instance_status(view, ratios) for view in views],
            hung_backends=hung_backend_statuses(cluster_view.hung),
            proposals=self.replanning.proposals(),
            no_proposals=self.replanning.refusals(),
            joules_per_token=joules_per_token,
        )

    async def ready(self, model: ModelService) -> None:
        """Load a model that is not loaded, or wait for its load in progress."""
        hosted = self._own(model)
        if hosted.is_awaited or (hosted.is_loaded and hosted.model_id not in self._loads):
            return
        hosted.waiting += 1
        try:
            await self._loaded(hosted)
        finally:
            hosted.waiting -= 1
            hosted.last_requested = time.monotonic()

    async def load(self, name: str) -> ModelService:
        """Load a model by any of its names, also one that was not served before."""
        hosted = self._named(name)
        if hosted is None:
            await self._fetch_missing(name)
            hosted = self._named(name) or await self._listed(name)
        await self._loaded(hosted)
        return hosted

    def _named(self, name: str) -> HostedModel | None:
        return next((each for each in self._hosted if name in each.served.names), None)

    async def unload(self, model: ModelService, *, force: bool) -> None:
        """Unload a model. By force, this also ends its load or move in progress."""
        hosted = self._own(model)
        loading = self._loads.get(hosted.model_id)
        if force and loading is not None:
            loading.cancel()
            await asyncio.wait((loading,))
        await self._order.unload(hosted, force=force)

    def _own(self, model: ModelService) -> HostedModel:
        return next(each for each in self._hosted if each is model)

    async def pull(self, name: str, *, force: bool, report: Report, lasts: bool = True) -> str:
        """Fetch a model that is not here, and list it as unloaded."""
        if not await self._fetch_missing(name, force=force, report=report, lasts=lasts):
            await self._list(name, force=force)
        return await asyncio.to_thread(full_name, name)

    async def cancel_pull(self, name: str) -> str:
        """End a fetch."""
        hub_id = await asyncio.to_thread(full_name, name)
        self._fetches.cancel(hub_id)
        return hub_id

    async def _fetch_missing(
        self, name: str, *, force: bool = False, report: Report | None = None, lasts: bool = True
    ) -> bool:
        """Fetch and list a model that is not here. Return False if it was here."""
        if not await asyncio.to_thread(must_be_fetched, name):
            return False
        hub_id = await asyncio.to_thread(full_name, name)
        memory = None if force else sum(node.memory_bytes for node in self.running(None).machines.nodes)
        await self._fetches.fetch(
            hub_id,
            must_fit=memory == 0 and self._settings.nodes == 1,
            memory_bytes=memory or None,
            report=report,
            lasts=lasts,
            then=lambda: self._list(hub_id, force=force),
        )
        return True

    async def _list(self, name: str, *, force: bool) -> None:
        """Add a model to the list. Raises `Conflict` if it cannot be served; a lack of memory may be forced."""
        try:
            await self._listed(name)
        except RingError as error:
            if not (force and isinstance(error, PlanError)):
                raise Conflict(f"{name} is on this machine, but cannot be served here: {error}") from error
            log.warning("%s is fetched, but cannot be served here: %s", name, error)

    @property
    def pulls(self) -> Mapping[str, PullProgress]:
        return self._fetches.progress

    def local_models(self) -> Sequence[LocalModel]:
        return list(list_local_models())

    def interrupted_pulls(self) -> Mapping[str, int]:
        return interrupted_downloads()

    async def delete(self, name: str) -> tuple[str, int]:
        """Remove a model from the disk that is not loaded, and from the list."""
        hub_id = await asyncio.to_thread(exact_name, name)
        # A model that is loaded may be moving for long, so the refusal does not wait for that.
        self._check_unused(hub_id, name)
        async with self._order.turn():
            named = self._check_unused(hub_id, name)
            for each in named:
                release(each.served.folder.path)
            try:
                removed = await asyncio.to_thread(remove_model, hub_id)
            except RingError:
                for each in named:
                    hold_folder(each.served.folder.path)
                raise
            self._hosted = [each for each in self._hosted if each not in named]
            return removed

    def _check_unused(self, hub_id: str, name: str) -> list[HostedModel]:
        """Return the listed models of these names. Raises `Conflict` if one is in use."""
        named = [each for each in self._hosted if hub_id in each.served.names or name in each.served.names]
        if self._fetches.is_running(hub_id):
            raise Conflict(f"{hub_id} is being downloaded: cancel the download, then remove the model.")
        if any(each.replicas or each is self._hosted[0] or each.is_awaited for each in named):
            raise Conflict(
                f"{hub_id} is served by this server: unload it first, or stop the server if it began with this model."
            )
        return named

    async def _listed(self, name: str) -> HostedModel:
        """Return a model of this machine, and add it to the list. One with the same name must be the same model."""
        own = self._settings.model_copy(update={"model": name, "served_model_name": ()})
        served = await asyncio.to_thread(prepare_model, own, insists=False)
        if (same := self._named(served.names[0])) is not None:
            if same.served.folder.path != served.folder.path:
                release(served.folder.path)
            if await asyncio.to_thread(lambda: same.served.read_digest() == served.read_digest()):
                return same
            raise Conflict(
                f"Another model is already served as {served.names[0]}: {same.served.folder.path}."
            )
        hosted = HostedModel(own, served, self._crash, self._missing, self._tracing)
        self._hosted.append(hosted)
        return hosted

    # ---- loading

    async def begin(self, machines: Machines) -> None:
        """Load the first models, except for those that are unloaded meanwhile.

        The first must fit; others that do not are loaded on request.

        Raises:
            RingError: the first model cannot be loaded.
        """
        self._machines = machines
        first, *others = self._hosted
        await self._tried(first)
        first.is_awaited = False
        for hosted in others:
            try:
                await self._tried(hosted, may_evict=False)
            except RingError as error:
                log.warning("%s will be loaded on request: %s", hosted.model_id, error)
            hosted.is_awaited = False

    def stop_fetching(self) -> None:
        """Cancel all fetches; requests that wait for one fail."""
        self._fetches.stop()

    async def end(self) -> None:
        """End every load and every instance, and refuse new loads."""
        self._has_ended = True
        tasks = [*self._loads.values(), *self._fetches.stop()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._learn()
        await asyncio.gather(*(hosted.stop("The server is shutting down.") for hosted in self._hosted))

    @property
    def declared(self) -> Sequence[Declared]:
        """First models, for machines on which an earlier head may have left them loaded."""
        return [Declared(hosted.served, hosted.settings) for hosted in self._hosted]

    def _missing(self) -> int:
        return 0 if self._machines is None else self._machines.missing

    async def _loaded(self, hosted: HostedModel) -> None:
        if not await self._tried(hosted):
            why = "The server is shutting down." if self._has_ended else f"{hosted.model_id} was unloaded."
            raise NotReady(why)

    async def _tried(self, hosted: HostedModel, *, may_evict: bool = True) -> bool:
        """Wait for a load, which continues without the request. Return False if it was given up."""
        if self._has_ended or (hosted.is_loaded and hosted.model_id not in self._loads):
            return not self._has_ended
        task = self._loads.get(hosted.model_id)
        if task is None:
            load = partial(self._run, hosted)
            work = self._order.load(hosted, load, lambda: self._hosted, may_evict=may_evict)
            hosted.is_queued = True
            task = asyncio.create_task(work, name=f"load {hosted.model_id}")
            self._loads[hosted.model_id] = task
            task.add_done_callback(lambda done: forget_load(self._loads, hosted, done))
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            waiting = asyncio.current_task()
            if not task.cancelled() or (waiting is not None and waiting.cancelling()):
                raise
            return False
        return True

    async def _run(self, hosted: HostedModel, turn: Turn) -> None:
        machines = self._begun()
        nodes = 1 if self._has_served else self._settings.nodes
        while machines.lacks(nodes):
            # Others may load and move meanwhile.
            turn.end()
            await machines.attend(nodes)
            await turn.resume()
        with turn.ends_after(machines.wait_until_lacking, nodes):
            candidate_sets = await machines.candidate_nodes(Declared(hosted.served, hosted.settings), nodes)
            check_room(hosted, len(candidate_sets), self._hosted, self._settings.model_memory)
            make = partial(self._make_replica, hosted, machines, nodes=nodes, replicas=len(candidate_sets))
            replicas = [make(hosted.meter(n), candidates=each) for n, each in enumerate(candidate_sets)]
            await hosted.run(replicas, self._ready)
        self._has_served = True
        hosted.last_requested = time.monotonic()

    def _make_replica(
        self,
        hosted: HostedModel,
        machines: Machines,
        meter: Meter,
        *,
        nodes: int,
        replicas: int,
        candidates: frozenset[str] | None = None,
        replaces: str = "",
    ) -> Replica:
        return Replica(
            hosted.settings,
            hosted.served,
            machines,
            self._shares,
            self._watcher,
            nodes=nodes,
            candidates=candidates,
            replicas=replicas,
            meter=meter,
            tracing=self._tracing,
            hold=hosted.hold if hosted.settings.resume == "on" else None,
            room=RoomAmongModels(self._order, hosted, lambda: self._hosted),
            replaces=replaces,
        )

    def _replacement(self, hosted: HostedModel, old: Replica) -> Replica:
        """Return a replica that takes the place of another one, if --model-memory allows both."""
        check_room(hosted, 1, self._hosted, self._settings.model_memory)
        make = partial(self._make_replica, hosted, self._begun(), hosted.unused_meter)
        new = make(nodes=1, replicas=len(hosted.replicas), replaces=old.service.info.name)
        new.had = old.had
        return new

    def _crash(self, error: Exception) -> None:
        if not self.crashed.done():
            self.crashed.set_exception(error)
