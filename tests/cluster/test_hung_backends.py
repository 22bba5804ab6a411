"""Backends whose groups hung, and where and how long they are barred."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_ring.cluster.quarantine import REST_S, WINDOW_S, Hang, HungBackends, Pair, pair_of

AB: Pair = ("a", "b")


def hang(at_s: float, pair: Pair | None = AB, backend: str = "ring", begun_s: float | None = None) -> Hang:
    return Hang(backend, pair, f"hung at {at_s:g}", at_s, at_s if begun_s is None else begun_s)


def hung(*hangs: Hang) -> HungBackends:
    backends = HungBackends()
    for each in hangs:
        backends.record(each)
    return backends


def test_two_hangs_in_ten_minutes_bar_a_backend_for_a_quarter_of_an_hour() -> None:
    backends = hung(hang(0.0))
    assert backends.barred(["a", "b"], 1.0) == frozenset()
    state = backends.record(hang(WINDOW_S - 1))
    end = WINDOW_S - 1 + REST_S
    assert (state.hangs, state.until_s, state.reason) == (2, end, f"hung at {WINDOW_S - 1:g}")
    assert backends.barred(["b", "a"], end - 1) == {"ring"}
    assert backends.barred(["a", "b"], end) == frozenset()
    (kept,) = backends.states(end)
    assert (kept.hangs, kept.until_s) == (2, None), "the record stays"


def test_hangs_far_apart_bar_nothing() -> None:
    times = [number * WINDOW_S for number in range(5)]
    assert hung(*map(hang, times)).barred(["a", "b"], times[-1]) == frozenset()


def test_instances_that_were_loaded_together_and_hang_together_count_once() -> None:
    backends = hung(hang(100.0, begun_s=0.0), hang(130.0, begun_s=5.0))
    assert backends.barred(["a", "b"], 131.0) == frozenset()
    assert backends.record(hang(150.0, begun_s=110.0)).until_s == 150.0 + REST_S


@pytest.mark.parametrize(
    ("nodes", "is_barred"),
    [
        (("a", "b"), True),
        (("b", "a"), True),
        (("a", "c"), False),
        (("a", "a"), False),
        (("c", "b", "a"), True),
    ],
)
def test_a_pair_is_barred_in_every_group_that_joins_it(nodes: Sequence[str], is_barred: bool) -> None:  # noqa: FBT001 - as pytest gives it
    assert bool(hung(hang(0.0), hang(9.0)).barred(nodes, 10.0)) == is_barred


def test_two_ranks_on_one_node_are_a_pair_of_their_own() -> None:
    backends = hung(hang(0.0, ("a", "a")), hang(9.0, ("a", "a")))
    assert backends.barred(["a", "a"], 10.0) == {"ring"}
    assert backends.barred(["a", "b"], 10.0) == frozenset()


@pytest.mark.parametrize(
    ("nodes", "pair"), [(("b", "a"), AB), (("a", "a"), ("a", "a")), (("a", "b", "c"), None), (("a",), None)]
)
def test_only_a_group_of_two_ranks_blames_a_pair(nodes: Sequence[str], pair: Pair | None) -> None:
    assert pair_of(nodes) == pair


def test_a_larger_group_blames_the_backend_everywhere() -> None:
    backends = hung(hang(0.0, None, "jaccl"), hang(9.0, None, "jaccl"))
    assert backends.barred(["x", "y"], 10.0) == {"jaccl"}


def test_hangs_of_other_pairs_and_backends_count_separately() -> None:
    backends = hung(hang(0.0), hang(1.0, backend="jaccl"), hang(2.0, ("a", "c")), hang(3.0, None))
    assert backends.barred(["a", "b", "c"], 4.0) == frozenset()
    assert len(backends.states(4.0)) == 4


def test_a_clock_that_was_set_back_bars_nothing_early() -> None:
    backends = hung(hang(5_000.0), hang(5_100.0))
    assert backends.barred(["a", "b"], 50.0) == frozenset()
    assert backends.record(hang(60.0)).until_s is None
    assert backends.record(hang(70.0)).until_s == 70.0 + REST_S


@given(st.lists(st.integers(1, 700), max_size=12), st.integers(0, 2_000))
def test_a_backend_is_barred_exactly_for_the_rest_after_two_close_hangs(gaps: list[int], later: int) -> None:
    times = [float(sum(gaps[: place + 1])) for place in range(len(gaps))]
    backends, now_s = hung(*map(hang, times)), sum(gaps) + float(later)
    expected = any(
        after - before < WINDOW_S and after <= now_s < after + REST_S for before, after in pairwise(times)
    )
    assert bool(backends.barred(["a", "b"], now_s)) == expected
    assert sum(state.hangs for state in backends.states(now_s)) == len(times)
