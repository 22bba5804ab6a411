"""Proposals of better splits for replicas and several models, and for machines that share layers."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tests.head.replanning_heads import (
    FakeHosted,
    Head,
    Machines,
    equal_layers,
    groups_of,
    hosted_on,
    member,
    proposed,
    replica_on,
)
from tests.planner.clusters import model_of, shared_model
from tests.planner.test_replan import REQUEST, machines

from mlx_ring.api.service import Moved
from mlx_ring.cluster.membership import Membership
from mlx_ring.cluster.quarantine import HungBackend
from mlx_ring.core.errors import PlanError
from mlx_ring.core.types import LayerRange
from mlx_ring.head import replanning as subject
from mlx_ring.head.moves import Choose
from mlx_ring.head.replanning import Compared, Present, ReplanMode, Replanning
from mlx_ring.host.interfaces import TrustedInterface
from mlx_ring.models.model_source import find_model
from mlx_ring.planner.place import place
from mlx_ring.planner.profiles import ModelProfile, NodeProfile
from mlx_ring.planner.replan import (
    stages_of,
)
from mlx_ring.planner.request import Demand, PlanRequest
from mlx_ring.rpc.link_profile import UNREACHABLE, LinkProfile


@pytest.fixture(autouse=True)
def sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subject, "sizes_of", equal_layers)


class TwoReplicas(Head):
    """Proposals for two replicas, each on two machines of its own. One may lose one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.request = PlanRequest(Demand(4096, 1), strategy="uniform")
        names = ("demo-1", "demo-2")
        services = [
            SimpleNamespace(info=SimpleNamespace(name=name), recoveries=SimpleNamespace(load_s=5.0))
            for name in names
        ]
        self.hosted.replicas = [SimpleNamespace(service=service, had={}) for service in services]
        nodes = machines(1, 1, 1, 1).nodes
        self.used: list[tuple[NodeProfile, ...]] = [nodes[:2], nodes[2:]]
        self.free: tuple[NodeProfile, ...] = ()

    def _compared(self, hosted: Any, machines: Any) -> list[Compared]:
        del hosted, machines
        found = list[Compared]()
        for replica, used in zip(self.hosted.replicas, self.used, strict=True):
            loaded = stages_of(place(model_of(28), replace(self.now, nodes=used), self.request))
            now = replace(self.now, nodes=(*used, *self.free))
            found.append(Compared(replica, Present(self.request, loaded, now, now, "")))
        return found


@pytest.mark.parametrize("lost", [0, 1])
def test_a_machine_that_is_back_goes_to_the_replica_with_fewer_machines(lost: int) -> None:
    async def run() -> None:
        head = TwoReplicas()
        assert await head.propose(cast("Any", head.hosted)) is None
        stays, back = head.used[lost]
        head.used[lost], head.free = (stays,), (back,)
        proposal = await head.propose(cast("Any", head.hosted))
        assert proposal is not None
        assert (proposal.instance, proposal.unused) == (f"demo-{1 + lost}", [back.name])

    asyncio.run(run())


class ReplicasHead(Head):
    """Proposals for two replicas on two machines each, of which the second one's last machine gets slow."""

    def __init__(self) -> None:
        super().__init__()
        service: Any = SimpleNamespace(
            **{**vars(self.hosted.service), "info": SimpleNamespace(name="demo-2")}
        )
        self.hosted.replicas.append(SimpleNamespace(service=service, placement=None, had={}))

    def _compared(self, hosted: Any, machines: Any) -> list[Compared]:
        del machines
        (first, second), now = hosted.replicas, self.present()
        renamed = replace(now.cluster, nodes=tuple(replace(n, name=f"b-{n.name}") for n in now.cluster.nodes))
        loaded = tuple((span, ((f"b-{name}", share),)) for span, ((name, share),) in now.loaded)
        slow = Present(now.request, loaded, renamed, renamed, "")
        return [Compared(first, now._replace(cluster=self.fast, beside=self.fast)), Compared(second, slow)]

    fast = machines(1, 1)

    async def split_again(self, hosted: FakeHosted, choose: Choose, *, may_pause: bool) -> Moved | None:
        del hosted, may_pause
        choice = await choose()
        assert choice is not None
        self.moves.append(choice.replica.service.info.name)
        return Moved("demo", choice.way, 2, 1.0)


