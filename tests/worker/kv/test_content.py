"""Content by layer, heads and tokens: read, written to another sequence, and continued there."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import ArraysCache, KVCache, RotatingKVCache
from tests.worker.kv.passes import HEADS, ModelRun, difference, feed
from tests.worker.kv.small_models import small_model, tokens

from mlx_ring.core.errors import StepFailed
from mlx_ring.worker.kv import KVStore

pytestmark = pytest.mark.usefixtures("writing")

WHOLE = (0, HEADS)


def filled(*caches: Any, count: int = 30, **options: Any) -> KVStore:
    store = KVStore(list(caches) or [KVCache()], mx.float32, **options)
    store.open(1, 500)
    (batch,) = store.batches([(1, count)])
    mx.eval(feed(batch, [list(range(count))]), *batch.arrays)
    store.commit(batch)
    return store


def test_range_of_tokens_and_heads_is_read_in_temporal_order() -> None:
    keys, values = filled().read(1, 0, (1, 2), (5, 8))
    assert keys.shape == (1, 3, 4)
    assert keys[0, :, 0].tolist() == [5.0, 6.0, 7.0]
    assert mx.array_equal(keys, -values)


def test_content_that_was_read_does_not_change_with_the_store() -> None:
    store = filled()
    keys, _ = store.read(1, 0, WHOLE, (0, 30))
    store.trim(1, 0)
    (batch,) = store.batches([(1, 30)])
    mx.eval(feed(batch, [[99] * 30]))
    assert keys[0, :, 0].tolist() == list(range(30))


def test_tokens_dropped_by_a_sliding_layer_cannot_be_read() -> None:
    store = filled(RotatingKVCache(4), count=300, slack=8)
    with pytest.raises(StepFailed, match=r"holds tokens \[289, 300\) in that layer, not \[0, 300\)"):
        store.read(1, 0, WHOLE, (0, 300))
    keys, _ = store.read(1, 0, WHOLE, (296, 300))
    assert keys[0, :, 0].tolist() == [296.0, 297.0, 298.0, 299.0]


def test_unknown_heads_are_refused() -> None:
    with pytest.raises(StepFailed, match=r"has KV heads \[0, 2\), not \[1, 3\)"):
        filled().read(1, 0, (1, 3), (0, 1))


def test_ranges_of_recurrent_state_cannot_be_read() -> None:
    store = KVStore([ArraysCache(2)], mx.float32)
    store.open(1, 10)
    with pytest.raises(StepFailed, match="moves only as a whole"):
        store.read(1, 0, WHOLE, (0, 1))


@pytest.mark.parametrize(
    ("family", "bits"), [("qwen3", None), ("qwen3", 8), ("gemma3_text", None), ("deepseek_v3", None)]
)
def test_sequence_written_from_another_continues_with_the_same_logits(family: str, bits: int | None) -> None:
    source, target = (ModelRun(small_model(family), kv_bits=bits) for _ in range(2))
    source.open(1)
    target.open(7)
    source.step({1: tokens(120)})
    for layer, cache in enumerate(source.own_caches()):
        begin = 120 - cache.max_size + 1 if hasattr(cache, "max_size") else 0
        heads = 1 if family == "deepseek_v3" else 2
        middle = (begin + 120) // 2
        for part in ((begin, middle), (middle, 120)):
            target.store.write(7, layer, (0, heads), part, source.store.read(1, layer, (0, heads), part))
    target.store.adopt(7, 120)
    for place in range(3):
        assert difference(source.step({1: [place]})[1], target.step({7: [place]})[7]) == 0.0


def test_heads_can_be_written_one_by_one_in_a_layer_of_known_shape() -> None:
    store = filled()
    store.open(2, 100)
    for head in (1, 0):
        store.write(2, 0, (head, head + 1), (0, 30), store.read(1, 0, (head, head + 1), (0, 30)))
    store.adopt(2, 30)
    for one, other in zip(store.read(1, 0, WHOLE, (0, 30)), store.read(2, 0, WHOLE, (0, 30)), strict=True):
        assert mx.array_equal(one, other)


def test_written_content_does_not_count_before_it_is_adopted() -> None:
    store = filled()
    store.open(2, 100)
    store.write(2, 0, WHOLE, (0, 30), store.read(1, 0, WHOLE, (0, 30)))
    assert store.length(2) == 0


def test_sequence_is_adopted_only_with_every_head_of_every_layer() -> None:
    store = filled(KVCache(), KVCache())
    store.open(2, 100)
    store.write(2, 0, WHOLE, (0, 30), store.read(1, 0, WHOLE, (0, 30)))
    store.write(2, 1, (0, 1), (0, 30), store.read(1, 1, (0, 1), (0, 30)))
    with pytest.raises(
        StepFailed, match="cannot be taken over at 30 tokens: cache 1 was written up to 0 only"
    ):
        store.adopt(2, 30)


def test_content_that_leaves_a_gap_is_refused() -> None:
    store = filled()
    store.open(2, 100)
    with pytest.raises(StepFailed, match=r"\[5, 30\) leaves a gap after 0"):
        store.write(2, 0, WHOLE, (5, 30), store.read(1, 0, WHOLE, (5, 30)))


@pytest.mark.parametrize(
    ("shape", "dtype", "message"),
    [
        ((2, 3, 4), mx.float16, "The content is"),
        ((2, 3, 5), mx.float32, "of width 5; the layer keeps"),
        ((2, 2, 4), mx.float32, "takes 2 arrays of"),
        ((1, 3, 4), mx.float32, "takes 2 arrays of"),
    ],
)
def test_content_that_does_not_fit_the_layer_is_refused(
    shape: tuple[int, ...], dtype: mx.Dtype, message: str
) -> None:
    store = filled()
    store.open(2, 100)
    array = mx.zeros(shape, dtype)
    with pytest.raises(StepFailed, match=message):
        store.write(2, 0, WHOLE, (0, 3), (array, array))


def test_content_must_follow_the_tokens_and_fit_the_maximum_length() -> None:
    store = filled()
    arrays = store.read(1, 0, WHOLE, (0, 10))
    for begin in (25, 495):
        with pytest.raises(StepFailed, match="has 30 tokens of 500"):
            store.write(1, 0, WHOLE, (begin, begin + 10), arrays)
