"""Single machine of a head without a cluster."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shlex
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from itertools import count
from pathlib import Path

from mlx_ring.agent.profiling import ProfileOptions, ProfileStore, build_kernels, recall, recall_or_measure
from mlx_ring.api.service import LinkInfo
from mlx_ring.cluster.agent_link import LocalAgent, Source
from mlx_ring.cluster.deployment import Site
from mlx_ring.cluster.membership import Joined, Member, Membership
from mlx_ring.cluster.relinking import wait_for_answers
from mlx_ring.core.errors import Conflict, NotReady, PlanError, RingError, without_number
from mlx_ring.core.folders import state_folder
from mlx_ring.head.instance import Epoch
from mlx_ring.head.nodes import Declared, NodeListener, new_instance
from mlx_ring.head.patching import PatchPlan, Remains, patch_ranks, wait_until_whole
from mlx_ring.head.placing import Order, place_single_node
from mlx_ring.head.reshaping import NextPlan
from mlx_ring.head.status import ClusterView
from mlx_ring.head.step_down import StepDown
from mlx_ring.host.energy import EnergyMeter
from mlx_ring.host.machine import node_name, share_cores
from mlx_ring.host.machine_profile import MachineProfile
from mlx_ring.host.process import usable_memory
from mlx_ring.rpc.hello import hello_versions, make_hello
from mlx_ring.rpc.link_profile import LinkProfile
from mlx_ring.settings.config import Settings
from mlx_ring.settings.rank_settings import rank_shares

log = logging.getLogger(__name__)

USES_ONE_MACHINE = (
    "This server uses one machine alone. To add others, start it with `mlx-ring serve MODEL --nodes 2`."
)
"""Reason why no other machine can join."""


def workers_here(settings: Settings, models: int) -> int:
    """Return the number of workers that share the cores of the head's machine, for the models with which it starts."""
    if settings.nodes != 1:
        return 1
    return settings.stages * len(rank_shares(settings)) * (settings.replicas or 1) * models


def profile_command(settings: Settings, models: int) -> str:
    """Return the command that measures the head's machine with the threads of its workers.

    Clients may read it, so it does not show the path of a state folder.
    """
    threads = settings.blas_threads or share_cores(workers_here(settings, models))
    words = ["mlx-ring", "profile", "--blas-threads", str(threads)]
    if settings.blas != "auto":
        words += ["--blas", settings.blas]
    if settings.state_dir is not None:
        words += ["--state-dir", "FOLDER"]
    return shlex.join(words)


async def measure_alone(machines: object, is_busy: Callable[[], bool]) -> None:
    """Measure the machine of a head without a cluster, unless it was. Members of a cluster were.

    Raises:
        NotReady: it was not, and `is_busy`.
    """
    if isinstance(machines, SingleNode):
        await machines.measure(is_busy)


