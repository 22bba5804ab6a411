"""One replica of a model: one instance after another, for what is lost is loaded again on what is there then."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Protocol

from mlx_ring.core.config import Settings
from mlx_ring.core.errors import RingError
from mlx_ring.core.logs import set_log_epoch
from mlx_ring.engine.served_model import ServedModel
from mlx_ring.node.arrangement import Arrangement, Order
from mlx_ring.node.instance import Epoch, Instance
from mlx_ring.node.instance_service import FIRST_EPOCH, InstanceService
from mlx_ring.node.kv_shares import KvShares
from mlx_ring.node.machines import Machines
from mlx_ring.rpc.protos import agent_pb2

log = logging.getLogger(__name__)

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 30.0
"""Between an instance's loss and the next attempt."""


class Watcher(Protocol):
    """Who is told how an instance comes up."""

    def planned(self, instance: str, arrangement: Arrangement) -> None:
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
        territory: frozenset[str] | None,
    ) -> None:
        """`territory` are the nodes that the first instance may have; None: any."""
        self._settings = settings
        self._served = served
        self._machines = machines
        self._shares = shares
        self._watcher = watcher
        self._territory = territory
        self._epoch: Epoch | None = None
        kv_bits = 0 if settings.kv_bits == "off" else int(settings.kv_bits)
        self.service = InstanceService(served.folder.num_layers, kv_bits)

    @property
    def nodes(self) -> frozenset[str]:
        """That it has now."""
        if self._epoch is None:
            return self._territory or frozenset()
        return frozenset(site.node for site in self._epoch.arrangement.nodes)

    @property
    def promised(self) -> Mapping[str, int]:
        """Bytes of memory that its plan counts on, by node; none where there is no plan."""
        plan = None if self._epoch is None else self._epoch.arrangement.plan
        return {} if plan is None else {stage.node: stage.memory_bytes for stage in plan.stages}

    async def run(
        self, ready: Callable[[float], None], others: Callable[[], tuple[frozenset[str], Mapping[str, int]]]
    ) -> None:
        """One instance after the other.

        Args:
            ready: told the seconds that loading took, each time that one serves.
            others: the nodes that this model's other replicas have, and the bytes that every other instance was promised.

        Raises:
            RingError: not even the first could be loaded.
        """
        number, pause_s, has_served = FIRST_EPOCH, _FIRST_PAUSE_S, False
        while True:
            try:
                avoid, taken = others()
                order = Order(
                    self._served,
                    self._settings,
                    number,
                    # It has served: from now on with whoever is there.
                    nodes=1 if has_served else self._settings.nodes,
                    only=None if has_served else self._territory,
                    avoid=avoid if has_served or self._territory is None else frozenset(),
                    taken=taken,
                )
                self._epoch = epoch = await self._machines.next_epoch(order)
                set_log_epoch(epoch.number)
                number = epoch.number + 1
                await self._run(epoch, ready)
                has_served, pause_s = True, _FIRST_PAUSE_S
            except RingError as error:
                if not has_served:
                    raise
                self.service.lose(error)
                pause_s = min(_LONGEST_PAUSE_S, 2 * pause_s)
            finally:
                self._epoch = None
            log.warning("loading %s again in %g s", self._served.names[0], pause_s)
            await asyncio.sleep(pause_s)

    async def _run(self, epoch: Epoch, ready: Callable[[float], None]) -> None:
        self.service.begin(epoch.instance, epoch.number, epoch.arrangement.ranges)
        self._watcher.planned(epoch.instance, epoch.arrangement)
        instance = Instance(
            self._settings,
            self._served,
            self.service,
            epoch,
            lambda progress: self._watcher.loading(epoch.instance, progress),
            self._shares,
        )
        with self._machines.watching(instance.heed_loss):
            await instance.run(ready)
