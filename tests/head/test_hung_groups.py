"""Blame for groups that hang, and plans that avoid their backend."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, cast

import pytest

from mlx_ring.cluster.agent_link import AgentLink, Source
from mlx_ring.cluster.deployment import Site
from mlx_ring.cluster.layer_split import even_split
from mlx_ring.cluster.quarantine import REST_S
from mlx_ring.core.errors import GroupStuck, LinkLost, PlanError, WorkerStuck
from mlx_ring.core.types import RankId
from mlx_ring.engine.in_flight import Unanswered
from mlx_ring.head.placing import Order, Placement
from mlx_ring.head.rank_placements import place_ranks
from mlx_ring.head.served_model import ServedModel
from mlx_ring.head.step_down import StepDown, blame_join, blame_late, blame_reset, groups_of
from mlx_ring.rpc.protos import agent_pb2, worker_pb2
from mlx_ring.settings.config import Settings

STEP = 7


def placement_of(*stages: str, link: str = "grpc") -> Placement:
    """Place a rank for each letter, on the node of that name."""
    sites = [
        Site(node, cast("AgentLink", None), is_local=True, hosts={}, source=Source())
        for nodes in stages
        for node in nodes
    ]
    ranks = place_ranks(sites, [(1.0,) * len(nodes) for nodes in stages])
    return Placement(even_split(8, len(stages)), ranks, None, group_settings={"link": link})


def state(kind: str = "", last_step: int = STEP, *, silent_s: float = 0.0) -> agent_pb2.WorkerState:
    """Return a worker's report that it waits in this."""
    status = worker_pb2.WorkerStatus(phase="ready", last_step=last_step)
    if kind:
        status.waits.CopyFrom(worker_pb2.Wait(kind=kind, backend="ring" if kind == "collective" else ""))
    return agent_pb2.WorkerState(alive=True, status=status, silent_s=silent_s)


def owed_by(stage: int, rank: int = 0) -> Unanswered:
    return Unanswered(RankId(stage, rank), STEP, 31.0, 30.0)


SHARED = placement_of("ab")
LINKED = placement_of("a", "b", link="ring")


@pytest.mark.parametrize("other", [state("collective"), state(), state(last_step=STEP + 1)])
def test_ranks_that_all_wait_for_each_other_blame_their_backend(other: agent_pb2.WorkerState) -> None:
    states = {RankId(0, 0): state("collective"), RankId(0, 1): other}
    error = blame_late(owed_by(0), SHARED, states)
    assert isinstance(error, GroupStuck)
    assert (error.backend, error.nodes, error.node, error.is_workers_own) == ("ring", ("a", "b"), "", False)
    assert str(error) == (
        "MLX's backend ring hangs between stage 0, rank 0 on a and stage 0, rank 1 on b: all these workers answer, "
        "but step 7 has waited for it for 31 s, more than the limit of 30 s."
    )


@pytest.mark.parametrize(
    ("placement", "place", "nodes"),
    [
        (SHARED, (0, 1), ("a", "b")),
        (LINKED, (1, 0), ("a", "b")),
        (placement_of("ab", "ac"), None, tuple("abac")),
        (placement_of("ab", "ac"), (0, 0), ("a", "b")),
        (placement_of("ab", "ac"), (1, 1), ("a", "c")),
    ],
)
def test_connection_of_a_group_that_broke_blames_its_backend(
    placement: Placement, place: tuple[int, int] | None, nodes: tuple[str, ...]
) -> None:
    report = state()
    report.status.group.backend = "ring"
    loss = LinkLost("A connection broke.")
    if place is not None:
        loss.reported_by(*place)
    error = blame_reset(loss, placement, dict.fromkeys([RankId(0, 0), RankId(1, 0)], report))
    assert isinstance(error, GroupStuck)
    assert (error.backend, error.nodes, error.node, error.is_workers_own) == ("ring", nodes, "", False)


def test_stage_that_waits_for_a_collective_of_the_stage_before_blames_the_link() -> None:
    states = {RankId(0, 0): state(), RankId(1, 0): state("collective")}
    error = blame_late(owed_by(1), LINKED, states)
    assert isinstance(error, GroupStuck)
    assert error.nodes == ("a", "b")


