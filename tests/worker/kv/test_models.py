"""mlx-lm's unmodified models over the store, compared with the same models over mlx-lm's own caches."""

from __future__ import annotations

import gc
from typing import Any, cast

import mlx.core as mx
import pytest
from mlx_lm.models.cache import QuantizedKVCache
from tests.worker.kv.passes import ModelRun, difference
from tests.worker.kv.small_models import CONFIGURATIONS, RAGGED, RECURRENT, SLIDING, small_model, tokens

from mlx_ring.core.errors import ModelUnsupported, StepFailed
from mlx_ring.worker.kv import KVStore

QUANTIZATION_LEVEL = 2e-3
ROUNDING = 2e-5
"""Largest difference of logits, which are of the order of ten, between sums in another order."""
CHUNKS = [tokens(30), tokens(100, 1), tokens(7, 2), *([place] for place in range(24)), tokens(36, 3)]


def tolerance(family: str) -> float:
    """Return the tolerance: mlx-lm's rotating cache decodes in rotated order, the store in temporal order."""
    return ROUNDING if family in SLIDING else 0.0


QUICK = {"deepseek_v32", "qwen3", "qwen3_next"}
"""Families that also the quick tests try: compressed, plain and recurrent KV."""


@pytest.fixture(
    params=[
        pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in sorted(CONFIGURATIONS)
    ]
)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_logits_depend_on_earlier_tokens(family: str) -> None:
    run = ModelRun(small_model(family))
    assert difference(run.alone([[1, 2, 3], [4]]), run.alone([[1, 5, 3], [4]])) > 1e-3


def test_single_row_gives_the_logits_of_mlx_lms_own_caches(family: str) -> None:
    run = ModelRun(small_model(family))
    run.open(1)
    caches = run.own_caches()
    for chunk in CHUNKS:
        assert difference(run.step({1: chunk})[1], run.alone([chunk], caches)) <= tolerance(family)


@pytest.mark.parametrize("family", SLIDING)
def test_sliding_row_prefills_bit_for_bit(family: str) -> None:
    run = ModelRun(small_model(family))
    run.open(1)
    caches = run.own_caches()
    for chunk in CHUNKS[:3]:
        assert difference(run.step({1: chunk})[1], run.alone([chunk], caches)) == 0.0


@pytest.mark.slow
def test_rows_of_all_lengths_step_together_as_each_does_alone(family: str) -> None:
    run = ModelRun(small_model(family))
    run.open(*range(5))
    caches = {row: run.own_caches() for row in range(5)}
    prefill = {row: tokens(3 + 11 * row, row) for row in range(5)}
    decode = [{row: [row + place] for row in range(5) if (place + row) % 4} for place in range(12)]
    drafts = [{row: tokens(1 + row, place) for row in range(5)} for place in range(6)]
    for work in [prefill, *decode, *drafts]:
        logits = run.step(work)
        for row, chunk in work.items():
            assert difference(logits[row], run.alone([chunk], caches[row])) <= ROUNDING


@pytest.mark.slow
def test_rows_join_and_leave_between_steps(family: str) -> None:
    run = ModelRun(small_model(family))
    caches: dict[int, Any] = {}
    for place in range(16):
        if place < 12:
            run.open(place)
            caches[place] = run.own_caches()
            prompt = tokens(2 + 9 * (place % 5), place)
            assert (
                difference(run.step({place: prompt})[place], run.alone([prompt], caches[place])) <= ROUNDING
            )
        if place >= 4:
            leaver = sorted(caches)[place % len(caches)]
            run.store.free(leaver)
            del caches[leaver]
        logits = run.step({row: [place] for row in caches})
        for row, own in caches.items():
            assert difference(logits[row], run.alone([[place]], own)) <= ROUNDING


@pytest.mark.parametrize("family", sorted(set(CONFIGURATIONS) - set(RECURRENT)))
def test_trimmed_row_continues_as_if_the_rest_had_never_been(family: str) -> None:
    run = ModelRun(small_model(family))
    run.open(1, 2)
    run.step({1: tokens(90), 2: tokens(40, 5)})
    for place in range(10):
        run.step({1: [place], 2: [place]})
    run.store.trim(1, 70)
    logits = run.step({1: tokens(5, 9), 2: [10]})
    assert difference(logits[1], run.alone([tokens(90)[:70], tokens(5, 9)])) <= ROUNDING
    assert difference(logits[2], run.alone([tokens(40, 5), *([place] for place in range(11))])) <= ROUNDING


def test_fork_and_its_source_continue_independently(family: str) -> None:
    run = ModelRun(small_model(family))
    length = 50 if family in RECURRENT else 35
    run.open(1, 2)
    run.step({1: tokens(50)})
    run.store.fork(1, 2, length)
    source, branch = [tokens(50)], [tokens(50)[:length]]
    for place in range(4):
        source, branch = [*source, [place]], [*branch, [place + 50]]
        logits = run.step({1: source[-1], 2: branch[-1]})
        assert difference(logits[1], run.alone(source)) <= ROUNDING
        assert difference(logits[2], run.alone(branch)) <= ROUNDING


def test_failed_step_leaves_no_trace(family: str) -> None:
    run = ModelRun(small_model(family))
    run.open(1, 2)
    run.step({1: tokens(40), 2: tokens(25, 1)})
    for batch in run.store.batches([(1, 80), (2, 3)]):
        run.model(mx.zeros((len(batch.rows), max(batch.counts)), mx.int32), cache=batch.caches)
    assert (run.store.length(1), run.store.length(2)) == (40, 25)
    logits = run.step({1: [3], 2: [4]})
    assert difference(logits[1], run.alone([tokens(40), [3]])) <= ROUNDING
    assert difference(logits[2], run.alone([tokens(25, 1), [4]])) <= ROUNDING