class SingleNode:
    """Single machine, whose agent is a child process.

    The agent ends with the head. If it ends earlier, the next epoch starts another.
    """

    def __init__(self, settings: Settings, run_dir: Path, workers: int) -> None:
        """Start without an agent; `workers` is the number of workers that will share the cores."""
        self._settings = settings
        self._run_dir = run_dir
        self._workers = workers
        self._agent: LocalAgent | None = None
        self._replacement: asyncio.Task[LocalAgent] | None = None
        """Start of another agent, while the present one is so silent that it may be lost."""
        self._dropping: set[asyncio.Task[None]] = set()
        self._kernels: asyncio.Task[None] | None = None
        self._is_urgent = False
        """True if a model or a measurement waits for the kernels."""
        self._compiling = asyncio.Lock()
        """Compilation of the native kernels."""
        self._profile: MachineProfile | None = None
        self._measuring = asyncio.Lock()
        self._since_s = time.time()
        self._serial = count()
        self._starting = asyncio.Lock()
        self._has_failed = False
        """True after the loss of an instance, until the agent has answered."""
        self._step_down = StepDown()
        self._energy = EnergyMeter()
        self.links: Sequence[LinkInfo] = ()
        """Always empty, because there is one machine."""
        self.link_profiles: Mapping[frozenset[str], LinkProfile] = {}
        self.missing = 0

    def lacks(self, nodes: int) -> bool:
        """Return False: this machine is there."""
        del nodes
        return False

    async def attend(self, nodes: int) -> None:
        """Do nothing: this machine is there."""
        del nodes

    async def wait_until_lacking(self, nodes: int) -> None:
        """Wait for ever."""
        del nodes
        await asyncio.Event().wait()

    async def wait_until_undrained(self, node: str) -> None:
        """Return at once: this machine cannot be drained."""
        del node

    async def candidate_nodes(self, declared: Declared, nodes: int) -> Sequence[frozenset[str] | None]:
        """Return one unrestricted entry for each replica, because there is one machine."""
        del nodes
        return [None] * (declared.settings.replicas or 1)

    async def next_epoch(self, order: Order) -> Epoch:
        # The built-in models are small, so they do not wait for the kernels.
        await self._prepare_kernels(is_urgent=order.served.local.kind != "built-in")
        agent = await self._alive()
        source = Source(str(order.served.folder.path))
        reserve_share = 1.0 - self._settings.memory_utilization
        site = Site(
            node_name(),
            agent.link,
            is_local=True,
            hosts={},
            source=source,
            reserve_share=reserve_share,
            memory_limit_bytes=self._settings.memory_limit,
        )
        self._profile = await asyncio.to_thread(self._kept_profile)
        await asyncio.to_thread(self._energy.open)
        profile = self._profile
        placement = await self._step_down.place(
            order,
            lambda order: asyncio.to_thread(place_single_node, order.settings, order.served, site, profile),
        )
        return Epoch(new_instance(order.served), order.number, placement, node_name())

    async def plan_patch(self, order: Order, remains: Remains) -> None:
        """Plan nothing, because every rank stays on this machine."""
        del order, remains

    async def check_whole(self, order: Order, remains: Remains) -> None:
        """Check nothing: this machine is never drained."""
        del order, remains

    async def plan_again(self, order: Order, remains: Remains) -> NextPlan:
        """Refuse, because the layers are split over no machines."""
        del order, remains
        raise PlanError(USES_ONE_MACHINE)

    async def patch(self, order: Order, remains: Remains, early: PatchPlan | None) -> Epoch:
        del early
        if self._agent is None or self._agent.exit_reason:
            raise NotReady("The agent of this machine has ended, and its workers with it.")
        order = self._step_down.without_barred(order, remains.placement)
        number = max(order.number, remains.epoch + 1)
        placement, prepared = await patch_ranks(order, remains, number, None, make_hello(node=node_name()))
        return Epoch(remains.instance, number, placement, node_name(), prepared=prepared)

    async def wait_for_return(self, remains: Remains) -> None:
        await wait_until_whole(
            remains,
            lambda site, pids: wait_for_answers(site, pids, remains.epoch, make_hello(node=node_name())),
        )

    def release(self, instance: str) -> None:
        """Do nothing: the agent answers, and was asked to end them."""

    async def measure(self, is_busy: Callable[[], bool]) -> None:
        """Measure this machine with the threads of its workers, unless it was. Log why it cannot be.

        A noisy profile is measured again by later calls, as for a cluster.

        Raises:
            NotReady: it was not, and answers are computed, as `is_busy` says: beside these it would seem slow.
        """
        async with self._measuring:
            if self._profile is not None and self._profile.is_steady:
                return
            if await self._must_wait(is_busy):
                return
            await self._prepare_kernels(is_urgent=True)
            if await self._must_wait(is_busy):
                return
            store, options = self._profiles(), self._profile_options()
            try:
                self._profile = await recall_or_measure(store, options, accepts_noise=False)
            except RingError as error:
                log.warning("This machine is not measured: %s", error)

    async def _must_wait(self, is_busy: Callable[[], bool]) -> bool:
        """Report whether this machine cannot be measured now, but has a profile. Raises `NotReady` if it has none."""
        if not is_busy():
            return False
        self._profile = self._profile or await asyncio.to_thread(self._kept_profile)
        if self._profile is None:
            raise NotReady(
                "This machine is not measured yet, and would seem slow while it computes answers: ask again once they end."
            )
        return True

    def _kept_profile(self) -> MachineProfile | None:
        """Return the stored profile; measuring would take seconds."""
        return recall(self._profiles(), self._profile_options())

    def _profiles(self) -> ProfileStore:
        return ProfileStore(state_folder(self._settings.state_dir))

    def _profile_options(self) -> ProfileOptions:
        threads = self._settings.blas_threads or share_cores(self._workers)
        return ProfileOptions(blas=self._settings.blas, blas_threads=threads)

    async def _prepare_kernels(self, *, is_urgent: bool) -> None:
        """Compile the native kernels if they are missing, and wait for them if it is urgent.

        A compilation for which nobody waited has the lowest priority, so another one takes its place.
        """
        async with self._compiling:
            if is_urgent and not self._is_urgent and self._kernels is not None and not self._kernels.done():
                self._kernels.cancel()
                await asyncio.wait((self._kernels,))
                self._kernels = None
            if self._kernels is None:
                building = build_kernels(self._settings.blas, is_urgent=is_urgent)
                self._kernels, self._is_urgent = (
                    asyncio.create_task(building, name="native kernels"),
                    is_urgent,
                )
        if is_urgent:
            await asyncio.shield(self._kernels)

    async def _alive(self) -> LocalAgent:
        async with self._starting:
            if self._agent is None or self._agent.exit_reason or await self._hangs(self._agent):
                replacement, self._replacement = self._replacement, None
                await self._stop_agent()
                self._agent = None if replacement is None else await replacement
                if self._agent is None or self._agent.exit_reason:
                    self._agent = await self._start()
            else:
                self._drop_replacement()
            return self._agent

    async def _start(self, *, with_spare: bool = False) -> LocalAgent:
        run_dir = self._run_dir / f"a{next(self._serial)}"
        try:
            run_dir.mkdir()
            agent = await LocalAgent.start(
                self._settings,
                node=node_name(),
                run_dir=run_dir,
                blas_threads=self._settings.blas_threads or share_cores(self._workers),
                with_spare=with_spare,
            )
        except OSError as error:
            raise NotReady(
                f"The agent of this machine cannot be started: {without_number(str(error))}."
            ) from error
        agent.link.on_suspect, agent.link.on_answer = self._begin_replacement, self._drop_replacement
        return agent

    def _begin_replacement(self) -> None:
        """Start another agent beside a silent one, because processes take seconds to start."""
        if self._replacement is None:
            self._replacement = asyncio.create_task(self._start(with_spare=True), name="another agent")

    def _drop_replacement(self) -> None:
        """End the other agent, because the silent one has answered."""
        replacement, self._replacement = self._replacement, None
        if replacement is not None:
            dropping = asyncio.create_task(_end(replacement), name="end of another agent")
            self._dropping.add(dropping)
            dropping.add_done_callback(self._dropping.discard)

    async def _hangs(self, agent: LocalAgent) -> bool:
        """Return True if the agent no longer answers after a failure."""
        if not self._has_failed:
            return False
        self._has_failed = False
        return not await agent.answers()

    async def stop(self) -> None:
        """End the agent, with every worker, and compilers."""
        self._drop_replacement()
        if self._kernels is not None:
            self._kernels.cancel()
            await asyncio.wait((self._kernels,))
        await asyncio.gather(self._stop_agent(), *self._dropping)

    async def _stop_agent(self) -> None:
        if self._agent is not None:
            await self._agent.stop()

    @contextlib.contextmanager
    def watching(self, instance: str, listener: NodeListener) -> Generator[None]:
        """Report nothing: the agent's own reports are enough."""
        del instance, listener
        yield

    def has_left(self, node: str) -> bool:
        """Return False: this machine is there."""
        del node
        return False

    async def wait_until_left(self, node: str) -> None:
        """Wait for ever."""
        del node
        await asyncio.Event().wait()

    async def wait_for_node(self, timeout_s: float) -> None:
        await asyncio.sleep(timeout_s)

    def record_failure(self, error: RingError | None, begun_s: float) -> None:
        """Record a hung group, and check the agent before the next epoch."""
        self._step_down.record(error, begun_s)
        self._has_failed = True

    def join_commands(self, life_s: float) -> Sequence[str]:
        """Refuse, because the cluster's ports are closed."""
        del life_s
        raise Conflict(USES_ONE_MACHINE)

    async def drain(self, node: str, *, is_drained: bool = True) -> None:
        """Refuse, because no other machine could take its layers."""
        del is_drained
        raise Conflict(f"{node} is the only machine of this server, so its layers cannot move elsewhere.")

    def cluster_view(self) -> ClusterView:
        hung = self._step_down.states()
        energy = self._energy.read()
        yielding = None if self._agent is None else self._agent.link.yielding
        if self._profile is None:
            return ClusterView(node_name(), hung=hung, own_energy=energy, own_yielding=yielding)
        itself = Member(
            node=node_name(),
            machine=node_name(),
            host="",
            port=0,
            head_host="",
            profile=self._profile,
            memory_utilization=self._settings.memory_utilization,
            session=1,
            memory_free_bytes=usable_memory().available_bytes,
            since_s=self._since_s,
            versions=hello_versions(make_hello()),
            energy=energy,
            yielding=yielding,
        )
        return ClusterView(node_name(), Membership().apply(Joined(itself)), hung=hung)


async def _end(starting: asyncio.Task[LocalAgent]) -> None:
    with contextlib.suppress(NotReady):
        await (await starting).stop()
