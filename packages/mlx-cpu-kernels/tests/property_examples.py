"""Numbers of examples of property tests, as shares of the Hypothesis profile in use."""

from __future__ import annotations

from hypothesis import settings


def examples(share: float) -> settings:
    """Return settings with a share of the profile's examples, and without a deadline."""
    return settings(max_examples=max(1, round(share * settings().max_examples)), deadline=None)
