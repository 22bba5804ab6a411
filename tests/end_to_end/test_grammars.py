"""Answers under schemas are valid, and those that mlx-lm gives under the same masks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.end_to_end.grammar_answers import (
    DemoModel,
    MaskedModel,
    compare_with_reference,
    count_valid_answers,
    demo_model,
)

_SCHEMAS, _MORE_SCHEMAS = 12, 30
"""Number of schemas, and that with `--thorough`. `make conformance` takes more."""


@pytest.fixture(scope="module")
def demo() -> DemoModel:
    return demo_model()


@pytest.fixture(scope="module")
def masked(demo: DemoModel) -> MaskedModel:
    return MaskedModel(demo)


def test_answers_at_temperature_1_are_valid(
    demo: DemoModel,
    tmp_path: Path,
    pytestconfig: pytest.Config,
    record_property: Callable[[str, Any], None],
) -> None:
    count = _MORE_SCHEMAS if pytestconfig.getoption("--thorough") else _SCHEMAS
    ended = count_valid_answers(demo, 2, count, tmp_path)
    record_property("answers that ended by themselves", f"{ended} of {count}")
    assert ended >= 0.7 * count


@pytest.mark.parametrize(("stages", "drafts"), [(2, 8), pytest.param(1, 0, marks=pytest.mark.thorough)])
def test_greedy_answers_are_those_of_mlx_lm_under_the_same_masks(
    demo: DemoModel, masked: MaskedModel, tmp_path: Path, stages: int, drafts: int
) -> None:
    accepted = compare_with_reference(demo, masked, tmp_path, stages=stages, drafts=drafts)
    assert (accepted > 0) == (drafts > 0)
