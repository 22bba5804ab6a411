"""Times of steps: their summary, the deadlines from them, and the sizes of chunks."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st
from tests.engine.timings import timing

from mlx_ring.core.engine_stats import StepTiming
from mlx_ring.core.types import RankId
from mlx_ring.engine.step_times import SMALLEST_CHUNK, ChunkSizer, StepDeadlines, StepSize, StepWindow

ONE = StepSize(rows=1, tokens=1, context_tokens=0, is_decode=True)
CHUNK = StepSize(rows=1, tokens=512, context_tokens=0, is_decode=False)


def window(*timings: StepTiming) -> StepWindow:
    steps = StepWindow()
    for one in timings:
        steps.record(one)
    return steps


def test_decode_steps_are_reported_by_rows_with_their_median() -> None:
    ones = [timing(step, compute_us) for step, compute_us in enumerate((10, 12, 9000))]
    fours = [timing(step, 30, rows=4, tokens=4) for step in (7, 8)]
    (stage,) = window(*ones, *fours).read().stages
    assert [(row.rows, row.steps, row.compute_us) for row in stage.decode] == [(1, 3, 12), (4, 2, 30)]


def test_drafted_steps_bare_operations_and_chunks_of_several_prompts_are_left_out() -> None:
    steps = window(
        timing(1, 50, tokens=5),
        timing(2, 1, rows=0, tokens=0),
        timing(3, 90, rows=2, tokens=64, is_decode=False),
        timing(4, 90, rank=RankId(0, 1)),
    )
    assert steps.read().stages == ()


def test_chunks_are_reported_by_stage_and_tokens_with_their_context() -> None:
    steps = window(
        *(timing(step, 800, tokens=512, is_decode=False, context_tokens=512 * step) for step in range(3)),
        timing(3, 100, tokens=64, is_decode=False),
        timing(3, 70, tokens=64, is_decode=False, rank=RankId(1, 0)),
    )
    first, second = steps.read().stages
    assert [(row.tokens, row.steps, row.context_tokens) for row in first.chunks] == [
        (64, 1, 0),
        (512, 3, 512),
    ]
    assert [row.compute_us for row in second.chunks] == [70]


def test_time_per_token_is_measured_between_successive_steps_of_the_last_stage() -> None:
    last = RankId(1, 0)
    alone = [timing(step, 5, rank=last, sequence=1, finished_us=40 * step) for step in range(1, 5)]
    other = [timing(step, 5, rank=last, sequence=2, finished_us=1000 + 7 * step) for step in (5, 9)]
    stream = window(timing(1, 5, sequence=1), *alone, *other).read().stream
    assert stream is not None
    assert (stream.token_us, stream.tokens) == (40, 3), (
        "gaps between sequences or across steps of others do not count"
    )


def test_time_per_token_needs_a_sequence_that_ran_alone() -> None:
    assert window(timing(1, 5, sequence=1)).read().stream is None
    assert window(timing(1, 5, rows=2, tokens=2), timing(2, 5, rows=2, tokens=2)).read().stream is None
    assert window().read().stream is None


def test_without_a_minimum_no_step_has_a_deadline() -> None:
    assert StepDeadlines(0.0, lambda _stage, _size: 9.0).of(0, ONE) == 0.0


def test_the_first_step_of_a_kind_has_a_longer_deadline() -> None:
    deadlines = StepDeadlines(30.0)
    assert deadlines.of(0, ONE) == deadlines.of(0, CHUNK) == 120.0
    deadlines.record(timing(1, 10_000))
    assert deadlines.of(0, ONE) == 30.0
    assert deadlines.of(0, CHUNK) == 120.0, "no chunk was measured yet"
    assert deadlines.of(1, ONE) == 120.0, "the other stage has no measured step"


def test_a_long_prediction_extends_the_deadline() -> None:
    deadlines = StepDeadlines(30.0, lambda stage, size: 0.05 * size.tokens * (stage + 1))
    assert deadlines.of(0, ONE) == 120.0
    assert deadlines.of(1, CHUNK) == 20 * 51.2


def test_a_measured_time_above_the_prediction_extends_the_deadline() -> None:
    deadlines = StepDeadlines(30.0, lambda _stage, _size: 1.0)
    deadlines.record(timing(1, 4_000_000, tokens=100, is_decode=False))
    assert deadlines.of(0, CHUNK) == 20 * 512 * 0.04


def test_steps_with_only_operations_have_a_deadline_too() -> None:
    nothing = StepSize(rows=0, tokens=0, context_tokens=0, is_decode=False)
    deadlines = StepDeadlines(30.0, lambda _stage, _size: 99.0)
    assert deadlines.of(0, nothing) == 120.0
    deadlines.record(timing(1, 10_000))
    assert deadlines.of(0, nothing) == 30.0


@given(st.lists(st.integers(1, 60_000_000), min_size=1, max_size=50))
def test_a_step_ten_times_as_slow_as_the_last_one_is_never_late(times_us: list[int]) -> None:
    deadlines = StepDeadlines(30.0)
    for compute_us in times_us:
        deadlines.record(timing(1, compute_us))
    assert deadlines.of(0, ONE) > 10 * times_us[-1] / 1e6


def step_timing(stage: int, *, rows: int, tokens: int, compute_us: int) -> StepTiming:
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


def make_sizer(
    *, decode_us: int, token_us: int, stages: int = 1, ratio: float = 3.0, steps: int = 1
) -> ChunkSizer:
    """Return a sizer that has seen a chunk of 100 tokens and decode steps of four rows on each stage."""
    sizer = ChunkSizer(stages, chunk=512, max_itl_ratio=ratio)
    for stage in range(stages):
        sizer.record(step_timing(stage, rows=1, tokens=100, compute_us=100 * token_us), is_prefill=True)
    for _ in range(steps):
        for stage in reversed(range(stages)):
            sizer.record(step_timing(stage, rows=4, tokens=4, compute_us=decode_us), is_prefill=False)
    return sizer


def test_a_chunk_beside_decode_takes_the_time_that_the_itl_ratio_leaves() -> None:
    size = make_sizer(decode_us=10_000, token_us=100).chunk(5000, 5000, beside_decode=True)
    assert 150 <= size <= 200, "two decode steps' time is left, some of it as a margin"


def test_drafted_steps_leave_time_for_prompts_too() -> None:
    sizer = make_sizer(decode_us=10_000, token_us=100)
    sizer.sent(9, 200, beside_decode=True)
    sizer.record(step_timing(0, rows=4, tokens=20, compute_us=14_000), is_prefill=False)
    assert sizer.chunk(5000, 5000, beside_decode=True) >= 150


def test_a_sent_chunk_uses_up_the_time_until_decode_steps_earn_more() -> None:
    sizer = make_sizer(decode_us=10_000, token_us=100, steps=2)
    size = sizer.chunk(5000, 5000, beside_decode=True)
    sizer.sent(9, size, beside_decode=True)
    assert sizer.chunk(5000, 5000, beside_decode=True) == 0
    sizer.record(step_timing(0, rows=4, tokens=4, compute_us=10_000), is_prefill=False)
    assert sizer.chunk(5000, 5000, beside_decode=True) == size // 2


def test_undisturbed_decode_saves_at_most_eight_steps_and_one_full_chunk() -> None:
    sizer = make_sizer(decode_us=1_000, token_us=100, steps=100)
    assert sizer.chunk(5000, 5000, beside_decode=True) == 144, "eight steps, 18 tokens each"
    sizer.sent(9, 144, beside_decode=True)
    assert sizer.chunk(5000, 5000, beside_decode=True) == 0
    assert make_sizer(decode_us=10_000, token_us=100, steps=100).chunk(5000, 5000, beside_decode=True) == 512


def test_several_steps_save_up_for_a_chunk_larger_than_the_smallest() -> None:
    sizer = make_sizer(decode_us=10_000, token_us=5_000, ratio=1.5)
    sizes: list[int] = []
    for _ in range(16):
        sizes.append(sizer.chunk(5000, 5000, beside_decode=True))
        if sizes[-1]:
            sizer.sent(9, sizes[-1], beside_decode=True)
        sizer.record(step_timing(0, rows=4, tokens=4, compute_us=10_000), is_prefill=False)
    assert sizes.count(0) >= 12
    assert max(sizes) > SMALLEST_CHUNK


def test_a_chunk_slower_than_predicted_delays_the_next_one() -> None:
    sizer = make_sizer(decode_us=10_000, token_us=100, steps=4)
    size = sizer.chunk(5000, 5000, beside_decode=True)
    sizer.sent(1, size, beside_decode=True)
    sizer.record(step_timing(0, rows=1, tokens=size, compute_us=size * 100 + 30_000), is_prefill=True)
    for _ in range(2):
        assert sizer.chunk(5000, 5000, beside_decode=True) == 0
        sizer.record(step_timing(0, rows=4, tokens=4, compute_us=10_000), is_prefill=False)
    assert sizer.chunk(5000, 5000, beside_decode=True) > 0


def test_drafted_steps_alone_earn_time_for_chunks() -> None:
    sizer = make_sizer(decode_us=10_000, token_us=100, steps=0)
    sizer.record(step_timing(0, rows=4, tokens=20, compute_us=10_000), is_prefill=False)
    assert sizer.chunk(5000, 5000, beside_decode=True) >= 150


def test_unmeasured_chunks_beside_decode_have_the_smallest_size() -> None:
    assert ChunkSizer(1, chunk=512, max_itl_ratio=2.0).chunk(5000, 5000, beside_decode=True) == SMALLEST_CHUNK


def test_chunks_never_exceed_the_configured_size() -> None:
    assert make_sizer(decode_us=10_000, token_us=1).chunk(5000, 5000, beside_decode=True) == 512
    assert ChunkSizer(1, chunk=2, max_itl_ratio=2.0).chunk(5000, 5000, beside_decode=True) == 2


def chunks_alone(stages: int, prompt: int) -> list[int]:
    sizer = ChunkSizer(stages, chunk=512, max_itl_ratio=2.0)
    chunks: list[int] = []
    while (remaining := prompt - sum(chunks)) > 0:
        chunks.append(min(remaining, sizer.chunk(remaining, prompt, beside_decode=False)))
    return chunks


def test_a_prompt_alone_is_split_so_that_stages_overlap() -> None:
    assert chunks_alone(1, 4000) == [512] * 7 + [416]
    assert chunks_alone(2, 4000) == [334] * 10 + [330, 165, 165]
    assert chunks_alone(2, 40) == [40]
    assert max(chunks_alone(3, 100_000)) == 512


def test_the_verifying_cost_is_the_measured_one() -> None:
    sizer = make_sizer(decode_us=10_000, token_us=100, stages=2)
    sizer.record(step_timing(1, rows=4, tokens=14, compute_us=15_000), is_prefill=False)
    assert sizer.verifying_cost(0) == 1.0
    assert sizer.verifying_cost(4) == 1.2


def test_one_draft_token_is_tried_once_plain_steps_are_measured() -> None:
    assert ChunkSizer(1, chunk=512, max_itl_ratio=2.0).verifying_cost(1) == math.inf
    sizer = make_sizer(decode_us=10_000, token_us=100, stages=2)
    assert sizer.verifying_cost(1) == 1.0
    assert sizer.verifying_cost(2) == math.inf
