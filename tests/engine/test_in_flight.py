"""Steps in flight: answers of ranks in their order, and the step that all wait for."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.engine.pipeline import PLAIN, Pipeline

from mlx_ring.core.errors import ProtocolError
from mlx_ring.core.types import RankId
from mlx_ring.rpc.protos import step_pb2

CHUNK_2 = replace(PLAIN, prefill_chunk=2)


def test_a_chunk_counts_as_in_flight_until_every_rank_has_answered() -> None:
    pipeline = Pipeline((1, 2), PLAIN)
    pipeline.add(40)
    pipeline.run(0)
    pipeline.run(1)
    assert len(pipeline.twin.sent) == 3
    pipeline.run(1, 1)
    assert len(pipeline.twin.sent) == 4


def test_an_answer_of_another_epoch_or_instance_is_dropped() -> None:
    pipeline = Pipeline((1,))
    pipeline.add(3)
    for stale in (
        step_pb2.StepDone(instance="demo", epoch=0, step=1),
        step_pb2.StepDone(instance="other", epoch=1, step=1),
    ):
        assert pipeline.scheduler.on_answer(stale, now=1.0) == []
    assert pipeline.scheduler.stats().steps_completed == 0


@pytest.mark.parametrize(
    ("stage", "rank", "step"),
    [(0, 0, 2), (0, 0, 9), (1, 0, 1), (0, 1, 1)],
    ids=["skipped step", "unsent step", "unknown stage", "unknown rank"],
)
def test_an_answer_out_of_order_or_of_an_unknown_rank_is_refused(stage: int, rank: int, step: int) -> None:
    pipeline = Pipeline((1,), CHUNK_2)
    pipeline.add(6)
    done = step_pb2.StepDone(instance="demo", epoch=1, stage=stage, rank=rank, step=step)
    with pytest.raises(ProtocolError):
        pipeline.scheduler.on_answer(done, now=1.0)


def test_the_oldest_unanswered_step_is_reported_with_rank_and_wait() -> None:
    pipeline = Pipeline((1, 1), CHUNK_2)
    assert pipeline.scheduler.oldest_unanswered(9.0) is None
    pipeline.add(6)
    first = pipeline.scheduler.oldest_unanswered(4.0)
    assert first is not None
    assert (first.rank, first.step, first.waited_s, first.is_late) == (RankId(0, 0), 1, 4.0, False)
    pipeline.run(0)
    second = pipeline.scheduler.oldest_unanswered(26.0)
    assert second is not None
    assert (second.rank, second.step, second.waited_s, second.is_late) == (RankId(1, 0), 1, 25.0, True), (
        "since the first stage has answered"
    )
