"""Cache slots of a stage: its own caches, and stand-ins for those of other stages."""

from __future__ import annotations

from typing import Any, cast

import mlx.core as mx
import pytest
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    KVCache,
    RotatingKVCache,
)

from mlx_ring.core.errors import ModelUnsupported
from mlx_ring.core.types import LayerRange
from mlx_ring.worker.cache_slots import LayerCalls, find_cache_slots

WINDOW = 8


def make_alternating_caches() -> list[Any]:
    """Make the caches of four layers: sliding, full, sliding, full."""
    make = (lambda: RotatingKVCache(max_size=WINDOW), KVCache)
    return [make[slot % 2]() for slot in range(4)]


def layer_calls(*slots: set[int]) -> LayerCalls:
    return LayerCalls([*slots], [0] * len(slots))


ONE_EACH = layer_calls({0}, {1}, {2}, {3})


def test_stage_owns_the_caches_of_its_layers() -> None:
    owned = find_cache_slots(ONE_EACH, LayerRange(1, 3), make_alternating_caches).make_owned()
    assert [type(cache) for cache in owned] == [KVCache, RotatingKVCache]


def test_slot_of_another_stage_is_filled_with_an_owned_cache_of_its_kind() -> None:
    slots = find_cache_slots(ONE_EACH, LayerRange(1, 3), make_alternating_caches)
    full, sliding = slots.make_owned()
    completed = slots.complete([full, sliding], 0)
    assert [cache is full for cache in completed] == [False, True, False, True]
    assert [cache is sliding for cache in completed] == [True, False, True, False]


def test_windows_of_different_sizes_are_different_kinds() -> None:
    def make() -> list[Any]:
        return [RotatingKVCache(max_size=WINDOW), RotatingKVCache(max_size=2 * WINDOW)]

    slots = find_cache_slots(layer_calls({0}, {1}), LayerRange(0, 1), make)
    (owned,) = slots.make_owned()
    assert slots.complete([owned], 0)[1] is not owned


@pytest.mark.parametrize("offset", [7, mx.array([7, 3])], ids=["one offset", "one per row"])
def test_phantom_has_the_position_if_no_cache_of_its_kind_is_owned(offset: int | mx.array) -> None:
    slots = find_cache_slots(ONE_EACH, LayerRange(1, 2), make_alternating_caches)
    phantom = slots.complete(slots.make_owned(), offset)[0]
    assert phantom.offset is offset
    assert phantom.max_size == WINDOW
    assert phantom.make_mask(1) is None
    assert phantom.make_mask(3, return_array=True, window_size=None).shape == (3, 3)


def test_each_part_of_a_cache_list_gets_a_phantom() -> None:
    def make() -> list[Any]:
        return [CacheList(ArraysCache(1), KVCache()), KVCache()]

    slots = find_cache_slots(layer_calls({0}, {1}), LayerRange(1, 2), make)
    nested = slots.complete(slots.make_owned(), 5)[0]
    assert isinstance(nested, CacheList)
    assert cast("Any", nested)[1].offset == 5


def test_writes_to_a_phantom_are_dropped() -> None:
    slots = find_cache_slots(layer_calls({0}, {1}), LayerRange(1, 2), lambda: [ArraysCache(1), KVCache()])
    phantom = slots.complete(slots.make_owned(), 0)[0]
    phantom[0] = mx.zeros((1,))
    assert phantom[0] is None


def test_cache_that_no_layer_gets_belongs_to_the_first_stage_only() -> None:
    def make() -> list[Any]:
        return [ArraysCache(1), ArraysCache(1), ArraysCache(1)]

    seen = layer_calls({1}, {2})
    assert len(find_cache_slots(seen, LayerRange(0, 1), make).make_owned()) == 2
    later = find_cache_slots(seen, LayerRange(1, 2), make)
    (owned,) = later.make_owned()
    completed = later.complete([owned], 0)
    assert completed[0] is not owned
    assert completed[1] is owned


def test_layers_that_share_a_cache_cannot_be_separated() -> None:
    shared = layer_calls({0}, {1}, {0, 1})
    with pytest.raises(ModelUnsupported, match=r"Layers \[0, 2\] share one cache"):
        find_cache_slots(shared, LayerRange(0, 2), lambda: [KVCache(), KVCache()])
    assert len(find_cache_slots(shared, LayerRange(0, 3), lambda: [KVCache(), KVCache()]).make_owned()) == 2
