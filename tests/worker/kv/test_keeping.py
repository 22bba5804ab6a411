"""Sequences of which a store keeps a part: the first tokens, under another id, as if no other had followed."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import pytest
from tests.worker.kv.passes import ModelRun, difference
from tests.worker.kv.small_models import RECURRENT, SLIDING, VOCABULARY, small_model

from mlx_ring.rpc.protos import worker_pb2

pytestmark = pytest.mark.usefixtures("writing")

KEPT_AS = 1 << 49


def tokens(seed: int, count: int) -> list[int]:
    return [(seed * 37 + place * 11) % VOCABULARY for place in range(count)]


def kept(sequence: int, length: int) -> worker_pb2.KeptSequence:
    return worker_pb2.KeptSequence(sequence=sequence, kept_as=KEPT_AS + sequence, length=length)


def run_with(family: str, *lengths: int, **options: object) -> ModelRun:
    """Return a run whose sequences 1, 2 and so on have these lengths."""
    run = ModelRun(small_model(family), **options)
    run.open(*range(1, 1 + len(lengths)))
    run.step({number: tokens(number, length) for number, length in enumerate(lengths, start=1)})
    return run


def continued(run: ModelRun, sequence: int, more: Sequence[int]) -> mx.array:
    """Return the logits of a sequence of the next epoch that takes the kept one over."""
    run.store.open(1, 4096)
    run.store.fork(KEPT_AS + sequence, 1, run.store.length(KEPT_AS + sequence), take=True)
    return run.step({1: more})[1]


@pytest.mark.parametrize("moves", [False, True])
@pytest.mark.parametrize(
    ("family", "kv_bits"), [("qwen3", None), ("qwen3", 8), *((name, None) for name in SLIDING)]
)
def test_a_kept_part_continues_as_if_no_other_tokens_had_followed(
    family: str, kv_bits: int | None, *, moves: bool
) -> None:
    run = run_with(family, 40, 60, 50, kv_bits=kv_bits)
    left = run.store.keep([kept(3, 44), kept(1, 38)], moves=moves)
    assert left == {KEPT_AS + 3, KEPT_AS + 1}
    assert run.store.length(KEPT_AS + 3) == 44
    undisturbed = run_with(family, 1, 1, 44, kv_bits=kv_bits)
    expected = undisturbed.step({3: [5, 6, 7]})[3]
    assert difference(continued(run, 3, [5, 6, 7]), expected) < 1e-5
    run.store.free(1)
    run.store.free(KEPT_AS + 1)
    assert run.store.nbytes == 0


def test_what_cannot_be_cut_is_freed() -> None:
    for family in RECURRENT:
        run = run_with(family, 40)
        assert run.store.keep([kept(1, 30)], moves=False) == frozenset()
        assert run.store.nbytes == 0
    for family in SLIDING:
        run = run_with(family, 400)
        assert run.store.keep([kept(1, 300)], moves=False) == frozenset()
        assert run.store.nbytes == 0


def test_unknown_sequences_and_lengths_are_not_kept() -> None:
    run = run_with("qwen3", 20)
    assert run.store.keep([kept(7, 10), kept(1, 21)], moves=False) == frozenset()


def test_ranks_that_ended_in_different_steps_group_what_they_keep_alike() -> None:
    ahead, behind = run_with("qwen3", 20, 30, 40), run_with("qwen3", 20, 30, 40)
    ahead.store.free(1)
    orders: list[list[tuple[int, ...]]] = []
    for run in (ahead, behind):
        run.store.keep([kept(2, 28), kept(3, 38)], moves=True)
        batches = run.store.batches([(KEPT_AS + 3, 1), (KEPT_AS + 2, 1)])
        orders.append([batch.rows for batch in batches])
    assert orders[0] == orders[1]
