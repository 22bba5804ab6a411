"""The search for a pipeline, compared with brute force."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations, pairwise, permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.examples import examples
from tests.planner.clusters import NODES, cluster_of, model_of

from mlx_ring.planner.profiles import NodeProfile
from mlx_ring.planner.rank_costs import kinds_of, sets_by_size
from mlx_ring.planner.request import Demand, Objective, PlanRequest
from mlx_ring.planner.search import (
    MachineLayers,
    Partition,
    RequestTables,
    any_partition,
    in_order,
    quickest_partition,
    steadiest_costs,
)
from mlx_ring.planner.stage_costs import Table
from mlx_ring.planner.timetable import Timetable


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[Table], Table]:
    layers, nodes = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    numbers = np.random.default_rng(draw(st.integers(0, 2**32)))
    tables: list[Table] = []
    for _ in range(nodes):
        table = numbers.integers(1, 40, (layers + 1, layers + 1)).astype(float)
        table[numbers.random(table.shape) < draw(st.sampled_from([0.0, 0.3, 0.7]))] = np.inf
        table[np.tril_indices(layers + 1)] = np.inf
        tables.append(table)
    if draw(st.booleans()):
        tables = [tables[draw(st.integers(0, place))] for place in range(nodes)]
    hops = (
        np.full((nodes, nodes), 3.0)
        if draw(st.booleans())
        else numbers.integers(1, 9, (nodes, nodes)).astype(float)
    )
    hops[numbers.random(hops.shape) < draw(st.sampled_from([0.0, 0.2, 0.6]))] = np.inf
    return tables, hops


def every_partition(
    tables: Sequence[Table], orders: Iterator[tuple[int, ...]]
) -> Iterator[tuple[MachineLayers, ...]]:
    layers = len(tables[0]) - 1
    for order in orders:
        for inner in combinations(range(1, layers), len(order) - 1):
            yield tuple(
                MachineLayers(node, first, end)
                for node, (first, end) in zip(order, pairwise((0, *inner, layers)), strict=True)
            )


def orders(nodes: int, stages: range) -> Iterator[tuple[int, ...]]:
    for count in stages:
        yield from permutations(range(nodes), count)


def times(tables: Sequence[Table], pieces: tuple[MachineLayers, ...]) -> list[float]:
    return [float(tables[piece.node][piece.first, piece.end]) for piece in pieces]


def hops_of(hops: Table, pieces: tuple[MachineLayers, ...]) -> float:
    places = [piece.node for piece in pieces]
    if len(places) == 1:
        return 0.0
    return sum(float(hops[one, other]) for one, other in zip(places, [*places[1:], places[0]], strict=True))


def has_cost(partition: Partition | None, cost: float) -> bool:
    return (
        partition is None
        if np.isinf(cost)
        else partition is not None and partition.cost == pytest.approx(cost)
    )


@given(problems())
@examples(1.5)
def test_the_quickest_partition_has_the_lowest_cost_of_all(problem: tuple[list[Table], Table]) -> None:
    tables, hops = problem
    nodes = len(tables)
    costs = {
        pieces: sum(times(tables, pieces)) + hops_of(hops, pieces)
        for pieces in every_partition(tables, orders(nodes, range(1, nodes + 1)))
    }
    partition = quickest_partition(tables, hops)
    assert has_cost(partition, min(costs.values(), default=np.inf))
    if partition is not None:
        assert costs[partition.pieces] == pytest.approx(partition.cost)


@given(
    problem=problems(),
    factors=st.lists(st.floats(0.2, 5), min_size=4, max_size=4),
    stages=st.none() | st.integers(1, 4),
    knows_least=st.booleans(),
)
@examples(2)
def test_the_quickest_partition_counts_each_machine_s_time_before_the_next_token(
    problem: tuple[list[Table], Table], factors: list[float], stages: int | None, *, knows_least: bool
) -> None:
    tables, hops = problem
    paces = [table * factor for table, factor in zip(tables, factors, strict=False)]
    stages = stages and min(stages, len(tables))
    numbers = range(1, len(tables) + 1) if stages is None else range(stages, stages + 1)
    costs = {
        pieces: max(sum(times(tables, pieces)) + hops_of(hops, pieces), *times(paces, pieces))
        for pieces in every_partition(tables, orders(len(tables), numbers))
    }
    least = min(costs.values(), default=np.inf)
    known = least if knows_least and np.isfinite(least) else 0.0
    partition = quickest_partition(tables, hops, paces, stages=stages, least=known)
    assert (partition is None) == np.isinf(least)
    if partition is not None:
        assert costs[partition.pieces] == pytest.approx(partition.cost)
        assert partition.cost <= 1.001 * least


@given(problems())
@examples(1.5)
def test_any_partition_is_found_where_the_search_finds_one(problem: tuple[list[Table], Table]) -> None:
    tables, hops = problem
    found = any_partition(tables, hops)
    assert (found is not None) == (quickest_partition(tables, hops) is not None)
    if found is not None:
        assert np.isfinite(sum(times(tables, found.pieces)) + hops_of(hops, found.pieces))


@given(problems())
def test_steadiest_costs_are_the_lowest_of_each_set_of_machines(
    problem: tuple[list[Table], Table],
) -> None:
    tables, hops = problem
    expected: dict[int, float] = {}
    for pieces in every_partition(tables, orders(len(tables), range(1, len(tables) + 1))):
        cost = max(times(tables, pieces)) + hops_of(np.where(np.isfinite(hops), 0.0, np.inf), pieces)
        members = sum(1 << piece.node for piece in pieces)
        if np.isfinite(cost):
            expected[members] = min(cost, expected.get(members, np.inf))
    assert steadiest_costs(tables, hops, len(tables)) == pytest.approx(expected)


@given(problems())
def test_in_order_uses_every_machine_with_the_best_cut(problem: tuple[list[Table], Table]) -> None:
    tables, _ = problem
    every = tuple(range(len(tables)))
    costs = {pieces: max(times(tables, pieces)) for pieces in every_partition(tables, iter([every]))}
    partition = in_order(tables)
    assert has_cost(partition, min(costs.values(), default=np.inf))
    if partition is not None:
        assert costs[partition.pieces] == pytest.approx(partition.cost)


def test_machines_are_alike_if_exchanging_them_changes_no_cost() -> None:
    hops = np.array([[0.0, 1, 1, 2], [1, 0, 1, 2], [1, 1, 0, 2], [2, 2, 2, 0]])
    assert kinds_of("aaaa", hops) == [[0, 1, 2], [3]]
    assert kinds_of("abaa", hops) == [[0, 2], [1], [3]]
    hops[0, 2] = 3
    assert kinds_of("aaaa", hops) == [[0], [1], [2], [3]]
    assert [len(sets) for sets in sets_by_size([[0, 1, 2], [3]])] == [1, 2, 2, 2, 1]


@examples(0.25)
@given(NODES, st.sampled_from(["latency", "first-token", "throughput"]), st.integers(1, 5))
def test_the_times_of_many_pipelines_at_once_are_those_of_each(
    nodes: list[NodeProfile], objective: Objective, users: int
) -> None:
    cluster, demand = cluster_of(*nodes), Demand(1024, users)
    request = PlanRequest(demand, objective=objective, users=users, prompt_tokens=700)
    times = Timetable(model_of(12), cluster, demand)
    pipelines = [
        tuple(
            MachineLayers(node, 12 * place // stages, 12 * (place + 1) // stages)
            for place, node in enumerate(order)
        )
        for stages in range(1, len(nodes) + 1)
        for order in permutations(range(len(nodes)), stages)
    ]
    for seconds, pieces in zip(times.requests_s(pipelines, request), pipelines, strict=True):
        fits = all(np.isfinite(times.tables(1)[piece.node][piece.first, piece.end]) for piece in pieces)
        assert np.isfinite(seconds) == fits
        if fits:
            assert seconds == pytest.approx(times.request_s(pieces, request), rel=1e-12)


def chain_cost(tables: RequestTables, slowest_s: float) -> float:
    """Return the least sum over machines in the order of their fastest layer, in plain code."""
    allowed = [
        np.where(paces <= slowest_s, sums, np.inf)
        for sums, paces in zip(tables.sums, tables.paces, strict=True)
    ]
    order = sorted(range(len(allowed)), key=lambda node: float(np.diagonal(allowed[node], 1).min()))
    ends = range(len(allowed[0]))
    costs: dict[tuple[int, int], float] = {}
    for place, node in enumerate(order):
        for end in ends:
            reached = (
                costs[before, first] + tables.hops[order[before], node] + allowed[node][first, end]
                for before in range(place)
                for first in ends
                if tables.link_paces[order[before], node] <= slowest_s
            )
            costs[place, end] = min(float(allowed[node][0, end]), min(reached, default=np.inf))
    return min(costs[place, ends[-1]] for place in range(len(order)))


@examples(0.2)
@given(st.integers(0, 2**32))
def test_many_unlike_machines_are_searched_as_in_plain_code_while_the_bound_falls(seed: int) -> None:
    numbers, machines, layers = np.random.default_rng(seed), 9, 6

    def table() -> Table:
        made = numbers.integers(1, 99, (layers + 1, layers + 1)).astype(float)
        made[numbers.random(made.shape) < 0.2] = np.inf
        made[np.tril_indices(layers + 1)] = np.inf
        return made

    sums = [table() for _ in range(machines)]
    hops, link_paces = (numbers.integers(0, 99, (machines, machines)).astype(float) for _ in range(2))
    paces = [np.where(np.isfinite(each), table(), np.inf) for each in sums]
    tables = RequestTables(sums, hops, np.full((machines, machines), 3.0), paces, link_paces)
    assert not tables.is_exact
    quickest, bounds = tables.search(), [np.inf, *range(98, 0, -7)]
    for bound in bounds:
        found, fresh = quickest(bound), tables.search()(bound)
        assert found == fresh
        assert np.isinf(chain_cost(tables, bound)) == (found is None)
        if found is not None:
            home_s = 3.0 * (len(found.pieces) > 1)
            least = chain_cost(tables, bound)
            assert least <= found.cost <= least + 3.0
            assert tables.slowest_s(found.pieces) <= bound
            # The last hop goes back to the first machine.
            inner = [(one.node, other.node) for one, other in pairwise(found.pieces)]
            total = sum(times(tables.sums, found.pieces)) + sum(float(hops[pair]) for pair in inner)
            assert found.cost == pytest.approx(total + home_s)
