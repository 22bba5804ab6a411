"""Patch of an instance: only lost ranks are started and loaded, and the others get their addresses."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import cast

import pytest
from tests.eventually import run_tasks_until

from mlx_ring.cluster import relinking
from mlx_ring.cluster.agent_link import AgentLink, Source
from mlx_ring.cluster.deployment import Site
from mlx_ring.cluster.layer_split import Cut, even_split, make_assignments
from mlx_ring.cluster.relinking import link, load_lost, prepare, with_their_groups
from mlx_ring.core.errors import WorkerLost
from mlx_ring.core.types import RankId
from mlx_ring.rpc.hello import make_hello
from mlx_ring.rpc.protos import agent_pb2, worker_pb2

Assignments = Sequence[worker_pb2.StageAssignment]


class _Agent:
    """Agent that answers for all its workers, except for the stages that are silent."""

    def __init__(self, *silent: int) -> None:
        self.silent = silent
        self.calls: list[tuple[str, list[int]]] = []
        self.kept: worker_pb2.KeptKv | None = None
        self.begun = 0
        """Last step that its workers have begun."""
        self.missing_halt: set[RankId] = set()
        """Ranks that cannot be halted."""
        self.hung: set[RankId] = set()
        """Ranks that do not finish their steps."""
        self.finished = asyncio.Event()
        """Set when they finish them after all."""
        self.until: list[int] = []
        """Last steps that its prepared workers must execute."""
        self.linked: dict[int, worker_pb2.StageAssignment] = {}
        self.expected: dict[int, str] = {}
        """Nodes before the prepared stages."""

    def site(self, node: str, weights: str = "") -> Site:
        source = Source(weights=weights) if weights else Source("model")
        return Site(node, cast("AgentLink", self), is_local=False, hosts={"": node}, source=source)

    def _note(self, call: str, assignments: Assignments) -> Sequence[agent_pb2.StartedWorker]:
        self.calls.append((call, [one.stage for one in assignments]))
        return [
            agent_pb2.StartedWorker(
                stage=one.stage,
                rank=one.rank,
                address=f"unix:{call}-{one.stage}",
                port=4000 + one.stage,
                means=worker_pb2.GroupMeans(backends=["ring"]),
            )
            for one in assignments
            if one.stage not in self.silent
        ]

    async def start(
        self, _hello: object, assignments: Assignments, **_: object
    ) -> Sequence[agent_pb2.StartedWorker]:
        return self._note("start", assignments)

    async def load(
        self,
        _hello: object,
        _source: object,
        assignments: Assignments,
        _report: object,
        *,
        only_fetch: bool,
    ) -> None:
        self._note("fetch" if only_fetch else "load", assignments)
        self.linked |= {one.stage: one for one in assignments}

    async def relink(
        self,
        _hello: object,
        assignments: Assignments,
        *,
        commit: bool,
        kept: worker_pb2.KeptKv | None = None,
        pids: Sequence[int] = (),
        leaves_others: bool = False,
        halt: bool = False,
        until_steps: Sequence[int] = (),
    ) -> Sequence[agent_pb2.StartedWorker]:
        assert commit or kept is None
        assert not leaves_others or len(assignments) == 1
        self.pids = list(pids)
        if halt:
            self.calls.append(("halt", [one.stage for one in assignments]))
            return [
                agent_pb2.StartedWorker(stage=one.stage, rank=one.rank, begun_step=self.begun)
                for one in assignments
                if place(one.stage, one.rank) not in self.missing_halt
            ]
        if self.hung & {place(one.stage, one.rank) for one in assignments}:
            self.calls.append(("hang", [one.stage for one in assignments]))
            await self.finished.wait()
        self.until = list(until_steps)
        self.kept = kept
        if commit:
            self.linked |= {one.stage: one for one in assignments}
        else:
            self.expected |= {one.stage: one.previous_node for one in assignments}
        return self._note("commit" if commit else "prepare", assignments)


class _Unreachable(_Agent):
    def _note(self, call: str, assignments: Assignments) -> Sequence[agent_pb2.StartedWorker]:
        raise WorkerLost(f"The agent does not answer: {call}, {len(assignments)}.")


def three_stages(ranks: Sequence[Sequence[float]] = ((1.0,),) * 3) -> Assignments:
    return make_assignments(
        Cut(even_split(3, 3), tuple(map(tuple, ranks))),
        instance="one",
        epoch=2,
        dtype="auto",
        model_digest="model",
        max_model_len=64,
    )


def place(stage: int, rank: int = 0) -> RankId:
    return RankId(stage, rank)


def test_only_the_lost_stage_is_loaded_and_the_others_are_linked_with_it_afterwards() -> None:
    here, there = _Agent(), _Agent()
    a, c = here.site("a"), there.site("c")
    # Stage 1 was on a machine that is lost, and moves to the last stage's.
    sites = {place(0): a, place(1): c, place(2): c}
    kept = worker_pb2.KeptKv(
        first_stage=2, sequences=[worker_pb2.KeptSequence(sequence=1, kept_as=9, length=5)]
    )

    async def run() -> None:
        prepared = await prepare(sites, three_stages(), {place(0), place(2)}, make_hello())
        assert set(prepared) == {place(0), place(2)}
        loaded = await load_lost(sites, three_stages(), prepared, make_hello(), lambda _progress: None)
        assert "commit" not in {call for call, _ in here.calls + there.calls}
        await link(loaded, prepared, make_hello(), kept)

    asyncio.run(run())
    assert here.calls == [("prepare", [0]), ("commit", [0])]
    assert there.calls == [("prepare", [2]), ("start", [1]), ("load", [1]), ("commit", [2])]
    assert (here.kept, there.kept) == (kept, kept)
    assert here.expected | there.expected == {0: "c", 2: ""}
    linked = here.linked | there.linked
    assert [(linked[stage].next_address, linked[stage].next_node) for stage in range(3)] == [
        ("c:4001", "c"),
        ("unix:prepare-2", ""),
        ("", ""),
    ]
    assert (linked[2].first_address, linked[2].first_node) == ("a:4000", "a")


def test_ranks_of_a_lost_group_on_two_machines_load_once_all_weights_are_fetched() -> None:
    here, there = _Agent(), _Agent()
    a, b = here.site("a"), there.site("b", weights="digest")
    assignments = three_stages(((1.0,), (0.5, 0.5), (1.0,)))
    sites = {place(0): a, place(1, 0): a, place(1, 1): b, place(2): a}

    async def run() -> None:
        prepared = await prepare(sites, assignments, {place(0), place(2)}, make_hello())
        loaded = await load_lost(sites, assignments, prepared, make_hello(), lambda _progress: None)
        await link(loaded, prepared, make_hello())

    asyncio.run(run())
    assert here.calls == [("prepare", [0, 2]), ("start", [1]), ("load", [1]), ("commit", [0, 2])]
    assert there.calls == [("start", [1]), ("fetch", [1]), ("load", [1])]


def test_ranks_of_a_group_that_stays_execute_the_steps_that_one_of_them_has_begun() -> None:
    here, there = _Agent(), _Agent()
    here.begun, there.begun = 7, 8
    a, b = here.site("a"), there.site("b")
    assignments = three_stages(((1.0,), (0.5, 0.5), (1.0,)))
    sites = {place(0): a, place(1, 0): a, place(1, 1): b, place(2): b}
    staying = {place(0), place(1, 0), place(1, 1)}
    prepared = asyncio.run(prepare(sites, assignments, staying, make_hello()))
    assert set(prepared) == staying
    assert here.calls == [("halt", [1]), ("prepare", [0, 1])]
    assert there.calls == [("halt", [1]), ("prepare", [1])]
    assert (here.until, there.until) == ([0, 8], [8])


def test_a_group_of_which_a_rank_cannot_be_halted_is_lost_at_once() -> None:
    here, there = _Agent(), _Agent()
    there.missing_halt = {place(1, 1)}
    here.hung = {place(1, 0)}
    a, b = here.site("a"), there.site("b")
    assignments = three_stages(((1.0,), (0.5, 0.5), (1.0,)))
    sites = {place(0): a, place(1, 0): a, place(1, 1): b, place(2): b}
    prepared = asyncio.run(prepare(sites, assignments, set(sites), make_hello()))
    assert set(prepared) == {place(0), place(2)}
    assert here.calls == [("halt", [1]), ("prepare", [0])]
    assert there.calls == [("halt", [1]), ("prepare", [2])]


@pytest.mark.parametrize("leaves", [False, True])
def test_no_rank_is_waited_for_long_whose_group_has_finished_its_steps_or_left(
    monkeypatch: pytest.MonkeyPatch, *, leaves: bool
) -> None:
    here, there = _Agent(), _Agent()
    here.hung = {place(1, 0)}
    there.hung = {place(2)} if leaves else set()
    a, b = here.site("a"), there.site("b")
    assignments = three_stages(((1.0,), (0.5, 0.5), (1.0,)))
    sites = {place(0): a, place(1, 0): a, place(1, 1): b, place(2): b}
    monkeypatch.setattr(relinking, "_GROUP_WAIT_S", 3600.0 if leaves else 0.01)
    monkeypatch.setattr(relinking, "_FREE_WAIT_S", 0.01)

    async def wait_until_left(node: str) -> None:
        await run_tasks_until(lambda: node == "b" and ("hang", [1, 2]) in there.calls)

    async def run() -> set[RankId]:
        async with asyncio.timeout(30.0):
            return {*await prepare(sites, assignments, set(sites), make_hello(), wait_until_left)}

    # Stage 0 is asked again without the rank beside it, which is ended then.
    if leaves:
        assert asyncio.run(run()) == {place(0)}
        assert here.calls == [("halt", [1]), ("hang", [0, 1]), ("prepare", [0])]
    else:
        assert asyncio.run(run()) == {place(0), place(2)}
        assert here.calls == [("halt", [1]), ("hang", [0, 1]), ("hang", [1]), ("prepare", [0])]


def test_a_rank_is_not_lost_because_a_stage_beside_it_computes_longer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    here, there = _Agent(), _Agent()
    here.hung = {place(0)}
    a, b = here.site("a"), there.site("b")
    assignments = three_stages(((1.0,), (0.5, 0.5), (1.0,)))
    sites = {place(0): a, place(1, 0): a, place(1, 1): b, place(2): b}
    monkeypatch.setattr(relinking, "_GROUP_WAIT_S", 0.01)

    async def run() -> set[RankId]:
        preparing = asyncio.create_task(prepare(sites, assignments, set(sites), make_hello()))
        await run_tasks_until(lambda: ("prepare", [1]) in here.calls)
        here.finished.set()
        return {*await preparing}

    assert asyncio.run(run()) == set(sites)
    assert here.calls == [("halt", [1]), ("hang", [0, 1]), ("prepare", [1]), ("prepare", [0, 1])]


def test_workers_that_do_not_answer_are_not_among_the_prepared() -> None:
    sites = {
        place(0): _Agent().site("a"),
        place(1): _Agent(1).site("b"),
        place(2): _Unreachable().site("c"),
    }
    prepared = asyncio.run(prepare(sites, three_stages(), set(sites), make_hello()))
    assert set(prepared) == {place(0)}


@pytest.mark.parametrize(
    ("lost", "expected"),
    [({place(0)}, {place(0)}), ({place(1, 1)}, {place(1, 0), place(1, 1)}), (set[RankId](), set[RankId]())],
)
def test_the_ranks_of_a_group_are_lost_together(lost: set[RankId], expected: set[RankId]) -> None:
    assert with_their_groups(lost, three_stages(((1.0,), (0.5, 0.5), (1.0,)))) == expected
