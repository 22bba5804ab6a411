"""Scale the examples of a property test to the Hypothesis profile: `--hypothesis-profile fast`, `default` or `thorough`."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

_EXAMPLES = {"fast": 15, "default": 50, "thorough": 1000}
"""Examples of a property test without a share of its own, by profile."""


def register_profiles() -> None:
    """Register the profiles and load the default one.

    None has a deadline: an example that is slow because the machine is busy is no failure.
    """
    for name, count in _EXAMPLES.items():
        settings.register_profile(name, deadline=None, max_examples=count)
    settings.load_profile("default")


def examples(share: float, **options: Any) -> settings:
    """Return settings with a share of the profile's examples, for a test whose example costs more or less than usual."""
    return settings(max_examples=max(1, round(share * settings().max_examples)), **options)


@given(st.text())
@settings(max_examples=100, database=None)
def fill_caches(_text: str) -> None:
    """Have Hypothesis save its tables of Unicode and the constants of all imported modules.

    Else each process of a run would spend seconds on both.
    """
