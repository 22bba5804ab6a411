"""The scheduler's configuration, made from settings."""

from __future__ import annotations

from dataclasses import fields

from mlx_ring.core.engine_stats import Policy
from mlx_ring.head.instance import policy_of
from mlx_ring.settings.config import Settings


def test_every_field_of_the_schedulers_configuration_but_one_is_a_setting() -> None:
    settings = Settings(max_queued_requests=7, num_speculative_tokens=3, prefix_cache="off")
    policy = policy_of(settings)
    assert (policy.max_queued_requests, policy.num_speculative_tokens, policy.prefix_cache) == (7, 3, False)
    assert {each.name for each in fields(Policy)} - Settings.model_fields.keys() == {"steps_ahead"}