@pytest.mark.parametrize(
    ("stage", "placement", "states", "node"),
    [
        (0, SHARED, {RankId(0, 0): state("collective"), RankId(0, 1): state("link")}, "b"),
        (0, SHARED, {RankId(0, 0): state("collective"), RankId(0, 1): state(last_step=STEP - 1)}, "b"),
        (0, SHARED, {RankId(0, 0): state("link"), RankId(0, 1): state("collective")}, "a"),
        (0, LINKED, {RankId(0, 0): state("device"), RankId(1, 0): state("collective")}, "a"),
        (1, LINKED, {RankId(0, 0): state(), RankId(1, 0): state("device")}, "b"),
        (1, placement_of("a", "b"), {RankId(0, 0): state(), RankId(1, 0): state("link")}, "b"),
        (0, placement_of("a"), {}, "a"),
    ],
)
def test_worker_that_hangs_by_itself_is_blamed(
    stage: int, placement: Placement, states: Mapping[RankId, agent_pb2.WorkerState], node: str
) -> None:
    error = blame_late(owed_by(stage), placement, states)
    assert type(error) is WorkerStuck
    assert (error.node, error.is_workers_own) == (node, True)


@pytest.mark.parametrize(
    "other", [{}, {RankId(0, 1): state("collective", silent_s=1.5)}, {RankId(0, 1): agent_pb2.WorkerState()}]
)
def test_nothing_is_blamed_while_a_rank_may_be_silent(other: Mapping[RankId, agent_pb2.WorkerState]) -> None:
    assert blame_late(owed_by(0), SHARED, {RankId(0, 0): state("collective"), **other}) is None


def join(placement: Placement, reporter: RankId, *phases: str) -> Exception:
    """Return the error of a load in which the ranks got so far, and of which one reports that it waits."""
    of_rank = dict(zip([place for group in groups_of(placement) for place in group], phases, strict=True))
    error = GroupStuck("The worker did not join.").of_group("ring", ()).reported_by(*reporter)
    return blame_join(error, placement, of_rank.__getitem__)


@pytest.mark.parametrize(
    "phases",
    [
        ("warm-up", "ready", "group", "weights"),
        ("ready", "ready", "warm-up", "warm-up"),
        ("group", "group", "group", "group"),
        ("group", "fetch", "group", "group"),
    ],
)
def test_group_whose_ranks_do_not_find_each_other_blames_its_backend(phases: tuple[str, ...]) -> None:
    error = join(placement_of("ab", "cd"), RankId(1, 0), *phases)
    assert isinstance(error, GroupStuck)
    assert (error.backend, error.nodes) == ("ring", ("c", "d"))


@pytest.mark.parametrize("phase", ["starting", "fetch"])
def test_rank_that_has_not_begun_to_join_is_blamed(phase: str) -> None:
    error = join(LINKED, RankId(0, 0), "group", phase)
    assert isinstance(error, WorkerStuck)
    assert not isinstance(error, GroupStuck)
    assert error.node == "b"


class Head:
    """Head that plans on two nodes, at a time that tests set."""

    def __init__(self, **settings: object) -> None:
        self.settings = Settings.model_validate(settings)
        self.now_s = 1_000.0
        self.step_down = StepDown(lambda: self.now_s)
        self.impossible = ""
        """Link of plans for which there is no room."""

    @property
    def order(self) -> Order:
        served = cast("ServedModel", SimpleNamespace(names=("demo",), folder=SimpleNamespace(num_layers=8)))
        return Order(served, self.settings, 1, nodes=1, only=None)

    def replaced(self) -> tuple[object, object]:
        """Return link and backend of an instance whose shared stage is replaced."""
        settings = self.step_down.without_barred(self.order, placement_of("ab", "c")).group_settings
        return settings["link"], settings["backend"]

    def plan(self) -> tuple[str, str, int, int]:
        """Return link and backend of the next plan, and its numbers of stages and of ranks in each."""

        async def place(order: Order) -> Placement:
            settings = order.settings
            if settings.link == self.impossible:
                raise PlanError("No room.")
            if settings.tp > 1:
                return placement_of("ab")
            return placement_of(*"ab"[: settings.stages])

        placement = asyncio.run(self.step_down.place(self.order, place))
        chosen: dict[str, Any] = dict(placement.group_settings)
        return chosen["link"], chosen["backend"], len(placement.ranks), len(placement.ranks[0])

    def hang(self, backend: str, times: int = 2, nodes: str = "ab") -> None:
        """Let a group hang, one minute after the other."""
        for _ in range(times):
            begun_s, self.now_s = self.now_s, self.now_s + 60
            self.step_down.record(GroupStuck("It hung.").of_group(backend, nodes), begun_s)


