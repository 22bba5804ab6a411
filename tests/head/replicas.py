"""A replica whose machines and instances are simulated."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from types import MappingProxyType, SimpleNamespace
from typing import Any, cast

from mlx_ring.core.engine_stats import Meter
from mlx_ring.core.errors import PlanError, RingError, WorkerStuck
from mlx_ring.core.types import RankId
from mlx_ring.engine.live_request import Hold
from mlx_ring.head.instance import Epoch
from mlx_ring.head.patching import Remains
from mlx_ring.head.placing import Placement
from mlx_ring.head.replica import Replica
from mlx_ring.settings.config import Settings

PLACEMENT = Placement((), (), None, None)


class FakeMachines:
    """Machines on which an earlier head left so many instances."""

    def __init__(self, adoptable: int = 0) -> None:
        self.adoptable = adoptable
        self.failures: list[RingError | None] = []
        self.patches = self.loads = 0
        self.calls: list[str] = []
        self.plan = object()
        self.returned = asyncio.Event()
        self.ended: list[str] = []
        """Instances whose end was reported."""
        self.remains: list[Remains] = []
        """Ranks that were to be patched."""
        self.is_slow = False
        """True if the patch of ranks that may return never ends."""

    def has_left(self, node: str) -> bool:
        return node == "n9"

    async def wait_until_left(self, node: str) -> None:
        if not self.has_left(node):
            await asyncio.get_running_loop().create_future()

    async def wait_for_return(self, remains: Remains) -> None:
        assert remains.may_return
        await self.returned.wait()

    async def plan_again(self, order: Any, remains: Remains) -> Any:
        self.calls.append(f"plan {order.number} again after {remains.epoch}")
        return SimpleNamespace(room=SimpleNamespace(sites=()))

    def release(self, instance: str) -> None:
        self.calls.append(f"release {instance}")

    async def plan_patch(self, order: Any, remains: Remains) -> Any:
        """Plan for an instance that is suspect."""
        self.calls.append(f"plan {order.number} without {[*remains.lost]}")
        return self.plan

    async def patch(self, order: Any, remains: Remains, early: Any) -> Epoch:
        self.remains.append(remains)
        if self.is_slow and remains.may_return:
            await asyncio.get_running_loop().create_future()
        self.calls.append(f"patch {order.number} {'as planned' if early is self.plan else early}")
        self.patches += 1
        return Epoch("demo-1", order.number, PLACEMENT, "n1", prepared={})

    async def next_epoch(self, order: Any) -> Epoch:
        self.loads += 1
        self.adoptable -= 1
        loaded: Any = (object(),) if self.adoptable >= 0 else ()
        return Epoch(f"demo-{order.number}", order.number, PLACEMENT, "n1", loaded=loaded)

    @contextmanager
    def watching(self, *_: object) -> Generator[None]:
        yield

    def record_failure(self, error: RingError | None, _begun_s: float) -> None:
        self.failures.append(error)

    async def wait_for_node(self, _timeout_s: float) -> None:
        """Return at once."""


class FakeRoom:
    """Memory that other models leave, of which some is freed on request."""

    def __init__(self, *, can_make: bool = False) -> None:
        self.freed, self.can_make = asyncio.Event(), can_make
        self.made: list[tuple[str, bool]] = []
        """Reasons for which room was to be made, and whether also without a request."""

    async def make(self, error: PlanError, *, insists: bool) -> bool:
        self.made.append((str(error), insists))
        return self.can_make


class FakeInstance:
    """Instance that cannot be adopted, and serves if it is loaded."""

    loss: RingError | None = None
    remains: Remains | None = None
    lost_ranks: Mapping[RankId, float] = MappingProxyType({})

    def __init__(
        self,
        _settings: object,
        _served: object,
        _service: object,
        epoch: Epoch,
        *others: Any,
        is_beside: bool,
    ) -> None:
        assert not is_beside
        self._epoch, self._on_suspects = epoch, others[-1]
        self.is_dropped = False
        self.watch = SimpleNamespace(on_node_lost=None)

    async def run(self, ready: Callable[[float], None]) -> None:
        if self._epoch.loaded:
            raise WorkerStuck("Worker 0 of stage 1 sent no greeting within 10 s.")
        ready(1.0)
        await asyncio.get_running_loop().create_future()


def make_replica(
    machines: FakeMachines,
    meter: Meter,
    room: FakeRoom | None = None,
    hold: Hold | None = None,
    *,
    replaces: str = "",
) -> Replica:
    folder = SimpleNamespace(num_layers=4)
    watcher = SimpleNamespace(planned=print, loading=print, ended=machines.ended.append)
    return Replica(
        Settings.model_validate({"model": "demo"}),
        cast("Any", SimpleNamespace(folder=folder, names=("demo",))),
        cast("Any", machines),
        cast("Any", None),
        cast("Any", watcher),
        nodes=2,
        candidates=None,
        replicas=1,
        meter=meter,
        tracing=None,
        hold=hold,
        room=FakeRoom() if room is None else room,
        replaces=replaces,
    )
