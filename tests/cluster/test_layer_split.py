"""Splits of layers: even, and balanced by the bytes of layers and head; digests of plans."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_ring.cluster.layer_split import (
    Cut,
    balanced_split,
    even_split,
    make_assignments,
    plan_digest,
    shaping_settings,
)
from mlx_ring.core.errors import PlanError
from mlx_ring.core.types import LayerRange
from mlx_ring.settings.settings_sources import load_settings

LAYERS_AND_STAGES = st.integers(1, 200).flatmap(
    lambda layers: st.tuples(st.just(layers), st.integers(1, layers))
)


@given(LAYERS_AND_STAGES)
def test_the_stages_cover_every_layer_once_and_in_order(given_sizes: tuple[int, int]) -> None:
    layers, stages = given_sizes
    ranges = even_split(layers, stages)
    assert len(ranges) == stages
    assert [layer for part in ranges for layer in range(part.start, part.end)] == list(range(layers))


@given(LAYERS_AND_STAGES)
def test_lengths_differ_by_one_at_most_and_the_ends_are_never_longer(
    given_sizes: tuple[int, int],
) -> None:
    lengths = [len(part) for part in even_split(*given_sizes)]
    assert max(lengths) - min(lengths) <= 1
    assert lengths[-1] == min(lengths)


@pytest.mark.parametrize(
    ("layers", "stages", "lengths"),
    [(28, 2, [14, 14]), (5, 2, [3, 2]), (10, 4, [2, 3, 3, 2]), (7, 3, [2, 3, 2])],
)
def test_remaining_layers_go_to_the_middle(layers: int, stages: int, lengths: list[int]) -> None:
    assert [len(part) for part in even_split(layers, stages)] == lengths


@pytest.mark.parametrize("stages", [0, 9])
def test_more_stages_than_layers_are_refused_with_both_numbers(stages: int) -> None:
    with pytest.raises(PlanError, match=rf"^{stages} stages were requested, but the model has 8 layers"):
        even_split(8, stages)


LAYER_BYTES = st.lists(st.integers(0, 50), min_size=1, max_size=9).flatmap(
    lambda layers: st.tuples(st.just(layers), st.integers(0, 120), st.integers(1, len(layers)))
)


def stage_bytes(ranges: tuple[LayerRange, ...], layers: list[int], head: int) -> list[int]:
    sizes = [sum(layers[part.start : part.end]) for part in ranges]
    return [*sizes[:-1], sizes[-1] + head]


@given(LAYER_BYTES)
def test_no_other_cut_is_lighter_or_more_even(
    given_sizes: tuple[list[int], int, int],
) -> None:
    layers, head, stages = given_sizes
    chosen = balanced_split(layers, head, stages)
    every = (
        tuple(LayerRange(start, end) for start, end in pairwise((0, *ends, len(layers))))
        for ends in combinations(range(1, len(layers)), stages - 1)
    )

    def order(ranges: tuple[LayerRange, ...]) -> tuple[int, int]:
        sizes = stage_bytes(ranges, layers, head)
        return max(sizes), sum(size**2 for size in sizes)

    assert [layer for part in chosen for layer in range(part.start, part.end)] == list(range(len(layers)))
    assert all(len(part) for part in chosen)
    assert order(chosen) == min(map(order, every))


@given(LAYERS_AND_STAGES, st.integers(1, 10**9))
def test_equal_layers_without_a_head_are_split_evenly(given_sizes: tuple[int, int], size: int) -> None:
    layers, stages = given_sizes
    assert balanced_split([size] * layers, 0, stages) == even_split(layers, stages)


@pytest.mark.parametrize(
    ("stages", "lengths"), [(2, [19, 9]), (3, [12, 13, 3]), (4, [9, 9, 9, 1]), (8, [3, 4, 4, 4, 4, 4, 4, 1])]
)
def test_a_head_as_heavy_as_ten_of_28_layers_leaves_the_last_stage_fewer(
    stages: int, lengths: list[int]
) -> None:
    assert [len(part) for part in balanced_split([100] * 28, 989, stages)] == lengths


def test_more_stages_than_layers_cannot_be_balanced_either() -> None:
    with pytest.raises(PlanError, match=r"^4 stages were requested, but the model has 3 layers"):
        balanced_split([1, 1, 1], 1, 4)


def test_a_plan_s_digest_depends_on_cut_type_model_kv_bits_and_settings() -> None:
    halves = Cut.alike([LayerRange(0, 4), LayerRange(4, 8)])
    plans = [
        (halves, "float32", "m", 0),
        (Cut.alike([LayerRange(0, 3), LayerRange(3, 8)]), "float32", "m", 0),
        (Cut.alike(halves.ranges, (3.0, 1.0)), "float32", "m", 0),
        (Cut.alike(halves.ranges, (1.0, 1.0)), "float32", "m", 0),
        (halves, "bfloat16", "m", 0),
        (halves, "float32", "n", 0),
        (halves, "float32", "m", 8),
    ]
    with_settings = {plan_digest(*plans[0], shaping=shaping) for shaping in ("uniform", "custom")}
    assert len({plan_digest(*plan) for plan in plans} | with_settings) == len(plans) + 2


@pytest.mark.parametrize(
    "flags",
    [
        {"strategy": "uniform"},
        {"strategy": "custom", "proportions": "0.7,0.3"},
        {"optimize_for": "throughput"},
        {"replicas": 2},
        {"nodes": 3},
        {"max_model_len": 64},
        {"tp": 2},
        {"tp_shares": "3,1"},
    ],
)
def test_settings_that_change_the_cut_are_included(flags: dict[str, object]) -> None:
    assert shaping_settings(load_settings(flags)) != shaping_settings(load_settings({}))


def test_settings_that_do_not_change_the_cut_are_ignored() -> None:
    flags = {"max_num_seqs": 4, "port": 0, "prefix_cache": "off", "log_level": "debug"}
    assert shaping_settings(load_settings(flags)) == shaping_settings(load_settings({}))
    each, few = {"optimize_for": "throughput"}, {"optimize_for": "throughput", "max_num_seqs": 4}
    assert shaping_settings(load_settings(each)) != shaping_settings(load_settings(few))


def test_each_assignment_names_its_place_and_they_share_one_digest() -> None:
    assigned = make_assignments(
        Cut.alike(even_split(8, 3)), instance="i", epoch=4, dtype="auto", model_digest="m", max_model_len=100
    )
    assert [(part.stage, part.first_layer, part.end_layer) for part in assigned] == [
        (0, 0, 3),
        (1, 3, 6),
        (2, 6, 8),
    ]
    assert {(part.stages, part.epoch, part.tp_size) for part in assigned} == {(3, 4, 1)}
    assert len({part.plan_digest for part in assigned}) == 1
