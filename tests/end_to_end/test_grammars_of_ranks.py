"""Answers of ranks that share layers under schemas, and of any split under many schemas."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.end_to_end.grammar_answers import (
    MaskedModel,
    compare_with_reference,
    count_valid_answers,
    demo_model,
)

pytestmark = pytest.mark.alone(loops=True)
_SCHEMAS = 200


def test_greedy_answers_of_two_ranks_are_those_of_mlx_lm_under_the_same_masks(tmp_path: Path) -> None:
    demo = demo_model()
    compare_with_reference(demo, MaskedModel(demo), tmp_path, stages=1, shares=(1.0, 1.0))


@pytest.mark.conformance
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "options", [{"stages": 2}, {"stages": 1, "shares": (1.0, 1.0)}], ids=["two stages", "two ranks"]
)
def test_answers_to_many_schemas_are_valid(tmp_path: Path, options: dict[str, Any]) -> None:
    assert count_valid_answers(demo_model(), count=_SCHEMAS, logs=tmp_path, **options) >= 0.7 * _SCHEMAS