def test_the_replica_that_gains_most_moves(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        head = ReplicasHead()
        await head.look_for(20)
        assert await head.propose(cast("Any", head.hosted)) is None
        head.change(machines(1, 4))
        await head.look_for(120)
        (proposal,) = head.proposals()
        assert (proposal.model, proposal.instance) == ("demo", "demo-2")
        assert {node for stage in proposal.planned.stages for node in stage.nodes} <= {"b-node-0", "b-node-1"}
        assert (await head.replan(cast("Any", head.hosted), may_pause=False))[1] is not None
        assert head.moves == ["demo-2"]

    asyncio.run(run())
    assert "A replica of demo would be " in caplog.text


def test_a_replica_is_compared_on_its_machines_and_those_without_a_replica(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subject, "plan_request", lambda *_: REQUEST)  # pyright: ignore[reportUnknownLambdaType, reportUnknownArgumentType]
    hosted = hosted_on(tmp_path, replica_on("a", "b"), replica_on("c", "d"))
    here: Any = Machines(*"abcde")
    head = Replanning("ask", lambda: here, lambda: cast("Any", [hosted]), cast("Any", None))
    compared = head._compared(cast("Any", hosted), here)  # pyright: ignore[reportPrivateUsage]
    assert [[node.name[0] for node in now.cluster.nodes] for _, now in compared] == [[*"abe"], [*"cde"]]
    assert [[ranks[0][0][0] for _, ranks in now.loaded] for _, now in compared] == [[*"ab"], [*"cd"]]
    assert {now.request.demand.sequences for _, now in compared} == {REQUEST.demand.sequences // 2}
    hosted.replicas[0].service.error = PlanError("It is loaded again.")
    ((_, now),) = head._compared(cast("Any", hosted), here)  # pyright: ignore[reportPrivateUsage]
    assert [node.name[0] for node in now.cluster.nodes] == [*"cde"]


def test_replicas_that_share_a_machine_after_a_loss_are_proposed_to_use_an_unused_one(tmp_path: Path) -> None:
    hosted = hosted_on(tmp_path, replica_on("a"), replica_on("a"))
    here: Any = Machines(*"ab")
    hosted.served.folder = find_model("demo").folder
    for number, replica in enumerate(hosted.replicas):
        replica.placement.ranges = [LayerRange(0, 28)]
        replica.service.info = SimpleNamespace(name=f"demo-{number}")
        replica.service.recoveries = SimpleNamespace(load_s=5.0)
    found = proposed(hosted, here)
    assert found is not None
    assert (found.way, found.unused) == ("beside", ["b-machine"])
    assert groups_of(found) == [["b-machine"]]
    # With two machines each, one of them in common, a replica keeps the other one.
    for replica, nodes in zip(hosted.replicas, ("ab", "bc"), strict=True):
        replica.placement = replica_on(*nodes).placement
    here.view = Machines(*"abcd").view
    head = Replanning("ask", lambda: here, lambda: cast("Any", [hosted]), cast("Any", None))
    first, second = head._compared(cast("Any", hosted), here)  # pyright: ignore[reportPrivateUsage]
    assert [[node.name[0] for node in now.cluster.nodes] for _, now in (first, second)] == [[*"ad"], [*"cd"]]
    assert [[node.name[0] for node in now.shared] for _, now in (first, second)] == [["b"], ["b"]]


def test_it_is_said_for_which_models_no_split_is_looked_for(tmp_path: Path) -> None:
    here: Any = Machines(*"abc")
    models = {
        "common": hosted_on(tmp_path, replica_on("a", "b"), replica_on("b", "c")),
        "given": hosted_on(tmp_path, replica_on("a", "b"), strategy="custom", nodes=2, proportions="1,1"),
        "compared": hosted_on(tmp_path, replica_on("a", "b"), replica_on("c")),
        "loading": hosted_on(tmp_path, replica_on("a", "b"), replica_on("b", "c")),
    }
    for name, hosted in models.items():
        hosted.model_id = name
    models["loading"].state = "loading"

    def refusals(mode: ReplanMode, machines: Any) -> list[tuple[str, str]]:
        hosted: Any = [*models.values()]
        found = Replanning(mode, lambda: machines, lambda: hosted, cast("Any", None)).refusals()
        return [(each.model, each.why) for each in found]

    assert refusals("ask", here) == [
        (
            "common",
            "No other split of common can be looked for: its replicas have machines in common, and none is unused.",
        ),
        ("given", "No other split of given can be looked for: --strategy custom gives the split."),
    ]
    assert [model for model, why in refusals("off", here) if "--replan off" in why] == [
        *("common", "given", "compared")
    ]
    assert refusals("ask", Machines("a")) == refusals("ask", None) == []


# ---- machines that share layers


CABLE = LinkProfile(20e-6, 5e9, trusted=True)


def trusting(*nodes: str) -> Any:
    """Return machines whose cables are trusted with collectives."""
    here: Any = Machines(*nodes)
    trusted = {
        node: replace(member(node), trusted=(TrustedInterface("en5", f"10.0.8.{ord(node)}", "10.0.8.0/24"),))
        for node in nodes
    }
    here.view = replace(here.view, membership=Membership(trusted))
    here.link_profiles = {frozenset(pair): CABLE for pair in combinations(nodes, 2)}
    return here


def shared_on(tmp_path: Path, nodes: str, **changes: Any) -> FakeHosted:
    """Return a model of which two ranks, or one, share all layers."""
    hosted = hosted_on(tmp_path, replica_on(), nodes=2, trusted_interface="lo", **changes)
    hosted.served.folder = find_model("demo").folder
    placement = hosted.replicas[0].placement
    placement.nodes = [SimpleNamespace(node=node) for node in nodes]
    placement.ranges = [LayerRange(0, 8)]
    placement.ranks = [[SimpleNamespace(site=site, share=1.0) for site in placement.nodes]]
    placement.plan = None
    hosted.replicas[0].service.recoveries = SimpleNamespace(load_s=5.0)
    hosted.replicas[0].service.info = SimpleNamespace(name="demo-1")
    return hosted


@pytest.fixture
def shared_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    def sizes_of(*_: object) -> ModelProfile:
        return shared_model(8, layer_bytes=50_000_000)

    monkeypatch.setattr(subject, "sizes_of", sizes_of)


BARRED = HungBackend("ring", None, 2, "It hung.", 1.0)


MACHINES = [*map("{}-machine".format, "ab")]


@pytest.mark.usefixtures("shared_sizes")
def test_machines_that_would_share_layers_are_proposed_unless_their_backend_hung(tmp_path: Path) -> None:
    hosted, here = shared_on(tmp_path, "a"), trusting(*"ab")
    found = proposed(hosted, here)
    assert groups_of(found) == [MACHINES]
    assert found is not None
    assert found.gain is not None
    assert found.gain > 0.15
    here.view = replace(here.view, hung=[BARRED])
    assert MACHINES not in (groups_of(proposed(hosted, here)) or [])
    hosted.settings = hosted.settings.model_copy(update={"link_step_down": "off"})
    assert groups_of(proposed(hosted, here)) == [MACHINES]


@pytest.mark.usefixtures("shared_sizes")
@pytest.mark.parametrize(("present", "planned"), [("aa", [MACHINES]), ("ab", None)])
def test_ranks_of_one_machine_are_proposed_to_spread_over_those_that_joined(
    tmp_path: Path, present: str, planned: list[list[str]] | None
) -> None:
    found = proposed(shared_on(tmp_path, present, tp=2), trusting(*"ab"))
    assert groups_of(found) == planned
    assert found is None or (found.way == "beside" and found.gain is not None and found.gain > 0.15)


def test_a_strategy_over_all_machines_is_compared_without_those_out_of_reach(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    hosted, here = shared_on(tmp_path, "a", strategy="uniform"), trusting(*"abc")
    here.link_profiles[frozenset("ac")] = here.link_profiles[frozenset("bc")] = UNREACHABLE
    here.link_profiles[frozenset("ab")] = replace(CABLE, round_trip_s=10.0)
    assert proposed(hosted, here) is None, "over a and b, it would not be faster"
    assert not caplog.records, "it is compared again and again"