@pytest.mark.parametrize("family", RAGGED)
def test_rows_of_different_lengths_take_one_pass(family: str) -> None:
    run = ModelRun(small_model(family))
    run.open(1, 2, 3)
    run.step({row: tokens(20 * row) for row in (1, 2, 3)})
    (batch,) = run.store.batches([(1, 1), (2, 1), (3, 1)])
    assert isinstance(batch.offset, mx.array)
    assert sorted(batch.offset.tolist()) == [20, 40, 60]  # pyright: ignore[reportArgumentType] - one axis


@pytest.mark.parametrize("family", RECURRENT)
def test_recurrent_rows_decode_in_one_pass_while_rows_join_and_leave(family: str) -> None:
    run = ModelRun(small_model(family))
    run.open(1, 2, 3, 4)
    fed = {row: [tokens(7 * row, row)] for row in (1, 2, 3, 4)}
    run.step({row: chunks[0] for row, chunks in fed.items()})
    passes: list[int] = []
    for place, present in enumerate(
        [(1, 2, 3), (1, 2, 3), (3, 1), (1, 2, 3, 4), (4, 3, 2, 1), (2,), (2, 4), (2, 4)]
    ):
        work = {row: [10 * place + row] for row in present}
        logits = run.step(work)
        for row in present:
            fed[row].append(work[row])
            assert difference(logits[row], run.alone(fed[row])) <= ROUNDING
        batches = run.store.batches([(row, 1) for row in present])
        passes.append(len(batches))
        run.store.undo(batches)
    assert passes == [1] * len(passes)


@pytest.mark.parametrize("family", RECURRENT)
def test_retained_recurrent_row_holds_no_states_of_other_rows(family: str) -> None:
    model = small_model(family)
    mx.eval(model.parameters())
    gc.collect()
    before = mx.get_active_memory()
    run = ModelRun(model)
    run.open(*range(1, 10))
    for row in range(1, 9):
        run.step({row: tokens(20, row)})
    for token in (5, 9):
        run.step({row: [token] for row in range(1, 9)})
    for row in range(2, 9):
        run.store.free(row)
    run.store.retain(1)
    gc.collect()
    assert mx.get_active_memory() - before < 2 * run.store.nbytes
    run.store.fork(1, 9, 22, take=True)
    assert difference(run.step({9: [3]})[9], run.alone([tokens(20, 1), [5], [9], [3]])) <= ROUNDING


@pytest.mark.parametrize("family", RECURRENT)
def test_recurrent_row_cannot_be_trimmed_or_forked_at_an_earlier_token(family: str) -> None:
    run = ModelRun(small_model(family))
    run.open(1, 2)
    run.step({1: tokens(20)})
    with pytest.raises(StepFailed, match=r"cannot be cut from 20 to 15 tokens"):
        run.store.trim(1, 15)
    with pytest.raises(StepFailed, match=r"stands at 20 tokens"):
        run.store.fork(1, 2, 15)
    assert difference(run.step({1: [5]})[1], run.alone([tokens(20), [5]])) == 0.0


@pytest.mark.parametrize("family", RECURRENT)
def test_recurrent_row_can_be_trimmed_to_zero_tokens_and_restarted(family: str) -> None:
    run = ModelRun(small_model(family))
    run.open(1)
    run.step({1: tokens(20)})
    run.store.trim(1, 0)
    assert run.store.nbytes == 0
    assert difference(run.step({1: tokens(9)})[1], run.alone([tokens(9)])) == 0.0


@pytest.mark.parametrize("bits", [8, 4])
def test_quantized_rows_equal_mlx_lms_quantized_cache(bits: int) -> None:
    model = small_model("qwen3")
    run = ModelRun(model, kv_bits=bits)
    run.open(1, 2)
    caches = {row: [quantized(bits) for _ in run.own_caches()] for row in (1, 2)}
    works = [{1: tokens(40)}, {2: tokens(13, 1)}, *({1: [place], 2: [place]} for place in range(9))]
    for work in works:
        logits = run.step(work)
        for row, chunk in work.items():
            # Batches round differently, which may move a key to the next quantization level.
            bound = 0.0 if len(work) == 1 else QUANTIZATION_LEVEL
            assert difference(logits[row], run.alone([chunk], caches[row])) <= bound


def quantized(bits: int) -> Any:
    return cast("Any", QuantizedKVCache)(group_size=32, bits=bits)


def test_quantized_rows_take_bytes_in_proportion_to_their_bits() -> None:
    sizes: list[int] = []
    for bits in (None, 8, 4):
        run = ModelRun(small_model("qwen3"), kv_bits=bits)
        run.open(1)
        run.step({1: tokens(10)})
        sizes.append(run.store.nbytes)
    whole, eight, four = sizes
    assert eight == whole * (8 + 2) // 32
    assert four == whole * (4 + 2) // 32


def test_keys_that_cannot_be_divided_into_groups_are_refused() -> None:
    store = KVStore(ModelRun(small_model("qwen3")).own_caches(), mx.float32, kv_bits=4)
    store.open(1, 10)
    (batch,) = store.batches([(1, 1)])
    with pytest.raises(ModelUnsupported, match=r"width \(20, 20\)"):
        batch.caches[0].update_and_fetch(mx.zeros((1, 2, 1, 20)), mx.zeros((1, 2, 1, 20)))
