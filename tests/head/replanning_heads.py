"""Models, machines and moves that only record what is asked of them, for tests of proposals of better splits."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any, cast

from tests.planner.clusters import model_of
from tests.planner.test_replan import REQUEST, Clock, loaded_on, machines
from tests.profiles import made_up_profile

from mlx_ring.api.ops.status import ProposalStatus
from mlx_ring.api.service import Moved
from mlx_ring.cluster.membership import Member, Membership
from mlx_ring.core.errors import RingError
from mlx_ring.core.types import LayerRange
from mlx_ring.engine.step_times import StageTimes, StepTimes
from mlx_ring.head.moves import Choose
from mlx_ring.head.replanning import Better, Compared, Present, ReplanMode, Replanning
from mlx_ring.head.status import ClusterView
from mlx_ring.planner.profiles import ClusterProfile, ModelProfile
from mlx_ring.planner.replan import (
    Situation,
    compare,
    stages_of,
)
from mlx_ring.rpc.link_profile import LinkProfile
from mlx_ring.settings.settings_sources import load_settings

LOOK_S = 10.0


def equal_layers(*_: object) -> ModelProfile:
    """Return the sizes of a model of 28 equal layers, in place of `sizes_of`."""
    return model_of(28)


class FakeHosted:
    """Model on two equal machines, whose steps are measured at each look."""

    model_id = "demo"

    def __init__(self) -> None:
        self.settings: Any = SimpleNamespace(
            strategy="auto",
            tp=1,
            tp_shares=(),
            resume="on",
            link="grpc",
            backend="auto",
            link_step_down="implicit",
        )
        self.served: Any = SimpleNamespace(folder=None, names=["demo"])
        self.state, self.open_requests = "ready", 0
        self.steps = 0
        self.service: Any = SimpleNamespace(
            info=SimpleNamespace(name="demo-1"),
            engine=SimpleNamespace(step_times=self.times),
            recoveries=SimpleNamespace(load_s=5.0),
            placement=None,
        )
        self.replicas: list[Any] = [SimpleNamespace(service=self.service, placement=None, had={})]
        self.instances = [self.service]
        self.is_moving = False

    def times(self) -> StepTimes:
        self.steps += 1
        return StepTimes((StageTimes(self.steps, (), ()),))


class Head(Replanning):
    """Proposals for one model, whose machines change by hand."""

    def __init__(self, mode: ReplanMode = "ask", problem: RingError | None = None) -> None:
        self.hosted, self.problem, self.moves = FakeHosted(), problem, list[str]()
        self.refusal, self.is_comparable = "", True
        self.clock = Clock()
        models = cast("Any", [self.hosted])
        super().__init__(mode, lambda: cast("Any", self), lambda: models, cast("Any", self), self.clock)
        self.now = self.beside = machines(1, 1)
        self.request = REQUEST
        self.loaded = loaded_on(self.now)

    def _why_not(self, hosted: Any) -> str:
        del hosted
        return "" if self.is_comparable else "it is loading"

    def cluster_view(self) -> ClusterView:
        return ClusterView("node-0")

    def present(self) -> Present:
        return Present(self.request, self.loaded, self.now, self.beside, self.refusal)

    def _compared(self, hosted: Any, machines: Any) -> list[Compared]:
        del hosted, machines
        return [Compared(self.hosted.replicas[0], self.present())]

    async def split_again(self, hosted: FakeHosted, choose: Choose, *, may_pause: bool) -> Moved | None:
        choice = await choose()
        if choice is None:
            return None
        if choice.refusal is not None:
            raise choice.refusal
        assert choice.replica is hosted.replicas[0]
        way = choice.way
        self.moves.append(way)
        if self.problem is not None and not may_pause:
            raise self.problem
        found = compare(Situation(model_of(28), *self.present()))
        assert found is not None
        self.loaded = stages_of(found.planned)
        self.hosted.service.info.name += "1"
        return Moved("demo", way, 2, 1.0)

    def change(self, now: ClusterProfile, beside: ClusterProfile | None = None) -> None:
        self.now, self.beside = now, beside or now

    async def look_for(self, seconds: float) -> None:
        for _ in range(int(seconds / LOOK_S)):
            await self.look(cast("Any", self.hosted))
            self.clock.now += LOOK_S


def member(node: str) -> Member:
    return Member(node, f"{node}-machine", "", 0, "", made_up_profile(), memory_utilization=0.75, session=1)


def replica_on(*nodes: str) -> Any:
    sites = [SimpleNamespace(node=node) for node in nodes]
    ranges = [LayerRange(14 * place, 14 * place + 14) for place in range(len(nodes))]
    ranks = [[SimpleNamespace(site=site, share=1.0)] for site in sites]
    service = SimpleNamespace(error=None, view={}.get)
    return SimpleNamespace(
        service=service, placement=SimpleNamespace(nodes=sites, ranges=ranges, ranks=ranks), had={}
    )


class Machines:
    """Machines that are connected."""

    link_profiles: Mapping[frozenset[str], LinkProfile] = MappingProxyType({})

    def __init__(self, *nodes: str) -> None:
        self.view = ClusterView("a", Membership({node: member(node) for node in nodes}))

    def cluster_view(self) -> ClusterView:
        return self.view


def hosted_on(tmp_path: Path, *replicas: Any, **changes: Any) -> FakeHosted:
    hosted = FakeHosted()
    hosted.settings = load_settings({"state_dir": str(tmp_path), **changes})
    hosted.replicas = [*replicas]
    hosted.instances = [replica.service for replica in replicas]
    return hosted


def proposed(hosted: FakeHosted, here: Any) -> ProposalStatus | None:
    models: Any = [hosted]
    head = Replanning("ask", lambda: here, lambda: models, cast("Any", None))
    return asyncio.run(head.propose(models[0]))


def groups_of(found: ProposalStatus | None) -> list[list[str]] | None:
    return None if found is None else [stage.nodes for stage in found.planned.stages]


def remembered(compare_now: Callable[..., Awaitable[Better | None]]) -> Any:
    """Return a comparison that remembers what it found, because a search takes a while."""
    found: dict[object, Better | None] = {}

    async def compared(hosted: Any, replicas: list[Compared]) -> Better | None:
        ((_, now),) = replicas
        key = now.loaded, tuple(node.ratios for node in now.cluster.nodes)
        if key not in found:
            found[key] = await compare_now(hosted, replicas)
        return found[key]

    return compared
