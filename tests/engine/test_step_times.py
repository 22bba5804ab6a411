"""What steps took, by those that can be compared."""

from __future__ import annotations

from tests.engine.timings import timing

from mlx_ring.core.engine_stats import StepTiming
from mlx_ring.core.types import RankId
from mlx_ring.engine.step_times import StepWindow


def window(*timings: StepTiming) -> StepWindow:
    kept = StepWindow()
    for one in timings:
        kept.record(one)
    return kept


def test_decode_steps_are_told_by_rows_and_the_median_forgets_the_slow_one() -> None:
    ones = [timing(step, compute_us) for step, compute_us in enumerate((10, 12, 9000))]
    fours = [timing(step, 30, rows=4, tokens=4) for step in (7, 8)]
    (stage,) = window(*ones, *fours).read().stages
    assert [(told.rows, told.steps, told.compute_us) for told in stage.decode] == [(1, 3, 12), (4, 2, 30)]


def test_steps_with_drafts_operations_alone_and_chunks_of_several_prompts_are_not_compared() -> None:
    kept = window(
        timing(1, 50, tokens=5),
        timing(2, 1, rows=0, tokens=0),
        timing(3, 90, rows=2, tokens=64, is_decode=False),
        timing(4, 90, rank=RankId(0, 1)),
    )
    assert kept.read().stages == ()


def test_chunks_are_told_by_tokens_and_context_of_each_stage() -> None:
    kept = window(
        *(timing(step, 800, tokens=512, is_decode=False, context_tokens=512 * step) for step in range(3)),
        timing(3, 100, tokens=64, is_decode=False),
        timing(3, 70, tokens=64, is_decode=False, rank=RankId(1, 0)),
    )
    first, second = kept.read().stages
    assert [(told.tokens, told.steps, told.context_tokens) for told in first.chunks] == [
        (64, 1, 0),
        (512, 3, 512),
    ]
    assert [told.compute_us for told in second.chunks] == [70]


def test_a_stream_s_pace_is_that_of_steps_that_follow_each_other_on_the_last_stage() -> None:
    last = RankId(1, 0)
    alone = [timing(step, 5, rank=last, sequence=1, finished_us=40 * step) for step in range(1, 5)]
    other = [timing(step, 5, rank=last, sequence=2, finished_us=1000 + 7 * step) for step in (5, 9)]
    pace = window(timing(1, 5, sequence=1), *alone, *other).read().stream
    assert pace is not None
    assert (pace.token_us, pace.tokens) == (40, 3), (
        "not from one sequence to another, nor over steps of others"
    )


def test_without_a_stream_that_was_alone_there_is_no_pace() -> None:
    assert window(timing(1, 5, sequence=1)).read().stream is None
    assert window(timing(1, 5, rows=2, tokens=2), timing(2, 5, rows=2, tokens=2)).read().stream is None
    assert window().read().stream is None
