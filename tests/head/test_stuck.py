"""Who is stuck, and who only seems to be."""

from __future__ import annotations

from mlx_ring.core.types import RankId
from mlx_ring.engine.step_times import Unanswered
from mlx_ring.head.instance import StuckWatch


def owed(waited_s: float, step: int = 5, deadline_s: float = 30.0) -> Unanswered:
    return Unanswered(RankId(1, 0), step, waited_s, deadline_s)


def test_who_is_late_twice_with_the_same_step_is_stuck() -> None:
    watch = StuckWatch()
    assert watch.look(owed(29.0)) is None
    assert watch.look(owed(31.0)) is None
    assert watch.look(owed(32.0)) == owed(32.0)


def test_a_head_that_was_away_itself_blames_nobody_whose_answer_it_then_reads() -> None:
    watch = StuckWatch()
    assert watch.look(owed(500.0)) is None
    assert watch.look(owed(500.0, step=6)) is None
    assert watch.look(None) is None
    assert watch.look(owed(40.0, step=6)) is None


def test_without_a_deadline_nobody_is_stuck() -> None:
    watch = StuckWatch()
    assert [watch.look(owed(1e9, deadline_s=0.0)) for _ in range(3)] == [None] * 3
