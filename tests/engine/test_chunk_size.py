"""Sizes of chunks from measured times."""

from __future__ import annotations

import math

from mlx_ring.core.engine_stats import StepTiming
from mlx_ring.core.types import RankId
from mlx_ring.engine.step_times import SMALLEST_CHUNK, ChunkSizer


def timing(stage: int, *, rows: int, tokens: int, compute_us: int) -> StepTiming:
    return StepTiming(
        step=1,
        rank=RankId(stage, 0),
        rows=rows,
        tokens=tokens,
        is_decode=rows > 1,
        started_us=0,
        finished_us=compute_us,
        queue_us=0,
        link_wait_us=0,
        compute_us=compute_us,
        link_send_us=0,
    )


def pacing(
    *, decode_us: int, token_us: int, stages: int = 1, ratio: float = 3.0, steps: int = 1
) -> ChunkSizer:
    """After one chunk of 100 tokens and some decode steps of four rows on each stage."""
    sizer = ChunkSizer(stages, chunk=512, max_itl_ratio=ratio)
    for stage in range(stages):
        sizer.record(timing(stage, rows=1, tokens=100, compute_us=100 * token_us), is_prefill=True)
    for _ in range(steps):
        for stage in reversed(range(stages)):
            sizer.record(timing(stage, rows=4, tokens=4, compute_us=decode_us), is_prefill=False)
    return sizer


def test_a_chunk_beside_decode_takes_what_the_ratio_leaves() -> None:
    size = pacing(decode_us=10_000, token_us=100).chunk(5000, 5000, beside_decode=True)
    assert 150 <= size <= 200, "two decode steps' time is left, some of it as a margin"


def test_steps_with_drafts_leave_time_to_prompts_too() -> None:
    sizer = pacing(decode_us=10_000, token_us=100)
    sizer.sent(9, 200, beside_decode=True)
    sizer.record(timing(0, rows=4, tokens=20, compute_us=14_000), is_prefill=False)
    assert sizer.chunk(5000, 5000, beside_decode=True) >= 150


def test_what_is_spent_must_be_earned_again() -> None:
    sizer = pacing(decode_us=10_000, token_us=100, steps=2)
    size = sizer.chunk(5000, 5000, beside_decode=True)
    sizer.sent(9, size, beside_decode=True)
    assert sizer.chunk(5000, 5000, beside_decode=True) == 0
    sizer.record(timing(0, rows=4, tokens=4, compute_us=10_000), is_prefill=False)
    assert sizer.chunk(5000, 5000, beside_decode=True) == size // 2


def test_streams_that_were_left_in_peace_owe_eight_steps_and_a_full_chunk_at_most() -> None:
    sizer = pacing(decode_us=1_000, token_us=100, steps=100)
    assert sizer.chunk(5000, 5000, beside_decode=True) == 144, "eight steps, 18 tokens each"
    sizer.sent(9, 144, beside_decode=True)
    assert sizer.chunk(5000, 5000, beside_decode=True) == 0
    assert pacing(decode_us=10_000, token_us=100, steps=100).chunk(5000, 5000, beside_decode=True) == 512


def test_where_one_step_does_not_pay_for_the_smallest_chunk_several_pay_for_a_larger_one() -> None:
    sizer = pacing(decode_us=10_000, token_us=5_000, ratio=1.5)
    sizes: list[int] = []
    for _ in range(16):
        sizes.append(sizer.chunk(5000, 5000, beside_decode=True))
        if sizes[-1]:
            sizer.sent(9, sizes[-1], beside_decode=True)
        sizer.record(timing(0, rows=4, tokens=4, compute_us=10_000), is_prefill=False)
    assert sizes.count(0) >= 12
    assert max(sizes) > SMALLEST_CHUNK


def test_a_chunk_that_took_longer_than_it_was_thought_to_is_paid_for_later() -> None:
    sizer = pacing(decode_us=10_000, token_us=100, steps=4)
    size = sizer.chunk(5000, 5000, beside_decode=True)
    sizer.sent(1, size, beside_decode=True)
    sizer.record(timing(0, rows=1, tokens=size, compute_us=size * 100 + 30_000), is_prefill=True)
    for _ in range(2):
        assert sizer.chunk(5000, 5000, beside_decode=True) == 0
        sizer.record(timing(0, rows=4, tokens=4, compute_us=10_000), is_prefill=False)
    assert sizer.chunk(5000, 5000, beside_decode=True) > 0


def test_time_is_earned_where_every_step_has_drafts() -> None:
    sizer = pacing(decode_us=10_000, token_us=100, steps=0)
    sizer.record(timing(0, rows=4, tokens=20, compute_us=10_000), is_prefill=False)
    assert sizer.chunk(5000, 5000, beside_decode=True) >= 150


def test_before_anything_is_measured_chunks_are_small_beside_decode() -> None:
    assert ChunkSizer(1, chunk=512, max_itl_ratio=2.0).chunk(5000, 5000, beside_decode=True) == SMALLEST_CHUNK


def test_chunks_stay_within_their_bounds() -> None:
    assert pacing(decode_us=10_000, token_us=1).chunk(5000, 5000, beside_decode=True) == 512
    assert ChunkSizer(1, chunk=2, max_itl_ratio=2.0).chunk(5000, 5000, beside_decode=True) == 2


def chunks_alone(stages: int, prompt: int) -> list[int]:
    sizer = ChunkSizer(stages, chunk=512, max_itl_ratio=2.0)
    chunks: list[int] = []
    while (remaining := prompt - sum(chunks)) > 0:
        chunks.append(min(remaining, sizer.chunk(remaining, prompt, beside_decode=False)))
    return chunks


def test_a_prompt_alone_is_cut_so_that_stages_overlap() -> None:
    assert chunks_alone(1, 4000) == [512] * 7 + [416]
    assert chunks_alone(2, 4000) == [334] * 10 + [330, 165, 165]
    assert chunks_alone(2, 40) == [40]
    assert max(chunks_alone(3, 100_000)) == 512


def test_verifying_costs_what_it_was_measured_to_cost() -> None:
    sizer = pacing(decode_us=10_000, token_us=100, stages=2)
    sizer.record(timing(1, rows=4, tokens=14, compute_us=15_000), is_prefill=False)
    assert sizer.verifying_cost(0) == 1.0
    assert sizer.verifying_cost(4) == 1.2


def test_before_it_was_measured_one_draft_token_is_tried_beside_steps_that_were() -> None:
    assert ChunkSizer(1, chunk=512, max_itl_ratio=2.0).verifying_cost(1) == math.inf
    sizer = pacing(decode_us=10_000, token_us=100, stages=2)
    assert sizer.verifying_cost(1) == 1.0
    assert sizer.verifying_cost(2) == math.inf