def test_links_step_down_from_jaccl_to_the_ring_to_grpc_and_back() -> None:
    head = Head(stages=2, link="jaccl")
    assert head.plan() == ("jaccl", "auto", 2, 1)
    head.hang("jaccl", 1)
    assert head.plan() == ("jaccl", "auto", 2, 1)
    head.hang("jaccl", 1)
    assert head.plan() == ("ring", "ring", 2, 1)
    head.hang("ring")
    assert head.plan() == ("grpc", "auto", 2, 1)
    head.now_s += REST_S
    assert head.plan() == ("jaccl", "auto", 2, 1)


def test_shared_layers_step_down_from_the_best_backend_to_the_ring_to_a_pipeline() -> None:
    head = Head(tp=2)
    head.hang("jaccl")
    assert head.plan() == ("grpc", "ring", 1, 2)
    head.hang("ring")
    assert head.plan() == ("grpc", "auto", 2, 1)


def test_sums_over_a_barred_ring_become_grpc() -> None:
    head = Head(stages=2, link="allreduce")
    head.hang("ring")
    assert head.plan() == ("grpc", "auto", 2, 1)


def test_backend_barred_between_other_nodes_is_used() -> None:
    head = Head(stages=2, link="ring")
    head.hang("ring", nodes="ac")
    assert head.plan() == ("ring", "auto", 2, 1)
    head.hang("ring", nodes="acd")
    assert head.plan() == ("grpc", "auto", 2, 1)


@pytest.mark.parametrize(
    ("mode", "link", "reason"),
    [("implicit", "allreduce", "--backend ring"), ("off", "ring", "--link-step-down off")],
)
def test_backend_that_must_stay_is_used_with_one_warning(
    mode: str, link: str, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    backend = "ring" if mode == "implicit" else "auto"
    head = Head(stages=2, link=link, backend=backend, link_step_down=mode)
    head.hang("ring")
    with caplog.at_level(logging.WARNING):
        assert [head.plan() for _ in range(3)] == [(link, backend, 2, 1)] * 3
    warnings = [record.getMessage() for record in caplog.records]
    assert len([text for text in warnings if reason in text and "--link-step-down auto" in text]) == 1


def test_named_backend_steps_down_if_that_is_set() -> None:
    head = Head(tp=2, backend="ring", link_step_down="auto")
    head.hang("ring")
    assert head.plan() == ("grpc", "auto", 2, 1)


def test_barred_backend_is_used_if_nothing_else_fits(caplog: pytest.LogCaptureFixture) -> None:
    head = Head(stages=2, link="ring")
    head.hang("ring")
    head.impossible = "grpc"
    assert head.plan() == ("ring", "auto", 2, 1)
    assert "Using MLX's backend ring, because without it: No room." in caplog.text


def test_a_group_is_replaced_with_the_ring_instead_of_a_barred_backend() -> None:
    head = Head(tp=2)
    assert head.replaced() == ("grpc", "auto")
    head.hang("jaccl")
    assert head.replaced() == ("grpc", "ring")
    head.hang("ring")
    with pytest.raises(PlanError, match="MLX's backend jaccl, ring is barred"):
        head.replaced()


def test_a_group_is_replaced_with_a_barred_backend_that_must_stay() -> None:
    head = Head(tp=2, backend="ring")
    head.hang("ring")
    assert head.replaced() == ("grpc", "ring")


def test_other_losses_are_not_recorded() -> None:
    head = Head(stages=2, link="ring")
    for error in (None, WorkerStuck("stuck"), GroupStuck("of an unknown backend")):
        head.step_down.record(error, 0.0)
    assert head.step_down.states() == ()
