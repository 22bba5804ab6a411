"""Instances of a replica, one after the other, without machines."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest

from mlx_ring.core.engine_stats import Meter
from mlx_ring.core.errors import RingError, WorkerStuck
from mlx_ring.head import replica as subject
from mlx_ring.head.instance import Epoch
from mlx_ring.head.placing import Placement
from mlx_ring.head.replica import Replica
from mlx_ring.settings.config import Settings

PLACEMENT = Placement((), (), None, None)


class FakeMachines:
    """Machines on which an earlier head left so many instances."""

    def __init__(self, adoptable: int = 0) -> None:
        self.adoptable = adoptable
        self.failures: list[RingError | None] = []

    async def next_epoch(self, order: Any) -> Epoch:
        self.adoptable -= 1
        loaded: Any = (object(),) if self.adoptable >= 0 else ()
        return Epoch(f"demo-{order.number}", order.number, PLACEMENT, "n1", loaded=loaded)

    @contextmanager
    def watching(self, *_: object) -> Generator[None]:
        yield

    def record_failure(self, error: RingError | None, _begun_s: float) -> None:
        self.failures.append(error)


class FakeInstance:
    """Instance that cannot be adopted, and serves if it is loaded."""

    loss = remains = None

    def __init__(
        self, _settings: object, _served: object, _service: object, epoch: Epoch, *_: object
    ) -> None:
        self._epoch = epoch
        self.watch = SimpleNamespace(on_node_lost=None)

    async def run(self, ready: Callable[[float], None]) -> None:
        if self._epoch.loaded:
            raise WorkerStuck("Worker 0 of stage 1 sent no greeting within 10 s.")
        ready(1.0)
        await asyncio.get_running_loop().create_future()


def make_replica(machines: FakeMachines, meter: Meter) -> Replica:
    folder = SimpleNamespace(num_layers=4)
    watcher = SimpleNamespace(planned=print, loading=print)
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
        hold=None,
    )


def test_a_head_that_cannot_adopt_the_workers_of_an_earlier_one_loads_the_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(subject, "Instance", FakeInstance)
    machines, meter = FakeMachines(adoptable=2), Meter()

    async def run() -> None:
        ready = asyncio.Event()
        running = asyncio.create_task(make_replica(machines, meter).run(lambda _: ready.set()))
        waiting = asyncio.create_task(ready.wait())
        await asyncio.wait((running, waiting), return_when=asyncio.FIRST_COMPLETED)
        assert waiting.done(), running.exception()
        running.cancel()

    asyncio.run(run())
    assert meter.losses == {"WorkerStuck": 2}
    assert machines.failures == [], "no machine is blamed"
