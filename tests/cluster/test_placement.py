"""The even split, by property."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_ring.cluster.placement import even_split, make_assignments, plan_digest
from mlx_ring.core.errors import PlanError
from mlx_ring.core.types import LayerRange

layers_and_stages = st.integers(1, 200).flatmap(
    lambda layers: st.tuples(st.just(layers), st.integers(1, layers))
)


@given(layers_and_stages)
def test_the_stages_cover_every_layer_once_and_in_order(given_sizes: tuple[int, int]) -> None:
    layers, stages = given_sizes
    ranges = even_split(layers, stages)
    assert len(ranges) == stages
    assert [layer for part in ranges for layer in range(part.start, part.end)] == list(range(layers))


@given(layers_and_stages)
def test_lengths_differ_by_one_at_most_and_the_ends_are_never_the_longer_ones(
    given_sizes: tuple[int, int],
) -> None:
    lengths = [len(part) for part in even_split(*given_sizes)]
    assert max(lengths) - min(lengths) <= 1
    assert lengths[-1] == min(lengths)


@pytest.mark.parametrize(
    ("layers", "stages", "lengths"),
    [(28, 2, [14, 14]), (5, 2, [3, 2]), (10, 4, [2, 3, 3, 2]), (7, 3, [2, 3, 2])],
)
def test_what_is_left_over_goes_to_the_middle(layers: int, stages: int, lengths: list[int]) -> None:
    assert [len(part) for part in even_split(layers, stages)] == lengths


@pytest.mark.parametrize("stages", [0, 9])
def test_more_stages_than_layers_are_refused_with_both_numbers(stages: int) -> None:
    with pytest.raises(PlanError, match=rf"^{stages} stages were asked for and the model has 8 layers"):
        even_split(8, stages)


def test_a_plan_s_digest_changes_with_cut_type_and_model() -> None:
    plans = [
        ([LayerRange(0, 4), LayerRange(4, 8)], "float32", "m"),
        ([LayerRange(0, 3), LayerRange(3, 8)], "float32", "m"),
        ([LayerRange(0, 4), LayerRange(4, 8)], "bfloat16", "m"),
        ([LayerRange(0, 4), LayerRange(4, 8)], "float32", "n"),
    ]
    assert len({plan_digest(*plan) for plan in plans}) == len(plans)


def test_each_assignment_names_its_place_and_they_share_one_digest() -> None:
    assigned = make_assignments(
        even_split(8, 3), instance="i", epoch=4, dtype="auto", model_digest="m", max_model_len=100
    )
    assert [(part.stage, part.first_layer, part.end_layer) for part in assigned] == [
        (0, 0, 3),
        (1, 3, 6),
        (2, 6, 8),
    ]
    assert {(part.stages, part.epoch, part.tp_size) for part in assigned} == {(3, 4, 1)}
    assert len({part.plan_digest for part in assigned}) == 1
