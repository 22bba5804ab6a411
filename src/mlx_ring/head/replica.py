"""One replica of a model: one instance after another, for what is lost is loaded again on what is there then."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Protocol

from mlx_ring.core.engine_stats import Meter
from mlx_ring.core.errors import NodeLost, RingError
from mlx_ring.core.logs import set_log_epoch
from mlx_ring.core.traces import Tracing
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
"""Between an instance's loss and the next attempt."""


class Watcher(Protocol):
    """Who is told how an instance comes up."""

    def planned(self, instance: str, placement: Placement) -> None:
        """Which stage goes where."""
        ...

    def loading(self, instance: str, progress: agent_pb2.StageProgress) -> None:
        """How far a worker has loaded."""
        ...


class Replica:
    """Runs until it is cancelled."""

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
    ) -> None:
        """What is to be loaded.

        Args:
            settings: that hold for the model.
            served: the model.
            machines: on which of them.
            shares: of memory for KV.
            watcher: told how instances come up.
            nodes: that must be there for the first instance.
            candidates: the nodes that the first instance may have; None: any.
            replicas: of the model, this one included.
            meter: of what its instances do, one after the other.
            tracing: where traces of requests go.
        """
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
        """One instance after the other.

        Args:
            ready: told the seconds that loading took, each time that one serves.

        Raises:
            RingError: not even the first could be loaded.
        """
        number, pause_s, has_served = FIRST_EPOCH, _FIRST_PAUSE_S, False
        while True:
            begun_s = time.time()
            try:
                order = Order(
                    self._served,
                    self._settings,
                    number,
                    # It has served: from now on with whoever is there.
                    nodes=1 if has_served else self._nodes,
                    only=None if has_served else self._candidates,
                    replicas=self._replicas,
                )
                epoch = await self._machines.next_epoch(order)
                set_log_epoch(epoch.number)
                number = epoch.number + 1
                await self._run(epoch, ready, begun_s)
                has_served, pause_s = True, _FIRST_PAUSE_S
            except RingError as error:
                self._meter.record_loss(error)
                if not has_served and not isinstance(error, NodeLost):
                    raise
                self.service.lose(error)
                self._machines.record_failure(error, begun_s)
                pause_s = min(_LONGEST_PAUSE_S, 2 * pause_s)
            log.warning("loading %s again in %g s", self._served.names[0], pause_s)
            await asyncio.sleep(pause_s)

    async def _run(self, epoch: Epoch, ready: Callable[[float], None], begun_s: float) -> None:
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
        )
        with self._machines.watching(epoch.instance, instance.on_node_lost):
            await instance.run(ready)
        self._meter.record_loss(instance.loss)
        self._machines.record_failure(instance.loss, begun_s)
