"""Detection of stuck ranks, and the scheduler's configuration from settings."""

from __future__ import annotations

from dataclasses import fields

from mlx_ring.core.engine_stats import Policy
from mlx_ring.core.types import RankId
from mlx_ring.engine.step_times import Unanswered
from mlx_ring.head.instance_watch import StuckWatch
from mlx_ring.head.served_model import policy_of
from mlx_ring.settings.config import Settings


def unanswered(waited_s: float, step: int = 5, deadline_s: float = 30.0) -> Unanswered:
    return Unanswered(RankId(1, 0), step, waited_s, deadline_s)


def test_rank_that_is_late_twice_with_the_same_step_is_stuck() -> None:
    watch = StuckWatch()
    assert watch.look(unanswered(29.0)) is None
    assert watch.look(unanswered(31.0)) is None
    assert watch.look(unanswered(32.0)) == unanswered(32.0)


def test_after_a_pause_of_the_head_a_rank_whose_answer_has_arrived_is_not_stuck() -> None:
    watch = StuckWatch()
    assert watch.look(unanswered(500.0)) is None
    assert watch.look(unanswered(500.0, step=6)) is None
    assert watch.look(None) is None
    assert watch.look(unanswered(40.0, step=6)) is None


def test_without_a_deadline_no_rank_is_stuck() -> None:
    watch = StuckWatch()
    assert [watch.look(unanswered(1e9, deadline_s=0.0)) for _ in range(3)] == [None] * 3


def test_every_field_of_the_policy_except_steps_ahead_is_a_setting() -> None:
    settings = Settings(max_queued_requests=7, num_speculative_tokens=3, prefix_cache="off")
    policy = policy_of(settings)
    assert (policy.max_queued_requests, policy.num_speculative_tokens, policy.prefix_cache) == (7, 3, False)
    assert {each.name for each in fields(Policy)} - Settings.model_fields.keys() == {"steps_ahead"}
