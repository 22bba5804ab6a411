"""Replica of a model, which loads a new instance after each loss."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from typing import Protocol

from mlx_ring.core.engine_stats import Meter
from mlx_ring.core.errors import NodeLost, RingError
from mlx_ring.core.logs import set_log_epoch
from mlx_ring.core.traces import Tracing
from mlx_ring.engine.live_request import Hold, LiveRequest, judge
from mlx_ring.head.instance import Epoch, Instance
from mlx_ring.head.instance_view import FIRST_EPOCH, InstanceService
from mlx_ring.head.kv_memory import KvShares
from mlx_ring.head.nodes import Machines
from mlx_ring.head.placing import Order, Placement
from mlx_ring.head.served_model import ServedModel
from mlx_ring.rpc.protos import agent_pb2
from mlx_ring.settings.config import Settings

log = logging.getLogger(__name__)

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 30.0
"""Pauses between the loss of an instance and the next attempt."""
_STEADY_S = 10.0
"""Time after the start of a load from which on a loss has no pause: the instance was in order."""


class Watcher(Protocol):
    """Observer of the loading of instances."""

    def planned(self, instance: str, placement: Placement) -> None:
        """Report the placement of an instance."""
        ...

    def loading(self, instance: str, progress: agent_pb2.StageProgress) -> None:
        """Report the loading progress of a worker."""
        ...


class Replica:
    """Replica of a model, which runs until it is cancelled."""

    def __init__(
        self,
        settings: Settings,
        served: ServedModel,
        machines: Machines,
        shares: KvShares,
        watcher: Watcher,
        *,
        nodes: int,
        candidates: frozenset[str] | None,
        replicas: int,
        meter: Meter,
        tracing: Tracing | None,
        hold: Hold | None,
    ) -> None:
        """Prepare a replica.

        Args:
            settings: settings of the model.
            served: the model.
            machines: the machines to use.
            shares: shares of KV memory.
            watcher: observer of loading.
            nodes: number of nodes that must be present for the first instance.
            candidates: the nodes that the first instance may have; None: any.
            replicas: number of replicas of the model.
            meter: measurements of its instances.
            tracing: destination of traces.
            hold: receives the requests of a lost instance; None: they end with an error.
        """
        self._hold = hold
        self._in_progress: list[LiveRequest] = []
        """Requests that were in progress when the last instance was lost."""
        self._meter, self._tracing = meter, tracing
        self._settings = settings
        self._served = served
        self._machines = machines
        self._shares = shares
        self._watcher = watcher
        self._nodes, self._candidates, self._replicas = nodes, candidates, replicas
        kv_bits = 0 if settings.kv_bits == "off" else int(settings.kv_bits)
        self.service = InstanceService(served.folder.num_layers, kv_bits)

    async def run(self, ready: Callable[[float], None]) -> None:
        """Run one instance after the other.

        Args:
            ready: receives each instance's load time in seconds.

        Raises:
            RingError: the first instance could not be loaded.
        """
        number, pause_s, has_served = FIRST_EPOCH, _FIRST_PAUSE_S, False
        while True:
            begun_s = time.time()
            try:
                order = Order(
                    self._served,
                    self._settings,
                    number,
                    # After the first instance, use the nodes that are present.
                    nodes=1 if has_served else self._nodes,
                    only=None if has_served else self._candidates,
                    replicas=self._replicas,
                )
                epoch = await self._machines.next_epoch(order)
                set_log_epoch(epoch.number)
                number = epoch.number + 1
                await self._run(epoch, ready, begun_s)
                has_served = True
                # Interrupted answers wait for the next load.
                pause_s = 0.0 if time.time() - begun_s >= _STEADY_S else _FIRST_PAUSE_S
            except RingError as error:
                self._meter.record_loss(error)
                if not has_served and not isinstance(error, NodeLost):
                    raise
                self.service.lose(error)
                self._machines.record_failure(error, begun_s)
                pause_s = min(_LONGEST_PAUSE_S, max(_FIRST_PAUSE_S, 2 * pause_s))
            log.warning("loading %s again%s", self._served.names[0], f" in {pause_s:g} s" if pause_s else "")
            await asyncio.sleep(pause_s)

    def _keep(self, lives: Iterable[LiveRequest], loss: RingError) -> None:
        interrupted = list(lives)
        self._in_progress = [live for live in interrupted if live.was_in_progress]
        if self._hold is not None:
            self._hold(interrupted, loss)

    async def _run(self, epoch: Epoch, ready: Callable[[float], None], begun_s: float) -> None:
        self._in_progress = []
        self.service.begin(epoch.instance, epoch.number, epoch.placement)
        self._watcher.planned(epoch.instance, epoch.placement)

        def loading(progress: agent_pb2.StageProgress) -> None:
            self.service.record_loading(progress)
            self._watcher.loading(epoch.instance, progress)

        instance = Instance(
            self._settings,
            self._served,
            self.service,
            epoch,
            loading,
            self._shares,
            self._meter,
            self._tracing,
            None if self._hold is None else self._keep,
        )
        with self._machines.watching(epoch.instance, instance.watch.on_node_lost):
            await instance.run(ready)
        self._meter.record_loss(instance.loss)
        if instance.loss is None or not judge(self._in_progress, instance.loss):
            self._machines.record_failure(instance.loss, begun_s)
